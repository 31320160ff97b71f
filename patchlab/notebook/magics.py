"""`%%patched` and `%patches`: scopes and the registry from a notebook cell.

`%%patched` is a rewrite of its line, not a cell magic that runs a body: an input transformer turns
the line into one call that opens the scope, with the same number of lines, and the end of the cell
closes it (`cell_scopes`). The body stays at top level, so its last value, `;`, `await` and its
tracebacks are IPython's own. The cell magic of the same name is there for `run_cell_magic`, where
no line is rewritten, and for `%%patched?`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from contextlib import AbstractContextManager
from typing import Any, Literal

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import cell_magic as ipython_cell_magic
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display
from torch import nn

from patchlab.errors import PatchlabError
from patchlab.notebook.cell_lines import report_lines, swap_lines
from patchlab.notebook.cell_scopes import CellScopes
from patchlab.notebook.cells import record_cell, show_line_as_comment
from patchlab.notebook.magic_line import MagicLine, asks_for_help, parse_line, resolve_mapping
from patchlab.notebook.magic_scopes import SwapForCell, WithoutWarnings
from patchlab.notebook.patches_line import run_command

MAGIC = "%%patched"
FLAGS = ("--strict", "--quiet", "--diff")


def rewrite(lines: list[str]) -> list[str]:
    """Turn a `%%patched` line into the call that opens its scope; all other lines stay as they are.

    Only comments and blank lines may stand above it. Where the line after it is a cell magic too,
    that one gets the rest of the cell, as it would at the top.
    """
    for i, line in enumerate(lines):
        text = line.strip()
        if text.split(maxsplit=1)[:1] == [MAGIC] and line.startswith(MAGIC):
            body = lines[i + 1 :]
            empty = "" if any(other.strip() for other in body) else ", empty=True"
            call = f"{PatchMagics.CALL}({text[len(MAGIC) :].strip()!r}{empty})\n"
            return [*lines[:i], call, *_rewrite_body(body)]
        if text and not text.startswith("#"):
            break
    return lines


# Skipped when IPython asks whether what was typed so far is a whole cell: a terminal then waits for
# the body, as with any cell magic.
rewrite.has_side_effects = True  # type: ignore[attr-defined]


def _rewrite_body(body: list[str]) -> list[str]:
    start = next((i for i, line in enumerate(body) if line.strip()), len(body))
    if start == len(body) or not body[start].startswith("%%"):
        return body
    inner = rewrite(body[start:])
    return body[:start] + (inner if inner != body[start:] else ipython_cell_magic(body[start:]))


def _help_of(magic: Any) -> str:
    """Return a magic's docstring as plain text, without the mark-up of its examples."""
    return str(inspect.getdoc(magic)).replace("\n\n::\n\n", "\n\n")


@magics_class
class PatchMagics(Magics):
    """The magics of one shell and the scopes that its cells have open."""

    shell: Any  # Never None here.

    CALL = "get_ipython().magics_manager.registry['PatchMagics'].open_cell"

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.scopes = CellScopes()

    def open_cell(self, line: str, *, empty: bool = False) -> None:
        """Open the scope of a `%%patched` line until the end of the cell, as the rewritten line.

        Raises:
            UsageError: The line cannot be carried out, or the cell has no body.
        """
        __tracebackhide__ = True
        if self._helped(line, empty=empty):
            return
        caller = sys._getframe(1)
        show_line_as_comment(caller, f"{MAGIC} {line}")
        options, scope = self._prepare(line, empty)
        try:
            self.scopes.enter(scope, caller, lambda entered: self._tell(options, entered))
        except PatchlabError as error:
            raise UsageError(str(error)) from error

    @no_var_expand
    @cell_magic
    def patched(self, line: str, cell: str) -> Any:
        """Build models under patches in this cell only, and say afterwards what was replaced.

        ::

            %%patched ^BertSelfAttention$=MyAttention BertLayerNorm=layers.MyNorm
            model = AutoModel.from_pretrained(folder)

        Rules are `key=Class`, separated by spaces. A key that is an identifier is an exact class
        name, anything else a regular expression; quotes keep spaces. The class is one of this
        notebook's, by its name or as an attribute of a Python module or class. Without rules, what
        is registered is applied. Afterwards transformers is as it was, however the cell ended.

        Options:
            --map "key=Class"  the same as a rule
            --model NAME       swap the modules of the model in this variable, and undo it after
            --convert NAME     a variable with weight conversions: {model type: [WeightConverter]}
            --strict           do not run the cell if a finding is an error
            --quiet            say nothing afterwards
            --diff             show the difference that was made to each model
            --help             show this; a cell with a body is not run

        Only comments may stand above the line. Where magics do not exist (a .py file, some hosted
        notebooks), write `with patchlab.patched({"key": Class}):` instead.
        """
        __tracebackhide__ = True
        if self._helped(line, empty=not cell.strip()):
            return None
        options, scope = self._prepare(line, empty=not cell.strip())
        try:
            entered = scope.__enter__()
        except PatchlabError as error:
            raise UsageError(str(error)) from error
        try:
            return self._run_body(cell)
        finally:
            scope.__exit__(None, None, None)
            self._tell(options, entered)

    @no_var_expand
    @line_magic("%patched")  # type: ignore[arg-type]
    def misplaced(self, line: str) -> None:
        """Say where `%%patched` belongs: IPython takes it for a line magic anywhere else."""
        __tracebackhide__ = True
        raise UsageError(
            "%%patched is not the first line of its cell. Only comments and blank lines may stand "
            "above it: move it to the top, or write `with patchlab.patched({...}):` around what it "
            "is meant for."
        )

    @no_var_expand
    @line_magic
    def patches(self, line: str) -> Any:
        """Show or change what is registered.

        ::

            %patches                        what is registered, by whom and since when
            %patches register key=Class     register rules; --overwrite replaces keys that are taken
            %patches unregister key         take keys out
            %patches clear                  take everything out
            %patches status                 the same as the first, with leaked classes
            %patches export patches.py      write what is in force here as a Python file
        """
        __tracebackhide__ = True
        if asks_for_help(line):
            print(_help_of(type(self).patches))
            return None
        return run_command(line, self.shell.user_ns)

    def record_classes(self, result: Any) -> None:
        """Keep the source of what a cell defined; called when it has ended."""
        info = getattr(result, "info", None)
        if info is None or not any(word in (info.raw_cell or "") for word in ("class", "def ")):
            return
        source = getattr(info, "transformed_cell", None) or self.shell.transform_cell(info.raw_cell)
        record_cell(source, self.shell.user_ns)

    def _helped(self, line: str, *, empty: bool) -> bool:
        """Show the help if the line asks for it; a body is not run for that."""
        if not asks_for_help(line):
            return False
        help_text = _help_of(type(self).patched)
        if not empty:
            raise UsageError(f"the cell was not run, since its line asks for help.\n\n{help_text}")
        print(help_text)
        return True

    def _prepare(self, line: str, empty: bool) -> tuple[MagicLine, AbstractContextManager[Any]]:
        options = parse_line(line, flags=FLAGS)
        if empty:
            raise UsageError(
                "%%patched needs a body: the cell has nothing below this line. To register for all "
                "cells use %patches register key=Class."
            )
        mapping = resolve_mapping(options.rules, self.shell.user_ns) if options.rules else None
        conversions = self._variable(options.convert, "--convert") if options.convert else None
        try:
            return options, self._scope(options, mapping, conversions)
        except PatchlabError as error:
            raise UsageError(str(error)) from error

    def _scope(
        self, options: MagicLine, mapping: dict[str, type[nn.Module]] | None, conversions: Any
    ) -> AbstractContextManager[Any]:
        strict = "--strict" in options.flags
        if options.model:
            model = self._variable(options.model, "--model")
            return SwapForCell(model, mapping, conversions, strict=strict)
        # Imported when used, so that loading the extension does not load the engine.
        from patchlab.apply.scope import patched

        # Findings are told in lines under the cell, so they are not warned about as well.
        on_finding: Literal["error", "ignore"] = "error" if strict else "ignore"
        return WithoutWarnings(patched(mapping, conversions=conversions, on_finding=on_finding))

    def _variable(self, name: str, option: str) -> Any:
        try:
            return self.shell.user_ns[name]
        except KeyError as error:
            raise UsageError(f"{option} {name}: there is no variable {name!r}.") from error

    def _tell(self, options: MagicLine, report: Any) -> None:
        if "--quiet" not in options.flags:
            if options.model:
                lines = swap_lines(options.model, report)
            else:
                lines = report_lines(report, self.shell.user_ns)
            print("\n".join(lines))
        if "--diff" in options.flags:
            for model in [report] if options.model else report.models:
                try:
                    display(model.diff)
                except PatchlabError as error:
                    print(f"no difference to show: {error}")

    def _run_body(self, cell: str) -> Any:
        """Run a body at the top level of the user's namespace and return its last value."""
        __tracebackhide__ = True
        shell = self.shell
        source = shell.transform_cell(cell)
        if shell.should_run_async(cell, transformed_cell=source):
            raise UsageError("a body with `await` needs %%patched as the first line of its cell.")
        name = shell.compile.cache(source, raw_code=cell)
        tree = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(shell.compile(tree, name, "exec"), shell.user_global_ns, shell.user_ns)
        if last is None:
            return None
        code = shell.compile(ast.Expression(last.value), name, "eval")
        return eval(code, shell.user_global_ns, shell.user_ns)
