"""Alignment: which row of a trace each token of a forward takes.

Rollout and training rarely have one shape. The rollout pads prompts on the left and runs on after a
sequence has ended; the training step pads on the right, packs, or takes a few sequences at a time;
and the last token of a generation was never run. What does not change is the order: the sequences
follow one another, and so do the tokens of each. Everything else that does not fit is refused, with
what was found and what was expected.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from patchlab.errors import RoutingError
from patchlab.routing.passes import TokenPass
from patchlab.routing.trace import LIVE, TokenBlock


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence of a trace, and how much of it has been handed out.

    Attributes:
        start: Row of its first position.
        block: The block it is in.
        real: Bool tensor `(block.length,)`, None if all positions are tokens.
        number: Which one of the trace it is.
        used: Positions, or tokens, handed out to earlier passes over the same cache.
        by_position: Whether positions are matched, not tokens; None before the first pass.
        end: How far its tokens went, where that is less than `used`: the rest was padding.
    """

    start: int
    block: TokenBlock
    real: torch.Tensor | None
    number: int = 0
    used: int = 0
    by_position: bool | None = None
    end: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.block.length if self.real is None else int(self.real.sum())

    @property
    def num_rows(self) -> int:
        """Routes it has for what is matched: for its positions or for its tokens."""
        return self.block.length if self.by_position else self.num_tokens

    @property
    def may_end_early(self) -> bool:
        """Whether it may have ended before others of its batch, and what came after is no part."""
        return self.block.prompt is not None and self.block.batch_size > 1

    @property
    def ran(self) -> int:
        """Positions, or tokens, that a forward has run."""
        return self.used if self.end is None else self.end

    @property
    def is_cut_in_prompt(self) -> bool:
        """Whether it ran, and not even to the end of what it was generated from."""
        prompt = self.block.prompt or 0
        if self.real is not None and not self.by_position:
            prompt = int(self.real[:prompt].sum())
        return 0 < self.ran < prompt

    def rows(self) -> torch.Tensor:
        """Return the rows of its tokens, padding left out."""
        rows = torch.arange(self.start, self.start + self.block.length)
        return rows if self.real is None else rows[self.real]


def _sequences(blocks: Sequence[TokenBlock]) -> list[_Sequence]:
    found, row = [], 0
    for block in blocks:
        for number in range(block.batch_size):
            real = None if block.real is None else block.real[number]
            found.append(_Sequence(row, block, real))
            row += block.length
    return found


@dataclass(slots=True, eq=False)
class Cursor:
    """Hands the sequences of a trace to the passes of a model, in order.

    Args:
        blocks: The sequences.
        strict: Refuse tokens without a route; otherwise a sequence may be one token longer than its
            trace, and its last token is routed live.
    """

    blocks: tuple[TokenBlock, ...]
    strict: bool = False
    next: int = 0
    _current: tuple[_Sequence, ...] = ()
    _current_past: int = 0
    # Of earlier passes, those that were cut short or may have been.
    _ended: tuple[_Sequence, ...] = ()
    _all: list[_Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._all = _sequences(self.blocks)

    def place(self, tokens: TokenPass) -> tuple[torch.Tensor, Cursor]:
        """Return the row for each token of a pass, and the cursor after it.

        Nothing changes in this cursor, so that a pass that fails can be run again.

        Returns:
            An int64 tensor `(num_tokens,)` on the CPU, -1 for tokens that are routed live; and the
            cursor to go on with when the pass has come to its end.

        Raises:
            RoutingError: The tokens do not fit what is left of the trace.
        """
        if tokens.past and self._current_past:
            return self._continue(tokens)
        if tokens.past:
            raise RoutingError(
                f"the forward runs {tokens}, but this replay has not seen the forward that filled "
                f"the cache. Enter replay_routing before the first token."
            )
        if tokens.starts:
            return self._packed(tokens)
        return self._start(tokens)

    def unused(self) -> tuple[str, ...]:
        """Say in phrases what of the trace was not handed out; empty when it is used up."""
        left = len(self._all) - self.next
        whole = f"{left} of {_plural(len(self._all), 'sequence')}"
        return (*((whole,) if left else ()), *self._cut_short())

    def _cut_short(self) -> Iterator[str]:
        """Tell of sequences that were not run to their end.

        Of those that were generated together one goes to the end, and others may end before.
        """
        ended = (*self._ended, *self._current)
        complete = {id(one.block) for one in ended if one.may_end_early and one.ran >= one.num_rows}
        for one in ended:
            if one.ran < one.num_rows and (one.is_cut_in_prompt or id(one.block) not in complete):
                yield f"sequence {one.number} after token {one.ran} of {one.num_rows}"

    def _taken(self, count: int, tokens: TokenPass) -> list[_Sequence]:
        left = self._all[self.next :]
        if len(left) == 1 and left[0].block.is_flat and count > 1:
            left = _unflattened(left[0], tokens)
        if len(left) < count:
            used = f", {self.next} of which are used" if self.next else ""
            raise RoutingError(
                f"the forward runs {tokens}; the trace has {_plural(len(self._all), 'sequence')}"
                f"{used}. Each forward takes the next ones; enter replay_routing anew to start "
                f"over, for another epoch say."
            )
        return [
            _Sequence(sequence.start, sequence.block, sequence.real, self.next + number)
            for number, sequence in enumerate(left[:count])
        ]

    def _after(self, count: int, current: Sequence[_Sequence], past: int) -> Cursor:
        after = copy.copy(self)
        if count:  # Not a further step of the same sequences.
            ended = [one for one in self._current if one.may_end_early or one.ran < one.num_rows]
            after._ended = (*self._ended, *ended)
        after.next = self.next + count
        after._current = tuple(current)
        after._current_past = past
        return after

    # --- one pass over whole sequences, or the first of several ----------------------------------

    def _start(self, tokens: TokenPass) -> tuple[torch.Tensor, Cursor]:
        taken = self._taken(tokens.batch_size, tokens)
        real = None if tokens.real is None else tokens.real.cpu()
        if real is not None and bool(real.all()):
            real = None
        parts = []
        for number, sequence in enumerate(taken):
            mask = None if real is None else real[number]
            parts.append(self._place_one(sequence, tokens, mask, self.next + number))
        count = len(taken) if len(taken) <= len(self._all) - self.next else 1
        rows = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        return rows, self._after(count, taken, tokens.length)

    def _place_one(
        self, sequence: _Sequence, tokens: TokenPass, mask: torch.Tensor | None, number: int
    ) -> torch.Tensor:
        length = tokens.length
        if _by_position(sequence, length, mask):
            sequence.by_position, sequence.used = True, length
            if mask is not None and sequence.may_end_early:
                sequence.end = int(mask.nonzero().max()) + 1 if bool(mask.any()) else 0
            rows = torch.arange(sequence.start, sequence.start + length)
            known = torch.arange(length) < sequence.block.length
            known &= True if sequence.real is None else _padded(sequence.real, length)
            rows = torch.where(known, rows, LIVE)
            missing = int((~known & (True if mask is None else mask)).sum())
        else:
            # The order of the tokens is what counts, wherever the padding is.
            wanted = torch.arange(length) if mask is None else mask.nonzero().flatten()
            own = sequence.rows()
            if not self._may_take(sequence, len(wanted), cached=tokens.cached):
                raise _misfit(sequence, len(wanted), number, tokens)
            sequence.by_position, sequence.used = False, len(wanted)
            rows = torch.full((length,), LIVE)
            taken = min(len(own), len(wanted))
            rows[wanted[:taken]] = own[:taken]
            missing = len(wanted) - taken
        if missing and self.strict:
            raise _not_strict(number, missing, sequence, length)
        return rows

    def _may_take(self, sequence: _Sequence, wanted: int, *, cached: bool) -> bool:
        own = sequence.num_tokens
        if wanted in (own, own + 1):
            return True
        if wanted > own:
            return False
        # Fewer: a step over a cache that more steps will follow, or a sequence that ended before
        # the others of its batch, so that what came after its end is no part of it.
        return cached or sequence.may_end_early

    # --- further passes over the same cache -----------------------------------------------------

    def _continue(self, tokens: TokenPass) -> tuple[torch.Tensor, Cursor]:
        current = self._current
        if len(current) != tokens.batch_size or tokens.past > self._current_past:
            raise RoutingError(
                f"the forward runs {tokens}; the forwards before it ran {len(current)} × "
                f"{self._current_past}, so it continues another run than this replay has seen."
            )
        back = self._current_past - tokens.past  # Taken back, as assisted decoding does.
        mask = None if tokens.real is None else tokens.real.cpu()
        parts, after = [], []
        for number, sequence in enumerate(current):
            own = (
                torch.arange(sequence.start, sequence.start + sequence.block.length)
                if sequence.by_position
                else sequence.rows()
            )
            step = _Sequence(sequence.start, sequence.block, sequence.real, sequence.number)
            step.by_position = sequence.by_position
            used = sequence.used - back
            if sequence.by_position or mask is None:
                wanted = torch.arange(tokens.length)
            else:
                wanted = mask[number].nonzero().flatten()
            missing = used + len(wanted) - len(own)
            if missing > (0 if self.strict else 1):
                raise RoutingError(
                    f"sequence {number} of the trace ends after {len(own)} tokens; the forward "
                    f"runs {tokens}, {used + len(wanted)} in all. Stop earlier, or leave the "
                    f"replay when the trace is used up."
                )
            rows = torch.full((tokens.length,), LIVE)
            taken = own[used : used + len(wanted)]
            rows[wanted[: len(taken)]] = taken
            step.used = used + len(wanted)
            parts.append(rows)
            after.append(step)
        past = tokens.past + tokens.length
        return torch.cat(parts), self._after(0, after, past)

    # --- several sequences in one row -------------------------------------------------------------

    def _packed(self, tokens: TokenPass) -> tuple[torch.Tensor, Cursor]:
        if len(self._all) - self.next == 1:
            return self._start(tokens)  # Recorded as packed.
        ends = (*tokens.starts[1:], tokens.length)
        taken = self._taken(len(tokens.starts), tokens)
        parts = []
        for number, (start, end) in enumerate(zip(tokens.starts, ends, strict=True)):
            part = TokenPass(1, end - start)
            parts.append(self._place_one(taken[number], part, None, self.next + number))
        return torch.cat(parts), self._after(len(taken), taken, 0)


def _padded(real: torch.Tensor, length: int) -> torch.Tensor:
    wide = torch.zeros(length, dtype=torch.bool)
    wide[: len(real)] = real[:length]
    return wide


def _by_position(sequence: _Sequence, length: int, mask: torch.Tensor | None) -> bool:
    """Tell whether the positions of a pass are those of the trace, one by one.

    Where the numbers of tokens agree, the tokens are matched in order instead, wherever the padding
    is. They do not agree where the trace has routes for what is padding in the pass: it was
    recorded without a mask, or a sequence of its batch was run on after its end.
    """
    own, block = sequence.num_tokens, sequence.block
    wanted = length if mask is None else int(mask.sum())
    if wanted in (own, own + 1) or length not in (block.length, block.length + 1):
        return False
    if mask is None:
        return True
    known = torch.ones(block.length, dtype=torch.bool) if sequence.real is None else sequence.real
    shared = mask[: block.length]
    return block.batch_size > 1 and not bool((shared & ~known[: len(shared)]).any())


def _unflattened(flat: _Sequence, tokens: TokenPass) -> list[_Sequence]:
    """Read a trace of unknown shape as sequences of one length, if the forward's shape says so."""
    own, count = flat.block.length, tokens.batch_size
    if own % count or tokens.length not in (own // count, own // count + 1):
        raise RoutingError(
            f"the forward runs {tokens}, so a trace needs {tokens.num_tokens} rows, or "
            f"{tokens.num_tokens - count} without the last token of each sequence; this one has "
            f"{own}."
        )
    block = TokenBlock(count, own // count)
    return [_Sequence(flat.start + number * block.length, block, None) for number in range(count)]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _misfit(sequence: _Sequence, wanted: int, number: int, tokens: TokenPass) -> RoutingError:
    own = sequence.num_tokens
    hint = ""
    if wanted < own:
        hint = (
            " To run it in steps, hand in a DynamicCache from the first on; to use a part, "
            "cut the trace."
        )
    return RoutingError(
        f"sequence {number} of the forward has {_plural(wanted, 'token')}, its trace has {own}; "
        f"{own} were expected, or {own + 1} with the last one routed live. The forward runs "
        f"{tokens}.{hint}"
    )


def _not_strict(number: int, missing: int, sequence: _Sequence, length: int) -> RoutingError:
    return RoutingError(
        f"sequence {number} has {_plural(missing, 'token')} without a route: it has {length} "
        f"positions, its trace {sequence.num_tokens} tokens. With strict=False these are routed "
        f"live."
    )
