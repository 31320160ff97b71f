"""Evidence: all that is known of one target under one mapping, for the analyses to read.

Gathered once, by `verify.preview`, and never changed. An analysis is a function from evidence to
findings; what it needs and is not there (the patched build failed, no forward could be run) it does
without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from patchlab._upstream import is_transformers_name, pretrained_model_class
from patchlab.mapping.rules import PatchMapping
from patchlab.model.catalog import Catalog, full_names
from patchlab.model.tree import ModuleTree
from patchlab.plan.containers import Container, find_containers, observed_pairs
from patchlab.plan.plan import PatchPlan, Replacement


@dataclass(frozen=True, eq=False, slots=True)
class ConstructorCall:
    """How one original class is constructed in the target, once for each distinct form.

    Attributes:
        args: The arguments, positional and by keyword.
        shown: The call as text, such as "config, layer_idx=0".
    """

    original: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shown: str


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """How a module's `forward` was called in a run on the meta device, and what came back.

    Attributes:
        num_positional: Number of positional arguments.
        keywords: Names of the arguments given by keyword.
        returned: What came back: "a tensor", "2 values", or the type's name.
        shapes: Of each value that came back, None for what is no tensor.
    """

    num_positional: int
    keywords: tuple[str, ...]
    returned: str
    shapes: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """Why the patched skeleton could not be built.

    Attributes:
        error: Type and message of the exception.
        where: The function that raised, as "BertAttention.__init__", with file and line.
        subject: The class that was being constructed or initialized.
        stage: "constructor" of a replacement, "parent" (the code that built it), or "init_weights".
    """

    error: str
    where: str
    subject: str
    stage: str


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known; see the attributes.

    Attributes:
        mapping: The rules.
        plan: Which modules of the unpatched target the rules decide.
        model: The unpatched skeleton.
        before: Its tree.
        after: The tree of the patched skeleton, None if it could not be built.
        failure: Why it could not.
        catalog: Every class of the installed transformers.
        constructor_calls: How the matched classes are constructed.
        calls_before: FQN → call of `forward` in the unpatched skeleton; empty if none could be run.
        calls_after: The same in the patched one.
        forward_failure: Why the patched skeleton's forward failed where the unpatched one's ran.
    """

    mapping: PatchMapping
    plan: PatchPlan
    model: nn.Module
    before: ModuleTree
    after: ModuleTree | None
    failure: BuildFailure | None
    catalog: Catalog
    constructor_calls: tuple[ConstructorCall, ...] = ()
    calls_before: Mapping[str, ForwardCall] = field(default_factory=dict)
    calls_after: Mapping[str, ForwardCall] = field(default_factory=dict)
    forward_failure: str = ""

    @cached_property
    def containers(self) -> tuple[Container, ...]:
        """The matched classes of the target that hold matched classes, from tree and source.

        A root that no model of its config can hold is no container; it is judged as the root
        (PL204).
        """
        modules = [(n.fqn, f"{n.python_module}.{n.class_name}") for n in self.before.nodes]
        inside = set(full_names(self.catalog, self._parts))
        scope = {full for fqn, full in modules if fqn in self.plan.fqns and (fqn or full in inside)}
        found = find_containers(
            self.mapping,
            self.catalog,
            scope=scope,
            observed=observed_pairs([m for m in modules if m[0] in self.plan.fqns], self.mapping),
        )
        return tuple(c for c in found if c.evidence == "static" or not self.is_built_again(c))

    @cached_property
    def kept(self) -> tuple[Replacement, ...]:
        """The replacements that the patched skeleton has, so without those swallowed."""
        if self.after is None:
            dropped = {container.class_name for container in self.containers}
            return tuple(r for r in self.plan if r.original.__name__ not in dropped)
        classes = [record.cls for record in self.after.classes]
        there = {fqn: classes[k] for fqn, k in zip(self.after.fqns, self.after.kinds, strict=True)}
        return tuple(r for r in self.plan if any(there.get(f) is r.replacement for f in r.fqns))

    def is_built_again(self, container: Container) -> bool:
        """Tell whether the patched skeleton has all that a container held.

        A replacement may build what its original held; then another rule replaces it there. Under
        the same rule the same class would stand in two places that differ.
        """
        if self.after is None:
            return False
        matched, present = self.plan.fqns, set(self.after.fqns)
        for fqn, replacement in matched.items():
            if replacement.original.__name__ != container.class_name:
                continue
            below = [f for f in matched if f != fqn and (not fqn or f.startswith(fqn + "."))]
            if any(f not in present or matched[f].rule is replacement.rule for f in below):
                return False
        return True

    @cached_property
    def architecture_names(self) -> frozenset[str]:
        """Names of the classes in the tree, and of all that its config class can bring in.

        Torch's own are left out: they are never replaced, and a `LayerNorm` of transformers is
        another class than the one in the tree.
        """
        in_tree = {n.class_name for n in self.before.nodes if is_transformers_name(n.python_module)}
        return frozenset({self.catalog.names[number] for number in self._numbers} | in_tree)

    @cached_property
    def architecture_containers(self) -> frozenset[str]:
        """Names of the containers among `architecture_names`, whatever the config's flags."""
        scope = full_names(self.catalog, self._parts)
        found = find_containers(self.mapping, self.catalog, scope=scope)
        return frozenset(c.class_name for c in (*found, *self.containers))

    @cached_property
    def _parts(self) -> frozenset[int]:
        """The numbers of what the models of the target's config class can hold."""
        return self.catalog.architecture(type(getattr(self.model, "config", None)).__name__)

    @cached_property
    def _numbers(self) -> frozenset[int]:
        """The numbers of the models of the target's config class, and of what they can hold."""
        entry = self.catalog.configs.get(type(getattr(self.model, "config", None)).__name__)
        return self._parts | frozenset(entry.models if entry is not None else ())

    @cached_property
    def sub_models(self) -> dict[str, str]:
        """FQN → class name of each `PreTrainedModel` in the target, the root first."""
        base = pretrained_model_class()
        return {n.fqn: n.class_name for n in self.before.nodes if issubclass(n.cls, base)}

    def sub_model_of(self, fqn: str) -> str:
        """Return the FQN of the innermost sub-model that holds a module, itself excluded."""
        parts = fqn.split(".")
        for length in range(len(parts) - 1, 0, -1):
            above = ".".join(parts[:length])
            if above in self.sub_models:
                return above
        return ""
