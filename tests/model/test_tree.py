"""The module tree: complete, counted right, and unimpressed by odd models."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from transformers import AutoModelForCausalLM

from patchlab.errors import TargetError
from patchlab.model.tree import ModuleTree, module_tree
from tests import toys
from tests.toy_trees import Toy, toy_models


def path_of(tree, node):
    """Return the names from the root to a node."""
    names = []
    while node.parent >= 0:
        names.append(node.name)
        node = tree.nodes[node.parent]
    return names[::-1]


def compiled(model):
    return torch.compile(model, backend="eager")


def submodule(model, names):
    for name in names:
        model = model._modules[name]
    return model


@given(toy_models())
def test_every_module_is_there_at_every_path_in_order(model):
    tree = module_tree(model)

    expected = [(fqn, type(module)) for fqn, module in model.named_modules(remove_duplicate=False)]

    assert [(node.fqn, node.cls) for node in tree] == expected


@given(toy_models())
def test_every_node_counts_the_unique_parameters_below_it(model):
    tree = module_tree(model)
    for node in tree:
        module = submodule(model, path_of(tree, node))
        assert node.num_parameters == sum(p.numel() for p in module.parameters())


@given(toy_models())
def test_every_node_has_its_own_tensors(model):
    tree = module_tree(model)
    for node in tree:
        module = submodule(model, path_of(tree, node))
        own = [(n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None]
        assert [(record.name, record.shape) for record in node.parameters] == own
        state_dict_names = {n for n in module.state_dict() if "." not in n}
        persistent = {b.name for b in node.buffers if b.persistent}
        assert persistent == state_dict_names - {n for n, _ in own}


@given(toy_models())
def test_shared_with_names_the_first_path_of_the_same_object(model):
    tree = module_tree(model)
    first = {}
    for node in tree:
        module = submodule(model, path_of(tree, node))
        assert node.shared_with == first.get(id(module))
        first.setdefault(id(module), node.fqn)


@given(toy_models())
def test_the_same_model_gives_an_equal_tree_and_the_same_bytes(model):
    one, two = module_tree(model), module_tree(model)

    assert one == two
    assert hash(one) == hash(two)
    assert one.to_text() == two.to_text()
    assert one.to_html() == two.to_html()
    assert one.to_dot() == two.to_dot()


@given(toy_models())
@settings(max_examples=30)
def test_no_output_holds_a_memory_address(model):
    tree = module_tree(model)
    for text in (tree.to_text(), tree.to_html(), tree.to_dot(), repr(tree)):
        assert "0x" not in text


@given(toy_models())
def test_children_are_the_nodes_that_name_it_as_parent(model):
    tree = module_tree(model)
    for node in tree:
        assert [child.parent for child in tree.children(node)] == [node.index] * len(
            submodule(model, path_of(tree, node))._modules
        )


def test_equal_modules_of_two_classes_of_one_name_make_unequal_trees():
    """Guards equality: it must look at the class and not at its name."""

    def build(name):
        cls = type(name, (nn.Module,), {})
        return module_tree(nn.Sequential(cls()))

    assert build("Same") != build("Same")
    assert module_tree(nn.Sequential(Toy())) == module_tree(nn.Sequential(Toy()))


def test_the_tree_keeps_no_tensor_alive():
    import weakref

    model = nn.Linear(2, 2)
    gone = weakref.ref(model.weight)
    tree = module_tree(model)
    del model

    assert gone() is None
    assert tree.num_parameters == 6


def test_tied_parameters_are_counted_once_and_named():
    model = Toy()
    model.embed, model.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
    model.head.weight = model.embed.weight
    tree = module_tree(model)

    assert tree.num_parameters == 10
    assert tree.find("head").num_parameters == 10
    assert tree.find("head").tied == (("weight", "embed.weight"),)
    assert tree.find("embed").tied == ()
    assert tree.to_text().endswith("weight tied to embed")
    assert "weight tied to embed<" in tree.to_html()


def test_one_parameter_under_two_names_of_one_module_is_tied_to_the_first():
    model = Toy()
    model.a = model.b = nn.Parameter(torch.zeros(3))

    assert module_tree(model).root.tied == (("b", "a"),)
    assert module_tree(model).num_parameters == 3


def test_parametrized_modules_are_one_class_to_a_reader():
    """torch makes a class for each; they fold, and a difference does not say replaced."""
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(3)]
    tree = module_tree(nn.Sequential(*layers, nn.Linear(3, 3)))

    assert len({node.cls_id for node in tree.children(tree.root)}) == 2
    assert "0–2 × 3" in tree.to_text()
    assert "older" not in tree.to_text()


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (compiled, "_orig_mod"),
        (nn.DataParallel, "module"),
        (lambda model: compiled(nn.DataParallel(model)), "_orig_mod.module"),
    ],
)
def test_wrappers_keep_their_fqns_and_can_be_looked_through(wrap, prefix):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    tree = module_tree(wrap(model))

    assert tree.find("0").fqn == f"{prefix}.0"
    assert tree.find(f"{prefix}.0") == tree.find("0")
    assert tree.unwrapped() == module_tree(model)
    assert tree.unwrapped().totals == module_tree(model).totals


def test_a_child_called_module_is_no_wrapper():
    """Guards the test above: a name alone does not make its parent a wrapper."""
    model = Toy()
    model.module = nn.Linear(2, 2)
    tree = module_tree(model)

    assert tree.unwrapped() is tree


@given(toy_models())
def test_unwrapping_gives_back_the_tree_of_what_was_wrapped(model):
    assert module_tree(nn.DataParallel(model)).unwrapped() == module_tree(model)


CONFIGS = [toys.bert_config(), toys.llama_config(), toys.qwen2_moe_config()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_real_models_are_the_same_on_the_meta_device_and_counted_right(config):
    model = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    tree = module_tree(model)

    assert tree == module_tree(skeleton)
    assert tree.to_html() == module_tree(skeleton).to_html()
    assert tree.num_parameters == model.num_parameters()
    assert tree.fqns == tuple(name for name, _ in model.named_modules(remove_duplicate=False))


def test_the_layers_of_a_real_model_are_one_row():
    model = AutoModelForCausalLM.from_config(toys.llama_config(num_hidden_layers=5))
    rows = module_tree(model).to_table().rows

    assert [(row.label, row.fold) for row in rows if row.cells[0] == "LlamaDecoderLayer"] == [
        ("0–4", 5)
    ]


def redefine(python_module, source):
    exec(source, vars(python_module))
    return python_module


@pytest.fixture
def cell(monkeypatch):
    """A Python module that stands for a notebook's namespace."""
    python_module = types.ModuleType("toy_cell")
    monkeypatch.setitem(sys.modules, "toy_cell", python_module)
    return python_module


SOURCE = "import torch\nclass Mine(torch.nn.Module): pass"


def test_a_class_defined_again_is_stale_in_the_older_model(cell):
    old = redefine(cell, SOURCE).Mine()
    fresh = redefine(cell, SOURCE).Mine()

    assert module_tree(old).root.stale
    assert not module_tree(fresh).root.stale
    assert "defined again since" in module_tree(old).to_text()


def test_a_name_bound_to_a_replacement_does_not_make_its_class_stale(cell):
    model = redefine(cell, SOURCE).Mine()
    cell.Mine = Toy

    assert not module_tree(model).root.stale


def test_old_and_new_class_of_one_name_read_differently(cell):
    model = nn.Sequential(redefine(cell, SOURCE).Mine(), redefine(cell, SOURCE).Mine())
    labels = [row.cells[0] for row in module_tree(model).to_table().rows[1:]]

    assert labels == ["Mine (toy_cell) (older)", "Mine (toy_cell)"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (None, "got NoneType"),
        ("bert-base-uncased", "got str"),
        (nn.Linear, "got the class Linear. Give an instance"),
        ({"weight": torch.zeros(2)}, "got dict"),
    ],
)
def test_what_is_no_model_is_refused_with_what_it_is(target, said):
    with pytest.raises(TargetError, match=said):
        module_tree(target)


def test_a_module_without_super_init_is_refused_with_the_reason():
    class Forgot(nn.Module):
        def __init__(self):
            pass

    with pytest.raises(TargetError, match=r"Forgot.*super\(\).__init__\(\)"):
        module_tree(Forgot())


@pytest.mark.parametrize(
    ("fqn", "said"),
    [
        ("layers.0.atn", "Did you mean 'layers.0.attn'"),
        ("0.attn", "Did you mean 'layers.0.attn'"),
        ("layers.7", "Its children are 0, 1"),
        ("layers.0.attn.deeper", "has no child 'deeper'. It has no children"),
    ],
)
def test_a_wrong_fqn_names_the_nearest(fqn, said):
    model = Toy()
    model.layers = nn.ModuleList([Toy(), Toy()])
    model.layers[0].attn = Toy()

    with pytest.raises(TargetError, match=said):
        module_tree(model).find(fqn)


def test_a_name_with_a_dot_in_it_is_found():
    model = Toy()
    model._modules["a.b"] = nn.Linear(1, 1)

    assert module_tree(model).find("a.b").name == "a.b"


def test_script_modules_are_walked():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    # torch 2.13 warns that TorchScript is deprecated; models saved with it are still about.
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(model)
    tree = module_tree(scripted)

    assert [node.fqn for node in tree] == ["", "0", "1", "1.0"]
    assert tree.num_parameters == 12


def test_the_frame_has_a_row_for_every_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    frame = module_tree(model).to_frame()

    assert list(frame["fqn"]) == ["", "0", "1", "2"]
    assert list(frame["num_parameters"]) == [16, 6, 4, 6]
    assert frame["buffers"][2].startswith("running_mean (2) float32")


def test_a_tree_is_a_frozen_value():
    tree = module_tree(Toy())

    with pytest.raises(AttributeError):
        tree.names = ()
    assert isinstance(tree, ModuleTree)
