"""What a type checker has to find in a user's script; each marked line is wrong."""

from transformers import BertConfig

import patchlab

shown = patchlab.preview(BertConfig(), {})
found: int = shown.findings  # wrong
name: str = patchlab.status().entries[0].replacement  # wrong
patchlab.patched({}, on_finding="warm")  # wrong
patchlab.swap()  # wrong
text: int = patchlab.module_tree(BertConfig()).to_text()  # wrong, twice: it is no module
with patchlab.record_routing("model") as trace:  # wrong
    layers: int = trace  # wrong
