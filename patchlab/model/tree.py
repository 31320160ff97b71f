"""The module tree: what a model is made of, as a value.

`module_tree` writes down every module at every path, with its class, parameters and buffers, and
lets go of the model. The tree is kept in columns, since a model may have fifty thousand modules and
most of what could be asked about each of them never is; `nodes` makes records of them on demand.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from patchlab.errors import TargetError
from patchlab.model.folding import Folding
from patchlab.model.nodes import ClassRecord, ModuleNode, ModuleState
from patchlab.model.tree_table import fold_tree, tree_table
from patchlab.model.walk import Columns, walk
from patchlab.render.frames import frame_of
from patchlab.render.rows import Mark, Table
from patchlab.render.shown import Shown

__all__ = ["ModuleNode", "ModuleTree", "module_tree"]

_WRAPPED_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel"})


@dataclass(frozen=True, eq=False, repr=False)
class ModuleTree(Shown):
    """The modules of a model, in preorder; made by `module_tree`.

    Two trees are equal if they have the same names, classes (by identity), tensors (name, shape and
    dtype), sharing and ties.

    Attributes:
        names: The last part of each FQN; "" for the root.
        parents: The place of each node's parent, -1 for the root.
        kinds: Each node's place in `classes`.
        states: Each node's place in `state_table`.
        totals: Elements of all parameters at and below each node, each tensor once.
        classes: The classes, in order of appearance.
        state_table: The different sets of tensors that modules hold themselves.
        shared: `(node, first node)` for modules that come earlier at another path.
        cycles: The nodes that are back-references to an ancestor.
        cut: Shared nodes that were not followed, since there are too many repeats.
        ties: `(node, ((parameter, first node, first parameter), ...))` for tied parameters.
    """

    names: tuple[str, ...]
    parents: tuple[int, ...]
    kinds: tuple[int, ...]
    states: tuple[int, ...]
    totals: tuple[int, ...]
    classes: tuple[ClassRecord, ...]
    state_table: tuple[ModuleState, ...]
    shared: tuple[tuple[int, int], ...] = ()
    cycles: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    ties: tuple[tuple[int, tuple[tuple[str, int, str], ...]], ...] = ()

    @classmethod
    def from_columns(cls, columns: Columns) -> ModuleTree:
        """Freeze columns."""
        return cls(
            names=tuple(columns.names),
            parents=tuple(columns.parents),
            kinds=tuple(columns.kinds),
            states=tuple(columns.states),
            totals=tuple(columns.totals),
            classes=tuple(columns.classes),
            state_table=tuple(columns.state_table),
            shared=tuple(sorted(columns.shared.items())),
            cycles=tuple(sorted(columns.cycles)),
            cut=tuple(sorted(columns.cut)),
            ties=tuple(sorted(columns.ties.items())),
        )

    @cached_property
    def nodes(self) -> tuple[ModuleNode, ...]:
        """A record of every module, in preorder."""
        fqns, depths, shared, ties = self.fqns, self.depths, dict(self.shared), dict(self.ties)
        cycles = frozenset(self.cycles)
        nodes = []
        for index, (name, parent, kind, state, total) in enumerate(
            zip(self.names, self.parents, self.kinds, self.states, self.totals, strict=True)
        ):
            held = self.state_table[state]
            first = shared.get(index)
            nodes.append(
                ModuleNode(
                    index=index,
                    parent=parent,
                    depth=depths[index],
                    fqn=fqns[index],
                    name=name,
                    record=self.classes[kind],
                    num_parameters=total,
                    parameters=held.parameters,
                    buffers=held.buffers,
                    shared_with=None if first is None else fqns[first],
                    is_cycle=index in cycles,
                    tied=tuple(
                        (own, join_fqn(fqns[node], other)) for own, node, other in ties[index]
                    )
                    if index in ties
                    else (),
                )
            )
        return tuple(nodes)

    @cached_property
    def fqns(self) -> tuple[str, ...]:
        """The FQN of every module, in preorder, as `named_modules(remove_duplicate=False)`."""
        fqns = [""] * len(self.names)
        for index, (name, parent) in enumerate(zip(self.names, self.parents, strict=True)):
            if parent > 0:
                fqns[index] = f"{fqns[parent]}.{name}"
            elif parent == 0:
                fqns[index] = name
        return tuple(fqns)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of every module, in preorder; 0 for the root."""
        depths = [0] * len(self.parents)
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                depths[index] = depths[parent] + 1
        return tuple(depths)

    @cached_property
    def folding(self) -> Folding:
        """Which modules are equal, for text, HTML and widget alike: one pass over the tree."""
        return fold_tree(self)

    @property
    def root(self) -> ModuleNode:
        """The model itself."""
        return self.nodes[0]

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, each tensor counted once."""
        return self.totals[0]

    def find(self, fqn: str) -> ModuleNode:
        """Return the module at a path; wrapper prefixes such as `_orig_mod.` may be left out.

        Raises:
            TargetError: There is none; the message names the nearest.
        """
        index = self._by_fqn.get(fqn)
        if index is None:
            index = self._by_path.get(fqn)
        if index is None:
            raise TargetError(self._missing(fqn))
        return self.nodes[index]

    def children(self, node: ModuleNode) -> tuple[ModuleNode, ...]:
        """Return the direct children of a module, in order."""
        return tuple(self.nodes[index] for index in self._children.get(node.index, ()))

    def unwrapped(self) -> ModuleTree:
        """Return the tree without wrappers (`torch.compile`, `DataParallel`, FSDP).

        What a wrapper wraps takes its place and its name. The tree itself if there are none.
        """
        wrappers = self._wrappers
        if not wrappers:
            return self
        place: dict[int, int] = {}
        columns = Columns(classes=list(self.classes), state_table=list(self.state_table))
        for index, parent in enumerate(self.parents):
            name = self.names[index]
            while parent in wrappers:
                name, parent = self.names[parent], self.parents[parent]
            if index in wrappers:
                continue
            place[index] = len(columns.names)
            columns.names.append(name)
            columns.parents.append(place[parent] if parent >= 0 else -1)
            columns.kinds.append(self.kinds[index])
            columns.states.append(self.states[index])
            columns.totals.append(self.totals[index])
        for index in reversed(sorted(wrappers)):
            place[index] = place[wrappers[index]]
        columns.shared = {
            place[a]: place[b] for a, b in self.shared if a not in wrappers and place[a] != place[b]
        }
        columns.cycles = {place[index] for index in self.cycles}
        columns.cut = {place[index] for index in self.cut}
        columns.ties = {
            place[index]: tuple((own, place[node], other) for own, node, other in ties)
            for index, ties in self.ties
        }
        return ModuleTree.from_columns(columns)

    def to_table(self, *, marks: Mapping[str, Mark] | None = None, folded: bool = True) -> Table:
        """Return the rows in which the tree is shown.

        Args:
            marks: FQN to what is to be said about that module. Marked modules are never folded
                into unmarked ones; siblings that are equal, marks and all, still are.
            folded: Whether equal siblings become one row.
        """
        return tree_table(self, marks or {}, folded=folded)

    def to_frame(self) -> Any:
        """Return a pandas frame with one row for every module, nothing folded."""
        nodes = self.nodes
        return frame_of(
            {
                "fqn": [node.fqn for node in nodes],
                "class_name": [node.class_name for node in nodes],
                "python_module": [node.python_module for node in nodes],
                "depth": [node.depth for node in nodes],
                "num_parameters": [node.num_parameters for node in nodes],
                "parameters": [", ".join(map(str, node.parameters)) for node in nodes],
                "buffers": [", ".join(map(str, node.buffers)) for node in nodes],
                "shared_with": [node.shared_with for node in nodes],
            }
        )

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ModuleNode]:
        return iter(self.nodes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleTree):
            return NotImplemented
        return self._content == other._content

    def __hash__(self) -> int:
        return hash((self.names, self.parents))

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        classes = tuple(self.classes[kind].cls_id for kind in self.kinds)
        states = tuple(self.state_table[state] for state in self.states)
        return (self.names, self.parents, classes, states, self.shared, self.cycles, self.ties)

    @cached_property
    def _by_fqn(self) -> dict[str, int]:
        # Backwards, so that of two equal FQNs (a name with a dot in it) the first one wins.
        return {self.fqns[index]: index for index in range(len(self) - 1, -1, -1)}

    @cached_property
    def _by_path(self) -> dict[str, int]:
        wrappers = self._wrappers
        if not wrappers:
            return {}
        kept = [index for index in range(len(self)) if index not in wrappers]
        return dict(zip(self.unwrapped().fqns, kept, strict=True))

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(index)
        return children

    @cached_property
    def _wrappers(self) -> dict[int, int]:
        """Each wrapper with what it wraps."""
        found: dict[int, int] = {}
        for index, (name, parent) in enumerate(zip(self.names, self.parents, strict=True)):
            if name in _WRAPPED_NAMES:
                found[parent] = index
            elif name == "module":
                record = self.classes[self.kinds[parent]]
                if record.name in _WRAPPERS and record.python_module.startswith("torch."):
                    found[parent] = index
        return {p: i for p, i in found.items() if len(self._children[p]) == 1}

    def _missing(self, fqn: str) -> str:
        known, _, last = fqn.rpartition(".")
        while known and known not in self._by_fqn:
            known, _, last = known.rpartition(".")
        parent = self._by_fqn[known]
        children = [self.names[index] for index in self._children.get(parent, ())]
        where = repr(known) if known else f"the root {self.classes[self.kinds[0]].name}"
        near = [join_fqn(known, name) for name in difflib.get_close_matches(last, children)]
        near += [name for name in self.fqns if name.endswith(f".{fqn}")]
        if near:
            hint = f"Did you mean {' or '.join(map(repr, near[:3]))}?"
        elif children:
            hint = f"Its children are {', '.join(children[:8])}{' …' * (len(children) > 8)}."
        else:
            hint = "It has no children."
        return f"no module {fqn!r} in this tree: {where} has no child {last!r}. {hint}"


def module_tree(model: Any) -> ModuleTree:
    """Write down the modules of a model: their classes, parameters and buffers.

    The tree holds no tensor and no module. Modules at several paths are there at each of them, with
    `shared_with` naming the first; a module below itself is there once more, as a back-reference.
    Works on the meta device and on lazy modules, at any depth.

    Raises:
        TargetError: `model` is no `nn.Module`.
    """
    return ModuleTree.from_columns(walk(model))


def join_fqn(parent: str, name: str) -> str:
    """Join an FQN and a name; the root's FQN is ""."""
    return f"{parent}.{name}" if parent else name
