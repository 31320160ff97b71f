"""A constant reads back as the value it was, and looks as the formatter would have it."""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchlab.errors import ExportError
from patchlab.ship.code import layout, quoted
from patchlab.ship.literals import constant


class Color(enum.Enum):
    RED = "r"


Odd = enum.Enum("Odd", {"a b": 1, "class": 2})


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Options:
    width: int
    names: tuple[str, ...] = ()


NAMESPACE = {
    "torch": torch, "re": re, "logging": logging, "Path": pathlib.Path, "Color": Color, "Odd": Odd,
    "Flags": Flags, "Options": Options, "typing": typing, "Callable": Callable,
    "PurePosixPath": pathlib.PurePosixPath, "Literal": typing.Literal, "TypeVar": typing.TypeVar,
}  # fmt: skip

atoms = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | st.complex_numbers() | st.just(...)
)  # fmt: skip
hashable = atoms | st.tuples(atoms, atoms) | st.frozensets(atoms, max_size=3)
containers = st.deferred(
    lambda: (
        st.lists(values, max_size=4)
        | st.tuples(values)
        | st.dictionaries(hashable, values, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.frozensets(hashable, max_size=4)
    )
)
values = atoms | containers


def reference(value):
    return value.__name__


def written(value):
    return layout(constant(value, reference), used=4)


def plain(value):
    """A value in a form that `==` compares, NaN and the sign of zero included."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else (value, math.copysign(1, value))
    if isinstance(value, complex):
        return (plain(value.real), plain(value.imag))
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(repr(plain(item)) for item in value))
    if isinstance(value, (list, tuple)):
        return (type(value), [plain(item) for item in value])
    if isinstance(value, dict):
        return [(plain(key), plain(item)) for key, item in value.items()]
    return (type(value), value)


@given(values)
def test_value_reads_back_as_it_was(value):
    assert plain(eval(written(value), dict(NAMESPACE))) == plain(value)


@given(st.text(), st.booleans())
def test_string_reads_back_as_it_was(text, raw):
    assert eval(quoted(text, raw=raw)) == text


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (Color.RED, "Color.RED"),
        (Odd["a b"], 'Odd["a b"]'),
        (Odd["class"], 'Odd["class"]'),
        (Flags.A | Flags.B, "Flags(3)"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cuda:1"), 'torch.device("cuda:1")'),
        (torch.Size([2, 3]), "torch.Size((2, 3))"),
        (pathlib.Path("a/b"), 'Path("a/b")'),
        (pathlib.PurePosixPath("a/b"), 'PurePosixPath("a/b")'),
        (re.compile(r"^a\w"), r're.compile(r"^a\w")'),
        (re.compile(b"a", re.I | re.M), 're.compile(b"a", re.IGNORECASE | re.MULTILINE)'),
        (logging.getLogger("mine"), 'logging.getLogger("mine")'),
        (Options(3, ("a",)), 'Options(width=3, names=("a",))'),
        (range(3), "range(0, 3)"),
        (slice(None, 2), "slice(None, 2, None)"),
        (dict[str, int | None], "dict[str, int | None]"),
        (typing.Optional[int], "int | None"),  # noqa: UP045
        (Callable[[int], str], "Callable[[int], str]"),
        (Callable[..., str], "Callable[..., str]"),
        (typing.Literal["a", 1], 'Literal["a", 1]'),
        ({"b", "a"}, '{"a", "b"}'),
        (set(), "set()"),
        (frozenset(), "frozenset()"),
        (-math.inf, '-float("inf")'),
        (int, "int"),
    ],
)
def test_code_of_a_constant(value, code):
    assert written(value) == code
    assert eval(code, dict(NAMESPACE)) == value


def test_type_variable_keeps_its_bound():
    code = written(typing.TypeVar("T", bound=int))

    assert code == 'TypeVar("T", bound=int)'
    assert eval(code, dict(NAMESPACE)).__bound__ is int


class Number(int):
    pass


ITSELF: list[object] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.zeros(1), "torch.Tensor"),
        ([torch.zeros(1)], "torch.Tensor"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (Number(3), "Number"),
        (object(), "it is a object"),
        (ITSELF, "holds itself"),
        (["x" * 1000] * 101, "which is data and not a constant"),
        ({"a": (1, object())}, "it is a object"),
    ],
)
def test_what_is_no_constant_is_refused(value, why):
    with pytest.raises(ExportError, match=why):
        constant(value, reference)


def test_formatter_leaves_constants_as_they_are(tmp_path):
    samples = [
        list(range(60)),
        {"key": [1, 2.5, None], "other": {"a" * 40: ("b" * 40,), "c": ["d" * 80]}},
        [{"x": i, "y": [i] * 30} for i in range(3)],
        {"it's", 'say "x"', "both ' and \"", "tab\t", "é", "\x00", "back\\slash"},
        {b"a'b": -1.5e-7, b'a"b': 1e300, b"c": complex(1, -0.0)},
        [Options(1, ("a" * 30, "b" * 30, "c" * 30)), re.compile("a" * 70, re.I | re.M | re.S)],
        [dict[str, tuple[int, ...]], frozenset({"a" * 45, "b" * 45})],
        (("a" * 90,), (1,), ()),
        [[], {}, set(), [[[]]]],
    ]
    path = tmp_path / "constants.py"
    lines = [
        f"v{n} = {layout(constant(value, reference), used=5)}" for n, value in enumerate(samples)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    ran = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--isolated", "--diff", str(path)],
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stdout
