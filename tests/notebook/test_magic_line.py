"""The line of a magic is read literally, and its classes are looked up and never evaluated."""

from __future__ import annotations

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from torch import nn

from patchlab.notebook.magic_line import (
    parse_line,
    resolve_mapping,
    resolve_name,
    split_rule,
    split_words,
)


class MyMLP(nn.Module):
    class Inner(nn.Module):
        pass


NAMESPACE = {"MyMLP": MyMLP, "MyAttention": type("MyAttention", (nn.Module,), {}), "number": 3}

no_quotes = st.text(st.characters(blacklist_characters="'\""), min_size=1)
keys = no_quotes.filter(lambda text: not any(c.isspace() for c in text) and text[0] != "-")


@given(st.lists(no_quotes.filter(lambda text: not any(c.isspace() for c in text))))
def test_words_without_quotes_come_back_as_typed(words):
    """For any characters, braces, dollars and backslashes among them."""
    assert split_words("  ".join(words)) == words


@given(no_quotes, st.sampled_from("'\""))
def test_quotes_keep_what_is_between_them_and_are_dropped(text, quote):
    assert split_words(f"a {quote}{text}{quote} b") == ["a", text, "b"]


@given(keys, st.from_regex(r"[A-Z]\w{0,8}(\.[A-Z]\w{0,8})?", fullmatch=True))
def test_rule_is_split_at_its_last_equals_sign(key, name):
    assert split_rule(f"{key}={name}") == (key, name)


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("", ()),
        ("LlamaMLP=MyMLP", (("LlamaMLP", "MyMLP"),)),
        ("  A=B   C=D.E ", (("A", "B"), ("C", "D.E"))),
        (r"^Llama\d+{1,2}$=MyMLP", ((r"^Llama\d+{1,2}$", "MyMLP"),)),
        (r"\bBert(?=Self)=MyMLP", ((r"\bBert(?=Self)", "MyMLP"),)),
        ("$HOME{x}=MyMLP", (("$HOME{x}", "MyMLP"),)),
        ('"LlamaAttention=My Mod"', (("LlamaAttention", "My Mod"),)),
        ("'A B=C' D=E", (("A B", "C"), ("D", "E"))),
        ('"A B"=C', (("A B", "C"),)),
        ('--map="A B=C"', (("A B", "C"),)),
        ('--map "A B=C"', (("A B", "C"),)),
        ("--map A=B --map=C=D E=F", (("A", "B"), ("C", "D"), ("E", "F"))),
    ],
)
def test_rules_are_read_as_typed(line, rules):
    assert parse_line(line).rules == rules


def test_options_are_read_in_both_forms_and_anywhere():
    read = parse_line("--quiet A=B --model model --convert=mine", flags=("--quiet", "--diff"))

    assert (read.model, read.convert) == ("model", "mine")
    assert read.flags == {"--quiet"}
    assert read.rules == (("A", "B"),)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("LlamaMLP", "not a rule"),
        ("=MyMLP", "not a rule"),
        ("LlamaMLP=", "not a rule"),
        ("LlamaMLP = MyMLP", "not a rule"),
        ("A=B A=C", "given twice"),
        ("'A=B", "not closed"),
        ("--quite A=B", "Did you mean --quiet"),
        ("--zzz", "There are --map, --model, --convert, --quiet"),
        ("A=B --model", "--model needs a value"),
        ("A=B --model=", "--model needs a value"),
        ("--map", "--map needs a value"),
    ],
)
def test_line_that_cannot_be_meant_is_refused_with_the_reason(line, said):
    with pytest.raises(UsageError, match=said):
        parse_line(line, flags=("--quiet",))


def test_class_is_found_by_name_and_by_path():
    module = types.ModuleType("layers")
    module.MyMLP = MyMLP
    namespace = {**NAMESPACE, "layers": module}

    assert resolve_name("MyMLP", namespace) is MyMLP
    assert resolve_name("layers.MyMLP", namespace) is MyMLP
    assert resolve_name("layers.MyMLP.Inner", namespace) is MyMLP.Inner


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MyMPL", "Did you mean MyMLP"),
        ("mymlp", "Did you mean MyMLP"),
        ("Zebra", "The module classes there: MyAttention, MyMLP"),
        ("MyMLP.Iner", "Did you mean MyMLP.Inner"),
        ("number.real", "neither a Python module nor a class"),
        ("MyMLP()", "there is no 'MyMLP\\(\\)'"),
        ("__import__('os')", "there is no"),
    ],
)
def test_name_that_is_not_there_is_refused_with_the_nearest(name, said):
    with pytest.raises(UsageError, match=said):
        resolve_name(name, NAMESPACE)


def test_name_in_a_notebook_without_classes_says_what_to_run():
    with pytest.raises(UsageError, match="run the cell that defines it first"):
        resolve_name("MyMLP", {"number": 3})


def test_properties_of_objects_are_not_run():
    """Only Python modules and classes have their attributes read."""

    class Trap:
        @property
        def Inner(self):
            raise AssertionError("the property must not run")

    with pytest.raises(UsageError, match="neither a Python module nor a class"):
        resolve_name("trap.Inner", {"trap": Trap()})


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("*Attention", "MyMLP", "glob"),
        ("(", "MyMLP", "not a valid regular expression"),
        ("LlamaMLP", "number", "must be a class, got int"),
        ("LlamaMLP", "MyMLP.forward", "function"),
    ],
)
def test_rule_that_can_never_work_is_a_usage_error(key, name, said):
    with pytest.raises(UsageError, match=said):
        resolve_mapping([(key, name)], NAMESPACE)
