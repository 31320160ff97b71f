"""Leaks: what a patch left behind in transformers' Python modules, found and mended.

`transformers.monkey_patching.apply_patches` (5.24.0) rebinds names and has no `finally`: after an
error in its block, or when two threads overlap, a name such as `modeling_llama.LlamaMLP` stays
bound to the replacement. By then nothing may hold the original class any more, so it is looked for
among the classes that are alive, and else its class statement is run again, from the installed
source file and in the Python module it belongs to.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from torch import nn

from patchlab._upstream import is_transformers_name, output_recorder_class, source_of_module
from patchlab.apply.construct import left_wrapped, unwrap_left
from patchlab.apply.rebind import is_rebound
from patchlab.errors import RestoreError
from patchlab.model.classes import loaded_module_classes, subclasses_of

LeakKind = Literal["name", "init", "recorder"]


@dataclass(frozen=True, eq=False, slots=True)
class Leak:
    """One thing in transformers that is not what it was.

    Attributes:
        kind: "name": a name bound to another class; "init": a wrapped `__init__`; "recorder": an
            output recorder that looks for another class.
        python_module: The Python module it is in.
        name: The name in it.
        found: What is there now, in words; "" if nothing is.
        holder: The Python module or class to mend.
    """

    kind: LeakKind
    python_module: str
    name: str
    found: str
    holder: Any

    @property
    def message(self) -> str:
        """The leak in a sentence."""
        where = f"{self.python_module}.{self.name}"
        if self.kind == "name":
            if not self.found:
                return f"{where} is gone: nothing is bound to the name of the class any more."
            return f"{where} is bound to {self.found}, which is not the class of that name."
        if self.kind == "init":
            return f"{where} still has the __init__ of a patch that is over."
        return f"the recorders of {where} look for {self.found}, which belongs to a patch."


def find_leaks() -> tuple[Leak, ...]:
    """Return everything in the loaded transformers modules that a patch has left behind."""
    names = tuple(_name_leaks(_loaded()))
    if names:
        names += tuple(_name_leaks(_superseded()))
    return (*names, *_lost_names(), *_init_leaks(), *_recorder_leaks())


def mend(leak: Leak) -> None:
    """Put back what a leak replaced.

    Raises:
        RestoreError: The original is gone and its source cannot be read.
    """
    if leak.kind == "init":
        unwrap_left(leak.holder)
    elif leak.kind == "name":
        setattr(leak.holder, leak.name, _original_class(leak.holder, leak.name))
    else:
        _mend_recorders(leak.holder)


def _name_leaks(modules: Iterable[tuple[str, ModuleType]]) -> Iterator[Leak]:
    for module_name, module in modules:
        for name, value in list(vars(module).items()):
            if not (isinstance(value, type) and issubclass(value, nn.Module)):
                continue
            if _belongs(value, module_name, name) or is_rebound(module, name):
                continue
            if _expected_home(module, name) is not None:
                found = f"{value.__module__}.{value.__qualname__}"
                yield Leak("name", module_name, name, found, module)


def _lost_names() -> Iterator[Leak]:
    """Find names of classes that are bound to no class any more: to a function, or to nothing."""
    for cls in loaded_module_classes():
        module = sys.modules.get(cls.__module__)
        if "." in cls.__qualname__ or not isinstance(module, ModuleType):
            continue
        bound = vars(module).get(cls.__name__)
        if isinstance(bound, type) or is_rebound(module, cls.__name__):
            continue
        if _expected_home(module, cls.__name__) is module:
            found = "" if bound is None else f"a {type(bound).__name__}"
            yield Leak("name", cls.__module__, cls.__name__, found, module)


def _init_leaks() -> Iterator[Leak]:
    for cls in left_wrapped():
        yield Leak("init", cls.__module__, cls.__qualname__, "a wrapper", cls)


def _recorder_leaks() -> Iterator[Leak]:
    for cls in loaded_module_classes():
        recorders = vars(cls).get("_can_record_outputs")
        if not isinstance(recorders, dict):
            continue
        for target in _targets(recorders):
            if _is_foreign(target, cls):
                found = f"{target.__module__}.{target.__qualname__}"
                yield Leak("recorder", cls.__module__, cls.__qualname__, found, cls)
                break


def _is_foreign(target: type, cls: type) -> bool:
    """Tell whether a recorder of a class looks for what the class's file knows nothing of."""
    if target.__module__ == cls.__module__ or target.__module__.startswith("torch."):
        return False
    if not is_transformers_name(target.__module__):
        return True
    # One class of transformers put in another one's place: its name is not in the file.
    source = source_of_module(sys.modules[cls.__module__])
    return bool(source) and not re.search(rf"\b{re.escape(target.__name__)}\b", source)


def _loaded() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if is_transformers_name(name) and isinstance(module, ModuleType):
            yield name, module


def _superseded() -> Iterator[tuple[str, ModuleType]]:
    """Find packages of transformers that others have taken the place of, and a user still holds.

    The first import of a submodule runs the lazy root anew (transformers 5.24.0), so who did
    `import transformers` before has another object than `sys.modules`, with names of its own.
    """
    for found in gc.get_objects():
        # By the type and not by isinstance, which asks lazy proxies for their class.
        if not issubclass(type(found), ModuleType):
            continue
        name = vars(found).get("__name__")
        if is_transformers_name(name) and sys.modules.get(name) is not found:
            yield name, found


def _belongs(cls: type, module_name: str, name: str) -> bool:
    """Tell at once, without reading source, that a binding is what its name says."""
    if cls.__module__ == module_name and cls.__qualname__ == name:
        return True
    # torch's own classes are bound under their own names in most modeling files.
    package = cls.__module__.partition(".")[0]
    return cls.__name__ == name and package in ("transformers", "torch")


def _expected_home(module: ModuleType, name: str) -> ModuleType | None:
    """Return the transformers module that should define a name bound here, None if none should.

    A name for another library's class, or an alias (`import X as Y`), has no such home.
    """
    source = source_of_module(module)
    if re.search(rf"^class {re.escape(name)}\b", source, re.MULTILINE):
        return module
    lazy = getattr(module, "_class_to_module", None)
    if isinstance(lazy, dict) and isinstance(lazy.get(name), str):
        home = sys.modules.get(f"{module.__name__}.{lazy[name]}")
        return home if home is None or home is module else _expected_home(home, name)
    home_name = _imported_from(source, name, module)
    home = sys.modules.get(home_name) if home_name else None
    if home is None or home is module or not is_transformers_name(home.__name__):
        return None
    return _expected_home(home, name)


def _imported_from(source: str, name: str, module: ModuleType) -> str | None:
    """Return the full name of the Python module that a name is imported from, under that name."""
    if not re.search(rf"\b{re.escape(name)}\b", source):
        return None
    package = module.__spec__.parent if module.__spec__ else module.__package__
    return _imports(source, package or "").get(name)


@functools.lru_cache(maxsize=128)
def _imports(source: str, package: str) -> dict[str, str]:
    """Return name → Python module for each `from … import name` that does not rename it."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        parents = package.split(".")
        base = parents[: len(parents) - node.level + 1] if node.level else []
        home = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.asname in (None, alias.name):
                found.setdefault(alias.name, home)
    return found


def _original_class(module: ModuleType, name: str) -> type:
    home = _expected_home(module, name)
    if home is None:
        raise RestoreError(
            f"{module.__name__}.{name} has no class of transformers behind it. Restart the kernel."
        )
    bound = vars(home).get(name)
    if isinstance(bound, type) and _belongs(bound, home.__name__, name):
        return bound
    # Among all classes, not only those of modules: transformers' own patch rebinds any name that
    # fits, also those of output classes and of interfaces.
    alive = [
        cls
        for cls in subclasses_of(object)
        if cls.__module__ == home.__name__ and cls.__qualname__ == name
    ]
    return alive[-1] if alive else _defined_again(home, name)


def _defined_again(home: ModuleType, name: str) -> type:
    """Run one class statement of the installed source again, in the Python module it belongs to."""
    statement = _statement(home, name)
    if statement is None:
        raise RestoreError(
            f"the original {home.__name__}.{name} is gone and its source cannot be read. "
            f"Restart the kernel."
        )
    kept = vars(home).get(name)
    code = compile(ast.Module([statement], []), home.__file__ or home.__name__, "exec")
    try:
        # The class statement of the installed library, and nothing of the user's.
        exec(code, vars(home))
        again: type = vars(home)[name]
    finally:
        setattr(home, name, kept)
    return again


def _statement(home: ModuleType, name: str) -> ast.stmt | None:
    source = source_of_module(home)
    body = ast.parse(source).body if source else []
    return next((s for s in body if isinstance(s, ast.ClassDef) and s.name == name), None)


def _mend_recorders(cls: type) -> None:
    """Evaluate a class's own `_can_record_outputs` again, as its source has it."""
    home = sys.modules[cls.__module__]
    statement = _statement(home, cls.__name__)
    assigned = (
        node.value
        for node in (statement.body if isinstance(statement, ast.ClassDef) else ())
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "_can_record_outputs" for t in node.targets)
    )
    value = next(assigned, None)
    if value is None:
        raise RestoreError(
            f"the recorders of {cls.__module__}.{cls.__qualname__} cannot be read from its source. "
            f"Restart the kernel."
        )
    code = compile(ast.Expression(value), home.__file__ or home.__name__, "eval")
    # The library's own class attribute, from its file.
    fresh: dict[str, Any] = eval(code, vars(home))
    recorders: dict[str, Any] = vars(cls)["_can_record_outputs"]
    # The same dict object is in transformers' registry, so it is changed and not replaced.
    recorders.clear()
    recorders.update(fresh)


def _targets(recorders: dict[str, Any]) -> Iterator[type]:
    recorder_class = output_recorder_class()
    for specs in recorders.values():
        for spec in specs if isinstance(specs, list | tuple) else [specs]:
            target: Any = (
                getattr(spec, "target_class", None) if isinstance(spec, recorder_class) else spec
            )
            for each in target if isinstance(target, tuple) else (target,):
                if isinstance(each, type):
                    yield each
