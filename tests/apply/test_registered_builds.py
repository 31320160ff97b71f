"""What is registered is told of as a scope would be: a container that a build has replaced."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers.models.bert.modeling_bert import BertSelfAttention

import patchlab
from patchlab.apply import telling
from patchlab.errors import CatalogError, OverMatchWarning
from patchlab.model.skeleton import skeleton
from tests.toys import SubAttention, SubMLP, bert_config, llama_config


class InnerAttention(BertSelfAttention):
    def __init__(self, config, *args, **kwargs):
        super().__init__(config)


@contextlib.contextmanager
def registered(mapping):
    patchlab.register_patch_mapping(mapping)
    try:
        yield
    finally:
        patchlab.clear_patch_mapping()


def holding():
    """Return a model that builds two BERTs with `from_config`, inside its own constructor."""

    class Two(transformers.BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.first = transformers.AutoModel.from_config(config)
            self.second = transformers.AutoModel.from_config(config)
            self.post_init()

    return Two


@pytest.fixture
def folder(tmp_path):
    transformers.BertModel(bert_config()).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("how", ["from_pretrained", "from_config", "nested"])
def test_a_build_warns_once_of_the_container_that_it_replaced(folder, how):
    builds = {
        "from_pretrained": lambda: transformers.AutoModel.from_pretrained(folder),
        "from_config": lambda: transformers.AutoModel.from_config(bert_config()),
        "nested": lambda: holding()._from_config(bert_config()),
    }
    narrower = r"PL101 .*BertAttention is a container.*\^Bert\(\?:Cross\|Self\)Attention\$"

    with (
        registered({".*Attention": InnerAttention}),
        pytest.warns(OverMatchWarning, match=narrower) as warned,
    ):
        builds[how]()

    assert len(warned) == 1
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("mapping", "config"),
    [
        ({"^BertSelfAttention$": InnerAttention}, bert_config()),
        ({"BertAttention": InnerAttention}, bert_config()),  # meant: it is named
        ({".*Attention": SubAttention}, llama_config()),  # matched elsewhere, built nowhere
        ({}, bert_config()),
    ],
)
def test_a_build_that_replaces_no_container_by_a_pattern_says_nothing(mapping, config):
    with registered(mapping), warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers.AutoModel.from_config(config)


@pytest.mark.parametrize(
    "scope",
    [
        lambda: patchlab.apply_patches(),
        lambda: patchlab.patched(on_finding="ignore"),
        lambda: patchlab.patched({".*Attention": InnerAttention}, on_finding="ignore"),
        lambda: patchlab.patched({"^Bert.*Attention$": InnerAttention}, on_finding="ignore"),
    ],
)
def test_what_an_enclosing_scope_tells_is_not_told_by_the_build(scope):
    with registered({".*Attention": InnerAttention}), scope() as report:
        transformers.AutoModel.from_config(bert_config())

    assert "PL101" in [finding.code for finding in report.findings]


def test_a_scope_of_other_rules_does_not_keep_the_build_from_telling():
    with (
        registered({".*Attention": InnerAttention}),
        patchlab.patched({"BertPooler": Pooler}),
        pytest.warns(OverMatchWarning, match="BertAttention") as warned,
    ):
        transformers.AutoModel.from_config(bert_config())
    assert len(warned) == 1


class Pooler(nn.Module):
    def __init__(self, config):
        super().__init__()


def test_looking_at_a_model_says_nothing_by_warning():
    """A preview has its findings; a skeleton is patchlab's own, whatever builds its parts."""
    whole = transformers.LlavaConfig(text_config=bert_config())
    with registered({"^Bert.*Attention": InnerAttention}):
        assert "PL101" in [finding.code for finding in patchlab.preview(bert_config()).findings]
        skeleton(whole)
        # Guards the above: in the caller's own hands the same parts are told of.
        with pytest.warns(OverMatchWarning, match="BertAttention"), torch.device("meta"):
            transformers.LlavaModel(whole)


def test_a_build_that_fails_raises_its_own_error_with_the_container_in_a_note():
    """`SubAttention` takes none of what `BertSelfAttention` is given."""
    with registered({".*Attention": SubAttention}), pytest.raises(TypeError) as caught:
        transformers.AutoModel.from_config(bert_config())

    notes = [note for note in caught.value.__notes__ if "PL101" in note]
    assert len(notes) == 1
    assert "key '.*Attention' is registered. PL101" in notes[0]
    assert "BertAttention is a container" in notes[0]
    assert "LlamaAttention.__init__() got an unexpected" in str(caught.value)


def test_a_build_that_fails_for_another_reason_has_no_such_note():
    class Failing(SubMLP):
        def __init__(self, config):
            raise ValueError("refused")

    with registered({"LlamaMLP": Failing}), pytest.raises(ValueError, match="refused") as caught:
        transformers.AutoModel.from_config(llama_config())

    assert not [note for note in caught.value.__notes__ if "PL101" in note]


def test_a_warning_that_is_made_an_error_leaves_nothing_open():
    with registered({".*Attention": InnerAttention}), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OverMatchWarning):
            transformers.AutoModel.from_config(bert_config())
        assert not patchlab.apply.construct.open_frames()


def test_a_transformers_that_cannot_be_read_fails_no_build(monkeypatch):
    def unreadable(*args):
        raise CatalogError("no source")

    monkeypatch.setattr(telling, "loaded_overmatches", unreadable)
    with registered({".*Attention": InnerAttention}):
        transformers.AutoModel.from_config(bert_config())
