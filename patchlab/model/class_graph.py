"""The facts of all files put together: which class is a module, and what it can hold.

Names are resolved through imports, aliases, dispatch dicts and helper functions; inherited
`__init__`s are followed along the bases; children built by an Auto class are looked up by the
config's default sub-config. Classes that are swapped in after construction are not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from patchlab.model.auto_mappings import AutoMappings
from patchlab.model.static_index import ClassFacts, FileFacts, FunctionFacts, Refs

PRETRAINED_MODEL = "transformers.modeling_utils.PreTrainedModel"
_NO_MODULES = frozenset({"Parameter", "ParameterList", "ParameterDict", "UninitializedParameter"})
_BUILDERS = frozenset({"from_config", "_from_config", "from_pretrained", "load_backbone"})
# What is read of a module, a class or a dict by these names still stands for the same classes.
_SAME = _BUILDERS | {
    *("get", "values", "items", "pop", "copy", "append", "extend", "insert", "children"),
    *("to", "eval", "train", "half", "float", "bfloat16", "requires_grad_", "apply", "__class__"),
}


@dataclass(slots=True)
class Place:
    """Where a name stands: its file, the class whose `self` is meant, the function around it."""

    file: FileFacts
    self_class: str = ""
    function: FunctionFacts | None = None


@dataclass
class ClassGraph:
    """Class ids (`python_module.ClassName`) with their files; answers are remembered.

    Attributes:
        load: Reads a Python module that is not among the files yet; None if there is no such file.
    """

    files: dict[str, FileFacts]
    autos: AutoMappings
    load: Callable[[str], FileFacts | None]
    _resolved: dict[tuple[str, str], str | None] = field(default_factory=dict)
    _modules: dict[str, bool] = field(default_factory=dict)
    _lines: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _by_name: dict[str, list[str]] = field(default_factory=dict)
    _owners: dict[tuple[str, int, str], set[str]] = field(default_factory=dict)

    def class_ids(self) -> list[str]:
        """Return every class of the files read so far, modules or not."""
        return [f"{file.python_module}.{n}" for file in self.files.values() for n in file.classes]

    def file(self, python_module: str) -> FileFacts | None:
        """Return the facts of a Python module of transformers, reading it if need be."""
        if python_module not in self.files:
            loaded = self.load(python_module)
            if loaded is None:
                return None
            self.files[python_module] = loaded
        return self.files[python_module]

    def class_facts(self, class_id: str) -> ClassFacts | None:
        """Return the facts of a class, None for one outside transformers."""
        python_module, _, name = class_id.rpartition(".")
        file = self.files.get(python_module)
        return None if file is None else file.classes.get(name)

    def resolve(self, python_module: str, name: str, depth: int = 0) -> str | None:
        """Resolve a dotted name to a class id or to a dotted name outside transformers."""
        key = (python_module, name)
        if key not in self._resolved:
            self._resolved[key] = None  # a name that leads back to itself
            self._resolved[key] = self._look_up(python_module, name, depth)
        return self._resolved[key]

    def _look_up(self, python_module: str, name: str, depth: int) -> str | None:
        file = self.file(python_module) if depth < 8 else None
        if file is None:
            return None
        if name in file.classes:
            return f"{python_module}.{name}"
        head, _, rest = name.partition(".")
        if head in file.imports:
            origin = file.imports[head] + ("." + rest if rest else "")
            if not origin.startswith("transformers."):
                return origin
            return self._look_up_origin(origin, depth)
        alias = file.assigned.get(name)
        if alias is not None and len(alias.names) == 1:
            (target,) = alias.names
            return self.resolve(python_module, target, depth + 1) if target != name else None
        return None

    def _look_up_origin(self, origin: str, depth: int) -> str | None:
        owner, _, tail = origin.rpartition(".")
        while owner and owner != "transformers":
            if self.file(owner) is not None:
                if (found := self.resolve(owner, tail, depth + 1)) is not None:
                    return found
                break
            owner, _, last = owner.rpartition(".")
            tail = f"{last}.{tail}"
        # A lazy package (`from ..clip import X`): its names are looked up by name.
        name = origin.rpartition(".")[2]
        return next(iter(self.named(name, folder_of(origin))), None) if name[:1].isupper() else None

    def is_module(self, class_id: str | None) -> bool:
        """Tell whether a class derives from `torch.nn.Module`."""
        if class_id is None:
            return False
        if class_id not in self._modules:
            self._modules[class_id] = False
            facts = self.class_facts(class_id)
            if facts is not None:
                owner = class_id.rpartition(".")[0]
                found = any(self.is_module(self.resolve(owner, base)) for base in facts.bases)
            else:
                owner, _, name = class_id.rpartition(".")
                found = (
                    owner.startswith("torch.nn")
                    and ".functional" not in owner
                    and name[:1].isupper()
                    and name not in _NO_MODULES
                )
            self._modules[class_id] = found
        return self._modules[class_id]

    def lineage(self, class_id: str) -> tuple[str, ...]:
        """Return the class and its bases within transformers, nearest first."""
        if class_id not in self._lines:
            self._lines[class_id] = ()
            line = [class_id]
            facts = self.class_facts(class_id)
            for base in facts.bases if facts is not None else ():
                resolved = self.resolve(class_id.rpartition(".")[0], base)
                if resolved is not None and self.class_facts(resolved) is not None:
                    line += [found for found in self.lineage(resolved) if found not in line]
            self._lines[class_id] = tuple(line)
        return self._lines[class_id]

    def signature(self, class_id: str, method: str) -> str | None:
        """Return the signature of "init" or "forward", its own or inherited within transformers."""
        for ancestor in self.lineage(class_id):
            facts = self.class_facts(ancestor)
            if facts is not None and (found := getattr(facts, method)) is not None:
                return str(found)
        return None

    def named(self, name: str, folder: str = "") -> tuple[str, ...]:
        """Return the ids of the classes with a name, those of a models folder first."""
        if not self._by_name:
            for file in self.files.values():
                for found in file.classes:
                    self._by_name.setdefault(found, []).append(f"{file.python_module}.{found}")
        start = f"transformers.models.{folder}."
        return tuple(sorted(self._by_name.get(name, ()), key=lambda i: not i.startswith(start)))

    def children(self, class_id: str) -> Iterator[tuple[str, str]]:
        """Yield `(attribute, class id)` for what a class can hold; "*" if not known where."""
        taken: set[str] = set()
        for place, function in self._initializers(class_id):
            for inner_place, reached in self._reached(place, function):
                for attribute, refs in reached.assigned:
                    if attribute and attribute not in taken:
                        for child in self._classes(refs, inner_place, set()):
                            yield attribute, child
            taken |= function.always | function.deleted

    def passed(self, class_id: str) -> Iterator[tuple[str, str, str]]:
        """Yield `(holder, attribute, class)` for what is given to a holder's constructor."""
        reached = [pair for start in self._initializers(class_id) for pair in self._reached(*start)]
        for place, function in reached:
            refs = [refs for _, refs in function.assigned]
            refs += [function.returned, *function.local.values()]
            for callee, key, name in sorted({p for r in refs for p in r.passed}, key=str):
                given = self._classes(Refs({name}), place, set())
                if not given:
                    continue
                for holder in self._classes(Refs({callee}), place, set()):
                    for attribute in self._stored_as(holder, key):
                        for inner in given:
                            yield holder, attribute, inner

    def _stored_as(self, holder: str, key: int | str) -> list[str]:
        """Return the attributes under which a class keeps an argument of its constructor."""
        for _, function in self._initializers(holder):
            if isinstance(key, int):
                if key >= len(function.parameters):
                    return []
                key = function.parameters[key]
            return [
                attribute
                for attribute, refs in function.assigned
                if attribute and key in refs.names
            ]
        return []

    def _initializers(self, class_id: str) -> Iterator[tuple[Place, FunctionFacts]]:
        """Yield the `__init__`s that run, along `super()` and direct calls, and their places."""
        line = list(self.lineage(class_id))
        while line:
            ancestor = line.pop(0)
            facts = self.class_facts(ancestor)
            init = facts.methods.get("__init__") if facts is not None else None
            if init is None:
                continue
            file = self.files[ancestor.rpartition(".")[0]]
            yield Place(file, class_id, init), init
            named = [self.resolve(file.python_module, base) for base in init.initializes]
            if named := [base for base in named if base is not None]:
                line = [base for base in named if self.class_facts(base) is not None]
            elif not init.calls_super:
                return

    def _reached(
        self, place: Place, function: FunctionFacts
    ) -> Iterator[tuple[Place, FunctionFacts]]:
        """Yield a function and the methods it calls on `self`, at any depth, each once."""
        waiting, seen = [(place, function)], {"__init__"}
        while waiting:
            here, current = waiting.pop(0)
            yield here, current
            names = {name for _, refs in current.assigned for name in refs.names}
            for name in sorted(names.union(*(refs.names for refs in current.local.values()))):
                method = name[5:] if name.startswith("self.") else ""
                if not method or method in seen:
                    continue
                seen.add(method)
                for ancestor in self.lineage(place.self_class):
                    facts = self.class_facts(ancestor)
                    if ancestor != PRETRAINED_MODEL and facts and method in facts.methods:
                        found = facts.methods[method]
                        file = self.files[ancestor.rpartition(".")[0]]
                        waiting.append((Place(file, place.self_class, found), found))
                        break

    def _classes(self, refs: Refs, place: Place, seen: set[tuple[str, int, str]]) -> set[str]:
        """Resolve names to the module classes of transformers that they can stand for."""
        found: set[str] = set()
        for auto_class, config in refs.autos:
            found |= self._auto_children(auto_class, config, place)
        for name in sorted(refs.names):
            key = (place.file.python_module, id(place.function), name)
            # A config is often made from the models' own (`encoder.config`), and is no module.
            if key in seen or "config" in name.split("."):
                continue
            seen.add(key)
            found |= self._classes_of_name(name, place, seen)
        return found

    def _classes_of_name(
        self, name: str, place: Place, seen: set[tuple[str, int, str]]
    ) -> set[str]:
        head, *rest = name.split(".")
        function, file = place.function, place.file
        steps = [step for step in rest if step not in _SAME]
        if head == "self":
            if steps[1:]:
                return self._along(self._attribute_of(place.self_class, steps[0]), steps[1:])
            return self._classes_of_attribute("".join(rest[:1]), place, seen)
        if function is not None and head in function.local:
            if not steps:
                return self._classes(function.local[head], place, seen)
            return self._along(self._local(head, function, place), steps)
        if function is not None and head in function.parameters:
            return set()
        if rest and rest[-1] in _BUILDERS:
            name = name.rpartition(".")[0]
        resolved = self.resolve(file.python_module, name)
        if resolved is not None and self.class_facts(resolved) is not None:
            return {resolved} if self.is_module(resolved) else set()
        if head in file.assigned:
            return self._classes(file.assigned[head], Place(file), seen)
        origin = file
        if head in file.imports and file.imports[head].startswith("transformers.models."):
            owner, _, head = file.imports[head].rpartition(".")
            origin = self.file(owner) or file
        if origin is not file and head in origin.assigned:
            return self._classes(origin.assigned[head], Place(origin), seen)
        helper = origin.functions.get(head)
        if helper is None:
            return set()
        return self._built_in(helper, Place(origin, "", helper), seen)

    def _along(self, found: set[str], steps: Iterable[str]) -> set[str]:
        """Follow attributes: `backbone.channels` is what a backbone has there, not the backbone."""
        for step in steps:
            found = {child for holder in found for child in self._attribute_of(holder, step)}
        return found

    def _attribute_of(self, holder: str, name: str) -> set[str]:
        """Resolve an attribute of a class; remembered, since many names lead over the same."""
        if (key := (holder, 0, name)) not in self._owners:
            self._owners[key] = set()  # an attribute that leads back to itself
            if file := self.files.get(holder.rpartition(".")[0]):
                self._owners[key] = self._classes_of_attribute(name, Place(file, holder), set())
        return self._owners[key]

    def _local(self, name: str, function: FunctionFacts, place: Place) -> set[str]:
        if (key := (place.self_class, id(function), name)) not in self._owners:
            self._owners[key] = set()
            self._owners[key] = self._classes(function.local[name], place, set())
        return self._owners[key]

    def _built_in(
        self, function: FunctionFacts, place: Place, seen: set[tuple[str, int, str]]
    ) -> set[str]:
        found = self._classes(function.returned, place, seen)
        for _, refs in function.assigned:
            found |= self._classes(refs, place, seen)
        return found

    def _classes_of_attribute(
        self, name: str, place: Place, seen: set[tuple[str, int, str]]
    ) -> set[str]:
        """Resolve `self.name`: a method that builds, a class attribute, one that was set before."""
        found: set[str] = set()
        for ancestor in self.lineage(place.self_class) if place.self_class else ():
            facts = self.class_facts(ancestor)
            if facts is None or ancestor == PRETRAINED_MODEL:
                continue
            file = self.files[ancestor.rpartition(".")[0]]
            if name in facts.methods and name != "__init__":
                method = facts.methods[name]
                return found | self._built_in(method, Place(file, place.self_class, method), seen)
            if name in facts.attributes:
                return found | self._classes(facts.attributes[name], Place(file), seen)
            init = facts.methods.get("__init__")
            for attribute, refs in init.assigned if init is not None else ():
                if attribute == name:
                    found |= self._classes(refs, Place(file, place.self_class, init), seen)
        return found

    def _auto_children(self, auto_class: str, config: str, place: Place) -> set[str]:
        """Resolve `AutoModel.from_config(config.text_config)` by the config's defaults."""
        auto = "AutoBackbone" if auto_class == "load_backbone" else auto_class.partition(".")[0]
        found: set[str] = set()
        for config_class, model_type in self._sub_configs(auto_class, config, place):
            facts = self.autos.configs.get(config_class)
            for name in self.autos.built_by(auto, model_type):
                found.update(self.named(name, facts.folder if facts is not None else "")[:1])
        return found

    def _sub_configs(self, auto_class: str, config: str, place: Place) -> set[tuple[str, str]]:
        """Return `(config class, model type)` for what an Auto class is given."""
        own = self.config_classes(place.self_class)
        attribute = config.rpartition(".")[2]
        if auto_class == "load_backbone":
            attribute = "backbone_config"
        found = {s for c in own if (s := self.autos.sub_config(c, attribute)) is not None}
        if attribute == "config":
            found |= {(c, self.autos.model_type(c)) for c in own[:1]}
        # A config that is converted on the way: `text_config = OtherConfig.from_dict(...)`.
        local = place.function.local.get(attribute) if place.function is not None else None
        for name in local.names if local is not None else ():
            if name.partition(".")[0] in self.autos.configs:
                found.add((name.partition(".")[0], self.autos.model_type(name.partition(".")[0])))
            elif name.startswith("config.") and name != config:
                found |= self._sub_configs(auto_class, name, Place(place.file, place.self_class))
        if not found:
            # No spec: a config of the folder with such a name (encoder_config, XEncoderConfig).
            ending = attribute.replace("_", "")
            folder = folder_of(place.file.python_module)
            for facts in self.autos.configs.values():
                if facts.folder == folder and facts.name.casefold().endswith(ending):
                    found.add((facts.name, self.autos.model_type(facts.name)))
                elif facts.folder == folder and attribute in facts.sub_configs:
                    found |= {s for s in [self.autos.sub_config(facts.name, attribute)] if s}
        return found

    def config_classes(self, class_id: str) -> tuple[str, ...]:
        """Return the config classes that a class is annotated with, nearest first."""
        found: list[str] = []
        for ancestor in self.lineage(class_id) if class_id else ():
            facts = self.class_facts(ancestor)
            if facts is None:
                continue
            texts = [facts.annotations.get("config", "")]
            if "config_class" in facts.attributes:
                texts += sorted(facts.attributes["config_class"].names)
            if "__init__" in facts.methods:
                texts += facts.methods["__init__"].annotations.values()
            found += [name for text in texts for name in _config_names(text) if name not in found]
        return tuple(found)


def folder_of(python_module: str) -> str:
    """Return the folder under `models`, "" for a file elsewhere."""
    parts = python_module.split(".")
    return parts[2] if len(parts) > 3 and parts[1] == "models" else ""


def _config_names(text: str) -> Iterable[str]:
    for part in text.replace('"', "").replace("'", "").split("|"):
        name = part.strip().rpartition(".")[2]
        if name.endswith("Config") and name not in ("PreTrainedConfig", "PretrainedConfig"):
            yield name
