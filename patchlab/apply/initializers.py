"""New parameters of a replacement, initialized by the replacement itself.

What a checkpoint lacks is uninitialized memory after `from_pretrained`: the model is built on the
meta device, and the model's `_init_weights` knows nothing of a replacement's own parameters. A
replacement that has some defines a method for them:

    def init_new_weights(self):
        init.constant_(self.gain, 1.0)      # from transformers import initialization as init

It is called for each of its modules after the model's own initialization, in `from_pretrained` and
in `from_config` (transformers 5.24.0, `PreTrainedModel._initialize_weights`). The functions of
`transformers.initialization` leave alone what was loaded, so the method may speak of all tensors,
non-persistent buffers too; with torch's own functions it must not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from patchlab._upstream import INITIALIZE, pretrained_model_class
from patchlab.apply.uninitialized import METHOD, watch_initialization

_bound: dict[str, Callable[..., None]] = {}


def initializer_of(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method by which a module initializes what is new in it, None if it has none."""
    method = getattr(module, METHOD, None)
    return method if callable(method) else None


def bind_initializers(wanted: bool) -> None:
    """Let loads call `init_new_weights`, or not any more; may be called again at any time."""
    base = pretrained_model_class()
    current = vars(base)[INITIALIZE]
    if wanted and current is not _bound.get("wrapper"):

        @functools.wraps(current)
        def initialize(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            done = getattr(module, "_is_hf_initialized", False)
            method = None if done else initializer_of(module)

            def by_model() -> None:
                current(self, module, *args, **kwargs)

            watch_initialization(self, module, by_model, method)

        _bound["original"] = current
        _bound["wrapper"] = initialize
        type.__setattr__(base, INITIALIZE, initialize)
    elif not wanted and current is _bound.get("wrapper"):
        type.__setattr__(base, INITIALIZE, _bound["original"])
