"""Alignment: for any rollout and any training step, each token takes the row that is its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchlab.errors import RoutingError
from patchlab.routing.align import Cursor
from patchlab.routing.passes import TokenPass
from patchlab.routing.trace import TokenBlock


@st.composite
def padded_batches(draw):
    """Numbers of tokens, and two paddings of them to rectangles."""
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    masks = []
    for _ in range(2):
        length = max(counts) + draw(st.integers(0, 2))
        mask = torch.zeros(len(counts), length, dtype=torch.bool)
        for row, count in enumerate(counts):
            start = draw(st.sampled_from([0, length - count]))
            mask[row, start : start + count] = True
        masks.append(mask)
    return masks


def token_numbers(mask):
    """For each position, which token of its sequence it is; -1 on padding."""
    return torch.where(mask, mask.cumsum(-1) - 1, -1)


@given(padded_batches())
def test_each_token_takes_its_own_row_wherever_the_padding_is(masks):
    """Real tokens get the row of the same token of the same sequence, padding gets none."""
    rollout, training = masks
    block = TokenBlock(*rollout.shape, real=rollout)

    rows, _ = Cursor((block,)).place(TokenPass(*training.shape, real=training))

    numbers = token_numbers(rollout).flatten()
    for place, row in enumerate(rows.tolist()):
        sequence, position = divmod(place, training.shape[1])
        if not training[sequence, position]:
            continue
        assert row // rollout.shape[1] == sequence
        assert numbers[row] == token_numbers(training)[sequence, position]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_steps_over_a_cache_take_the_rows_of_one_pass(lengths, data):
    """However a run is cut into steps, the rows are those of the run as a whole."""
    batch_size = data.draw(st.integers(1, 3))
    total = sum(lengths)
    cursor = Cursor((TokenBlock(batch_size, total),))
    whole, _ = cursor.place(TokenPass(batch_size, total))

    parts, past = [], 0
    for length in lengths:
        tokens = TokenPass(batch_size, length, past=past, cached=True)
        rows, cursor = cursor.place(tokens)
        parts.append(rows.unflatten(0, (batch_size, length)))
        past += length

    assert torch.equal(torch.cat(parts, dim=1).flatten(), whole)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_micro_batches_use_every_row_once(sizes):
    cursor = Cursor((TokenBlock(sum(sizes), 3),))
    seen = []
    for size in sizes:
        rows, cursor = cursor.place(TokenPass(size, 3))
        seen += rows.tolist()

    assert seen == list(range(3 * sum(sizes)))
    with pytest.raises(RoutingError, match="are used"):
        cursor.place(TokenPass(1, 3))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(-5, 8))
def test_only_one_more_token_is_allowed(batch_size, length, more):
    """As many tokens, or one more for the last; anything else is refused before it runs."""
    cursor = Cursor((TokenBlock(batch_size, length),))
    wanted = length + more
    if wanted < 1:
        return
    tokens = TokenPass(batch_size, wanted)
    if more in (0, 1):
        rows, _ = cursor.place(tokens)
        assert int((rows < 0).sum()) == batch_size * more
    else:
        with pytest.raises(RoutingError, match=f"its trace has {length}"):
            cursor.place(tokens)


def test_placing_changes_nothing_until_the_pass_has_ended():
    cursor = Cursor((TokenBlock(2, 3),))
    first, after = cursor.place(TokenPass(2, 3))
    again, _ = cursor.place(TokenPass(2, 3))

    assert torch.equal(first, again)
    with pytest.raises(RoutingError, match="2 of which are used"):
        after.place(TokenPass(2, 3))


def test_steps_that_were_taken_back_are_taken_again():
    cursor = Cursor((TokenBlock(1, 6),))
    _, cursor = cursor.place(TokenPass(1, 4, cached=True))
    _, cursor = cursor.place(TokenPass(1, 2, past=4, cached=True))
    rows, _ = cursor.place(TokenPass(1, 1, past=3, cached=True))

    assert rows.tolist() == [3]
