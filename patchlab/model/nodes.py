"""What a module tree is made of: plain records of tensors, classes and modules.

A record holds no tensor and no module, so a tree that stays in a notebook's history keeps no
weights alive. Classes are told apart by identity and never by name: `cls_id` is a number handed
out when a class is first seen in this process, so two trees can be compared, and a class that is
defined a second time in a notebook cell has another number than its older self.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_numbers: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
_parametrized: dict[int, int] = {}
_counter = itertools.count(1)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A parameter or buffer that a module holds itself.

    Attributes:
        name: Its name in the module, "weight".
        shape: Sizes, or None where they are not known yet (a lazy module before its first call) or
            cannot be read.
        dtype: As torch names it, without the "torch."; "unknown" where it cannot be read.
        persistent: Whether it is part of the state dict; True for every parameter.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    persistent: bool = True

    @property
    def numel(self) -> int:
        """Number of elements; 0 while the shape is not known."""
        if self.shape is None:
            return 0
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        size = "uninitialized" if self.shape is None else f"({', '.join(map(str, self.shape))})"
        return f"{self.name} {size} {self.dtype}"


@dataclass(frozen=True, slots=True)
class ModuleState:
    """The tensors that a module holds itself, without those of its submodules."""

    parameters: tuple[TensorRecord, ...] = ()
    buffers: tuple[TensorRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """A class of modules; two records are equal if they are of the same class.

    Attributes:
        cls: The class itself, so that whoever holds the tree can replace it.
        stale: Whether its Python module now binds another class of this qualified name, as after
            the cell that defines it was run again.
    """

    name: str = field(compare=False)
    python_module: str = field(compare=False)
    cls_id: int
    cls: type = field(compare=False, repr=False)
    stale: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """One module of a tree, at one path.

    Attributes:
        index: Its place in `ModuleTree.nodes`, which is preorder.
        parent: The place of its parent, -1 for the root.
        depth: 0 for the root.
        fqn: As `named_modules()` gives it; "" for the root.
        name: The last part of the FQN.
        record: Its class.
        num_parameters: Elements of all parameters here and below, each tensor counted once;
            uninitialized ones count as 0.
        parameters: The parameters that it holds itself.
        buffers: The buffers that it holds itself.
        shared_with: The FQN at which the same module object comes first, None if this is the first.
            For a cycle, that of the ancestor that the module is.
        is_cycle: Whether this is a back-reference to an ancestor; it is not followed.
        tied: For each own parameter that comes first somewhere else: its name, and the full name of
            the first place. Left out for modules that are shared as a whole.
    """

    index: int
    parent: int
    depth: int
    fqn: str
    name: str
    record: ClassRecord
    num_parameters: int
    parameters: tuple[TensorRecord, ...]
    buffers: tuple[TensorRecord, ...]
    shared_with: str | None = None
    is_cycle: bool = False
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def cls(self) -> type:
        """The class itself."""
        return self.record.cls

    @property
    def class_name(self) -> str:
        """The class's name, which rules are matched against."""
        return self.record.name

    @property
    def python_module(self) -> str:
        """The name of the Python module that defines the class."""
        return self.record.python_module

    @property
    def cls_id(self) -> int:
        """The class's number: equal if and only if the class is the same, within this process."""
        return self.record.cls_id

    @property
    def stale(self) -> bool:
        """Whether the class has been defined again since."""
        return self.record.stale


def class_record(cls: type) -> ClassRecord:
    """Describe a class as it is bound now."""
    return ClassRecord(
        name=cls.__name__,
        python_module=str(cls.__module__),
        cls_id=_class_number(cls),
        cls=cls,
        stale=_is_stale(cls),
    )


def _class_number(cls: type) -> int:
    number = _numbers.get(cls)
    if number is None:
        # torch.nn.utils.parametrize makes a new class for every instance. They are one class to a
        # reader, and twelve parametrized layers fold like twelve plain ones.
        made_by_torch = cls.__module__ == "torch.nn.utils.parametrize"
        if made_by_torch and cls.__name__ == f"Parametrized{cls.__base__.__name__}":  # type: ignore[union-attr]
            base = _class_number(cls.__bases__[0])
            number = _parametrized.setdefault(base, next(_counter))
        else:
            number = next(_counter)
        number = _numbers.setdefault(cls, number)
    return number


def _is_stale(cls: type) -> bool:
    if "<locals>" in cls.__qualname__:
        return False
    # vars() and not getattr(): a lazy Python module would import what it is asked for.
    bound: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        if not isinstance(bound, (ModuleType, type)):
            return False
        bound = vars(bound).get(part)
    # A name that is bound to a class of another name is patched and not defined again.
    return (
        isinstance(bound, type)
        and bound is not cls
        and bound.__qualname__ == cls.__qualname__
        and bound.__module__ == cls.__module__
    )
