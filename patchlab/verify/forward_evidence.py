"""What runs of both skeletons of a preview show, with as little running as will show it.

How the modules of transformers' own models are called does not change from one key to the next, so
the unpatched run is remembered as long as nothing of it has changed. Where the modules around the
replaced ones are the same classes as ever and cannot tell the difference, the replacements are
called by themselves, just as their originals were; the patched skeleton is run only where that
would not show what happens.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from typing import Any

from torch import nn

from patchlab._upstream import is_transformers_name, pretrained_model_class
from patchlab.model.tree import ModuleTree
from patchlab.plan.plan import PatchPlan
from patchlab.plan.wording import needs_values
from patchlab.verify.forward_calls import NOT_RUN, ForwardRun, call_again, run_forward

_MOST_REMEMBERED = 16
_remembered: OrderedDict[Hashable, ForwardRun] = OrderedDict()
_BY_NAME = ("LOAD_CONST", "LOAD_GLOBAL")
# What runs before a forward does.
_BEFORE = frozenset({"__init__", "__init_subclass__", "_init_weights", "post_init"})


def observe_forwards(
    model: nn.Module, before: ModuleTree, patched: nn.Module | None, plan: PatchPlan
) -> tuple[ForwardRun, ForwardRun]:
    """Run both skeletons, or find out without.

    Args:
        model: The unpatched skeleton.
        before: Its tree.
        patched: The patched one, None if it cannot be built.
        plan: What is replaced.

    Returns:
        The unpatched run and the patched one, without calls where it is not known.
    """
    # Replacements that all keep their originals' forwards are called and return as ever.
    if all(r.replacement.forward is r.original.forward for r in plan):
        return NOT_RUN, NOT_RUN
    fqns = [r.fqns[0] for r in plan]
    unpatched = _unpatched_run(model, before, fqns)
    if patched is None or unpatched.failure:
        return unpatched, NOT_RUN
    run = _called_alone(model, patched, fqns, unpatched) or run_forward(patched, fqns)
    if needs_values(run.failure):
        # A forward that reads values runs on real tensors; here it is judged without a run.
        return unpatched, NOT_RUN
    return unpatched, run


def _unpatched_run(model: nn.Module, before: ModuleTree, fqns: list[str]) -> ForwardRun:
    classes = {node.cls for node in before.nodes}
    if not all(is_transformers_name(cls.__module__) or _is_torch(cls) for cls in classes):
        return run_forward(model, fqns)
    # A class whose forward somebody has changed is another one.
    made_of = frozenset((cls, getattr(cls, "forward", None)) for cls in classes)
    key = (type(model), _settings(getattr(model, "config", None)), made_of, tuple(fqns))
    run = _remembered.pop(key, None) or run_forward(model, fqns)
    _remembered[key] = run
    while len(_remembered) > _MOST_REMEMBERED:
        _remembered.popitem(last=False)
    return run


def _is_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.")


def _settings(value: Any) -> Hashable:
    """Return all that a config says, with what its `to_dict` leaves out."""
    if hasattr(value, "model_type"):
        items = sorted(vars(value).items())
        return type(value), tuple((name, _settings(item)) for name, item in items)
    return repr(value)


def _called_alone(
    model: nn.Module, patched: nn.Module, fqns: list[str], seen: ForwardRun
) -> ForwardRun | None:
    """Call the replacements as their originals were, if what is around them will not notice."""
    olds, news = dict(model.named_modules()), dict(patched.named_modules())
    called, around = [], set[type]()
    missed: set[str] = set()
    for fqn in fqns:
        above = _above(fqn)
        if fqn not in news and any(outer in fqns for outer in above):
            continue  # swallowed: nobody calls it
        if fqn not in news or any(type(olds[a]) is not type(news.get(a)) for a in above):
            return None
        called.append(fqn)
        around |= {type(olds[a]) for a in above}
        missed |= {*dir(olds[fqn])} - {*dir(news[fqn])} | {type(olds[fqn]).__name__}
    if missed & _names_asked_for(around):
        return None
    return call_again(news, called, seen)


def _above(fqn: str) -> list[str]:
    parts = fqn.split(".") if fqn else []
    return [".".join(parts[:length]) for length in range(len(parts))]


def _names_asked_for(classes: Collection[type]) -> set[str]:
    """Return the names that methods of these classes know other modules and their classes by.

    Those are attributes of anything but self, globals, and strings, as `getattr` takes them. What
    transformers gives to all models alike knows no part of any by name.
    """
    known = (*pretrained_model_class().__mro__, *nn.ModuleList.__mro__, *nn.ModuleDict.__mro__)
    return {
        name
        for cls in classes
        for part in cls.__mro__
        if part not in known
        for method, function in vars(part).items()
        if method not in _BEFORE
        for code in _codes(function)
        for name in _names_in(code)
    }


def _codes(function: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of what its decorators have wrapped."""
    seen: set[int] = set()
    stack = [function]
    while stack:
        value = stack.pop()
        value = getattr(value, "__func__", value)
        if isinstance(value, property):
            stack.append(value.fget)
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value.__code__
        if hasattr(value, "__wrapped__"):
            stack.append(value.__wrapped__)
        for cell in value.__closure__ or ():
            try:
                stack.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue


@functools.lru_cache(maxsize=2048)
def _names_in(code: types.CodeType) -> frozenset[str]:
    found: set[str] = set()
    own = code.co_varnames[0] if code.co_argcount and code.co_varnames else ""
    previous: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            of_self = (
                previous is not None
                and previous.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
                and previous.argval in (own, "self")
            )
            if not of_self:
                found.add(str(instruction.argval))
        elif instruction.opname in _BY_NAME and isinstance(instruction.argval, str):
            found.add(instruction.argval)
        previous = instruction
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant)
    return frozenset(found)
