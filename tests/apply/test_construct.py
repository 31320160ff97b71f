"""What stands in a replacement's way at construction, and odd classes that do not."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama
from transformers.models.mistral.modeling_mistral import MistralMLP

import patchlab
from patchlab.errors import ApplyError
from patchlab.model.classes import subclasses_of
from tests.toys import OtherMLP, PlainMLP, SubMLP, count, llama_config, tokens

LlamaMLP = modeling_llama.LlamaMLP
T = TypeVar("T")


def build(**changes):
    return transformers.LlamaModel(llama_config(**changes))


class AbstractMLP(PlainMLP, abc.ABC):
    @abc.abstractmethod
    def scale(self): ...

    @property
    @abc.abstractmethod
    def width(self): ...


class Meta(type):
    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        made.ready = True
        return made


class MetaMLP(PlainMLP, metaclass=Meta):
    pass


@pytest.mark.parametrize(
    ("replacement", "reason"), [(AbstractMLP, "Define scale, width"), (MetaMLP, "Meta.*__call__")]
)
def test_what_a_call_would_do_outside_of_init_is_refused_at_the_door(replacement, reason):
    scope = patchlab.patched({"LlamaMLP": replacement})
    with pytest.raises(ApplyError, match=reason), scope:
        pytest.fail("the block must not run")


class ConcreteMLP(AbstractMLP):
    def scale(self):
        return 1

    width = 2


class QuietMeta(type):
    """A metaclass that leaves the call alone."""


class QuietMLP(PlainMLP, metaclass=QuietMeta):
    pass


class GenericMLP(PlainMLP, Generic[T]):
    pass


@dataclasses.dataclass(eq=False)
class DataMLP(nn.Module):
    config: transformers.LlamaConfig

    def __post_init__(self):
        super().__init__()
        self.linear = nn.Linear(self.config.hidden_size, self.config.hidden_size)

    def forward(self, hidden_states):
        return self.linear(hidden_states)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


class ParametrizedMLP(LlamaMLP):
    """Changes its own class while it is being constructed."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(1))
        parametrize.register_parametrization(self, "scale", Doubled())

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.scale


def with_default(function):
    @functools.wraps(function)
    def wrapper(self, config, *args):
        return function(self, config, *args)

    return wrapper


class WrappedMLP(LlamaMLP):
    @with_default
    def __init__(self, config):
        super().__init__(config)


@pytest.mark.parametrize(
    "replacement",
    [
        ConcreteMLP,
        QuietMLP,
        GenericMLP,
        GenericMLP[int].__origin__,
        DataMLP,
        ParametrizedMLP,
        WrappedMLP,
        MistralMLP,
    ],
)
def test_odd_classes_take_the_place(replacement):
    config = llama_config(mlp_bias=False)
    with patchlab.patched({"LlamaMLP": replacement}) as report:
        model = transformers.LlamaModel(config)
    assert report.counts == {"LlamaMLP": 2}
    assert all(isinstance(layer.mlp, replacement) for layer in model.layers)
    assert torch.isfinite(model(tokens()).last_hidden_state).all()


class SubMistral(MistralMLP):
    pass


def test_what_was_given_its_replacement_is_not_replaced_once_more():
    """The replacement is a class of transformers that another rule matches."""
    rules = {"LlamaMLP": MistralMLP, "^MistralMLP$": SubMistral}
    with patchlab.patched(rules, on_finding="ignore") as report:
        model = build()
        alone = MistralMLP(llama_config())
    assert [type(layer.mlp) for layer in model.layers] == [MistralMLP] * 2
    assert type(alone) is SubMistral
    assert report.counts == {"LlamaMLP": 2, "^MistralMLP$": 1}


def test_two_classes_can_be_exchanged():
    config = llama_config()
    with patchlab.patched({"LlamaMLP": MistralMLP, "MistralMLP": LlamaMLP}):
        assert type(LlamaMLP(config)) is MistralMLP
        assert type(MistralMLP(config)) is LlamaMLP
    assert type(LlamaMLP(config)) is LlamaMLP


class OtherArguments(nn.Module):
    def __init__(self, size, bias):
        super().__init__()


class Fails(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = nn.Linear(config.hidden_size, "many")


@pytest.mark.parametrize("replacement", [OtherArguments, Fails])
def test_an_error_in_a_constructor_keeps_its_type_and_names_the_patch(replacement):
    with pytest.raises(TypeError) as raised, patchlab.patched({"^LlamaMLP$": replacement}):
        transformers.AutoModel.from_config(llama_config())
    (note,) = raised.value.__notes__
    assert f"{replacement.__name__} was being built in place of LlamaMLP" in note
    assert "key '^LlamaMLP$'" in note
    assert note.endswith(f"{replacement.__name__}(LlamaConfig).")


def test_of_replacements_inside_one_another_the_innermost_is_named():
    class Layer(modeling_llama.LlamaDecoderLayer):
        pass

    rules = {"LlamaDecoderLayer": Layer, "LlamaMLP": OtherArguments}
    with pytest.raises(TypeError) as raised, patchlab.patched(rules):
        build()
    assert [note.count("OtherArguments was") for note in raised.value.__notes__] == [1]


def test_an_error_without_a_patch_has_no_note():
    """Guards the two tests above."""
    with pytest.raises(TypeError) as raised, patchlab.patched({"LlamaMLP": SubMLP}):
        LlamaMLP()
    assert "SubMLP" in raised.value.__notes__[0]
    with pytest.raises(TypeError) as raised:
        LlamaMLP()
    assert not getattr(raised.value, "__notes__", ())


class WrapsEveryInit:
    """Puts a wrapper on every `__init__` for a block, as deepspeed's `zero.Init` does."""

    def __enter__(self):
        self.before = {cls: cls.__init__ for cls in subclasses_of(nn.Module)}
        self.hook = nn.Module.__init_subclass__
        for cls, init in self.before.items():
            cls.__init__ = self.wrapper(init)
        nn.Module.__init_subclass__ = classmethod(lambda cls, **kwargs: None)

    def wrapper(self, init):
        @functools.wraps(init)
        def wrapped(module, *args, **kwargs):
            init(module, *args, **kwargs)

        return wrapped

    def __exit__(self, *error):
        for cls, init in self.before.items():
            cls.__init__ = init
        nn.Module.__init_subclass__ = self.hook


@pytest.fixture
def tidied():
    """Take off what `WrapsEveryInit` itself leaves: inherited constructors made a class's own."""
    owners = {cls for cls in subclasses_of(nn.Module) if "__init__" in vars(cls)}
    yield
    for cls in subclasses_of(nn.Module):
        if cls not in owners and "__init__" in vars(cls):
            del cls.__init__
    if "__init_subclass__" in vars(nn.Module):
        del nn.Module.__init_subclass__


@pytest.mark.usefixtures("tidied")
def test_another_patcher_may_be_entered_and_left_around_and_inside_a_scope():
    with WrapsEveryInit(), patchlab.patched({"LlamaMLP": SubMLP}):
        around = build()
    with patchlab.patched({"LlamaMLP": SubMLP}), WrapsEveryInit():
        inside = build()
    assert [count(model, SubMLP) for model in (around, inside, build())] == [2, 2, 0]


@pytest.mark.usefixtures("tidied")
def test_another_patcher_that_overlaps_with_a_scope_leaves_what_repair_takes_off():
    scope, other = patchlab.patched({"LlamaMLP": SubMLP}), WrapsEveryInit()
    scope.__enter__()
    other.__enter__()
    overlapped = build()
    scope.__exit__(None, None, None)
    other.__exit__(None, None, None)
    assert [count(model, SubMLP) for model in (overlapped, build())] == [2, 0]
    assert {leak.kind for leak in patchlab.status().leaks} == {"init"}
    assert not patchlab.status().repair().leaks
    with patchlab.patched({"LlamaMLP": SubMLP}):
        assert count(build(), SubMLP) == 2


def test_a_pool_of_threads_that_was_there_before_builds_originals():
    with ThreadPoolExecutor(2) as pool:
        pool.submit(build).result()
        with patchlab.patched({"LlamaMLP": SubMLP}):
            plain = list(pool.map(lambda _: count(build(), SubMLP), range(4)))
    assert plain == [0] * 4


def test_threads_that_load_with_one_registered_patch_all_get_it(tmp_path, monkeypatch):
    """In transformers this leaves the class swapped for good, at times."""
    # Loads that overlap can leave transformers' own stand-ins for the process (`initialization`,
    # 5.24.0: no_tie_weights, meta_device_safe_creation_ops), patch or no patch. Put back at the
    # end.
    base = transformers.PreTrainedModel
    monkeypatch.setattr(base, "tie_weights", base.tie_weights)
    monkeypatch.setattr(torch, "linspace", torch.linspace)
    transformers.LlamaForCausalLM(llama_config()).save_pretrained(tmp_path)
    patchlab.register_patch_mapping({"LlamaMLP": SubMLP})

    def load(_):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return count(model, SubMLP), any(p.is_meta for p in model.parameters())

    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(load, range(8))) == {(2, False)}
    finally:
        patchlab.clear_patch_mapping()


def test_a_patched_model_compiles_whole_and_scopes_do_not_compile_it_again():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with patchlab.patched({"LlamaMLP": SubMLP}), torch.no_grad():
        model = build().eval()
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        inside = compiled(tokens(), use_cache=False).last_hidden_state
    with torch.no_grad():
        outside = compiled(tokens(), use_cache=False).last_hidden_state
        with patchlab.patched({"LlamaMLP": OtherMLP}):
            under = compiled(tokens(), use_cache=False).last_hidden_state
        plain = model(tokens(), use_cache=False).last_hidden_state
    assert len(graphs) == 1
    for each in (inside, outside, under):
        assert torch.allclose(each, plain, atol=1e-6)


@pytest.mark.reloads("transformers.models.nanochat.")
def test_what_is_first_imported_inside_keeps_its_documentation():
    """transformers writes it to the constructor as the class is defined."""
    name = "transformers.models.nanochat.modeling_nanochat"
    documented = importlib.import_module(name).NanoChatModel.__init__.__doc__
    assert "config" in documented
    with patchlab.patched({".*NanoChat.*": PlainMLP}, on_finding="ignore"):
        again = importlib.reload(sys.modules[name])
    assert again.NanoChatModel.__init__.__doc__ == documented
