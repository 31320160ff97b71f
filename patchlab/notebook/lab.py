"""`lab`: the whole laboratory in one panel: the tree, the form, findings, and what is registered.

The panel decides nothing. The form's answers say what to show, the tree shows it, and "Apply to
this model" swaps by the very rules that were previewed. Everything is a method that raises; the
buttons show errors in the form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
from torch import nn

from patchlab.errors import MappingError, SwapError, TargetError
from patchlab.mapping.registry import registered_mapping
from patchlab.mapping.rules import check_key
from patchlab.model.diff import TreeDiff
from patchlab.model.tree import ModuleTree
from patchlab.notebook.closing import close_all, close_looks
from patchlab.notebook.copy_button import CopyButton
from patchlab.notebook.form_checks import Answer, Question, Target, class_part, find_class
from patchlab.notebook.form_style import code_html, style_html, verdict_html
from patchlab.notebook.forms import PatchForm
from patchlab.notebook.patches_line import Registered
from patchlab.notebook.tree_views import preview_line
from patchlab.notebook.tree_widget import TreeWidget
from patchlab.plan.explain import finding_lines, finding_remarks
from patchlab.plan.findings import Finding
from patchlab.render.html import remark_html, text_html
from patchlab.render.numbers import count, human

if TYPE_CHECKING:
    from patchlab.apply.swap import Swap
    from patchlab.verify.preview import Preview

__all__ = ["Lab", "lab"]


class Lab(widgets.VBox):
    """The panel; made by `lab`.

    Attributes:
        form: The form.
        tree: The tree, None without a target.
        target: As it was given, None if nothing was.
        apply_button: The button that swaps.
        undo_button: The button that undoes the last swap.
    """

    def __init__(self, target: Any = None, *, namespace: Mapping[str, Any] | None = None) -> None:
        """Make the panel.

        Args:
            target: A model, a config, a checkpoint folder or a model id; None for the form alone.
            namespace: Where classes are looked up; None for that of the notebook.

        Raises:
            TargetError: The target cannot be read.
        """
        self.target = target
        self._target = None if target is None else Target.of(target)
        self._swaps: list[_Applied] = []
        self.form = PatchForm(namespace=namespace, target=self._target)
        self.tree = None if self._target is None else TreeWidget(self._target.tree)
        self._shown: Any = None if self._target is None else self._target.tree
        self.apply_button = widgets.Button(description="Apply to this model")
        self.undo_button = widgets.Button(description="Undo", tooltip="Put the old modules back")
        self.apply_button.on_click(lambda _: self.form.guarded(self.apply))
        self.undo_button.on_click(lambda _: self.form.guarded(self.undo))
        self.copy = CopyButton(lambda: self.form.guarded(self._show_code), self.form.refresh)
        self.form.on_screen = self.copy
        self._verdict, self._code = widgets.HTML(), widgets.HTML()
        self._verdict.add_class("patchlab-live")
        super().__init__(self._make())
        self.add_class("patchlab-lab")
        self.form.on_answer(self._follow)
        self._follow(self.form.answer)

    def _make(self) -> list[widgets.Widget]:
        style = widgets.HTML(style_html())
        style.add_class("patchlab-hidden")
        head = widgets.Box([self._verdict, self.copy, self._code])
        head.add_class("patchlab-head")
        panes = widgets.Box([self.form] if self.tree is None else [self.tree, self.form])
        panes.add_class("patchlab-panes")
        if self.tree is None:
            panes.add_class("patchlab-alone")
        else:
            self.tree.on_suggestion(self.form.use_suggestion)
            self.form.actions.children = [self.form.button, self.apply_button, self.undo_button]
        return [style, head, panes]

    @property
    def preview(self) -> Preview | None:
        """What all rules together would do, None while there are none or the form is not complete.

        It follows what is typed; `lab.form.busy` tells whether a newer one is on its way.
        """
        found: Preview | None = self.form.answer.preview
        return found

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, or worth knowing."""
        return self.form.findings

    @property
    def verdict(self) -> str:
        """The line on top."""
        return _verdict(self.form.answer, self._target, self._swaps)[2].replace("**", "")

    def apply(self) -> Swap:
        """Swap the modules of the target, in place, by the rules that are shown.

        These are the registered ones and what is in the form.

        Returns:
            The swap; `undo` or its own `undo()` takes it back.

        Raises:
            TargetError: The target is no model.
            MappingError: There is no rule, or the one in the form can never work.
            SwapError: A module cannot be replaced; nothing is changed.
        """
        if not isinstance(self.target, nn.Module):
            raise TargetError(
                "only a model can be swapped in place, and this laboratory was given none. Use "
                "patchlab.lab(model); to patch what is built later, register the rule."
            )
        from patchlab.apply.swap import swap

        swapped = swap(self.target, self._rules())
        self._swaps.append(_Applied(swapped, self.form.answer.question))
        self._follow(self.form.answer)
        return swapped

    def undo(self) -> None:
        """Undo the last swap made here.

        Raises:
            SwapError: There is none, or something else has been put into the model since.
        """
        if not self._swaps:
            raise SwapError("nothing was applied to the model here, so there is nothing to undo.")
        self._swaps[-1].swap.undo()
        self._swaps.pop()
        self._follow(self.form.answer)

    def to_code(self) -> str:
        """Return the line of Python that shows the same preview.

        Raises:
            MappingError: The form is not complete.
        """
        if self.target is None:
            return self.form.to_code()
        name = self._target_name()
        if not self.form.key.value:
            return f"patchlab.preview({name})"
        return f"patchlab.preview({name}, {self._rules_code()})"

    def close(self) -> None:
        """Close the panel with all that is in it; what was applied stays."""
        # Python closes what is collected, also a panel that was refused its target.
        if (form := getattr(self, "form", None)) is not None:
            form.close()
        # The buttons too, which a panel without a tree does not show.
        buttons = (getattr(self, name, None) for name in ("apply_button", "undo_button"))
        close_all([*self.children, *(button for button in buttons if button is not None)])
        close_looks(self)
        super().close()

    def to_text(self) -> str:
        """Return the static twin as text."""
        parts = [self.verdict, *finding_lines(self.findings)]
        if self.tree is not None:
            parts.append(self.tree.to_text())
        return "\n".join([*parts, Registered(self.form.entries).to_text()])

    def to_html(self) -> str:
        """Return the static twin as HTML."""
        lines = [f"<p><b>{text_html(self.verdict)}</b></p>"]
        lines += map(remark_html, finding_remarks(self.findings))
        if self.tree is not None:
            lines.append(self.tree.to_html())
        return "".join([*lines, Registered(self.form.entries).to_html()])

    def __repr__(self) -> str:
        return f"<Lab: {self.verdict}>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        shown = super()._repr_mimebundle_(**options)
        if shown is None:
            return None
        return {**shown, "text/plain": self.to_text(), "text/html": self.to_html()}

    def _rules(self) -> dict[str, type[nn.Module]]:
        rules = registered_mapping().to_dict()
        if self.form.key.value:
            key = check_key(self.form.key.value)
            rules[key] = find_class(self.form.cls.value, self.form.namespace)
        if not rules:
            raise MappingError("no rule to apply: type a key and choose a class, or register one.")
        return rules

    def _rules_code(self) -> str:
        self._rules()
        rule = f"{self.form.key.value!r}: {class_part(self.form.cls.value)}"
        others = [key for key in registered_mapping().to_dict() if key != self.form.key.value]
        return f"{{**patchlab.get_patch_mapping(), {rule}}}" if others else f"{{{rule}}}"

    def _target_name(self) -> str:
        if isinstance(self.target, str):
            return repr(self.target)
        names = [name for name, value in self.form.namespace.items() if value is self.target]
        return next((name for name in names if not name.startswith("_")), "model")

    def _show_code(self) -> None:
        self._code.value = code_html(self.to_code())

    def _follow(self, told: Answer) -> None:
        """Show an answer of the form, and what was applied."""
        self._verdict.value = verdict_html(*_verdict(told, self._target, self._swaps))
        self._code.value = ""
        try:
            self.copy.code = self.to_code()
        except MappingError:
            self.copy.code = ""  # Not complete yet; whoever clicks is told why.
        self._enable(told)
        if self.tree is None or self._target is None:
            return
        applied = _applied(told, self._swaps)
        if applied is not None:
            self._show(applied.diff, applied.findings)
            return
        if told.preview is not None:
            diff = told.preview.diff
            self._show(told.preview.before if diff is None else diff, told.findings)
        elif told.whole:
            self._show(self._target.tree, told.findings)
        self._highlight(told)

    def _show(self, shown: ModuleTree | TreeDiff, findings: Iterable[Finding]) -> None:
        assert self.tree is not None
        if shown is self._shown:
            return  # While a key is typed only its marks change; a large tree is not sent again.
        self._shown = shown
        if isinstance(shown, ModuleTree):
            self.tree.show(shown, findings=findings)
        else:
            self.tree.show(diff=shown, findings=findings)

    def _highlight(self, told: Answer) -> None:
        assert self.tree is not None
        self.tree.set_highlight(self.tree.known(told.marks.marks), reasons=told.marks.reasons)

    def _enable(self, told: Answer) -> None:
        is_model = isinstance(self.target, nn.Module)
        self.apply_button.disabled = not is_model or told.preview is None
        self.undo_button.disabled = not self._swaps
        code = self.copy.code.replace("patchlab.preview(", "patchlab.swap(", 1)
        self.apply_button.tooltip = code if is_model else "The target is not a model"


def lab(target: Any = None) -> Lab:
    """Show the whole laboratory: the tree of a target, the form, findings, and what is registered.

    While a key is typed its matches are marked in the tree; with a class chosen, the preview is
    made anew. The model itself is changed by "Apply to this model" alone, until "Undo".

    Args:
        target: A model, a config, a checkpoint folder or a model id; without one there is the form
            alone.

    Raises:
        TargetError: The target cannot be read.
    """
    return Lab(target)


@dataclass(frozen=True)
class _Applied:
    """A swap, and what was in the form when it was made."""

    swap: Swap
    question: Question


def _applied(told: Answer, swaps: list[_Applied]) -> Swap | None:
    """Return the last swap if the form still holds what it was made of."""
    if not swaps:
        return None
    made, now = swaps[-1].question, told.question
    same = (now.key, now.class_name) == (made.key, made.class_name)
    return swaps[-1].swap if same else None


def _verdict(told: Answer, target: Target | None, swaps: list[_Applied]) -> tuple[str, str, str]:
    """Return the tone, the pill and the line on top."""
    if target is None:
        return "", "", "**patchlab** · type a key to see what it matches"
    errors = sum(finding.severity == "error" for finding in told.findings)
    warnings = sum(finding.severity == "warning" for finding in told.findings)
    if told.problem:
        tone, pill = "error", "key"
    elif errors:
        tone, pill = "error", count(errors, "error")
    elif warnings:
        tone, pill = "warning", count(warnings, "warning")
    else:
        tone, pill = ("ok", "ok") if told.preview is not None else ("", "")
    tree = target.tree
    size = f"{count(len(tree), 'module')} · {human(tree.num_parameters)} parameters"
    name = tree.root.class_name
    applied = _applied(told, swaps)
    if applied is not None:
        done = count(sum(applied.counts.values()), "module")
        return "ok", "applied", f"**{done}** replaced in **{name}**, until Undo"
    if told.preview is not None:
        return tone, pill, preview_line(told.preview)
    if told.matches:
        return tone, pill, f"**{count(told.here, 'module')}** matched in **{name}** · {size}"
    return tone, pill, f"**{name}** · {size}"
