"""The routing widget: load by layer and expert, experts by token, and where two traces part.

Python counts and the browser draws. The load goes over as numbers, the experts of the first tokens
as 16-bit integers; `view` and `cell` are synced, so that setting them here moves the view and what
is chosen there is read here. Beside it stand text and static HTML, for readers without a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import torch
import traitlets

from patchlab.errors import RoutingError
from patchlab.notebook.closing import close_looks
from patchlab.render.rows import Table
from patchlab.routing.agreement import RoutingAgreement, paired_rows, partners
from patchlab.routing.trace import LIVE, RoutingTrace

__all__ = ["RoutingWidget"]

_STATIC = Path(__file__).parent / "static"
MOST_TOKENS = 1024
"""Tokens that go to the browser: 1 MB at 58 layers of 8 experts. The load is of all of them."""


class RoutingWidget(anywidget.AnyWidget):
    """A view of a routing trace, or of two traces of the same tokens.

    Args:
        trace: The trace.
        other: A trace of the same tokens, to see where they part.
        token_ids: The ids of the tokens, `(num_tokens,)` or as the model takes them, for the
            tokenizer.
        tokenizer: Turns ids into the text of each token (`convert_ids_to_tokens`).

    Attributes:
        view: "load", "tokens", or with another trace "divergence".
        cell: Row (the layer's place among those with a router) and column of the selected cell.
        errors: What went wrong in the browser, oldest first; not synced.

    Raises:
        RoutingError: The traces are not of the same tokens and routers; the ids are not as many as
            the tokens; or a tokenizer has no ids to work on.
    """

    # Text and not paths: anywidget lets a file's contents, which the class holds, hold each widget.
    _esm = (_STATIC / "routing.js").read_text(encoding="utf-8")
    _css = (_STATIC / "routing.css").read_text(encoding="utf-8")

    view = traitlets.Enum(["load", "tokens", "divergence"], "load").tag(sync=True)
    cell = traitlets.Tuple(traitlets.Int(), traitlets.Int(), default_value=(0, 0)).tag(sync=True)
    facts = traitlets.Dict().tag(sync=True)
    experts = traitlets.Bytes(b"").tag(sync=True)
    other_experts = traitlets.Bytes(b"").tag(sync=True)
    errors = traitlets.Tuple()

    def __init__(
        self,
        trace: RoutingTrace,
        other: RoutingTrace | None = None,
        *,
        token_ids: Any = None,
        tokenizer: Any = None,
        **traits: Any,
    ) -> None:
        # All that can fail comes first.
        if not isinstance(trace, RoutingTrace):
            raise RoutingError(
                f"a RoutingWidget shows a RoutingTrace, not a {type(trace).__name__}. Of an "
                f"engine's arrays make one first: RoutingTrace.from_vllm(model, array)."
            )
        agreement = None if other is None else trace.agreement(other)
        names = _token_names(trace, token_ids, tokenizer)
        super().__init__(**traits)
        self._trace, self._agreement = trace, agreement
        self.on_msg(self._receive)
        first = _main_routers(trace)
        loads = trace.load_per_expert()
        shown = min(len(trace.indices[first[0]]), MOST_TOKENS)
        with self.hold_sync():
            self.facts = {
                "caption": self._table().caption,
                "layers": [router.layer for router in trace.routers if router.fqn in first],
                "routers": first,
                "load": [loads[fqn].tolist() for fqn in first],
                "top_k": trace.top_k,
                "tokens": shown,
                "all_tokens": trace.num_tokens,
                "names": names[:shown],
                "compared": agreement is not None,
            }
            self.experts = _packed(trace, first, shown)
            if agreement is not None and other is not None:
                self.other_experts = _packed(trace, first, shown, other)

    def close(self) -> None:
        """Close the widget with its layout."""
        close_looks(self)
        super().close()

    def to_text(self) -> str:
        """Return the static twin as text."""
        return self._value().to_text()

    def to_html(self) -> str:
        """Return the static twin as HTML."""
        return self._value().to_html()

    def _value(self) -> RoutingTrace | RoutingAgreement:
        return self._trace if self._agreement is None else self._agreement

    def _table(self) -> Table:
        return self._value().to_table()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        shown = super()._repr_mimebundle_(**options)
        if shown is None:
            return None
        bundle, metadata = shown if isinstance(shown, tuple) else (shown, {})
        return {**bundle, "text/plain": self.to_text(), "text/html": self.to_html()}, metadata

    def __repr__(self) -> str:
        return f"<RoutingWidget: {self._table().caption}>"

    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if isinstance(content, dict) and content.get("type") == "error":
            self.errors = (*self.errors, str(content.get("message", "unknown error")))[-100:]


def _main_routers(trace: RoutingTrace) -> list[str]:
    """Return the routers that see the tokens of the last one: the decoder's."""
    tokens = trace.routers[-1].tokens
    return [router.fqn for router in trace.routers if router.tokens == tokens]


def _packed(
    trace: RoutingTrace, routers: Sequence[str], tokens: int, other: RoutingTrace | None = None
) -> bytes:
    """Pack experts as little-endian int16 `(routers, tokens, top_k)`, -1 where there is none.

    With another trace, its experts, each under the token of the first trace that it belongs to.
    """
    packed = torch.full((len(routers), tokens, trace.top_k), LIVE, dtype=torch.int16)
    names = {} if other is None else partners(trace, other)
    for row, fqn in enumerate(routers):
        index = trace.indices[fqn].to(torch.int16)
        if other is not None:
            # A step may have one token more in each sequence than the generation it follows.
            rows, theirs = paired_rows(trace, other, fqn, names[fqn])
            own = other.indices[names[fqn]].to(torch.int16)
            index = torch.full((len(index), own.shape[1]), LIVE, dtype=torch.int16)
            index[rows] = own[theirs]
        index = index[:tokens]
        packed[row, : len(index), : index.shape[1]] = index
    return packed.numpy().astype("<i2").tobytes()


def _token_names(trace: RoutingTrace, token_ids: Any, tokenizer: Any) -> list[str]:
    if token_ids is None:
        if tokenizer is not None:
            raise RoutingError("a tokenizer without token_ids has nothing to name; give both.")
        return []
    try:
        ids = torch.as_tensor(token_ids).flatten().tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoutingError(
            f"token_ids are numbers, as the model takes them, and not a "
            f"{type(token_ids).__name__} ({error}). Let the tokenizer make them: "
            f"tokenizer(text).input_ids."
        ) from error
    if len(ids) != trace.num_tokens:
        raise RoutingError(
            f"{len(ids)} token ids for a trace of {trace.num_tokens} tokens. Of a generation, "
            f"leave out the last token of each sequence: sequences[:, :-1]."
        )
    if tokenizer is None:
        return [str(number) for number in ids]
    return [str(name) for name in tokenizer.convert_ids_to_tokens(ids[:MOST_TOKENS])]
