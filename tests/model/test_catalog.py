"""The catalog: does it agree with what importing and building show, and with its cached file."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from patchlab.model.catalog import Catalog, load_catalog, parse_signature
from patchlab.model.containment import Containment, as_mask, numbers_in

FAMILIES = ("bert", "t5", "llama", "falcon", "mixtral", "llava", "sam", "wav2vec2", "detr")


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(progress=False)


# --- against the imported classes -----------------------------------------------------------------


def imported_classes(family: str) -> list[type[nn.Module]]:
    python_module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return [
        value
        for value in vars(python_module).values()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == python_module.__name__
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_imported_module_class_is_in_the_catalog_and_no_other(catalog, family):
    expected = {cls.__name__ for cls in imported_classes(family)}

    found = {
        entry.name
        for entry in catalog
        if entry.python_module == f"transformers.models.{family}.modeling_{family}"
    }

    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_catalog_agrees_with_the_class_on_kind_and_constructor(catalog, family):
    from transformers import PreTrainedModel

    for cls in imported_classes(family):
        entry = catalog.find(f"{cls.__module__}.{cls.__name__}")
        assert entry is not None
        assert entry.is_pretrained_model == issubclass(cls, PreTrainedModel), cls
        assert entry.model_type == family
        if "__init__" in vars(cls):
            actual = list(inspect.signature(cls.__init__).parameters.values())[1:]
            read = list(parse_signature(entry.init or "").parameters.values())
            assert [(p.name, p.kind) for p in read] == [(p.name, p.kind) for p in actual], cls
            required = [p.name for p in actual if p.default is p.empty]
            assert [p.name for p in read if p.default is p.empty] == required, cls


def test_non_module_names_are_known_and_kept_apart(catalog):
    others = set(catalog.other_names)

    assert {"BertConfig", "AttentionInterface", "CausalLMOutputWithCrossAttentions"} <= others
    assert {"BertTokenizer", "Cache"} <= others
    assert not others & set(catalog.names)


def test_configs_lead_to_their_models(catalog):
    entry = catalog.configs["BertConfig"]

    assert (entry.model_type, entry.folder) == ("bert", "bert")
    assert catalog[entry.models[0]].name == "BertModel"
    assert catalog.config_names["bert"] == "BertConfig"


@pytest.mark.parametrize("config", ["BertConfig", "LlavaConfig", "MaskFormerConfig", "MimiConfig"])
def test_architecture_holds_every_class_of_the_built_model(catalog, config):
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, config)())

    known = {catalog[number].full_name for number in catalog.architecture(config)}
    built = {
        f"{type(module).__module__}.{type(module).__name__}"
        for name, module in model.named_modules()
        if name and type(module).__module__.startswith("transformers.models.")
    }
    assert built
    assert built <= known


def test_unknown_names_give_nothing(catalog):
    assert catalog.architecture("NoSuchConfig") == frozenset()
    assert catalog.named("NoSuchClass") == ()
    assert catalog.find("transformers.models.bert.modeling_bert.NoSuchClass") is None


# --- properties -----------------------------------------------------------------------------------

graphs = st.integers(1, 12).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(0, size - 1), max_size=4), min_size=size, max_size=size
    )
)


@given(graphs)
def test_closure_is_what_can_be_reached_step_by_step(children):
    """For any graph, with circles or not, the closure is what a walk along its edges meets."""
    containment = Containment([[["x", *found]] for found in children])
    for start in range(len(children)):
        met: set[int] = set()
        waiting = list(children[start])
        while waiting:
            number = waiting.pop()
            if number not in met:
                met.add(number)
                waiting.extend(children[number])

        assert set(numbers_in(containment.closure(start))) == met


@given(st.sets(st.integers(0, 5000)))
def test_bit_sets_give_back_what_went_in(numbers):
    assert list(numbers_in(as_mask(numbers))) == sorted(numbers)


names = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=5)


@given(names, st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 5))
def test_signature_text_says_what_the_function_takes(parameters, keywords, args, kwargs, defaults):
    """For any function, the text read from its source binds as its own signature does."""
    from patchlab.model.static_index import read_source

    split = max(0, len(parameters) - keywords)
    plain, only = parameters[:split], parameters[split:]
    first = max(0, len(plain) - defaults)
    parts = ["self", *plain[:first], *(f"{name}=1" for name in plain[first:])]
    parts += ["*args"] if args else ["*"] if only else []
    parts += [f"{name}=1" if place < defaults else name for place, name in enumerate(only)]
    parts += ["**kwargs"] if kwargs else []
    source = f"class X:\n    def forward({', '.join(parts)}): pass\n"
    namespace: dict = {}
    exec(source, namespace)  # our own text, made above
    actual = list(inspect.signature(namespace["X"].forward).parameters.values())[1:]

    text = read_source(source, "m").classes["X"].forward

    read = list(parse_signature(text or "").parameters.values())
    assert [(p.name, p.kind, p.default is p.empty) for p in read] == [
        (p.name, p.kind, p.default is p.empty) for p in actual
    ]
