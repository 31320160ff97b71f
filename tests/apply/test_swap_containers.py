"""A swap whose key fits a container and what is inside: told as such, and refused if asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertModel
from transformers.models.bert.modeling_bert import BertAttention, BertSelfAttention

import patchlab
from patchlab.errors import FindingsError, OverMatchWarning
from tests.toys import Wrapping, bert_config

KEY = ".*Attention"


class Inner(BertSelfAttention):
    """Meant for what is inside."""


class Whole(BertAttention):
    """Meant for the container: builds, inside, what that builds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Using(Wrapping):
    """Uses the weights, and not the modules that have them."""

    def __init__(self, original):
        nn.Module.__init__(self)
        inner = getattr(original, "self", original)
        self.query, self.key, self.value = inner.query, inner.key, inner.value


class Dropping(Wrapping):
    """Takes nothing over."""

    def __init__(self, original):
        nn.Module.__init__(self)
        self.fresh = nn.Linear(4, 4)


@pytest.fixture
def bert():
    torch.manual_seed(0)
    return BertModel(bert_config()).eval()


def codes(findings):
    return [finding.code for finding in findings if finding.severity == "error"]


@pytest.mark.parametrize("replacement", [Inner, Dropping])
def test_container_is_named_with_the_key_for_what_is_inside(bert, replacement):
    with pytest.warns(OverMatchWarning, match="BertSelfAttention inside of it") as told:
        swapped = patchlab.swap(bert, {KEY: replacement})

    assert len(told) == 1
    assert codes(swapped.findings) == ["PL101"]
    (finding,) = (f for f in swapped.findings if f.code == "PL101")
    assert finding.suggestion in str(told[0].message)
    assert "use the old names or give a weight conversion" not in swapped.to_text()
    swapped.undo()
    (replaced,) = patchlab.swap(bert, {finding.suggestion: Inner}, on_finding="error").replacements
    assert replaced.original is BertSelfAttention
    assert len(replaced.fqns) == 2


@pytest.mark.parametrize("replacement", [Inner, Dropping])
def test_container_is_refused_where_findings_are_errors_and_nothing_is_changed(bert, replacement):
    before = {name: (module, type(module)) for name, module in bert.named_modules()}
    tensors = {name: id(tensor) for name, tensor in bert.named_parameters()}

    with pytest.raises(FindingsError, match=r"(?s)nothing was swapped:.*PL101"):
        patchlab.swap(bert, {KEY: replacement}, on_finding="error")

    assert {name: (module, type(module)) for name, module in bert.named_modules()} == before
    assert {name: id(tensor) for name, tensor in bert.named_parameters()} == tensors


def test_replacement_of_the_container_is_told_the_key_for_that(bert):
    """What is inside would be replaced by it as well, which is as wrong."""
    with pytest.raises(FindingsError, match=r"PL101.* use '\^BertAttention\$'"):
        patchlab.swap(bert, {KEY: Whole}, on_finding="error")
    assert not patchlab.swap(bert, {"^BertAttention$": Whole}, on_finding="error").findings


def test_inner_modules_of_an_earlier_swap_that_are_kept_are_no_false_alarm(bert):
    class InnerAttention(BertSelfAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    patchlab.swap(bert, {"BertSelfAttention": InnerAttention})
    kept = bert.encoder.layer[0].attention.self
    swapped = patchlab.swap(bert, {"^BertAttention|^InnerAttention": Whole}, on_finding="error")
    assert type(bert.encoder.layer[0].attention) is Whole
    assert bert.encoder.layer[0].attention.self is kept
    assert not codes(swapped.findings)


@pytest.mark.parametrize("replacement", [Wrapping, Using])
def test_replacement_that_has_what_is_inside_is_no_false_alarm(bert, replacement):
    """Warnings are errors here."""
    swapped = patchlab.swap(bert, {KEY: replacement}, on_finding="error")
    assert not codes(swapped.findings)
    assert sum(swapped.counts.values()) == 2


@pytest.mark.parametrize("key", ["BertAttention", "BertAttention$", "^BertSelfAttention$"])
def test_key_that_fits_one_class_alone_is_no_container(bert, key):
    """A pattern, too; the weights that have no place are told of as before."""
    swapped = patchlab.swap(bert, {key: Inner}, on_finding="ignore")
    assert sum(swapped.counts.values()) == 2
    assert codes(swapped.findings) == ([] if "Self" in key else ["PL301"])


def test_class_that_holds_its_own_kind_is_no_container():
    class Block(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.depth = depth
            self.inner = Block(depth - 1) if depth else nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x)

    class MyBlock(Block):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Block(2))
    assert not patchlab.swap(model, {"^Block$": MyBlock}, on_finding="error").findings


def test_users_own_container_is_told_of_as_well():
    """Of classes that transformers does not know there is no key to suggest but their names."""

    class PairAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = LeafAttention(), LeafAttention()

        def forward(self, x):
            return self.left(x) + self.right(x)

    class LeafAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.weight * x

    class Mine(LeafAttention):
        def forward(self, x):
            return -super().forward(x)

    model = nn.Sequential(PairAttention(), LeafAttention())
    before = model(torch.ones(2))
    with pytest.raises(FindingsError, match="LeafAttention inside of it"):
        patchlab.swap(model, {"Attention$": Mine}, on_finding="error")
    assert torch.equal(model(torch.ones(2)), before)
    swapped = patchlab.swap(model, {"Attention$": Mine}, on_finding="ignore")
    key = next(f.suggestion for f in swapped.findings if f.code == "PL101")
    swapped.undo()
    assert patchlab.swap(model, {key: Mine}, on_finding="error").counts == {key: 3}
