"""Where a value can be imported from in another process.

Of several homes the public one comes first: `torch.nn` for `Linear`, and not
`torch.nn.modules.linear`. Nothing is imported to find out, except what a lazy package itself says
is one of its names.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# Not the real ones in another process, whatever stands in `sys.modules`.
_MAIN = frozenset({"__main__", "__mp_main__"})
# patchlab's own code that a file takes along, so that it works where patchlab is not installed.
WRITTEN_OUT = frozenset({"patchlab.apply.concatenation", "patchlab.errors"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `from module import attribute as name`, or `import module as name`."""

    module: str
    attribute: str
    name: str

    @property
    def root(self) -> str:
        """The package at its root."""
        return self.module.partition(".")[0]

    @property
    def plain(self) -> bool:
        """Whether it is an `import` without `from`."""
        return not self.attribute


def is_importable(module_name: str) -> bool:
    """Tell whether another process can import a Python module that is loaded in this one."""
    module = sys.modules.get(module_name)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None or module_name in _MAIN or module_name in WRITTEN_OUT:
        return False
    if not _is_found(module_name.partition(".")[0], tuple(sys.path)):
        return False
    if spec.origin in ("built-in", "frozen") or spec.submodule_search_locations:
        return True
    return isinstance(spec.origin, str) and Path(spec.origin).exists()


def import_of_module(module: ModuleType, name: str) -> Import | None:
    """Return the import that binds a Python module to a name, None if there is none."""
    # "posixpath" is "ntpath" elsewhere.
    full_name = "os.path" if module is sys.modules.get("os.path") else module.__name__
    known = sys.modules.get(full_name)
    # A lazy package can put another object into `sys.modules` than an earlier import has given
    # (transformers 5.24.0, once its `models` are read); the file is the same.
    same = known is module or getattr(known, "__file__", "") == getattr(module, "__file__", None)
    if not same or not is_importable(full_name):
        return None
    package, _, last = full_name.rpartition(".")
    if full_name == name:
        return Import(full_name, "", name)
    if package and last == name:
        return Import(package, last, name)
    return Import(full_name, "", name)


def import_of_value(value: Any, name: str) -> Import | None:
    """Return the import that binds a class, a function or another object to a name.

    Args:
        value: Anything that is not a Python module.
        name: The name it has where it is used, which it may have at home, too.

    Returns:
        The import, None if no Python module that can be imported has this very object.
    """
    own = (getattr(value, "__qualname__", None), getattr(value, "__name__", None))
    told_names = [n for n in own if isinstance(n, str) and n.isidentifier()]
    names = list(dict.fromkeys([*told_names, name]))
    told = getattr(value, "__module__", None)
    modules = [told, type(value).__module__] if isinstance(told, str) else [type(value).__module__]
    for module_name in modules:
        for attribute in names:
            home = _home(module_name, attribute, value)
            if home:
                return Import(home, attribute, name)
    found = [
        (_rank(module_name, told), module_name, attribute)
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        for attribute in names
        if vars(module).get(attribute, _MISSING) is value and is_importable(module_name)
    ]
    if not found:
        return None
    _, home, attribute = min(found)
    return Import(home, attribute, name)


def submodules_to_import(value: ModuleType, attributes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the submodules that attributes read off a package lead to, if it does not load them.

    `import xml` does not make `xml.etree.ElementTree` known; somebody has imported that, too.
    """
    needed = []
    module = value
    for attribute in attributes:
        inner = vars(module).get(attribute)
        full_name = f"{module.__name__}.{attribute}"
        if not isinstance(inner, ModuleType) or sys.modules.get(full_name) is not inner:
            break
        if attribute not in _loaded_by(module) and is_importable(full_name):
            needed.append(full_name)
        module = inner
    return tuple(needed[-1:])


def is_of_the_user(module_name: str) -> bool:
    """Tell whether a Python module is no part of Python and no installed package."""
    module = sys.modules.get(module_name.partition(".")[0])
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or module_name.partition(".")[0] in sys.stdlib_module_names:
        return False
    return not _INSTALLED & set(Path(file).parts)


def is_installed(root: str) -> bool:
    """Tell whether a package that is installed has this name, loaded or not."""
    if not root.isidentifier():
        return False
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return False
    origin = getattr(spec, "origin", None)
    return isinstance(origin, str) and bool(_INSTALLED & set(Path(origin).parts))


def _home(module_name: str, attribute: str, value: Any) -> str:
    """The shortest public prefix of a Python module's name that has the value, else itself."""
    parts = module_name.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for prefix in prefixes:
        if not any(part.startswith("_") for part in prefix.split(".")) and _has(
            prefix, attribute, value
        ):
            return prefix
    # A private home is only the last resort: `torch._C._nn` of what is `torch.nn.functional`'s.
    return ""


def _has(module_name: str, attribute: str, value: Any) -> bool:
    module = sys.modules.get(module_name)
    if not isinstance(module, ModuleType) or not is_importable(module_name):
        return False
    if attribute not in vars(module) and attribute in getattr(module, "__all__", ()):
        # A lazy package, as transformers: what it says it has does not depend on who asked before.
        return getattr(module, attribute, _MISSING) is value
    return vars(module).get(attribute, _MISSING) is value


def _rank(module_name: str, told: Any) -> tuple[bool, bool, int]:
    same_root = isinstance(told, str) and told.partition(".")[0] == module_name.partition(".")[0]
    private = any(part.startswith("_") for part in module_name.split("."))
    return (not same_root, private, module_name.count("."))


@functools.lru_cache(maxsize=1024)
def _is_found(root: str, path: tuple[str, ...]) -> bool:
    """Tell whether an `import` in another process would find a package, as this one's would.

    A file that was loaded by its path is found by none, and remote code lies in a folder that only
    transformers knows.
    """
    loaded = getattr(sys.modules.get(root), "__spec__", None)
    if loaded is None or root == "transformers_modules":
        return False
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(root, None, None) if find is not None else None
        if spec is not None:
            return bool(spec.origin == loaded.origin)
    return False


@functools.lru_cache(maxsize=64)
def _loaded_by(module: ModuleType) -> frozenset[str]:
    """The submodules that a package's own file imports."""
    file = getattr(module, "__file__", None)
    if type(module) is not ModuleType or not isinstance(file, str) or not file.endswith(".py"):
        return _EVERYTHING  # A lazy package finds them itself.
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(_submodules_of(tree, module.__name__))


def _submodules_of(tree: ast.Module, package: str) -> Iterator[str]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level == 1:
                origin = f"{package}.{origin}".rstrip(".")
            names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.startswith(package + "."):
                yield name[len(package) + 1 :].partition(".")[0]


class _Everything(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return True


_EVERYTHING = _Everything()
