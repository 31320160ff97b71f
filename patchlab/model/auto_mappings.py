"""Which class transformers' Auto classes build for which config, read from the source.

A composite model builds its parts with `AutoModel.from_config(config.text_config)`. Which class
that is follows from three tables, none of which needs an import: the config's
`sub_configs_defaults` (attribute → config class or model type), the config class's `model_type`,
and the Auto mappings (model type → class names) in `models/auto`. Layout as of transformers 5.24.0.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from patchlab.model.static_index import dotted_name


@dataclass(slots=True)
class ConfigFacts:
    """One config class: its model type, its folder under `models`, its sub-configs' defaults."""

    name: str
    folder: str
    bases: tuple[str, ...] = ()
    model_type: str = ""
    sub_configs: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class AutoMappings:
    """The Auto tables and every config class.

    Attributes:
        models: Auto class name → model type → class names.
        configs: Config class name → facts.
        config_names: Model type → config class name, as in `CONFIG_MAPPING_NAMES`.
    """

    models: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    configs: dict[str, ConfigFacts] = field(default_factory=dict)
    config_names: dict[str, str] = field(default_factory=dict)

    def add_configs(self, source: str, folder: str) -> None:
        """Read the config classes of one `configuration_*.py`.

        Raises:
            SyntaxError: The file cannot be parsed.
        """
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                facts = _read_config(node, folder)
                self.configs.setdefault(facts.name, facts)

    def sub_config(self, config: str, attribute: str) -> tuple[str, str] | None:
        """Return `(config class, model type)` that a config's attribute has by default."""
        seen: set[str] = set()
        waiting = [config]
        while waiting:
            name = waiting.pop(0)
            facts = self.configs.get(name)
            if facts is None or name in seen:
                continue
            seen.add(name)
            if attribute in facts.sub_configs:
                found, model_type = facts.sub_configs[attribute]
                if found == "AutoConfig":
                    return self.config_names.get(model_type, ""), model_type
                return found, model_type or self.model_type(found)
            waiting.extend(facts.bases)
        return None

    def model_type(self, config: str) -> str:
        """Return the `model_type` of a config class, its own or inherited; "" if it has none."""
        facts = self.configs.get(config)
        if facts is None:
            return ""
        return facts.model_type or next(
            (found for base in facts.bases if base != config and (found := self.model_type(base))),
            "",
        )

    def built_by(self, auto_class: str, model_type: str) -> tuple[str, ...]:
        """Return the names of the classes that an Auto class builds for a model type."""
        return self.models.get(auto_class, {}).get(model_type, ())


def read_auto_mappings(sources: Mapping[str, str]) -> AutoMappings:
    """Read the files of `models/auto`, given as file name → source.

    Raises:
        SyntaxError: A file cannot be parsed.
    """
    tables: dict[str, dict[str, tuple[str, ...]]] = {}
    lazy: dict[str, str] = {}
    mapping_of: dict[str, str] = {}
    bases: dict[str, tuple[str, ...]] = {}
    # auto_mappings.py first: the others import its tables and add to them.
    for file_name in sorted(sources, key=lambda name: (name != "auto_mappings.py", name)):
        for node in ast.parse(sources[file_name]).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = tuple(dotted_name(b) or "" for b in node.bases)
                for item in node.body:
                    if (
                        isinstance(item, ast.Assign)
                        and dotted_name(item.targets[0]) == "_model_mapping"
                    ):
                        mapping_of[node.name] = dotted_name(item.value) or ""
                continue
            for name, value in _assignments(node):
                if isinstance(value, ast.Call) and dotted_name(value.func) == "_LazyAutoMapping":
                    lazy[name] = dotted_name(value.args[-1]) or ""
                elif isinstance(value, (ast.Call, ast.Dict)):
                    tables.setdefault(name, {}).update(_read_table(value, tables))
    autos = AutoMappings()
    for auto_class in bases:
        origin = auto_class
        while origin not in mapping_of and bases.get(origin):
            origin = bases[origin][0]
        table = tables.get(lazy.get(mapping_of.get(origin, ""), ""))
        if table is not None:
            autos.models[auto_class] = table
    names = tables.get("CONFIG_MAPPING_NAMES", {})
    autos.config_names = {model_type: found[0] for model_type, found in names.items() if found}
    return autos


def _assignments(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield `NAME = value`, annotated or not, and `NAME.update(value)`."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        yield node.target.id, node.value
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        name, _, method = (dotted_name(node.value.func) or "").rpartition(".")
        if method == "update":
            yield name, node.value.args[0]


def _read_table(
    value: ast.expr, tables: Mapping[str, dict[str, tuple[str, ...]]]
) -> dict[str, tuple[str, ...]]:
    """Read a dict display, or an `OrderedDict` of pairs and of other tables' items."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and node.id in tables:
            found.update(tables[node.id])
        elif isinstance(node, ast.Dict):
            for key, item in zip(node.keys, node.values, strict=True):
                if key is not None:
                    _add_entry(key, item, found)
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            _add_entry(node.elts[0], node.elts[1], found)
    return found


def _add_entry(key: ast.expr, value: ast.expr, found: dict[str, tuple[str, ...]]) -> None:
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        return
    items = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value]
    names = [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)]
    if names:
        found[key.value] = tuple(names)


def _read_config(node: ast.ClassDef, folder: str) -> ConfigFacts:
    facts = ConfigFacts(node.name, folder, tuple(dotted_name(b) or "" for b in node.bases))
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__post_init__"):
            for call in ast.walk(item):
                for keyword in call.keywords if isinstance(call, ast.Call) else ():
                    if keyword.arg == "default_config_type" and isinstance(
                        keyword.value, ast.Constant
                    ):
                        # What consolidate_backbone_kwargs_to_config falls back to, before the spec.
                        facts.sub_configs["backbone_config"] = (
                            "AutoConfig",
                            str(keyword.value.value),
                        )
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Name):
            continue
        name = item.targets[0].id
        if name == "model_type" and isinstance(item.value, ast.Constant):
            facts.model_type = str(item.value.value)
        elif name in ("sub_configs_defaults", "sub_configs") and isinstance(item.value, ast.Dict):
            for key, value in zip(item.value.keys, item.value.values, strict=True):
                if isinstance(key, ast.Constant):
                    facts.sub_configs.setdefault(str(key.value), _read_spec(value))
    return facts


def _read_spec(value: ast.expr) -> tuple[str, str]:
    """Read `SubConfigSpec(config_class=..., model_type=...)`, or a bare config class."""
    if not isinstance(value, ast.Call):
        return dotted_name(value) or "", ""
    config, model_type = "", ""
    for keyword in value.keywords:
        if keyword.arg == "config_class":
            config = dotted_name(keyword.value) or ""
        elif keyword.arg == "model_type" and isinstance(keyword.value, ast.Constant):
            model_type = str(keyword.value.value)
    if not config and value.args:
        config = dotted_name(value.args[0]) or ""
    return config, model_type
