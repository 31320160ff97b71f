"""The walk through a live model: every module at every path, written down in columns.

One pass, without recursion, so that depth is no limit; a module that is its own descendant is
written down once more as a back-reference and not followed. Reading costs about as much as
`str(model)`: columns of plain lists, and tensors described once for each different set of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from patchlab.errors import TargetError
from patchlab.model.nodes import ClassRecord, ModuleState, TensorRecord, class_record

# A module that holds one child twice, n levels deep, has 2^n paths. Beyond this many, repeats of
# modules already written down are no longer followed.
MAX_REPEATED_NODES = 100_000


@dataclass(slots=True)
class Columns:
    """A tree as columns, one entry a module, in preorder; what `ModuleTree` is made from.

    Attributes:
        kinds: Index into `classes`.
        states: Index into `state_table`.
        shared: Node to the node where the same module object comes first.
        cycles: The nodes that are back-references to an ancestor.
        cut: Shared nodes that were not followed, since there are too many repeats.
        ties: Node to `(parameter, first node, first parameter)`, for tensors that come first
            somewhere else.
    """

    names: list[str] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    classes: list[ClassRecord] = field(default_factory=list)
    state_table: list[ModuleState] = field(default_factory=list)
    shared: dict[int, int] = field(default_factory=dict)
    cycles: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    ties: dict[int, tuple[tuple[str, int, str], ...]] = field(default_factory=dict)


def check_module(model: Any) -> None:
    """Check that something is a model that can be walked.

    Raises:
        TargetError: It is not.
    """
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        hint = "Give an instance of it." if isinstance(model, type) else "Give the model itself."
        raise TargetError(f"model must be a torch.nn.Module, got {found}. {hint}")
    if "_modules" not in model.__dict__:
        raise TargetError(
            f"this {type(model).__name__} has no table of submodules: its __init__ did not call "
            f"super().__init__(). Call it first thing in {type(model).__name__}.__init__."
        )


def paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `list(model.named_modules())` does, several times faster and at any depth.

    torch resumes a generator for every level above a module; here nothing is nested. A report
    walks each model that a scope sees, which must cost next to nothing beside building it.
    """
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path = stack.pop()
        fqn, module = path
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append(path)
        children = module.__dict__.get("_modules")
        if children:
            prefix = fqn + "." if fqn else ""
            below = [(prefix + n, c) for n, c in list(children.items()) if c is not None]
            below.reverse()
            stack += below
    return found


def walk(model: Any) -> Columns:
    """Write down a model.

    Raises:
        TargetError: `model` is no `nn.Module`, or one whose `__init__` did not call
            `super().__init__()`.
    """
    check_module(model)
    columns = Columns()
    names, parents, kinds, states = columns.names, columns.parents, columns.kinds, columns.states
    kind_of: dict[type, int] = {}
    reader = _StateReader(columns.state_table)
    first: dict[int, int] = {}
    modules: list[Any] = []
    # The nodes from the root to the one at hand, and by `id` of their modules where they are.
    path: list[int] = []
    on_path: dict[int, int] = {}

    stack: list[tuple[Any, str, int]] = [(model, "", -1)]
    while stack:
        module, name, parent = stack.pop()
        index = len(names)
        while path and path[-1] != parent:
            del on_path[id(modules[path.pop()])]
        names.append(name)
        parents.append(parent)
        modules.append(module)
        cls = type(module)
        kind = kind_of.get(cls)
        if kind is None:
            kind = kind_of[cls] = _kind(columns.classes, class_record(cls))
        kinds.append(kind)
        seen = first.setdefault(id(module), index)
        if seen != index:
            # Of a module with a cycle that comes twice, each place has its own way back.
            ancestor = on_path.get(id(module))
            columns.shared[index] = seen if ancestor is None else ancestor
            if ancestor is not None:
                columns.cycles.add(index)
                states.append(0)
                continue
        attributes = module.__dict__
        parameters, buffers = attributes.get("_parameters"), attributes.get("_buffers")
        states.append(reader.read(attributes, parameters, buffers) if parameters or buffers else 0)
        children = attributes.get("_modules")
        if not children:
            continue
        if seen != index and len(columns.shared) > MAX_REPEATED_NODES:
            columns.cut.add(index)
            continue
        path.append(index)
        on_path[id(module)] = index
        # Copied before it is turned round: the table of a TorchScript module is no dict.
        for child_name, child in reversed(list(children.items())):
            if child is not None:
                stack.append((child, child_name, index))

    owned = [reader.owned[state] for state in states]
    columns.totals, repeats = subtree_totals(parents, owned, reader.repeated(states))
    for index in columns.cycles | columns.cut:
        columns.totals[index] = columns.totals[columns.shared[index]]
    columns.ties = _ties(modules, columns.shared, repeats)
    return columns


def _kind(classes: list[ClassRecord], record: ClassRecord) -> int:
    # Classes that torch makes for one instance each are equal records of one class.
    if record in classes:
        return classes.index(record)
    classes.append(record)
    return len(classes) - 1


def subtree_totals(
    parents: Sequence[int], owned: Sequence[int], tensors: Iterable[tuple[int, Hashable, int]]
) -> tuple[list[int], list[tuple[int, Hashable, int]]]:
    """Count the elements below each node, each tensor once for every node that it lies below.

    Args:
        parents: The parent of each node, in preorder, -1 for the root.
        owned: Elements that each node holds itself.
        tensors: Node, identity and number of elements of every tensor, in preorder; may be left
            empty if none comes twice.

    Returns:
        The count for each node; and node, identity and first node of every repeated tensor.
    """
    totals = list(owned)
    last: dict[Hashable, int] = {}
    first: dict[Hashable, int] = {}
    repeats: list[tuple[int, Hashable, int]] = []
    for node, identity, numel in tensors:
        before = last.get(identity)
        if before is None:
            first[identity] = node
        else:
            # A node above both places would count the tensor twice. Taking it off once at their
            # lowest common ancestor is right for any number of places, since in preorder those
            # below a node follow each other.
            totals[_common_ancestor(before, node, parents)] -= numel
            repeats.append((node, identity, first[identity]))
        last[identity] = node
    for node in range(len(parents) - 1, 0, -1):
        totals[parents[node]] += totals[node]
    return totals, repeats


class _StateReader:
    """Describes the tensors of one module after another, each different set of them once.

    Description 0 is that of a module without tensors. `owned` has the number of elements of the
    parameters of each description.
    """

    def __init__(self, table: list[ModuleState]) -> None:
        self._table = table
        self._table.append(ModuleState())
        self._known: dict[Hashable, int] = {}
        self._ids: list[int] = []
        self.owned = [0]

    def read(self, attributes: Any, parameters: Any, buffers: Any) -> int:
        """Return the index of the description of these tensors."""
        ids, mark = self._ids, len(self._ids)
        key: Any = []
        try:
            for name, tensor in parameters.items() if parameters else ():
                if tensor is not None:
                    ids.append(id(tensor))
                    key += (name, tensor.shape, tensor.dtype)
            key = tuple(key)
            if buffers:
                key = (key, _buffer_key(attributes, buffers))
            state = self._known.get(key)
        except Exception:  # noqa: BLE001 - a lazy or foreign tensor may refuse with anything
            del ids[mark:]
            ids += (id(tensor) for tensor in parameters.values() if tensor is not None)
            key, state = None, None
        if state is None:
            described = _describe_all(attributes, parameters, buffers)
            key = described if key is None else key
            state = self._known.setdefault(key, len(self._table))
            if state == len(self._table):
                self._table.append(described)
                self.owned.append(sum(record.numel for record in described.parameters))
        return state

    def repeated(self, states: Iterable[int]) -> list[tuple[int, Hashable, int]]:
        """Return node, identity and elements of every parameter; [] if none comes twice."""
        ids = self._ids
        if len(set(ids)) == len(ids):
            return []
        held = (
            (node, record.numel)
            for node, state in enumerate(states)
            for record in self._table[state].parameters
        )
        return [(node, identity, numel) for identity, (node, numel) in zip(ids, held, strict=True)]


def _buffer_key(attributes: Any, buffers: Any) -> Hashable:
    skipped = _not_persistent(attributes)
    return tuple(
        [
            (name, tensor.shape, tensor.dtype, name in skipped)
            for name, tensor in buffers.items()
            if tensor is not None
        ]
    )


def _describe_all(attributes: Any, parameters: Any, buffers: Any) -> ModuleState:
    skipped = _not_persistent(attributes)
    held, buffered = (parameters or {}).items(), (buffers or {}).items()
    return ModuleState(
        tuple(_describe(name, tensor) for name, tensor in held if tensor is not None),
        tuple(_describe(n, t, n not in skipped) for n, t in buffered if t is not None),
    )


def _not_persistent(attributes: Any) -> Any:
    return attributes.get("_non_persistent_buffers_set") or ()


def _describe(name: str, tensor: Any, persistent: bool = True) -> TensorRecord:
    try:
        shape: tuple[int, ...] | None = tuple(int(size) for size in tensor.shape)
    except Exception:  # noqa: BLE001 - a lazy tensor raises RuntimeError, a foreign one anything
        shape = None
    try:
        dtype = str(tensor.dtype).removeprefix("torch.")
    except Exception:  # noqa: BLE001 - as above
        dtype = "unknown"
    return TensorRecord(name, shape, dtype, persistent)


def _ties(
    modules: list[Any], shared: dict[int, int], repeats: list[tuple[int, Hashable, int]]
) -> dict[int, tuple[tuple[str, int, str], ...]]:
    found: dict[int, tuple[tuple[str, int, str], ...]] = {}
    for node, identity, first in repeats:
        if node in shared:
            continue
        names = [name for name, t in modules[node]._parameters.items() if id(t) == identity]
        origin = next(n for n, t in modules[first]._parameters.items() if id(t) == identity)
        ties = tuple((n, first, origin) for n in names if (first, origin) != (node, n))
        found[node] = tuple(dict.fromkeys((*found.get(node, ()), *ties)))
    return found


def _common_ancestor(a: int, b: int, parents: Sequence[int]) -> int:
    while a != b:
        if a > b:
            a = parents[a]
        else:
            b = parents[b]
    return a
