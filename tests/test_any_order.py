"""Scopes, registry, swaps and models in any order: which class is built is what the rules say."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import nn
from transformers import AutoModel, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import patchlab
from patchlab.errors import PatchlabError
from tests.toys import OtherMLP, SubAttention, SubMLP, llama_config

CONFIG = llama_config(num_hidden_layers=1)
ORIGINALS = {"mlp": LlamaMLP, "self_attn": LlamaAttention}
# Key → the names of the originals that it matches.
KEYS = {
    "LlamaMLP": ("mlp",),
    "^LlamaMLP$": ("mlp",),
    "LlamaAttention": ("self_attn",),
    "^Llama(MLP|Attention)$": ("mlp", "self_attn"),
    "Nothing": (),
}
CLASSES = {"mlp": (SubMLP, OtherMLP), "self_attn": (SubAttention,)}


class Free(nn.Module):
    """Takes any place and passes its input on."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def fitting(key):
    parts = KEYS[key]
    return CLASSES[parts[0]] if len(parts) == 1 else (Free,)


mappings = st.dictionaries(st.sampled_from(sorted(KEYS)), st.integers(0, 1), max_size=3).map(
    lambda drawn: {key: fitting(key)[number % len(fitting(key))] for key, number in drawn.items()}
)


def decided(mapping, part):
    """The class a mapping has for a part: an exact name first, then the first pattern."""
    fits = [key for key in mapping if part in KEYS[key]]
    exact = [key for key in fits if key.isidentifier()]
    return mapping[(exact or fits)[0]] if fits else None


class AnyOrder(RuleBasedStateMachine):
    scopes = Bundle("scopes")

    @initialize()
    def start(self):
        self.open, self.registered = [], {}
        self.model = LlamaModel(CONFIG)
        self.before = list(self.model.modules())

    def expected(self, part, mappings):
        found = (decided(mapping, part) for mapping in reversed(mappings))
        return next((cls for cls in found if cls is not None), ORIGINALS[part])

    def check(self, model, mappings):
        for part in ORIGINALS:
            assert type(getattr(model.layers[0], part)) is self.expected(part, mappings), part

    @rule(target=scopes, mapping=mappings)
    def enter(self, mapping):
        scope = patchlab.patched(mapping, on_finding="ignore")
        scope.__enter__()
        self.open.append((scope, mapping))
        return scope

    @rule(scope=consumes(scopes))
    def leave(self, scope):
        scope.__exit__(None, None, None)
        self.open = [one for one in self.open if one[0] is not scope]

    # Not inside of scopes, which put the registry back as it was when they were entered.
    @precondition(lambda self: not self.open)
    @rule(mapping=mappings, overwrite=st.booleans())
    def register(self, mapping, overwrite):
        taken = set(mapping) & set(self.registered)
        try:
            patchlab.register_patch_mapping(mapping, overwrite=overwrite)
        except PatchlabError:
            assert taken
            assert not overwrite
        else:
            self.registered |= mapping

    @precondition(lambda self: not self.open)
    @rule(key=st.sampled_from(sorted(KEYS)))
    def unregister(self, key):
        try:
            patchlab.unregister_patch_mapping([key])
        except PatchlabError:
            assert key not in self.registered
        else:
            del self.registered[key]

    @precondition(lambda self: not self.open)
    @rule()
    def clear(self):
        patchlab.clear_patch_mapping()
        self.registered = {}

    @rule()
    def construct(self):
        with torch.device("meta"):
            model = LlamaModel(CONFIG)
        self.check(model, [mapping for _, mapping in self.open])

    @rule()
    def construct_from_config(self):
        mappings = [mapping for _, mapping in self.open]
        with torch.device("meta"):
            model = AutoModel.from_config(CONFIG)
        self.check(model, [self.registered, *mappings])

    @rule(key=st.sampled_from(["LlamaMLP", "LlamaAttention"]), number=st.integers(0, 1))
    def swap_and_undo(self, key, number):
        classes = fitting(key)
        swap = patchlab.swap(self.model, {key: classes[number % len(classes)]})
        part = KEYS[key][0]
        assert type(getattr(self.model.layers[0], part)) is classes[number % len(classes)]
        swap.undo()

    @invariant()
    def nothing_is_half(self):
        if not hasattr(self, "open"):
            return
        assert dict(patchlab.get_patch_mapping()) == self.registered
        assert list(self.model.modules()) == self.before

    def teardown(self):
        for scope, _ in getattr(self, "open", []):
            scope.__exit__(None, None, None)
        patchlab.clear_patch_mapping()
        state = patchlab.status()
        assert not state.open_scopes
        assert not state.leaks


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
