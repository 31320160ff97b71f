"""What reading tells of an expression is what running it makes, and nothing is run."""

from __future__ import annotations

import ast
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchlab.ship.reading import UNKNOWN, body_values, value_of

NAMES = {"N": 3, "L": [1, 2], "D": {"a": 1}, "math": math, "torch": torch}
RUN = []


def noted(*arguments):
    RUN.append(arguments)
    return arguments


def read(text, names=NAMES):
    return value_of(ast.parse(text, mode="eval").body, names)


leaves = st.sampled_from(["1", "-2", "0.5", "True", "None", "'ab'", "N", "L", "D", "math.pi", "()"])
expressions = st.recursive(
    leaves,
    lambda inner: (
        st.tuples(inner, inner).map("[{0[0]}, {0[1]}]".format)
        | st.tuples(inner, inner).map("({0[0]}, *L, {0[1]})".format)
        | st.tuples(inner, inner).map("{{'a': {0[0]}, **D, 'b': {0[1]}}}".format)
        | st.tuples(
            inner,
            st.sampled_from(
                ["+", "-", "*", "/", "//", "%", "**", "<<", "==", "<", "in", "is", "and", "or"]
            ),
            inner,
        ).map("({0[0]} {0[1]} {0[2]})".format)
        | inner.map("[{0} for i in range(3) if i % 2]".format)
        | inner.map("{{i: {0} for i in L}}".format)
        | inner.map("dict(a={0}, b=N)".format)
        | inner.map("sorted([{0}])".format)
        | st.tuples(inner, inner).map("({0[0]} if N else {0[1]})".format)
        | inner.map("({0}, 2)[0]".format)
    ),
    max_leaves=6,
)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@given(expressions)
def test_value_that_is_told_is_the_one_that_running_makes(text):
    told = read(text)
    if told is UNKNOWN:
        return

    made = eval(text, dict(NAMES))

    assert type(told) is type(made)
    assert told == made


@pytest.mark.parametrize(
    "text",
    ["[N, L]", "dict(a=1)", "{i: i * 2 for i in range(3)}", "1 if N > 2 else 0", "math.pi", "-N",
     "2 ** -10", "1 << 4", "math.sqrt(2)", "max(L)",
     "torch.finfo(torch.float16).min", "D['a']", "[*L, 3]", "N in L", "not L", "float('nan') != 1"],
)  # fmt: skip
def test_plain_expressions_are_told(text):
    """Guards the property above, which would hold if nothing were ever told."""
    assert read(text) == eval(text, dict(NAMES))


@pytest.mark.parametrize(
    "text",
    ["noted(1)", "[noted(1)]", "L.append(3)", "math.factorial(9)", "f'{noted(1)}'", "nowhere",
     "[0] * 10 ** 9", "[0] * 100_000", "9 ** 9 ** 9", "1 << 10 ** 9",
     "'x' * 100_000 * 100_000", "1 / 0", "D['z']", "lambda: 1",
     "list(range(10 ** 9))", "(noted(i) for i in L)", "range.mro()"],
)  # fmt: skip
def test_nothing_is_run_and_nothing_large_is_made(text):
    names = NAMES | {"noted": noted}

    assert read(text, names) is UNKNOWN
    assert RUN == []
    assert names["L"] == [1, 2]


def test_builtin_that_the_session_has_bound_anew_is_not_called():
    assert read("len(L)", NAMES | {"len": noted}) is UNKNOWN
    assert RUN == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("a = 1\nb = a + 1", {"a": 1, "b": 2}),
        ("a, (b, c) = 1, [2, 3]", {"a": 1, "b": 2, "c": 3}),
        ("a = 1\na += N", {"a": 4}),
        ("a = 1\ndel a", {}),
        ("if N > 2:\n    a = 1\nelse:\n    a = 2", {"a": 1}),
        ("a: int = 5\nb: int", {"a": 5}),
        ("if noted(1):\n    a = 1", {"a": UNKNOWN}),
        ("a = []\na.append(1)", {"a": UNKNOWN}),
        ("a = {}\na['b'] = 1", {"a": UNKNOWN}),
        ("for a in L:\n    b = a", {"a": UNKNOWN, "b": UNKNOWN}),
        ("def a(): pass\nclass b: pass", {"a": UNKNOWN, "b": UNKNOWN}),
        ("import os.path as a, json", {"a": UNKNOWN, "json": UNKNOWN}),
        ("N = noted(1)\na = N", {"N": UNKNOWN, "a": UNKNOWN}),
        ("'a text'\na = 1", {"a": 1}),
    ],
)
def test_body_is_read_in_its_order(body, told):
    assert body_values(ast.parse(body).body, NAMES | {"noted": noted}) == told
    assert RUN == []
