"""The engine: replacement at construction, decided per context.

While a scope is open, the `__init__` of every class its rules match is wrapped. When an instance of
exactly such a class is being made and a scope *of this context* matches it, the instance is given
the replacement class and the replacement's `__init__` runs. No name is ever rebound, so
`isinstance`, dispatch dicts, pickling and classes that others hold already are right, and a thread
or task without the scope builds what it always built. When no scope needs a wrapper any more it is
taken off.

Rejected, both measured on transformers 5.24.0: rebinding names (what transformers does; it misses
dispatch dicts in 19 modeling files, breaks `isinstance` in `_init_weights` in 386, and is seen by
every thread), and a `__new__` on `nn.Module` (breaks `torch.compile(fullgraph=True)`, and deleting
an added `__new__` breaks a class for good in CPython).

State is brought to what the open frames want by `_synchronize`, which may be interrupted anywhere
and run again: the next call finishes what the last one left.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from patchlab._upstream import is_transformers_name, pretrained_model_class
from patchlab.apply.becoming import blame, check_assignable
from patchlab.apply.conversions import Conversions, synchronize_conversions
from patchlab.apply.recorders import adopt_recorders
from patchlab.mapping.rules import PatchMapping, PatchRule
from patchlab.model.classes import matched_classes, subclasses_of

LOCK = threading.RLock()


@dataclass(frozen=True, eq=False, slots=True)
class Replaced:
    """One module that was given its replacement class while a frame was open."""

    module: weakref.ref[nn.Module]
    original: type[nn.Module]
    rule: PatchRule


@dataclass(frozen=True, eq=False, slots=True)
class Left:
    """One tensor that a load has not filled; see `uninitialized` for the kinds."""

    module: weakref.ref[nn.Module]
    name: str
    kind: str


@dataclass(frozen=True, eq=False, slots=True)
class Construction:
    """One call of an original's constructor, as a model made it."""

    module: Any
    original: type
    rule: PatchRule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(eq=False)
class Frame:
    """What one scope asks for, and what was built under it.

    A context that outlives its scope (a task, a copied context) still holds the frame; `is_open`
    tells it that the scope is closed. Lists only ever grow, by `append`, which is atomic.

    Attributes:
        registered: Whether the rules are those of the registry, applied by a build or
            `apply_patches`.
        classes: The originals that the rules match, as far as they are loaded.
        attempted: The originals whose replacement was constructed, or failed to be.
        replaced: The modules replaced under this frame.
        elsewhere: By id, modules that another open frame replaced meanwhile.
        built: Each `PreTrainedModel` whose constructor began under this frame, sub-models included.
        conversions: Weight conversions for loads under this frame.
        completed: Called with each `PreTrainedModel` whose constructor has come to its end.
        constructions: If a list, nothing is replaced: what would be is built as ever, and noted
            here.
        hollow: What is noted is left empty, and not built.
        dry: Whether it is patchlab's own look at a skeleton, and no scope that anybody opened.
        left: By storage, tensors that a load has not filled.
    """

    mapping: PatchMapping
    registered: bool = False
    is_open: bool = False
    classes: set[type] = field(default_factory=set)
    attempted: set[type] = field(default_factory=set)
    replaced: list[Replaced] = field(default_factory=list)
    elsewhere: dict[int, Replaced] = field(default_factory=dict)
    built: list[weakref.ref[nn.Module]] = field(default_factory=list)
    conversions: Conversions = field(default_factory=dict)
    completed: Callable[[nn.Module], None] | None = None
    constructions: list[Construction] | None = None
    hollow: bool = False
    dry: bool = False
    left: dict[int, Left] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Key → number of modules replaced, 0 included, in the order of the rules."""
        found = Counter(replaced.rule.key for replaced in list(self.replaced))
        return {rule.key: found[rule.key] for rule in self.mapping}


_FRAMES: ContextVar[tuple[Frame, ...]] = ContextVar("patchlab_frames", default=())
# Originals whose replacement is being constructed in this context, each with the instance. Inside
# that constructor the original's name means the original, so a replacement that wraps an original
# does not recurse; and what has been given its replacement class is not replaced once more, also
# where that class is transformers' own and matched by a rule itself.
_CONSTRUCTING: ContextVar[tuple[tuple[type, Any], ...]] = ContextVar(
    "patchlab_constructing", default=()
)


@dataclass(frozen=True, slots=True)
class _Wrapping:
    had_own: bool
    original: Callable[..., None]
    wrapper: Callable[..., None]


_OPEN: list[Frame] = []
_COMPLETION: dict[str, Callable[..., None]] = {}
_WRAPPED: dict[type, _Wrapping] = {}
# Every wrapper alive with what it wraps. A mark on the function would not do: `functools.wraps`
# copies it onto the wrapper that another patcher puts on top.
_WRAPPERS: weakref.WeakKeyDictionary[Callable[..., None], Callable[..., None]] = (
    weakref.WeakKeyDictionary()
)


def open_frames() -> tuple[Frame, ...]:
    """Return the frames that are open in this context, innermost last."""
    return tuple(frame for frame in _FRAMES.get() if frame.is_open)


def open_frame_count() -> int:
    """Return how many frames are open in the whole process."""
    return len(_OPEN)


def open_scope_count() -> int:
    """Return how many of them somebody opened: a preview in another thread is not one."""
    return sum(not frame.dry for frame in list(_OPEN))


def open_frame(frame: Frame, *, outermost: bool = False) -> None:
    """Open a frame in this context and wrap the classes it matches.

    Args:
        frame: The frame, not open yet.
        outermost: Put it around the frames that are open, so that their rules come before its own.

    Raises:
        ApplyError: A replacement that no instance of the original can become; nothing is changed.
    """
    try:
        with LOCK:
            _OPEN.append(frame)
            # Watched first and searched second: a class that another thread defines in between is
            # then found by one of the two.
            _watch_new_classes(True)
            matched = matched_classes(frame.mapping)
            for cls, rule in matched.items():
                check_assignable(cls, rule)
            frame.classes.update(matched)
            _synchronize()
        frames = _FRAMES.get()
        _FRAMES.set((frame, *frames) if outermost else (*frames, frame))
        frame.is_open = True
    except BaseException:
        close_frame(frame)
        raise


def close_frame(frame: Frame) -> None:
    """Close a frame, from any context and in any order; closing twice does no harm."""
    frame.is_open = False
    _FRAMES.set(tuple(f for f in _FRAMES.get() if f is not frame))
    with LOCK:
        _OPEN[:] = [f for f in _OPEN if f is not frame]
        _synchronize()


def _synchronize() -> None:
    """Make the wrapped classes those that the open frames match. The caller holds `LOCK`."""
    wanted: set[type] = set().union(*(frame.classes for frame in _OPEN))
    if _OPEN:
        wanted.add(pretrained_model_class())
    for cls in [cls for cls in _WRAPPED if cls not in wanted]:
        _unwrap(cls)
    for cls in wanted:
        if cls not in _WRAPPED:
            _wrap(cls)
    _watch_new_classes(bool(_OPEN))
    _watch_completion(bool(_OPEN))
    synchronize_conversions({name for f in _OPEN for name in f.conversions}, find_conversions)


def find_conversions(name: str) -> list[Any] | None:
    """Return the weight conversions that this context has for a name, None for nothing."""
    for frame in reversed(_FRAMES.get()):
        if frame.is_open and name in frame.conversions:
            return frame.conversions[name]
    return None


def _wrap(cls: type) -> None:
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]
    make = _observing if cls is pretrained_model_class() else _replacing
    wrapper = make(cls, original)
    _WRAPPERS[wrapper] = original
    # Recorded before it is done: an interrupt between the two lines is then undone by `_unwrap`,
    # which takes off only what it finds to be ours.
    _WRAPPED[cls] = _Wrapping("__init__" in vars(cls), original, wrapper)
    cls.__init__ = wrapper  # type: ignore[misc]


def _unwrap(cls: type) -> None:
    wrapping = _WRAPPED[cls]
    if vars(cls).get("__init__") is wrapping.wrapper:
        # A decorator of a class that was defined inside a scope has written to our wrapper.
        documented = wrapping.wrapper.__doc__
        if documented != wrapping.original.__doc__ and inspect.isfunction(wrapping.original):
            wrapping.original.__doc__ = documented
        if wrapping.had_own:
            cls.__init__ = wrapping.original  # type: ignore[misc]
        else:
            del cls.__init__  # type: ignore[misc]
    # Anything else there was put on top by somebody else and is left alone; our wrapper below it
    # passes through once no frame is open.
    del _WRAPPED[cls]


def _replacing(cls: type, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        if type(self) is cls and not any(
            constructed is cls or module is self for constructed, module in _CONSTRUCTING.get()
        ):
            for frame in reversed(_FRAMES.get()):
                if not frame.is_open:
                    continue
                rule = frame.mapping.find(cls.__name__)
                if rule is None or rule.replacement is cls:
                    continue
                if frame.constructions is not None:
                    frame.constructions.append(Construction(self, cls, rule, args, kwargs))
                    if frame.hollow:
                        nn.Module.__init__(self)  # type: ignore[arg-type]
                        return
                    break
                _construct(self, cls, rule, frame, args, kwargs)
                return
        original(self, *args, **kwargs)

    return __init__


def _construct(
    module: Any,
    cls: type,
    rule: PatchRule,
    frame: Frame,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    __tracebackhide__ = True
    # Once more: a class that was first imported inside the scope was not there at its door.
    check_assignable(cls, rule)
    frame.attempted.add(cls)
    token = _CONSTRUCTING.set((*_CONSTRUCTING.get(), (cls, module)))
    try:
        module.__class__ = rule.replacement
        rule.replacement.__init__(module, *args, **kwargs)
    except Exception as error:
        blame(error, cls, rule, args, kwargs)
        raise
    finally:
        _CONSTRUCTING.reset(token)
    noted = Replaced(weakref.ref(module), cls, rule)
    frame.replaced.append(noted)
    for other in open_frames():
        if other is not frame:
            other.elsewhere[id(module)] = noted
    if frame.completed is not None and isinstance(module, pretrained_model_class()):
        # Its `post_init`, which told of it before, came while it was not noted as replaced yet.
        frame.completed(module)


def _observing(cls: type, original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `PreTrainedModel.__init__`, so that an open scope knows each model built under it."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True  # A traceback shows the user's lines and transformers'.
        frames = open_frames()
        for frame in frames:
            frame.built.append(weakref.ref(self))
        original(self, *args, **kwargs)
        if frames:
            adopt_recorders(self, [frame.mapping for frame in reversed(frames)])

    return __init__


def _watch_completion(watch: bool) -> None:
    """Tell the open frames of each model that is whole: `post_init` ends every constructor.

    A model that is built by hand and dropped inside the block can be looked at only then.
    """
    base = pretrained_model_class()
    current = vars(base)["post_init"]
    if watch and current is not _COMPLETION.get("wrapper"):

        @functools.wraps(current)
        def post_init(self: Any) -> None:
            __tracebackhide__ = True
            current(self)
            for frame in open_frames():
                if frame.completed is not None:
                    frame.completed(self)

        _COMPLETION["original"] = current
        _COMPLETION["wrapper"] = post_init
        type.__setattr__(base, "post_init", post_init)
    elif not watch and current is _COMPLETION.get("wrapper"):
        type.__setattr__(base, "post_init", _COMPLETION["original"])


def _watch_new_classes(watch: bool) -> None:
    """Wrap classes that transformers defines while a scope is open, as they are defined.

    A modeling file that is first imported inside the block would otherwise be missed. A hook on
    class creation needs no import machinery, and so works for editable installs and reloads alike.
    """
    hook = vars(nn.Module).get("__init_subclass__")
    # Ours as a bound method is what another patcher puts back who read it off the class. It is
    # bound to `nn.Module`, so it says nothing of the class that is defined.
    ours = getattr(hook, "__func__", None) is _defined
    if watch and (hook is None or (ours and not isinstance(hook, classmethod))):
        type.__setattr__(nn.Module, "__init_subclass__", classmethod(_defined))
    elif not watch and ours:
        del nn.Module.__init_subclass__


def _defined(cls: type[nn.Module], /, **kwargs: Any) -> None:
    super(nn.Module, cls).__init_subclass__(**kwargs)
    if not is_transformers_name(getattr(cls, "__module__", None)):
        return
    with LOCK:
        for frame in _OPEN:
            rule = frame.mapping.find(cls.__name__)
            if rule is not None and rule.replacement is not cls:
                frame.classes.add(cls)
                if cls not in _WRAPPED:
                    _wrap(cls)


def left_wrapped() -> tuple[type, ...]:
    """Return the classes that carry a wrapper of ours which no open frame needs.

    That happens when another patcher wraps on top inside a scope and later puts back what it found.
    """
    with LOCK:
        return tuple(
            cls
            for cls in subclasses_of(nn.Module)
            if vars(cls).get("__init__") in _WRAPPERS and cls not in _WRAPPED
        )


def unwrap_left(cls: type) -> None:
    """Take off a wrapper that `left_wrapped` found."""
    with LOCK:
        init = vars(cls).get("__init__")
        if cls in _WRAPPED or init is None or init not in _WRAPPERS:
            return
        original = _WRAPPERS[init]
        inherited = next(
            (vars(b)["__init__"] for b in cls.__mro__[1:] if "__init__" in vars(b)), None
        )
        if inherited is original:
            del cls.__init__  # type: ignore[misc]
        else:
            cls.__init__ = original  # type: ignore[misc]
