"""Everything that a patch needs, found from its classes on: what is imported, what is written out.

A class or function of `__main__`, or of any Python module that another process cannot import, is
written out as a piece: its own statement. Each name that a piece uses is looked up as Python would
look it up now, and becomes an import, a constant, or a further piece. What cannot be written is a
problem with a name; all problems are collected, since who mends one wants to know of the others.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Literal

import torch

from patchlab.errors import ExportError
from patchlab.ship.at_home import changed_at_home, changed_where_read
from patchlab.ship.code import Code, layout
from patchlab.ship.homes import (
    Import,
    import_of_module,
    import_of_value,
    is_importable,
    submodules_to_import,
)
from patchlab.ship.literals import constant
from patchlab.ship.names import Uses, is_guarded, used_names
from patchlab.ship.objects import named_tuple, named_tuple_fields
from patchlab.ship.pieces import Piece
from patchlab.ship.sources import (
    Statement,
    class_statement,
    function_statement,
    namespace_of,
    plain_function,
)
from patchlab.ship.staleness import stale_class, stale_function

# The names that the file has for itself, and those of Python's that its own code uses.
RESERVED = frozenset(
    {"MAPPING", "CONVERSIONS", "NOT_MODULES", "TP_PLAN", "register", "dict", "list", "str", "type"}
)
_MISSING = object()


class Collection:
    """What is needed so far; `require` adds to it.

    Attributes:
        pieces: Name → what is written out.
        imports: Name → what is imported; further names are submodules imported for their effect.
        problems: What cannot be exported, with its name and the reason.
        notes: What a reader of the file should know.
        late_annotations: Whether any piece was compiled under the future import.
    """

    def __init__(self) -> None:
        self.pieces: dict[str, Piece] = {}
        self.imports: dict[str, Import] = {}
        self.problems: dict[str, str] = {}
        self.notes: list[str] = []
        self.late_annotations = False
        self._bound: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def require_class(self, cls: type, purpose: str) -> str:
        """Take a class along, and return the expression that names it in the file."""
        root = cls.__qualname__.partition(".")[0]
        value: Any = cls
        if "<locals>" in cls.__qualname__:
            self._refuse(cls.__name__, f"{purpose}: {_made_inside(cls)}")
            return cls.__name__
        if root != cls.__qualname__:
            value = vars(sys.modules.get(cls.__module__, object)).get(root)
            found = value
            for part in cls.__qualname__.split(".")[1:]:
                found = getattr(found, part, None)
            if found is not cls:
                self._refuse(cls.__qualname__, f"{purpose}: no name leads to it any more")
        elsewhere = self._bound.get(root, value) is not value and is_importable(cls.__module__)
        if elsewhere and root == cls.__qualname__ and not _kin(self._bound[root], value):
            try:
                return self.reference(cls)  # Imported under another name.
            except ExportError as error:
                self._refuse(f"{cls.__module__}.{root}", f"{purpose}: {error}")
        self.require(root, value, purpose)
        now = vars(sys.modules.get(cls.__module__, object)).get(root)
        if root in self.pieces and isinstance(now, type) and now is not value:
            self.notes.append(
                f"{root} is the class {purpose}; the session has defined another {root} since."
            )
        return cls.__qualname__

    def require(self, name: str, value: Any, purpose: str) -> None:
        """Take a value along under the name by which it is used."""
        if name in self._bound:
            if not _same(self._bound[name], value):
                self._refuse(
                    name,
                    f"{purpose}: another {name} is exported as well. "
                    + (
                        "One of them is older than the other: run the cell that registers it again"
                        if _kin(self._bound[name], value)
                        else "Rename one of them"
                    ),
                )
            return
        if name in RESERVED:
            self._refuse(name, f"{purpose}: the file needs this name for itself. Rename it")
            return
        if not name.isidentifier() or keyword.iskeyword(name):
            self._refuse(name, f"{purpose}: this is no name that Python code can use. Rename it")
            return
        self._bound[name] = value
        try:
            self._take(name, value, purpose)
            self._names.setdefault(id(value), name)
        except ExportError as error:
            self._refuse(name, f"{purpose}: {error}")

    def reference(self, value: Any) -> str:
        """Return a name for a class, function or Python module, taking it along if need be.

        Raises:
            ExportError: It can be neither imported nor written out.
        """
        known = self._names.get(id(value))
        if known is not None and self._bound.get(known) is value:
            return known
        plain = str(getattr(value, "__name__", "") or "").rpartition(".")[2]
        if isinstance(value, type):
            plain = value.__qualname__.partition(".")[0]
        name = plain if plain.isidentifier() else "value"
        while name in self._bound or name in RESERVED or hasattr(builtins, name):
            if getattr(builtins, name, _MISSING) is value:
                return name
            name += "_"
        if isinstance(value, type):
            if "<locals>" in value.__qualname__:
                raise ExportError(f"it uses {value.__name__}, and {_made_inside(value)}")
            if value.__qualname__ != plain:
                return self.require_class(value, f"{value.__qualname__} is used")
        self._bound[name] = value
        try:
            self._take(name, value, f"{name} is used")
        except ExportError as error:
            raise ExportError(f"it uses {plain or value!r}: {error}") from error
        self._names[id(value)] = name
        return name

    def _take(self, name: str, value: Any, purpose: str) -> None:
        if isinstance(value, ModuleType):
            found = import_of_module(value, name)
            if found is None:
                raise ExportError(
                    f"the Python module {value.__name__} cannot be imported in another process"
                )
            self.imports[name] = found
            return
        made = named_tuple_fields(value) is not None and not is_importable(str(value.__module__))
        if not made and (isinstance(value, type) or plain_function(value) is not None):
            if is_importable(str(value.__module__)) or isinstance(value, BuiltinFunctionType):
                self._import(name, value)
            else:
                self._write_out(name, value)
            return
        if isinstance(value, torch.Tensor | torch.nn.Module):
            raise ExportError(
                f"it is a live {type(value).__name__}, and a file cannot hold its values. Make it "
                f"in the constructor of the class, or load it from a file there"
            )
        # A list or an object is the one that its home module has, and a copy would be another.
        shared = not isinstance(value, int | float | complex | str | bytes | tuple | None)
        home = import_of_value(value, name) if shared else None
        if home is not None:
            self._take_import(name, home, home.module)
            return
        if type(value) is object:
            self.pieces[name] = Piece(name, "constant", f"{name} = object()\n")
            return
        used: list[str] = []

        def reference(item: Any) -> str:
            used.append(self.reference(item))
            return used[-1]

        def write(item: Any) -> Code:
            return constant(item, reference)

        code = named_tuple(value, reference, write) if made else write(value)
        text = f"{name} = {layout(code, used=len(name) + 3)}\n"
        roots = tuple(dict.fromkeys(item.partition(".")[0] for item in used))
        self.pieces[name] = Piece(name, "constant", text, now=roots)

    def _import(self, name: str, value: Any) -> None:
        found = import_of_value(value, name)
        if found is not None:
            self._take_import(name, found, str(value.__module__))
            return
        qualname = getattr(value, "__qualname__", "")
        root = qualname.partition(".")[0]
        home = sys.modules.get(str(value.__module__))
        outer = getattr(home, root, None)
        if "." not in qualname or "<locals>" in qualname or outer is None:
            raise ExportError(
                f"{value.__module__} has no {getattr(value, '__name__', name)} by which it could "
                f"be imported"
            )
        self.require(root, outer, f"{name} is part of it")
        self.pieces[name] = Piece(name, "constant", f"{name} = {qualname}\n", now=(root,))

    def _take_import(self, name: str, found: Import, defined_in: str) -> None:
        home = sys.modules.get(defined_in)
        if home is None or found.attribute not in vars(home):
            home = sys.modules[found.module]
        changed = changed_at_home(home, found.attribute, self.notes)
        if changed:
            raise ExportError(changed)
        self.imports[name] = found

    def _write_out(self, name: str, value: Any) -> None:
        inner = value if isinstance(value, type) else plain_function(value)
        assert inner is not None
        own = inner.__name__
        if hasattr(value, "registry") and hasattr(value, "dispatch"):
            raise ExportError(
                "it is a functools.singledispatch, whose other branches are registered elsewhere. "
                "Choose by isinstance in one function"
            )
        if own == "<lambda>":
            raise ExportError("it is a lambda. Write it as a function with def")
        if "<locals>" in inner.__qualname__:
            raise ExportError(_made_inside(inner))
        if "." in inner.__qualname__:
            self._part(name, value, inner)
            return
        if name != own:
            self._alias(name, own, value)
            return
        if isinstance(inner, type):
            statement = class_statement(inner)
            namespace = namespace_of(inner)
            stale = stale_class(inner, statement.node, namespace, self.notes)
        else:
            if inner is not value and not _is_decorated(inner):
                raise ExportError(
                    f"it was wrapped after its def statement. Write the wrapper as a decorator "
                    f"above def {own}"
                )
            statement = function_statement(inner)
            namespace = inner.__globals__
            stale = stale_function(inner, statement.node, namespace, self.notes)
        if stale:
            raise ExportError(stale)
        self._write(name, statement, namespace, "class" if isinstance(inner, type) else "function")

    def _part(self, name: str, value: Any, inner: Any) -> None:
        """Take along what is written inside of a class, `g = Outer.g`."""
        root, *parts = inner.__qualname__.split(".")
        outer = found = vars(sys.modules.get(inner.__module__, object)).get(root)
        for part in parts:
            found = getattr(found, part, None)
        if found is not value:
            raise ExportError(f"{inner.__qualname__} is another now. Run its cell again")
        self.require(root, outer, f"{name} is part of it")
        self.pieces[name] = Piece(name, "constant", f"{name} = {inner.__qualname__}\n", (root,))

    def _alias(self, name: str, own: str, value: Any) -> None:
        """Take along what is known by another name than its own, `g = f`."""
        self.require(own, value, f"{name} is another name of it")
        self.pieces[name] = Piece(name, "constant", f"{name} = {own}\n", now=(own,))

    def _write(
        self,
        name: str,
        statement: Statement,
        namespace: Mapping[str, Any],
        kind: Literal["class", "function"],
    ) -> None:
        self.late_annotations |= statement.late_annotations
        uses = used_names(statement.text, late_annotations=statement.late_annotations)
        found: dict[str, tuple[str, ...]] = {}
        for when, names in (("now", uses.now), ("later", uses.later)):
            taken = [used for used in names if self._look_up(used, namespace, name)]
            found[when] = tuple(taken)
        for used in uses.optional:
            self._look_up(used, namespace, name, optional=True)
        self._let_guarded(name, uses.later, statement.text)
        self._submodules(uses, namespace)
        # The optional ones are needed now as well, where a class body reads them.
        now = (*found["now"], *(used for used in uses.optional if used in self.pieces))
        self.pieces[name] = Piece(name, kind, statement.text, now, found["later"])

    def _look_up(
        self, used: str, namespace: Mapping[str, Any], by: str, *, optional: bool = False
    ) -> bool:
        """Take along what a name stands for; tell whether the file has it."""
        value = namespace.get(used, _MISSING)
        if value is _MISSING:
            value = getattr(builtins, used, _MISSING)
            if value is not _MISSING and not _is_added(value):
                return False
        if value is _MISSING:
            if not optional:
                self._refuse(used, _missing(by))
            return False
        if optional and used not in self._bound:
            before = [dict(found) for found in self._all()]
            late, notes = self.late_annotations, len(self.notes)
            self.require(used, value, f"{by} is annotated with it")
            if self.problems == before[0]:
                return True
            # Nothing evaluates it, so the file does without, and without all that it would need.
            for found, kept in zip(self._all(), before, strict=True):
                found.clear()
                found.update(kept)
            self.late_annotations = late
            del self.notes[notes:]
            return False
        self.require(used, value, f"{by} uses it")
        return True

    def _let_guarded(self, by: str, later: tuple[str, ...], text: str) -> None:
        """Accept names that are not there, as they are not in the session, under a condition."""
        for used in later:
            if self.problems.get(used) == _missing(by) and is_guarded(text, used):
                del self.problems[used]
                self.notes.append(
                    f"{by} uses {used} under a condition; the session has no {used}, nor has this "
                    f"file."
                )

    def _all(self) -> tuple[dict[Any, Any], ...]:
        return self.problems, self.pieces, self.imports, self._bound, self._names

    def _submodules(self, uses: Uses, namespace: Mapping[str, Any]) -> None:
        for root, *attributes in uses.chains:
            value = namespace.get(root)
            if isinstance(value, ModuleType) and root in self.imports:
                for full_name in submodules_to_import(value, tuple(attributes)):
                    self.imports.setdefault(full_name, Import(full_name, "", full_name))
                where, changed = changed_where_read(value, attributes, self.notes)
                if changed:
                    self._refuse(f"{root}.{where}", changed)

    def _refuse(self, name: str, reason: str) -> None:
        self.problems.setdefault(name, reason)


def _missing(by: str) -> str:
    return f"{by} uses it, and there is no such name"


def _made_inside(value: Any) -> str:
    outer = value.__qualname__.partition(".<locals>")[0]
    closed = getattr(getattr(value, "__code__", None), "co_freevars", ())
    over = f", over whose {', '.join(closed)} it closes" if closed else ""
    return (
        f"it was made inside the function {outer}{over}. Write it at the top level of a cell or "
        f"file, and give it what it needs as class attributes or constants"
    )


def _is_decorated(function: FunctionType) -> bool:
    node = function_statement(function).node
    return bool(node.decorator_list)


def _is_added(value: Any) -> bool:
    """Tell whether IPython has put something among the builtins."""
    root = str(getattr(value, "__module__", None) or "").partition(".")[0]
    return root == "IPython" or (inspect.ismethod(value) and not isinstance(value.__self__, type))


def _same(known: Any, value: Any) -> bool:
    if known is value:
        return True
    if isinstance(known, ModuleType) and isinstance(value, ModuleType):
        return known.__name__ == value.__name__
    return type(known) is type(value) and isinstance(known, int | float | str) and known == value


def _kin(known: Any, value: Any) -> bool:
    return (
        isinstance(known, type) and isinstance(value, type) and known.__module__ == value.__module__
    )
