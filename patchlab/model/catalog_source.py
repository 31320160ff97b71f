"""The catalog's raw data, made from the source files of the installed transformers.

`read_catalog` turns the package's folder into one plain dict of lists, ready for JSON: strings
once, classes and signatures by number. Nothing of transformers is imported or run.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patchlab.errors import CatalogError
from patchlab.model.auto_mappings import AutoMappings, read_auto_mappings
from patchlab.model.class_graph import PRETRAINED_MODEL, ClassGraph, folder_of
from patchlab.model.static_index import FileFacts, read_source

_AUTO_FILES = ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py")
_CLASS_LINE = re.compile(r"^class (\w+)", re.MULTILINE)
_MODULE_CLASS = re.compile(r"^class \w+\(.*(nn\.[A-Z]\w+|PreTrainedModel)\b.*\):", re.MULTILINE)
_EXPORTS = re.compile(r"^__all__ = \[(.*?)\]", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"[\"'](\w+)[\"']")


def package_root() -> Path:
    """Return the folder of the installed transformers, which is located and not imported.

    Raises:
        CatalogError: transformers is not installed, or not as a folder of source files.
    """
    spec = importlib.util.find_spec("transformers")
    root = Path(spec.origin).parent if spec is not None and spec.origin else None
    if root is None or not (root / "models").is_dir():
        raise CatalogError(
            f"transformers is not installed as a folder of source files (found {root}), so its "
            f"classes cannot be read. Install it with `pip install transformers`."
        )
    return root


def source_paths(root: Path) -> list[str]:
    """Return the Python files that the catalog is made from, sorted; plain strings, for speed.

    All of the package but tests, examples and the `modular_*` sources, which are never imported.
    """
    found: list[str] = []
    waiting = [str(root)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue  # a folder that vanished or is not ours to read
        for entry in entries:
            name = entry.name
            if name.endswith(".py"):
                if not name.startswith("modular_"):
                    found.append(entry.path)
            elif "." not in name and name != "__pycache__" and entry.is_dir():
                waiting.append(entry.path)
    return sorted(found)


def source_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the modeling files, and every other Python file that may define a class."""
    modeling: list[Path] = []
    others: list[Path] = []
    for path in map(Path, source_paths(root)):
        is_modeling = path.name.startswith("modeling_") and path.parent.parent.name == "models"
        (modeling if is_modeling and path.parent.name != "auto" else others).append(path)
    return modeling, others


def read_catalog(root: Path, *, progress: bool = False) -> dict[str, Any]:
    """Read every class of the package.

    Args:
        root: The package's folder.
        progress: Whether to show a bar on standard error; it takes several seconds.

    Returns:
        A JSON-ready dict; `Catalog` is its reader.

    Raises:
        CatalogError: No modeling file could be read.
    """
    # Here and not above: it is needed once for an installation, and takes 30 ms to import.
    from tqdm.auto import tqdm

    modeling, others = source_files(root)
    files: dict[str, FileFacts] = {}
    names: set[str] = set()
    # The second half stands for the classes, which are put together faster than files are read.
    total = len(modeling) * 2
    drawn = progress and _can_show(tqdm)
    if progress and not drawn:
        print("Reading transformers, once for this version of it …", file=sys.stderr)
    bar = tqdm(total=total, desc="Reading transformers", disable=not drawn, leave=False)
    with _no_garbage_collection(), bar:
        for path in modeling:
            source = _read(path)
            if source is not None and (facts := _parse(source, path, root)) is not None:
                files[facts.python_module] = facts
                names.update(_exported(source))
            bar.update()
        if not files:
            raise CatalogError(
                f"no modeling file under {root / 'models'} could be read. Reinstall transformers."
            )
        autos = _read_others(others, root, files, names)
        graph = ClassGraph(files, autos, lambda python_module: _load(python_module, root))
        found = _collect(graph, names, bar)
        # A bar that closes before its end stays, and in a notebook turns red.
        bar.update(total - bar.n)
        return found


def _can_show(bar_class: type) -> bool:
    """Tell whether a bar can be drawn: by a notebook or a terminal, and not in a file."""
    is_widget = any(base.__module__ == "tqdm.notebook" for base in bar_class.__mro__)
    return is_widget or sys.stderr.isatty()


def _read_others(
    paths: Iterable[Path], root: Path, files: dict[str, FileFacts], names: set[str]
) -> AutoMappings:
    """Read everything that is no modeling file: names, stray modules, configs and Auto tables."""
    autos: dict[str, str] = {}
    configs: list[tuple[str, str]] = []
    for path in paths:
        source = _read(path)
        if source is None:
            continue
        names.update(_CLASS_LINE.findall(source))
        names.update(_exported(source))
        if _MODULE_CLASS.search(source) and (facts := _parse(source, path, root)) is not None:
            files[facts.python_module] = facts
        if path.parent.name == "auto" and path.name in _AUTO_FILES:
            autos[path.name] = source
        elif path.name.startswith("configuration_") and path.parent.parent.name == "models":
            configs.append((source, path.parent.name))
        elif path == root / "__init__.py":
            names.update(name for name in _QUOTED.findall(source) if _is_class_name(name))
    mappings = read_auto_mappings(autos)
    for source, folder in configs:
        mappings.add_configs(source, folder)
    return mappings


def _collect(graph: ClassGraph, names: set[str], bar: Any) -> dict[str, Any]:
    """Resolve the whole graph and number what it holds."""
    graph.file("transformers.modeling_utils")
    # Twice: resolving bases reads further files (modeling_layers), whose modules count too.
    modules = {class_id for class_id in graph.class_ids() if graph.is_module(class_id)}
    defined = graph.class_ids()
    modules.update(class_id for class_id in defined if graph.is_module(class_id))
    ids = sorted(modules)
    number = {class_id: i for i, class_id in enumerate(ids)}
    children: dict[str, dict[str, set[int]]] = {class_id: {} for class_id in ids}
    for i, class_id in enumerate(ids):
        for attribute, child in graph.children(class_id):
            if child in number:
                children[class_id].setdefault(attribute, set()).add(number[child])
        for holder, attribute, child in graph.passed(class_id):
            if child in number and holder in number and child != holder:
                children[holder].setdefault(attribute, set()).add(number[child])
        if i % 100 == 0:
            bar.update((bar.total - bar.n) * 100 // (len(ids) - i + 100))
    python_modules = sorted({class_id.rpartition(".")[0] for class_id in ids})
    module_number = {name: i for i, name in enumerate(python_modules)}
    signatures: dict[str, int] = {"": 0}
    signature_numbers = {
        method: [
            signatures.setdefault(found, len(signatures))
            if (found := graph.signature(class_id, method)) is not None
            else -1
            for class_id in ids
        ]
        for method in ("init", "forward")
    }
    module_names = {class_id.rpartition(".")[2] for class_id in ids}
    others = names | {class_id.rpartition(".")[2] for class_id in defined}
    return {
        "python_modules": python_modules,
        "names": [class_id.rpartition(".")[2] for class_id in ids],
        "module": [module_number[class_id.rpartition(".")[0]] for class_id in ids],
        "bases": [_base_names(graph, class_id) for class_id in ids],
        "init": signature_numbers["init"],
        "forward": signature_numbers["forward"],
        "signatures": list(signatures),
        "pretrained": [number[i] for i in ids if PRETRAINED_MODEL in graph.lineage(i)],
        "children": [
            [[attribute, *sorted(found)] for attribute, found in children[class_id].items()]
            for class_id in ids
        ],
        "other_names": sorted(n for n in others if _is_class_name(n) and n not in module_names),
        "configs": _config_models(graph, number),
        "model_types": graph.autos.config_names,
    }


def _base_names(graph: ClassGraph, class_id: str) -> list[str]:
    facts = graph.class_facts(class_id)
    owner = class_id.rpartition(".")[0]
    return [graph.resolve(owner, base) or base for base in facts.bases] if facts is not None else []


def _config_models(graph: ClassGraph, number: dict[str, int]) -> dict[str, list[Any]]:
    """Map each config class to its model type, folder and models' numbers, base model first."""
    by_config: dict[str, list[str]] = {}
    for class_id in number:
        if PRETRAINED_MODEL in graph.lineage(class_id):
            for config in graph.config_classes(class_id)[:1]:
                by_config.setdefault(config, []).append(class_id)
    found: dict[str, list[Any]] = {}
    for config, facts in sorted(graph.autos.configs.items()):
        model_type = graph.autos.model_type(config)
        models: dict[str, None] = {}
        for auto_class in sorted(graph.autos.models, key=lambda a: (a != "AutoModel", a)):
            for name in graph.autos.built_by(auto_class, model_type):
                models.update(dict.fromkeys(graph.named(name, facts.folder)[:1]))
        models.update(dict.fromkeys(by_config.get(config, ())))
        numbers = [number[class_id] for class_id in models if class_id in number]
        if numbers:
            found[config] = [model_type, facts.folder, *numbers]
    return found


def _is_class_name(name: str) -> bool:
    return name.lstrip("_")[:1].isupper() and not name.isupper()


def _exported(source: str) -> Iterable[str]:
    match = _EXPORTS.search(source)
    return [n for n in _QUOTED.findall(match.group(1)) if _is_class_name(n)] if match else []


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # one unreadable file must not cost the other five hundred


def _parse(source: str, path: Path, root: Path) -> FileFacts | None:
    parts = path.relative_to(root.parent).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    python_module = ".".join(parts[:-1] if is_package else parts)
    try:
        return read_source(source, python_module, is_package=is_package)
    except (SyntaxError, ValueError):
        return None  # written for a newer Python, or cut short; nothing else depends on it


def _load(python_module: str, root: Path) -> FileFacts | None:
    """Read a file that a modeling file imports from."""
    if not python_module.startswith("transformers.") or folder_of(python_module) == "auto":
        return None
    path = root.joinpath(*python_module.split(".")[1:])
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file() and (source := _read(candidate)) is not None:
            return _parse(source, candidate, root)
    return None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from walking a million syntax nodes; parsing takes a third less."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
