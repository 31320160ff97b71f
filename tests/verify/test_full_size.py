"""Models that do not fit are looked at without one tensor of theirs being made."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import patchlab
from benchmarks.bench_full_size import conversions_of, patch_of
from benchmarks.full_size import CONFIGS, write_headers
from patchlab.notebook.tree_views import widget_for

# 64 MB of float32: what a check of conversions may take to look at values.
LARGEST = 1 << 24


class Materialized(TorchDispatchMode):
    """Notes the largest tensor, in elements, that is made and is not on the meta device."""

    def __init__(self):
        super().__init__()
        self.largest, self.by = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            real = isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"
            if real and tensor.numel() > self.largest:
                self.largest, self.by = tensor.numel(), str(func)
        return made


def few_layers(case):
    """The config at its full width, with the kinds of layers that it has."""
    config = CONFIGS[case]()
    text = config.get_text_config()
    text.num_hidden_layers = 4
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:4]
    return config


@pytest.mark.parametrize("case", CONFIGS)
def test_preview_and_widget_of_a_full_size_model_make_no_tensor(case):
    with Materialized() as seen:
        shown = patchlab.preview(CONFIGS[case](), patch_of(case))
        text = shown.to_text()
        widget = widget_for(shown)

    assert sum(shown.counts.values()) >= 61
    assert shown.ok
    assert "× " in text
    assert widget is not None
    assert seen.largest <= LARGEST, seen.by


@pytest.mark.parametrize("case", CONFIGS)
def test_checkpoint_of_a_full_size_model_is_judged_by_its_headers(case, tmp_path):
    config = few_layers(case)
    total = write_headers(config, tmp_path)

    with Materialized() as seen:
        report = patchlab.check_checkpoint(
            tmp_path, None, patch_of(case), conversions=conversions_of(case, config)
        )

    assert total > 10e9
    assert report.nbytes == total
    assert report.ok, report.to_text()
    assert all(item.converted or item.loaded for item in report.classes)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert seen.largest <= LARGEST, seen.by


def test_a_tensor_that_is_made_is_seen():
    """Guards the tests above."""
    with Materialized() as seen:
        torch.empty(LARGEST, 2, device="meta").to(torch.bfloat16)
        assert seen.largest == 0
        torch.ones(1000, 20)

    assert seen.largest == 20_000
