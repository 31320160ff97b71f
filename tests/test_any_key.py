"""Any text as a key, at every door: a rule, or a refusal in patchlab's own words; never a half."""

from __future__ import annotations

import contextlib
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP

import patchlab
from patchlab.errors import PatchlabError, PatchlabWarning
from tests.toys import SubMLP, llama_config

CONFIG = llama_config()
MODEL = LlamaModel(CONFIG)

# Pieces that make expressions, right and wrong ones, rather than texts of which few are any.
PIECES = [
    "Llama", "MLP", "Attention", "Bert", ".*", ".", "^", "$", "(", ")", "(?:", "|", "[", "]", "[[",
    "[^", "&&", "--", "{", "}", "{2}", "{,99999}", "*", "+", "?", "\\", "\\b", "\\d", "\\1", "\\Z",
    "(?P<a>", "(?P=a)", "(?i)", "(?x)", "(?#", "(?=", "(?!", "(?<=", "(?(1)", "\\N{DIGIT ONE}", "=",
    "'", '"', " ", "\n", "\t", "\x00", "\u2028", "\ud800", "é", "е", "<b>", "__init__", "a.b", "%s",
]  # fmt: skip
keys = st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(max_size=20)


def refused_or(use):
    """Use a key; tell whether it was refused. Anything but patchlab's own errors is a failure."""
    with warnings.catch_warnings():
        # Findings and dead keys are warnings; whatever else warns is none of a user's business.
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", PatchlabWarning)
        try:
            use()
        except PatchlabError as error:
            refusal = str(error)
        else:
            return False
    assert len(refusal) > 20
    return True


@settings(max_examples=250, deadline=None)
@given(keys)
@example("[[a]MLP")
@example("(?x) Llama MLP #")
@example("\ud800")
def test_every_door_takes_or_refuses_a_key_and_they_agree(key):
    mapping = {key: SubMLP}

    def scope():
        # Nothing is built: under ".*" every class would be replaced, and not all of them can be.
        with patchlab.patched(mapping, on_finding="ignore"):
            pass

    refused = {"patched": refused_or(scope)}
    refused["register"] = refused_or(lambda: patchlab.register_patch_mapping(mapping))
    registered = dict(patchlab.get_patch_mapping())
    patchlab.clear_patch_mapping()

    assert registered == ({} if refused["register"] else mapping)
    assert len(set(refused.values())) == 1, refused


@settings(max_examples=40, deadline=None)
@given(keys)
def test_previews_and_swaps_refuse_what_scopes_refuse_and_change_nothing(key):
    mapping = {key: SubMLP}
    before = [id(module) for module in MODEL.modules()]

    def swapped():
        patchlab.swap(MODEL, mapping).undo()

    refused = refused_or(lambda: patchlab.patched(mapping, on_finding="ignore").__enter__)
    shown = refused_or(lambda: patchlab.preview(CONFIG, mapping).to_html())
    refused_or(swapped)

    assert [id(module) for module in MODEL.modules()] == before
    assert type(MODEL.layers[0].mlp) is LlamaMLP
    assert shown or not refused


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(keys, st.sampled_from([SubMLP, int, None, "SubMLP", SubMLP.__init__])))
def test_one_bad_rule_among_good_ones_leaves_nothing(mapping):
    if refused_or(lambda: patchlab.register_patch_mapping(mapping)):
        assert not patchlab.get_patch_mapping()
    patchlab.clear_patch_mapping()


def test_a_foreign_error_is_not_taken_for_a_refusal():
    """Guards the tests above."""

    def broken():
        raise KeyError("from inside")

    with pytest.raises(KeyError):
        refused_or(broken)
    with contextlib.suppress(PatchlabError):
        patchlab.register_patch_mapping({"(": SubMLP})
    assert not patchlab.get_patch_mapping()
