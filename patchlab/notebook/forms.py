"""`patch_form`: rules registered, judged while they are typed, and taken back, without code.

Each thing that the form does is a method that anybody can call, that raises what is wrong, and that
has an equivalent of one line; a button calls the method and shows the error in the form. What the
form says while one types is worked out beside the kernel's event loop (`latest`, `form_checks`);
what it does to the registry is done at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import ipywidgets as widgets
import traitlets
from IPython.core.getipython import get_ipython

from patchlab.apply import hooks
from patchlab.errors import MappingError, PatchlabError
from patchlab.mapping.registry import (
    RegisteredEntry,
    registered_by,
    registered_entries,
    registered_mapping,
    registry_state,
)
from patchlab.mapping.rules import check_key
from patchlab.notebook.closing import close_all, close_looks
from patchlab.notebook.form_checks import (
    Answer,
    Question,
    Target,
    answer,
    class_options,
    class_part,
    find_class,
)
from patchlab.notebook.form_parts import FormParts
from patchlab.notebook.form_rows import stale_note
from patchlab.notebook.form_state import Step, undo_step
from patchlab.notebook.latest import Latest, Tell
from patchlab.notebook.patches_line import Registered
from patchlab.plan.findings import Finding

__all__ = ["PatchForm", "patch_form"]

_open: WeakSet[PatchForm] = WeakSet()


class PatchForm(widgets.VBox):
    """The form; made by `patch_form`, and a part of `lab`.

    Attributes:
        key: The text field of the key; set `key.value`.
        cls: The field of the replacement class, by name, as "MyMLP" or "layers.MyMLP".
        overwrite: The switch for keys that are registered already.
        button: The button that registers.
        copy: The button that copies `to_code()`.
        on_screen: The part by which the form knows that it is on no screen any more.
        actions: The row of buttons.
        error: What went wrong last, "" after anything that went well; shown in the form.
        answer: What there is to say about key and class.
        namespace: Where classes are looked up.
    """

    error = traitlets.Unicode("")
    answer: Any = traitlets.Instance(Answer)

    def __init__(
        self, *, namespace: Mapping[str, Any] | None = None, target: Target | None = None
    ) -> None:
        """Make the form.

        Args:
            namespace: Where classes are looked up; None for that of the notebook.
            target: What keys are tried on; None for every architecture.
        """
        self._shell = get_ipython() if namespace is None else None
        self.namespace = _user_namespace(self._shell) if namespace is None else namespace
        self.target = target
        self._steps: list[Step] = []
        self._seen: tuple[Any, ...] = ()
        self._callbacks: list[Callable[[Answer], object]] = []
        self._latest = Latest(
            self._show_answer, self._show_failure, lambda s: self._parts.show_progress(s)
        )
        parts = FormParts(lambda: self.guarded(self._show_code), self.refresh)
        self._parts, self.key, self.cls, self.overwrite = (
            parts,
            parts.key,
            parts.cls,
            parts.overwrite,
        )
        self.button, self.copy, self.actions = parts.register, parts.copy, parts.actions
        self.on_screen = parts.copy
        super().__init__(parts.all, answer=Answer(Question("", "")))
        self.add_class("patchlab-form")
        for button, action in (
            (parts.register, self.register),
            (parts.clear, self.clear),
            (parts.undo, self.undo),
            (parts.cancel, self.cancel),
        ):
            button.on_click(lambda _, action=action: self.guarded(action))
        for field in (self.key, self.cls, self.overwrite):
            field.observe(self._changed, "value")
        self.observe(self._show_error, "error")
        if self._shell is not None:
            self._shell.events.register("post_run_cell", self._after_cell)
        _open.add(self)
        self.refresh()

    @property
    def entries(self) -> tuple[RegisteredEntry, ...]:
        """What is registered."""
        return registered_entries()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the key and the class, or worth knowing."""
        found: tuple[Finding, ...] = self.answer.findings
        return found

    @property
    def message(self) -> str:
        """What the form says about the last thing done with it, as HTML."""
        return self._parts.message

    @property
    def busy(self) -> bool:
        """Whether more is to be said about key and class."""
        return self._latest.busy

    def register(self) -> None:
        """Register the key for the class.

        Raises:
            MappingError: The key can never match or is taken, or there is no such class; nothing is
                registered.
        """
        key = self.key.value
        check_key(key)
        replacement = find_class(self.cls.value, self.namespace)

        def change() -> None:
            with registered_by("form"):
                hooks.register_patch_mapping({key: replacement}, overwrite=self.overwrite.value)

        self._change("register", change)
        self._say(f"Registered {key} → {replacement.__qualname__}.")

    def unregister(self, key: str) -> None:
        """Take a key out of the registry.

        Raises:
            MappingError: It is not registered.
        """
        self._change("unregister", lambda: hooks.unregister_patch_mapping(key))
        self._say(f"Unregistered {key}.")

    def clear(self) -> None:
        """Take everything out of the registry, whoever registered it; `undo` puts it back."""
        number = len(self.entries)
        self._change("clear", hooks.clear_patch_mapping)
        self._say(f"Cleared: {number} taken out.")

    def undo(self) -> None:
        """Put back what this form changed last in the registry.

        Raises:
            MappingError: It has changed nothing.
        """
        if not self._steps:
            raise MappingError("this form has changed nothing, so there is nothing to undo.")
        step = self._steps.pop()
        undo_step(step)
        _refresh_all()
        self._say(f"Undone: {step.name}.")

    def use_suggestion(self, key: str = "") -> None:
        """Put a suggested key into the form.

        Args:
            key: The key; by default the first that a finding suggests.

        Raises:
            MappingError: Nothing is suggested.
        """
        suggested = key or next((f.suggestion for f in self.findings if f.suggestion), "")
        if not suggested:
            raise MappingError("no finding suggests another key for what is in the form.")
        self.error = ""
        self.key.value = suggested

    def to_code(self) -> str:
        """Return the line of Python that does what the button does.

        Raises:
            MappingError: The form is not complete.
        """
        key = check_key(self.key.value)
        find_class(self.cls.value, self.namespace)
        option = ", overwrite=True" if self.overwrite.value else ""
        return f"patchlab.register_patch_mapping({{{key!r}: {class_part(self.cls.value)}}}{option})"

    def check(self) -> Answer:
        """Return what there is to say about key and class, worked out now.

        Raises:
            PatchlabError: It cannot be worked out.
        """
        told: list[Answer] = []
        answer(self._question(), self.namespace, self.target, told.append)
        return told[-1]

    def cancel(self) -> None:
        """Stop waiting for what is being worked out."""
        self._latest.cancel()

    def refresh(self) -> None:
        """Show the registry and the classes to choose from as they are now.

        Called after each cell and each change made with a form. A form whose output is gone waits
        until it is shown again.
        """
        if self.on_screen.was_closed:
            return
        options = class_options(self.namespace)
        if self.cls.options != tuple(options):
            self.cls.options = tuple(options)
        entries = self.entries
        stale = tuple(stale_note(entry, self.namespace) for entry in entries)
        chosen = options.get(self.cls.value) or self.namespace.get(class_part(self.cls.value))
        seen = (entries, stale, chosen)
        if seen != self._seen:
            self._seen = seen
            self._parts.show_entries(entries, self.namespace, self._unregister_clicked)
            self._ask()
        last = self._steps[-1].name if self._steps else None
        self._parts.show_steps(bool(entries), last)

    def show_all_findings(self) -> None:
        """Show the findings that were only counted."""
        self._show_findings(None)

    def on_answer(self, callback: Callable[[Answer], object]) -> None:
        """Call back with each answer, as it is shown."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """Close the form with all that is in it."""
        _open.discard(self)
        self.cancel()
        if self._shell is not None and self._after_cell in self._shell.events.callbacks.get(
            "post_run_cell", ()
        ):
            self._shell.events.unregister("post_run_cell", self._after_cell)
        # The button too where a panel has taken it out of the form.
        close_all([*self.children, self.copy])
        close_looks(self)
        super().close()

    def to_text(self) -> str:
        """Return the static twin as text."""
        return Registered(self.entries).to_text()

    def to_html(self) -> str:
        """Return the static twin as HTML."""
        return Registered(self.entries).to_html()

    def __repr__(self) -> str:
        return f"<PatchForm: {len(self.entries)} registered>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        shown = super()._repr_mimebundle_(**options)
        if shown is None:
            return None
        return {**shown, "text/plain": self.to_text(), "text/html": self.to_html()}

    def guarded(self, action: Callable[[], object]) -> None:
        """Do what a button stands for, and show what goes wrong in the form."""
        self.error = ""
        try:
            action()
        except PatchlabError as error:
            self.error = str(error)
        except Exception as error:  # noqa: BLE001 - a click has nobody to raise it to
            self.error = f"{type(error).__name__}: {error}"

    def _change(self, name: str, change: Callable[[], None]) -> None:
        before = registry_state()
        change()
        self._steps.append(Step(name, before, registry_state()))
        _refresh_all()

    def _question(self) -> Question:
        registered = registered_mapping().to_dict() if self.target is not None else {}
        return Question(self.key.value, self.cls.value, registered)

    def _ask(self) -> None:
        question, namespace, target = self._question(), self.namespace, self.target

        def work(tell: Tell) -> None:
            answer(question, namespace, target, tell)

        self._latest.ask(work)

    def _changed(self, change: Any) -> None:
        self.error = ""
        self._parts.show_code("")
        self._parts.show_note("")
        try:
            code = self.to_code()
        except PatchlabError:
            code = ""  # Not complete yet; whoever clicks is told why.
        self.copy.code, self.button.tooltip = code, code
        if change["owner"] is not self.overwrite:
            self._ask()

    def _show_code(self) -> None:
        self._parts.show_code(self.to_code())

    def _show_answer(self, told: Answer) -> None:
        self._parts.show_key(told.question.key, told.problem, told.matches)
        self._parts.show_class(told.class_problem, told.class_note)
        self.answer = told
        self._show_findings(self.show_all_findings)
        for callback in self._callbacks:
            callback(told)

    def _show_findings(self, on_more: Callable[[], None] | None) -> None:
        self._parts.show_findings(
            self.findings, lambda key: self.guarded(lambda: self.use_suggestion(key)), on_more
        )

    def _show_failure(self, error: Exception) -> None:
        is_ours = isinstance(error, PatchlabError)
        self.error = str(error) if is_ours else f"{type(error).__name__}: {error}"

    def _show_error(self, _change: Any) -> None:
        self._parts.show_error(self.error)

    def _say(self, text: str) -> None:
        self.error = ""
        self._parts.show_note(text)

    def _unregister_clicked(self, key: str) -> None:
        self.guarded(lambda: self.unregister(key))

    def _after_cell(self, _result: Any) -> None:
        self.refresh()


def patch_form() -> PatchForm:
    """Show a form that registers patches and takes them back.

    While a key is typed the form says what it matches in the installed transformers and what is
    wrong with it; classes are those of the notebook. What a button does, a method does too:
    `form.register()`, `form.unregister(key)`, `form.clear()`, `form.undo()`,
    `form.use_suggestion()`; `form.to_code()` is the same as a line of Python.
    """
    return PatchForm()


def _refresh_all() -> None:
    for form in list(_open):
        form.refresh()


def _user_namespace(shell: Any) -> Mapping[str, Any]:
    namespace: Mapping[str, Any] = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    return namespace
