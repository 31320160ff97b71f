"""Rules are refused at the door when they can never work, with the key that was meant."""

from __future__ import annotations

import functools
import re
import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from transformers import monkey_patching

from patchlab.errors import MappingError, MappingTypeError
from patchlab.mapping.matching import explain_match, near_names
from patchlab.mapping.rules import PatchMapping, PatchRule, check_key, is_exact_name


class A(nn.Module):
    pass


class B(nn.Module):
    pass


names = st.sampled_from(
    ["BertLayer", "RemBertLayer", "LlamaMLP", "LlamaAttention", "T5LayerNorm", "Model", "BertModel"]
)
patterns = st.sampled_from(
    [
        ".*Layer",
        "^Bert",
        "Layer$",
        "Attention|MLP",
        "^(?!Rem).*Layer$",
        "[A-Z]5",
        "(?i)llama.+",
        ".*",
    ]
)
rule_lists = st.lists(st.tuples(patterns, st.sampled_from([A, B])), unique_by=lambda r: r[0])


@given(names, rule_lists)
def test_patterns_agree_with_transformers(class_name, rules):
    """For any name and any patterns, it predicts the class that transformers would bind."""
    mapping = dict(rules)

    rule = PatchMapping.of(mapping).find(class_name)

    expected = monkey_patching._find_replacement_class(class_name, mapping)
    assert (rule and rule.replacement) is expected


@given(names, names, rule_lists)
def test_exact_names_come_first_as_in_transformers(class_name, exact, rules):
    mapping = dict(rules) | {exact: A}
    rule = PatchMapping.of(mapping).find(class_name)
    if exact == class_name or not re.search(exact, class_name):
        expected = monkey_patching._find_replacement_class(class_name, mapping)
        assert (rule and rule.replacement) is expected


@pytest.mark.parametrize(
    ("key", "class_name", "theirs", "ours"),
    [
        ("BertLayer", "RemBertLayer", True, False),
        ("BertModel", "VisualBertModel", True, False),
        ("BertLayer", "BertLayer", True, True),
        ("^BertLayer$", "RemBertLayer", False, False),
        ("BertLayer.*", "RemBertLayer", True, True),
    ],
)
def test_differs_from_transformers_only_where_it_searches_exact_names(
    key, class_name, theirs, ours
):
    """The whole table of where matching differs on purpose: an exact name is no pattern."""
    upstream = monkey_patching._find_replacement_class(class_name, {key: A})
    assert (upstream is not None) is theirs
    assert (PatchMapping.of({key: A}).find(class_name) is not None) is ours


@given(st.text(alphabet=string.ascii_letters + string.digits + "_", min_size=1))
def test_an_identifier_matches_itself_and_nothing_longer(name):
    assume(is_exact_name(name))
    rule = PatchRule(name, A)
    assert rule.matches(name)
    assert not rule.matches(name + "X")
    assert not rule.matches("X" + name)


@given(st.text(max_size=12))
def test_any_text_is_accepted_or_refused_with_its_repr(key):
    """No key makes anything but a rule or a MappingError that names it."""
    try:
        accepted = check_key(key)
    except MappingError as error:
        refusal = error
    else:
        refusal = None
        re.compile(accepted)
    assert accepted_or_named(key, refusal)


def accepted_or_named(key: str, refusal: MappingError | None) -> bool:
    return refusal is None or repr(key) in str(refusal)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("*Attention", "'.*Attention$'"),
        ("linear*", "'^linear'"),
        ("Llama*", "'^Llama'"),
        ("*MLP*", "'.*MLP'"),
        ("transformers.models.llama.modeling_llama.LlamaMLP", "'LlamaMLP'"),
        ("'LlamaMLP'", "'LlamaMLP'"),
        ('"LlamaMLP"', "'LlamaMLP'"),
        (" LlamaMLP", "'LlamaMLP'"),
        ("LlamaMLP\n", "'LlamaMLP'"),
        ("[Wqkv]", "'Wqkv'"),
        ("models/llama/LlamaMLP", "slash"),
        ("Llama MLP", "'LlamaMLP'"),
        ("Llama(MLP", r"Llama\\(MLP"),
        ("LlamaMLP,LlamaAttention", "'^(?:LlamaMLP|LlamaAttention)$'"),
        ("LlamaMLP, LlamaAttention", "'^(?:LlamaMLP|LlamaAttention)$'"),
        ("LlamaMLP; LlamaAttention;", "'^(?:LlamaMLP|LlamaAttention)$'"),
        ("class LlamaMLP", "Use 'LlamaMLP'"),
        ("class LlamaMLP(nn.Module):", "Use 'LlamaMLP'"),
        ("<class 'LlamaMLP'>", "Use 'LlamaMLP'"),
        ("<class 'transformers.models.llama.modeling_llama.LlamaMLP'>", "Use 'LlamaMLP'"),
        ("<class '__main__.f.<locals>.LlamaMLP'>", "Use 'LlamaMLP'"),
        ("model.layers.0.mlp", "place of a module"),
        ("layers.*.mlp", "place of a module"),
        ("model.layers.11", "place of a module"),
        ("LlamaMLP|", "Use 'LlamaMLP'"),
        ("|LlamaMLP", "Use 'LlamaMLP'"),
        ("LlamaMLP||LlamaAttention", "Use 'LlamaMLP|LlamaAttention'"),
        ("LlamaMLP$|", "Use 'LlamaMLP$'"),
        ("", "empty"),
        ("   ", "empty"),
    ],
)
def test_a_key_that_cannot_match_is_refused_with_what_was_meant(key, meant):
    with pytest.raises(MappingError, match=re.escape(meant)) as refused:
        PatchRule(key, A)
    assert repr(key) in str(refused.value)


@pytest.mark.parametrize(
    "key",
    [
        "LlamaMLP|LlamaAttention",
        "^Llama(MLP|)Attention$",  # An empty choice inside of more matches no more than it says.
        r"Llama\|",
        "Llama.*",
        "Llama.*.Attention",
        "(?:classifier)",
        "Class.+",
        "[,;]|MLP",
        "MLP{1,2}",
    ],
)
def test_a_pattern_that_only_looks_like_another_notation_is_accepted(key):
    assert check_key(key) == key


@pytest.mark.parametrize("key", [3, None, b"LlamaMLP", re.compile("x"), nn.Linear, ("a",)])
def test_a_key_that_is_no_string_is_a_type_error(key):
    with pytest.raises(TypeError, match="key"):
        PatchMapping.of({key: A})


@pytest.mark.parametrize(
    ("replacement", "hint"),
    [
        (nn.Linear(1, 1), "instance"),
        ("LlamaMLP", "import the class"),
        (functools.partial(nn.Linear, 1), "functools.partial"),
        (lambda config: None, "function"),
        (None, "leave it out"),
        (dict, "subclass of nn.Module"),
        (3, "must be a class"),
    ],
)
def test_a_replacement_that_is_no_module_class_is_a_type_error(replacement, hint):
    with pytest.raises(MappingTypeError, match=hint) as refused:
        PatchRule("LlamaMLP", replacement)
    assert isinstance(refused.value, TypeError)
    assert "'LlamaMLP'" in str(refused.value)


@pytest.mark.parametrize("mapping", [None, "LlamaMLP", [("LlamaMLP", A)], lambda: None, A])
def test_what_is_no_dict_is_refused(mapping):
    with pytest.raises(TypeError, match="mapping must be a dict"):
        PatchMapping.of(mapping)


def test_the_rules_of_the_guide_are_accepted():
    for key in ["LlamaAttention", ".*Attention", ".*MoeExperts$", "^Llama\\d+Attention$", ".*MLP"]:
        assert check_key(key) == key


def test_a_match_says_which_rules_fit_in_vain():
    mapping = PatchMapping.of({".*Attention": A, "LlamaAttention": B, "^Llama": A})
    match = explain_match("LlamaAttention", mapping)
    assert (match.kind, match.rule.key) == ("exact", "LlamaAttention")
    assert [rule.key for rule in match.shadowed] == [".*Attention", "^Llama"]
    assert explain_match("BertModel", mapping).kind == "none"


def test_the_nearest_name_differs_in_case_alone():
    found = near_names(
        "LLaMADecoderLayer", ["LlamaDecoderLayers", "LlamaDecoderLayer", "BertLayer"]
    )
    assert found[0] == "LlamaDecoderLayer"
    assert near_names("Zzzzz", ["LlamaDecoderLayer"]) == ()
    assert near_names("^$", ["LlamaDecoderLayer"]) == ()
