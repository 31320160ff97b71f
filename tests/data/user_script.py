"""A user's script as a type checker sees it: what patchlab returns is typed, errors included."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertSelfAttention

import patchlab


class Quiet(BertSelfAttention):
    """A replacement that changes nothing."""


mapping: dict[str, type[nn.Module]] = {"BertSelfAttention": Quiet}
Model: type[nn.Module] = BertModel
config = BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99
)

shown: patchlab.Preview = patchlab.preview(config, mapping)
codes: list[str] = [finding.code for finding in shown.check().findings]
counts: dict[str, int] = shown.counts

with patchlab.patched(mapping, on_finding="error") as report:
    model = Model(config)
settled: patchlab.PatchReport = report
replaced: tuple[str, ...] = tuple(f for r in report.replacements for f in r.fqns)


@patchlab.patched(mapping)
def build(layers: int) -> int:
    """Build under the patch; the decorator keeps the signature."""
    return layers


layers: int = build(2)

tree: patchlab.ModuleTree = patchlab.module_tree(model)
text: str = tree.to_text()
plain = Model(config)
difference: patchlab.TreeDiff = patchlab.diff_trees(plain, model)

swapped: patchlab.Swap = patchlab.swap(plain, mapping)
swapped.undo()

inputs: dict[str, torch.Tensor] = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
compared: patchlab.OutputComparison = patchlab.compare_outputs(plain, plain, inputs)
ok: bool = compared.ok and shown.ok

patchlab.register_patch_mapping(mapping)
state: patchlab.Status = patchlab.status()
keys: list[str] = [entry.key for entry in state.entries]
patchlab.unregister_patch_mapping(keys)
print(len(counts), len(replaced), layers, len(text), ok, keys, codes)
