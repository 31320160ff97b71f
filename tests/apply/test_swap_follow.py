"""A model that is moved during a swap is of one dtype after it, whatever the swap left out."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import patchlab
from tests.fused_families import attentions, conversions, fused
from tests.toys import BuiltMLP, SubMLP, Wrapping, llama_config, tokens


class ClonedNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)


class BuiltNorm(nn.BatchNorm1d):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)


class ClonedLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class WithoutBias(nn.Module):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x):
        return x @ self.weight.T


class Handed(WithoutBias):
    """Made by its factory, which takes the weight alone."""

    @classmethod
    def from_original(cls, original):
        new = cls(original.in_features, original.out_features)
        new.weight = original.weight
        return new


class Nothing(nn.Identity):
    """Has no tensor at all."""

    @classmethod
    def from_original(cls, original):
        return cls()


def toy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


MAPPINGS = [
    {"BatchNorm1d": ClonedNorm},
    {"BatchNorm1d": BuiltNorm},
    {"Linear": WithoutBias},
    {"Linear": Handed},
    {"Linear": Wrapping},
    {"Linear": Nothing},
    {"Linear": Nothing, "BatchNorm1d": Wrapping},
]
ignored = {"on_finding": "ignore"}


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("moves", [("double",), ("half",), ("half", "float"), ("double", "half")])
@pytest.mark.parametrize(
    "mapping", MAPPINGS, ids=lambda m: "-".join(c.__name__ for c in m.values())
)
def test_undone_model_is_what_the_plain_one_would_be(mapping, moves):
    """Every tensor, of what was shared, dropped and wrapped alike."""
    model = toy()
    plain, parameters = copy.deepcopy(model), dict(model.named_parameters())

    swapped = patchlab.swap(model, mapping, **ignored)
    for move in moves:
        getattr(model, move)()
        getattr(plain, move)()
    swapped.undo()

    assert dtypes(model) == dtypes(plain)
    for name, tensor in plain.state_dict().items():
        # What was dropped did not go through half precision and back.
        assert torch.allclose(model.state_dict()[name], tensor, atol=1e-3), name
    assert all(p is parameters[name] for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "mapping", MAPPINGS, ids=lambda m: "-".join(c.__name__ for c in m.values())
)
def test_model_that_was_not_moved_keeps_its_very_tensors(mapping):
    model = toy()
    before = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    patchlab.swap(model, mapping, **ignored).undo()

    assert {id(tensor) for tensor in [*model.parameters(), *model.buffers()]} == before


@pytest.mark.parametrize("replacement", [SubMLP, BuiltMLP])
def test_model_of_transformers_follows_as_a_whole(llama, replacement):
    with patchlab.swap(llama, {"LlamaMLP": replacement, "LlamaRotaryEmbedding": Wrapping}):
        llama.double()
        expected = llama(tokens()).logits
    tensors = [*llama.parameters(), *llama.buffers()]

    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float64}
    assert torch.equal(llama(tokens()).logits, expected)


def test_weights_that_a_conversion_replaced_follow(llama):
    """No module in the model holds the three that the fused one was made of."""
    original, sizes = attentions(llama)["LlamaAttention"]
    with patchlab.swap(
        llama, {"LlamaAttention": fused(original)}, conversions=conversions(llama, sizes)
    ):
        llama.double()
    tensors = [*llama.parameters(), *llama.buffers()]

    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float64}
    llama(tokens())


def test_statistics_that_were_counted_after_the_move_are_kept():
    model = toy()
    with patchlab.swap(model, {"BatchNorm1d": ClonedNorm}):
        model.double()
        model(torch.randn(8, 4, dtype=torch.float64))
        mean = model[1].running_mean.clone()

    assert int(model[1].num_batches_tracked) == 1
    assert torch.equal(model[1].running_mean, mean)


def test_weights_that_were_loaded_by_assignment_are_kept():
    """As they are if they are loaded by copying: where both hold a tensor, they go on to."""
    model, other = toy(), toy()
    nn.init.ones_(other[1].weight)
    with patchlab.swap(model, {"BatchNorm1d": ClonedNorm}):
        model.load_state_dict(other.state_dict(), assign=True)

    assert all(torch.equal(model.state_dict()[k], v) for k, v in other.state_dict().items())


def test_gradients_follow_with_their_parameters():
    model = toy()
    model(torch.randn(8, 4)).sum().backward()
    with patchlab.swap(model, {"Linear": Handed}, **ignored):
        model.double()

    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


def test_one_tensor_that_was_moved_alone_moves_nothing_else():
    """Guards the tests above: it is the module that must have been moved, not a part of it."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with patchlab.swap(model, {"Linear": Nothing}, **ignored):
        model[0][1].weight.data = model[0][1].weight.data.half()

    assert model[0][0].weight.dtype is torch.float32


def test_move_below_another_swap_reaches_the_first_modules():
    model = toy()
    first = patchlab.swap(model, {"BatchNorm1d": BuiltNorm})
    second = patchlab.swap(model, {"BuiltNorm": Nothing}, **ignored)
    model.double()
    second.undo()
    first.undo()

    assert set(dtypes(model).values()) == {torch.float64, torch.int64}
    model(torch.randn(8, 4, dtype=torch.float64))


class Fresh(nn.Embedding):
    @classmethod
    def from_original(cls, original):
        return nn.Embedding(original.num_embeddings, original.embedding_dim)


@pytest.mark.parametrize("tie", [True, False])
def test_weights_that_were_tied_are_so_again_after_the_undo(tie):
    """Whether `tie_weights` has tied the head to the new embedding meanwhile, or not."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=True)).eval()
    weight, expected = model.lm_head.weight, model(tokens()).logits
    swapped = patchlab.swap(model, {"Embedding": Fresh}, **ignored)
    if tie:
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    swapped.undo()

    assert model.lm_head.weight is model.model.embed_tokens.weight is weight
    assert torch.equal(model(tokens()).logits, expected)


def test_head_that_was_given_weights_of_its_own_meanwhile_keeps_them():
    """Guards the test above: only what the swap's own module brought is taken back."""
    model = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=True))
    own = nn.Parameter(torch.ones_like(model.lm_head.weight))
    with patchlab.swap(model, {"Embedding": Fresh}, **ignored):
        model.lm_head.weight = own

    assert model.lm_head.weight is own


def test_weight_that_was_quantized_meanwhile_is_so_in_the_new_module_alone():
    model = toy()
    weight, expected = model[0].weight, model.eval()(torch.ones(2, 4))
    with patchlab.swap(model, {"Linear": ClonedLinear}):
        model[0].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)

    assert model[0].weight is weight
    assert torch.equal(model(torch.ones(2, 4)), expected)
