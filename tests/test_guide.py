"""Every recipe of the transformers guide to monkey patching is in notebooks/guide.ipynb.

The notebook runs whole in test_notebooks. Here its headings are compared with those of the guide,
as it was for transformers 5.24.0, and the code under each with the calls and names that the recipes
there cannot be without.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "guide.ipynb"

RECIPES = {
    "Quick start": [
        ["register_patch_mapping(mapping={", "LlamaAttention", "from_pretrained", "self_attn"]
    ],
    "How it works": [],
    "Global registration": [
        ["register_patch_mapping(mapping={", '"Qwen2MoeExperts": SequentialExperts'],
        ['"Qwen2MoeAttention": CustomAttention', "overwrite=True"],
    ],
    "Pattern matching": [
        ['".*Attention"', "register_patch_mapping(mapping={"],
        ['".*MoeExperts$"', r"^Llama\d+Attention$"],
    ],
    "Unregister, clear, look": [
        [
            "unregister_patch_mapping(keys=[",
            '"Qwen2MoeAttention", "Qwen2MoeExperts"',
            '".*Attention"',
        ],
        ["clear_patch_mapping()"],
        ["current_patches = theirs.get_patch_mapping()"],
    ],
    "Manual model construction": [
        ["apply_patches():", "LlamaModel(llama_config)", "LlamaModel.from_pretrained"]
    ],
    "Important notes": [],
    "Troubleshooting": [],
    "My patch isn't being applied": [
        ['"LlamaAttention": CustomAttention', '".*MLP": CustomAttention'],
        ["print(theirs.get_patch_mapping())"],
        ["dir(modeling_llama)"],
    ],
    "How do I know if my patch is working?": [
        ["type(model.model.layers[0].self_attn)", "named_modules()", '"attention" in name.lower()']
    ],
    "Weight shape mismatch errors": [
        ["WeightConverter(", '["q_proj", "k_proj", "v_proj"]', '["qkv_proj"]', "Concatenate(dim=0)"]
    ],
    "Cleaning up patches": [["try:", "finally:", "clear_patch_mapping()"]],
    "Complete example": [
        ["class ModuleListExperts(nn.ModuleList)", "one_hot(", "permute(2, 1, 0)", "index_add_("],
        ["class FusedQKVAttention(nn.Module)", "chunk(3", "apply_rotary_pos_emb("],
        ['"Qwen2MoeExperts": ModuleListExperts, "Qwen2MoeAttention": FusedQKVAttention'],
    ],
    "Recording and replaying MoE expert routing": [
        [
            "class ReplayableQwen3MoeTopKRouter(Qwen3MoeTopKRouter)",
            "_forced_indices",
            "torch.topk(",
        ],
        ["_CAN_RECORD_REGISTRY[str(inner.__class__)]", "index=2", "output_selected_experts=True"],
        ["with replay_moe_routing(inner, list(selected_experts)):"],
    ],
    "vLLM interoperability": [
        ["torch.from_numpy(routed_experts[:, layer, :].copy()).long()", "replay_moe_routing("]
    ],
    "API reference": [
        ["register_patch_mapping(mapping="],
        ["unregister_patch_mapping(["],
        ["clear_patch_mapping()"],
        ["get_patch_mapping()"],
        ["with apply_patches():", "Qwen2MoeModel("],
    ],
}
# What patchlab does about it, in each section that has a recipe.
ANSWERS = r"patchlab\.\w+\(|RoutingTrace|from patchlab import"


def sections_of(notebook):
    """Return heading → the code under it, without comments."""
    found, heading = {}, ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found[heading] = found.get(heading, "") + re.sub(r"  #.*", "", cell.source) + "\n"
            continue
        for title in re.findall(r"^##+ (.+)$", cell.source, re.MULTILINE):
            heading = title
            found.setdefault(heading, "")
    return found


def lacking(code, recipes):
    """Return what of the recipes is not in the code."""
    plain = re.sub(r"\s+", " ", code)
    return [part for recipe in recipes for part in recipe if part not in plain]


SECTIONS = sections_of(nbformat.read(NOTEBOOK, as_version=4))


def test_notebook_has_the_headings_of_the_guide_in_their_order():
    assert [title for title in SECTIONS if title] == list(RECIPES)


@pytest.mark.parametrize("title", RECIPES)
def test_every_recipe_of_a_section_has_its_counterpart(title):
    assert lacking(SECTIONS[title], RECIPES[title]) == []


@pytest.mark.parametrize("title", [title for title, recipes in RECIPES.items() if recipes])
def test_every_section_with_a_recipe_says_what_patchlab_does(title):
    assert re.search(ANSWERS, SECTIONS[title])


@pytest.mark.parametrize("title", [title for title, recipes in RECIPES.items() if recipes])
def test_a_recipe_that_is_not_there_is_told(title):
    """Guards the tests above."""
    first = RECIPES[title][0][0]

    assert lacking(SECTIONS[title].replace(first, "other"), RECIPES[title])
    assert lacking("", RECIPES[title])
