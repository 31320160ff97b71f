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
from patchlab.notebook.copy_button import CopyButton
from patchlab.notebook.form_checks import (
    Answer,
    Question,
    Target,
    answer,
    class_options,
    class_part,
    find_class,
)
from patchlab.notebook.form_rows import close_all, entry_row, finding_list, stale_note
from patchlab.notebook.form_state import Step, undo_step
from patchlab.notebook.form_style import (
    busy_html,
    code_html,
    error_html,
    line_html,
    note_html,
    style_html,
)
from patchlab.notebook.latest import Latest, Tell
from patchlab.notebook.patches_line import Registered
from patchlab.plan.findings import Finding

__all__ = ["PatchForm", "patch_form"]

# What a button may show instead of raising; an interrupt still ends the cell or the handler.
_open: WeakSet[PatchForm] = WeakSet()


class PatchForm(widgets.VBox):
    """The form; made by `patch_form`, and a part of `lab`.

    Attributes:
        key: The text field of the key; set `key.value`.
        cls: The field of the replacement class, by name, as "MyMLP" or "layers.MyMLP".
        overwrite: The switch for keys that are registered already.
        button: The button that registers.
        copy: The button that copies `to_code()`.
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
        self._latest = Latest(self._show_answer, self._show_failure, self._show_progress)
        super().__init__(self._make(), answer=Answer(Question("", "")))
        self.add_class("patchlab-form")
        for field in (self.key, self.cls, self.overwrite):
            field.observe(self._changed, "value")
        self.observe(self._show_error, "error")
        if self._shell is not None:
            self._shell.events.register("post_run_cell", self._after_cell)
        _open.add(self)
        self.refresh()

    def _make(self) -> list[widgets.Widget]:
        wide = {"description_width": "initial"}
        self.key = widgets.Text(
            description="Key: exact class name or pattern",
            placeholder="LlamaMLP or ^Llama(MLP|Attention)$",
            style=wide,
        )
        self.cls = widgets.Combobox(
            description="Replacement", placeholder="a class of this notebook", style=wide
        )
        self.overwrite = widgets.Checkbox(
            description="Overwrite a key that is registered", indent=False
        )
        self.button = _button("Register", self.register, self._guarded, "patchlab-first")
        self.copy = CopyButton(lambda: self._guarded(self._show_code))
        self.actions = _stack([self.button, self.copy], "patchlab-row")
        self._match_line, self._class_line = widgets.HTML(), widgets.HTML()
        self._message, self._code, self._busy = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.cancel_button = _button("Cancel", self.cancel, self._guarded, "patchlab-link")
        self._progress = _stack([self._busy, self.cancel_button], "patchlab-row")
        self._progress.layout.display = "none"
        self._findings = _stack([], "patchlab-stack")
        self.clear_button = _button("Clear all", self.clear, self._guarded, "patchlab-link")
        self.undo_button = _button("Undo", self.undo, self._guarded, "patchlab-link")
        self.clear_button.tooltip = "patchlab.clear_patch_mapping()"
        self._rows = _stack([], "patchlab-stack")
        self._rows.add_class("patchlab-entries")
        ends = _stack([self.clear_button, self.undo_button], "patchlab-row")
        style = widgets.HTML(style_html())
        style.add_class("patchlab-hidden")
        return [
            style,
            _stack([self.key, self._match_line], "patchlab-stack"),
            _stack([self.cls, self._class_line], "patchlab-stack"),
            self.overwrite,
            self.actions,
            self._message,
            self._code,
            self._progress,
            self._findings,
            self._rows,
            ends,
        ]

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

        Called after each cell and each change made with a form.
        """
        options = class_options(self.namespace)
        if self.cls.options != tuple(options):
            self.cls.options = tuple(options)
        entries = self.entries
        stale = tuple(stale_note(entry, self.namespace) for entry in entries)
        chosen = options.get(self.cls.value) or self.namespace.get(class_part(self.cls.value))
        seen = (entries, stale, chosen)
        if seen != self._seen:
            self._seen = seen
            self._show_entries(entries)
            self._ask()
        self._show_steps()

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
        close_all(self.children)
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
        self._guarded(action)

    def _guarded(self, action: Callable[[], object]) -> None:
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
        self._code.value = ""
        try:
            code = self.to_code()
        except PatchlabError:
            code = ""  # Not complete yet; whoever clicks is told why.
        self.copy.code, self.button.tooltip = code, code
        if change["owner"] is not self.overwrite:
            self._ask()

    def _show_code(self) -> None:
        self._code.value = code_html(self.to_code())

    def _show_answer(self, told: Answer) -> None:
        self._match_line.value = line_html(told.problem, "error") or line_html(told.matches)
        self._class_line.value = line_html(told.class_problem, "warning") or line_html(
            told.class_note
        )
        (self.key.add_class if told.problem else self.key.remove_class)("patchlab-wrong")
        old = self._findings.children
        self._findings.children = finding_list(
            told.findings, lambda key: self._guarded(lambda: self.use_suggestion(key))
        )
        close_all(old)
        self.answer = told
        for callback in self._callbacks:
            callback(told)

    def _show_failure(self, error: Exception) -> None:
        is_ours = isinstance(error, PatchlabError)
        self.error = str(error) if is_ours else f"{type(error).__name__}: {error}"

    def _show_progress(self, seconds: int | None) -> None:
        self._progress.layout.display = "none" if seconds is None else None
        if seconds is not None:
            self._busy.value = busy_html(f"Looking into it … {seconds} s")

    def _show_error(self, _change: Any) -> None:
        self._message.value = error_html(self.error)

    def _say(self, text: str) -> None:
        self.error = ""
        self._message.value = note_html(text)

    def _show_entries(self, entries: tuple[RegisteredEntry, ...]) -> None:
        old = self._rows.children
        head = "Registered" if entries else "Nothing is registered."
        title = widgets.HTML(f'<p class="head">{head}</p>')
        self._rows.children = [
            title,
            *(entry_row(entry, self.namespace, self._unregister_clicked) for entry in entries),
        ]
        close_all(old)

    def _unregister_clicked(self, key: str) -> None:
        self._guarded(lambda: self.unregister(key))

    def _show_steps(self) -> None:
        self.clear_button.disabled = not self.entries
        self.undo_button.disabled = not self._steps
        name = f"Undo {self._steps[-1].name}" if self._steps else "Undo"
        self.undo_button.description = name

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


def _button(
    name: str,
    action: Callable[[], object],
    guarded: Callable[[Callable[[], object]], None],
    look: str,
) -> widgets.Button:
    button = widgets.Button(description=name)
    button.add_class(look)
    button.on_click(lambda _: guarded(action))
    return button


def _stack(children: list[widgets.Widget], look: str) -> widgets.Box:
    box = widgets.Box(children)
    box.add_class(look)
    return box
