"""What is refused at the door says what was found and what to do about it."""

from __future__ import annotations

import abc
import re

import pytest
import torch
import transformers
from torch import nn

import patchlab
from patchlab import errors
from patchlab.plan.findings import Finding
from tests.toys import SubMLP, bert_config


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x):
        """To be defined."""


def built_under(mapping):
    with patchlab.patched(mapping):
        pytest.fail("the block must not run")


REFUSED = {
    "a pattern that Python will read otherwise": (
        lambda: patchlab.register_patch_mapping({"Llama[[MLP]": SubMLP}),
        "MappingError: key 'Llama[[MLP]' will mean something else in a later Python: "
        "Possible nested set at position 6. Put a backslash before a bracket or an operator",
    ),
    "a pattern that is too much for Python": (
        lambda: patchlab.register_patch_mapping({"Llama{99999999999}": SubMLP}),
        "MappingError: key 'Llama{99999999999}' is too much for a regular expression: "
        "the repetition number is too large. Write several shorter keys.",
    ),
    "unregistering what is no key": (
        lambda: patchlab.unregister_patch_mapping([SubMLP]),
        "MappingTypeError: key <class 'tests.toys.SubMLP'> is of type type; give the keys as they "
        "were registered, as strings. Nothing was removed.",
    ),
    "unregistering nothing": (
        lambda: patchlab.unregister_patch_mapping(None),
        "MappingTypeError: keys must be a key or a list of keys, got NoneType None. "
        "Nothing was removed.",
    ),
    "a replacement of which there is no instance": (
        lambda: built_under({"BertSelfAttention": Abstract}),
        "ApplyError: Abstract, the replacement of BertSelfAttention (key 'BertSelfAttention'), is "
        "abstract, so no instance of it can be made. Define forward.",
    ),
    "a preview of a number": (
        lambda: patchlab.preview(3, {}),
        "TargetError: got int; give a model, a config of transformers, a checkpoint folder or a "
        "model id.",
    ),
    "a preview of a config class": (
        lambda: patchlab.preview(transformers.BertConfig, {}),
        "TargetError: got the class BertConfig; give a model, a config of transformers, a "
        "checkpoint folder or a model id. Of a class, give an instance.",
    ),
    "a preview of a config without a model": (
        lambda: patchlab.preview(transformers.PretrainedConfig(), {}),
        "Set its `architectures` to a class name such as 'LlamaForCausalLM', or give a model.",
    ),
    "a preview of a folder that is not there": (
        lambda: patchlab.preview("./no/such/folder", {}),
        "TargetError: there is no './no/such/folder'. Give a folder that holds a config.json, or "
        "the id of a model in the local cache.",
    ),
    "a preview with conversions that are none": (
        lambda: patchlab.preview(bert_config(), {}, conversions=[3]),
        "MappingTypeError: conversions must be a dict from model type or class name to a list of "
        "weight conversions, got list.",
    ),
    "a comparison of what is no model": (
        lambda: patchlab.compare_outputs(nn.ReLU(), "model", torch.ones(1)),
        "TargetError: compare_outputs takes two models, got str 'model'. Give the models "
        "themselves; to compare trees use patchlab.diff_trees.",
    ),
    "a comparison on what is no input": (
        lambda: patchlab.compare_outputs(nn.ReLU(), nn.ReLU(), 3),
        "TargetError: inputs are a dict of keyword arguments, a tuple of positional ones or a "
        "tensor; got int.",
    ),
    "a survey of a model type that there is not": (
        lambda: patchlab.survey(".*MLP", progress=False).filter(model_type="zzz"),
        "has no model type 'zzz'. Survey.model_types lists those matched.",
    ),
    "what to do about findings, in another word": (
        lambda: patchlab.patched({}, on_finding="raise"),
        "MappingError: on_finding is 'raise'; it is one of 'warn', 'error' and 'ignore'.",
    ),
    "a finding of a code that there is not": (
        lambda: Finding("PL999", "error", "", "", ""),
        "UnknownCodeError: 'PL999' is no finding code; the codes are in TITLES.",
    ),
    "a finding of a severity that there is not": (
        lambda: Finding("PL101", "fatal", "", "", ""),
        "ValueError: severity 'fatal' is none of error, warning, info.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_says_what_was_found_and_what_to_do(case):
    refused, told = REFUSED[case]

    with pytest.raises((errors.PatchlabError, ValueError)) as raised:
        refused()

    assert told in f"{raised.type.__name__}: {raised.value}"


def test_header_of_the_errors_names_each_class_with_the_builtin_it_refines():
    """Whoever chooses what to catch reads it there."""
    entries = [" ".join(e.split()) for e in re.split(r"\n *[*+-] ", errors.__doc__)]
    said = {entry.partition(" ")[0]: entry for entry in entries}
    classes = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type)}

    assert classes.keys() == said.keys() - {entries[0].partition(" ")[0]}
    for name, cls in classes.items():
        for base in {ValueError, TypeError, RuntimeError}.intersection(cls.__bases__):
            assert f"(a {base.__name__}" in said[name]
