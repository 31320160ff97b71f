"""Every modeling class of the installed transformers, known without importing one.

The catalog answers for all architectures what a module tree answers for one model: which classes
there are, how they are called, and what they can hold. It is read from the source
(`catalog_source`), which takes several seconds once, and kept on disk (`catalog_cache`), from where
it loads in some 40 ms. A class is told by its full name,
"transformers.models.bert.modeling_bert.BertLayer"; within the catalog by its number, its place in
`names`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchlab.errors import CatalogError
from patchlab.model import catalog_cache
from patchlab.model.catalog_source import package_root, read_catalog, source_paths
from patchlab.model.class_graph import folder_of
from patchlab.model.containment import Containment, as_mask, numbers_in


@dataclass(frozen=True, slots=True)
class CatalogClass:
    """One `nn.Module` class of transformers, as its source has it.

    Attributes:
        number: Its place in the catalog.
        name: Its `__name__`, which rules are matched against.
        python_module: Where it is defined.
        model_type: The folder under `models`, "bert"; "" for a class of the library itself.
        bases: Full names of its bases, or as the source writes what is not found.
        init: Parameters of `__init__` after `self`, its own or inherited, written
            "config, layer_idx=, *, scale=, **kwargs"; None if torch's own. See `parse_signature`.
        forward: The same for `forward`.
        is_pretrained_model: Whether it derives from `PreTrainedModel`.
        children: `(attribute, numbers of the classes it can hold there)`; "*" where the attribute
            is not known. Both branches of a condition and each entry of a dispatch dict count.
    """

    number: int
    name: str
    python_module: str
    model_type: str
    bases: tuple[str, ...]
    init: str | None
    forward: str | None
    is_pretrained_model: bool
    children: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def full_name(self) -> str:
        """Python module and name, joined by a dot."""
        return f"{self.python_module}.{self.name}"


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A config class: its `model_type`, folder, and models' numbers, the base model first."""

    name: str
    model_type: str
    folder: str
    models: tuple[int, ...]


class Catalog:
    """The classes of one installation; immutable, safe to share between threads.

    Attributes:
        version: Version of transformers.
        names: Class names by number; a name can stand for several classes.
        other_names: Names of transformers' classes that are no modules (configs, output classes,
            tokenizers, `AttentionInterface`), sorted.
        configs: Config class name → entry, for those that a model is built from.
        config_names: `model_type` → config class name.
    """

    def __init__(self, data: Mapping[str, Any], version: str) -> None:
        self.version = version
        self.names: tuple[str, ...] = tuple(data["names"])
        self.other_names: tuple[str, ...] = tuple(data["other_names"])
        self.config_names: Mapping[str, str] = data["model_types"]
        self.configs: Mapping[str, ConfigEntry] = {
            name: ConfigEntry(name, model_type, folder, tuple(models))
            for name, (model_type, folder, *models) in data["configs"].items()
        }
        self._data = data
        self._folders = [folder_of(name) for name in data["python_modules"]]
        if any(len(data[column]) != len(self.names) for column in _COLUMNS):
            raise ValueError("columns of the catalog differ in length")

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[CatalogClass]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> CatalogClass:
        data = self._data
        init, forward = data["init"][number], data["forward"][number]
        return CatalogClass(
            number=number,
            name=self.names[number],
            python_module=self.python_module(number),
            model_type=self.model_type(number),
            bases=tuple(data["bases"][number]),
            init=data["signatures"][init] if init >= 0 else None,
            forward=data["signatures"][forward] if forward >= 0 else None,
            is_pretrained_model=number in self._pretrained,
            children=tuple((name, tuple(held)) for name, *held in data["children"][number]),
        )

    def python_module(self, number: int) -> str:
        """Return the Python module of a class."""
        return str(self._data["python_modules"][self._data["module"][number]])

    def model_type(self, number: int) -> str:
        """Return the folder under `models` of a class, "" for a class of the library itself."""
        return self._folders[int(self._data["module"][number])]

    def named(self, name: str) -> tuple[CatalogClass, ...]:
        """Return every class of a name, in order of Python module."""
        return tuple(self[number] for number in self._numbers.get(name, ()))

    def find(self, full_name: str) -> CatalogClass | None:
        """Return the class of a full name ("python_module.ClassName"), None if there is none."""
        python_module, _, name = full_name.rpartition(".")
        for number in self._numbers.get(name, ()):
            if self.python_module(number) == python_module:
                return self[number]
        return None

    def architecture(self, config_name: str) -> frozenset[int]:
        """Return what the models of a config class can hold at any depth, the models left out.

        A model that is part of another, as a base model of one with a head, is there. Parts that an
        Auto class builds are those of the config's defaults. Empty for an unknown config.
        """
        entry = self.configs.get(config_name)
        models = entry.models if entry is not None else ()
        return frozenset(numbers_in(self.containment.reachable(models)))

    def model_type_classes(self, model_type: str) -> frozenset[int]:
        """Return the classes defined under one folder of `models`, and what they can hold."""
        own = [n for n in range(len(self)) if self.model_type(n) == model_type]
        return frozenset(numbers_in(self.containment.reachable(own) | as_mask(own)))

    @functools.cached_property
    def model_types(self) -> tuple[str, ...]:
        """The folders under `models` that hold a modeling file, sorted."""
        return tuple(sorted({folder for folder in self._folders if folder}))

    @functools.cached_property
    def containment(self) -> Containment:
        """What each class can hold, closed; made on first use."""
        return Containment(self._data["children"])

    @functools.cached_property
    def _pretrained(self) -> frozenset[int]:
        return frozenset(self._data["pretrained"])

    @functools.cached_property
    def _numbers(self) -> Mapping[str, list[int]]:
        numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            numbers.setdefault(name, []).append(number)
        return numbers


# A file made by other code than this says something else, whatever it was made from.
READERS = tuple(
    str(Path(__file__).with_name(name))
    for name in ("static_index.py", "class_graph.py", "auto_mappings.py", "catalog_source.py")
)
_COLUMNS = ("module", "bases", "init", "forward", "children")
_LOCK = threading.Lock()
_loaded: dict[Path, Catalog] = {}


def load_catalog(*, progress: bool = True) -> Catalog:
    """Return the catalog of the installed transformers, the same object for the whole process.

    The first call in a process reads the cached file (some 40 ms); the first for an installation
    reads the source (5-10 s) and writes the file. Threads wait for one another; processes may read
    the source at the same time and write the same file.

    Args:
        progress: Whether to show a bar on standard error while the source is read.

    Raises:
        CatalogError: transformers is not installed, or none of its modeling files could be read.
    """
    root = package_root()
    with _LOCK:
        if root not in _loaded:
            _loaded[root] = build_catalog(root, progress=progress)
        return _loaded[root]


def build_catalog(root: Path, *, progress: bool = False) -> Catalog:
    """Read the catalog of a package folder from its cached file, or from its source.

    Raises:
        CatalogError: None of its modeling files could be read.
    """
    version = installed_version(root)
    stamp = catalog_cache.stamp_of(version, [*READERS, *source_paths(root)])
    path = catalog_cache.cache_file(root, version)
    data = catalog_cache.read_cache(path, stamp)
    if data is not None:
        try:
            return Catalog(data, version)
        except (KeyError, TypeError, ValueError):
            data = None  # the right stamp on other content
    data = read_catalog(root, progress=progress)
    data["stamp"] = stamp
    catalog_cache.write_cache(path, data)
    return Catalog(data, version)


def installed_version(root: Path) -> str:
    """Return the version of a package folder, read and not imported.

    Raises:
        CatalogError: The folder has no `__init__.py` that can be read.
    """
    try:
        head = (root / "__init__.py").read_text(encoding="utf-8")[:4000]
    except OSError as error:
        raise CatalogError(f"{root / '__init__.py'} cannot be read: {error}.") from error
    found = re.search(r"^__version__ = [\"']([^\"']+)[\"']", head, re.MULTILINE)
    if found is not None:
        return found.group(1)
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def parse_signature(text: str) -> inspect.Signature:
    """Turn a signature's text into one that arguments can be bound to.

    A parameter with a default has `...` for it, since the catalog does not keep the value.

    Example:
        >>> parse_signature("config, layer_idx=, **kwargs")
        <Signature (config, layer_idx=Ellipsis, **kwargs)>
    """
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters: list[inspect.Parameter] = []
    for part in filter(None, text.split(", ")):
        if part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif part.startswith("**"):
            parameters.append(inspect.Parameter(part[2:], inspect.Parameter.VAR_KEYWORD))
        elif part.startswith("*"):
            parameters.append(inspect.Parameter(part[1:], inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            default = ... if part.endswith("=") else inspect.Parameter.empty
            parameters.append(inspect.Parameter(part.rstrip("="), kind, default=default))
    return inspect.Signature(parameters)


def full_names(catalog: Catalog, numbers: Iterable[int]) -> tuple[str, ...]:
    """Return the full names of some classes, sorted."""
    return tuple(sorted(f"{catalog.python_module(n)}.{catalog.names[n]}" for n in numbers))
