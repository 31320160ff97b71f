"""What a real load reports, and what a check of the same checkpoint found."""

from __future__ import annotations

import transformers

import patchlab
from notebooks.replacements.fused_qkv import FusedLlamaAttention

FUSED_LLAMA = {"LlamaAttention": FusedLlamaAttention}


def codes(report, severity="error"):
    return [finding.code for finding in report.findings if finding.severity == severity]


def loading_info(folder, mapping, conversions=None):
    """What a real load reports."""
    with patchlab.patched(mapping, conversions=conversions, on_finding="ignore"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    return model, info
