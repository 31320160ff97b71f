"""The Python side of the tree widget: what is sent, what is answered, what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from patchlab.errors import TargetError
from patchlab.model.diff import diff_trees
from patchlab.model.tree import module_tree
from patchlab.notebook.tree_widget import TreeWidget
from patchlab.plan.findings import Finding
from patchlab.render.payload import unpack_marks, unpack_tree

ROOT = Path(__file__).parents[2]
FRONTEND = ROOT / "frontend"
STATIC = ROOT / "patchlab" / "notebook" / "static"


class Inner(nn.Module):
    def __init__(self, config, *, act=torch.relu):
        super().__init__()
        self.proj = nn.Linear(2, 3)
        self.register_buffer("mask", torch.ones(2, 2), persistent=False)


class Other(nn.Linear):
    pass


class Model(nn.Module):
    def __init__(self, inner=Inner):
        super().__init__()
        self.first = inner(None) if inner is Inner else inner(2, 3)
        self.second = Inner(None)
        self.again = self.second


@pytest.fixture
def widget():
    made = TreeWidget(Model())
    yield made
    made.close()


def rows(widget):
    header, columns = unpack_tree(widget.payload)
    return [header["names"][name] for name in columns["name"]], header, columns


def test_every_module_is_sent_with_its_class():
    widget = TreeWidget(Model())
    names, header, columns = rows(widget)

    tree = module_tree(Model())
    assert names == [node.name for node in tree.nodes]
    classes = [header["classes"][kind - 1][0] for kind in columns["before"]]
    assert classes == [node.class_name for node in tree.nodes]
    assert columns["depth"] == [node.depth for node in tree.nodes]
    assert [place - 1 for place in columns["shared"] if place] == [3, 4]


def test_a_tied_module_points_to_the_one_that_has_the_parameter_first():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[1].weight
    own = nn.Linear(2, 2)
    own.again = own.weight
    model.append(own)  # Tied to itself, which is no note on another row.

    for widget in (TreeWidget(model), TreeWidget(model, after=nn.Sequential(*model, own))):
        _, _, columns = rows(widget)
        assert columns["tied"][:5] == [0, 0, 0, 3, 0]
    assert "tied" not in rows(TreeWidget(nn.Sequential(nn.Linear(2, 2))))[2]


def test_equal_siblings_have_one_shape_and_different_ones_do_not():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3))
    _, _, columns = rows(TreeWidget(model))

    _, a, b, c = columns["shape"]
    assert a == b != c


def test_difference_is_sent_as_one_tree_with_both_classes():
    widget = TreeWidget(Model(), after=Model(Other))
    names, header, columns = rows(widget)

    first = names.index("first")
    before, after = (header["classes"][columns[side][first] - 1] for side in ("before", "after"))
    assert (before[0], after[0]) == ("Inner", "Other")
    assert header["diff"] is True
    # The inside of what was replaced is in the tree before alone.
    assert columns["after"][first + 1] == 0


def test_tree_model_and_diff_say_the_same():
    model, other = Model(), Model(Other)

    assert TreeWidget(module_tree(model)).payload == TreeWidget(model).payload
    diff = diff_trees(model, other)
    assert TreeWidget(diff=diff).payload == TreeWidget(model, after=other).payload


def test_lazy_parameters_are_sent_as_uninitialized():
    _, header, columns = rows(TreeWidget(nn.Sequential(nn.LazyLinear(3))))

    assert [header["numbers"][place] for place in columns["params_before"]] == [-1, -1]


def test_same_class_name_from_two_places_is_told_apart():
    twin = type("Linear", (nn.Linear,), {"__module__": "elsewhere"})
    _, header, _ = rows(TreeWidget(nn.Sequential(nn.Linear(2, 2)), after=nn.Sequential(twin(2, 2))))

    labels = [label for label, _ in header["classes"]]
    assert "Linear (elsewhere)" in labels
    assert len(set(labels)) == len(labels)


def test_selected_module_is_described(widget):
    widget.selected = "first"

    (side,) = widget.details["sides"]
    assert (side["class_name"], side["python_module"]) == ("Inner", __name__)
    assert side["signature"].startswith("(config, *, act=<built-in")
    assert side["buffers"] == [["mask", "2 × 2", "float32, not saved"]]
    assert side["num_parameters"] == 9
    widget.selected = "first.proj"
    assert widget.details["sides"][0]["parameters"][0] == ["weight", "3 × 2", "float32"]
    widget.selected = None
    assert widget.details == {}


def test_details_hold_no_memory_address(widget):
    class Keeps(nn.Module):
        def __init__(self, act=lambda x: x, other=object()):  # noqa: B008 - a default with an address
            super().__init__()

    shown = TreeWidget(nn.Sequential(Keeps()))
    shown.selected = "0"
    assert "0x" not in json.dumps(shown.details)
    assert "act=<function" in shown.details["sides"][0]["signature"]


def test_class_whose_signature_cannot_be_read_is_described_without_it():
    class Refuses:
        def __repr__(self):
            raise RuntimeError("no")

    class Odd(nn.Module):
        def __init__(self, value=Refuses()):  # noqa: B008 - the default is the point
            super().__init__()

    widget = TreeWidget(Odd())
    widget.selected = ""
    assert widget.details["sides"][0]["signature"] == ""


def test_replaced_module_is_described_before_and_after():
    widget = TreeWidget(Model(), after=Model(Other))
    widget.selected = "first"

    assert [side["title"] for side in widget.details["sides"]] == ["Before", "After"]
    assert [side["class_name"] for side in widget.details["sides"]] == ["Inner", "Other"]


def test_root_and_nothing_are_two_selections(widget):
    assert widget.selected is None
    widget.selected = ""
    assert widget.details["sides"][0]["class_name"] == "Model"


def test_selection_of_a_module_that_is_not_there_describes_nothing(widget):
    widget.selected = "no.such"
    assert widget.details == {}


def test_highlight_reaches_the_rows_and_is_taken_back(widget):
    widget.selected = "first"
    widget.set_highlight(
        {"first": "container", "first.proj": "swallowed"}, reasons={"first": "why"}
    )

    names, _, _ = rows(widget)
    states = dict(zip(names, unpack_marks(widget.highlight, len(names)), strict=False))
    assert (states["first"], states["proj"]) == ("container", "none")
    assert unpack_marks(widget.highlight, len(names))[2] == "swallowed"
    assert widget.details["rule"] == "why"
    widget.set_highlight(None)
    assert widget.highlight == b""
    assert widget.details["rule"] == ""


def test_highlight_of_an_unknown_module_is_refused_and_changes_nothing(widget):
    widget.set_highlight({"first": "exact"})
    before = widget.highlight

    with pytest.raises(TargetError, match=r"'no\.such'"):
        widget.set_highlight({"no.such": "exact"})
    with pytest.raises(ValueError, match="'odd'"):
        widget.set_highlight({"second": "odd"})

    assert widget.highlight == before
    assert "exact match" in widget.to_text()


FINDINGS = [
    Finding("PL201", "warning", "k", "Other", "m"),
    Finding("PL101", "error", "k", "Inner", "m", "^Inner$"),
]


def test_findings_come_errors_first_and_point_to_a_module():
    widget = TreeWidget(Model(), findings=FINDINGS)

    assert [item["code"] for item in widget.findings] == ["PL101", "PL201"]
    assert [item["fqn"] for item in widget.findings] == ["first", None]
    assert widget.verdict["tone"] == "error"
    assert widget.verdict["pill"] == "1 error"
    widget.selected = "second"
    assert [item["code"] for item in widget.details["findings"]] == ["PL101"]


@pytest.mark.parametrize(
    ("findings", "verdict", "tone"),
    [((), "", ""), ((), "all good", "ok"), (FINDINGS[:1], "", "warning"), (FINDINGS, "", "error")],
)
def test_pill_is_the_worst_finding(findings, verdict, tone):
    assert TreeWidget(Model(), findings=findings, verdict=verdict).verdict["tone"] == tone


def test_showing_another_model_keeps_the_selection_where_it_is_there(widget):
    widget.selected = "first"
    widget.show(Model(), after=Model(Other))
    assert [side["class_name"] for side in widget.details["sides"]] == ["Inner", "Other"]
    widget.show(nn.Linear(2, 2))
    assert widget.selected is None
    assert widget.details == {}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "nothing to show"),
        ({"tree": nn.Linear}, "must be a torch.nn.Module"),
        ({"tree": nn.ReLU(), "diff": diff_trees(nn.ReLU(), nn.ReLU())}, "not both"),
        ({"tree": nn.ReLU(), "marks": {"first": "exact"}}, "no module 'first'"),
    ],
)
def test_bad_arguments_are_refused_and_the_widget_stays_as_it_was(widget, arguments, problem):
    before = widget.payload

    with pytest.raises(TargetError, match=problem):
        widget.show(**arguments)

    assert widget.payload == before
    widget.selected = "first"
    assert widget.details["fqn"] == "first"


def test_error_of_the_browser_is_kept(widget):
    widget._handle_custom_msg({"type": "error", "message": "TypeError: x"}, [])
    assert widget.errors == ("TypeError: x",)


@pytest.mark.parametrize("content", [None, 3, {}, {"type": "else"}, {"type": "error"}])
def test_any_message_of_the_browser_is_taken(widget, content):
    widget._handle_custom_msg(content, [])
    assert len(widget.errors) == (content == {"type": "error"})


def test_suggestion_is_called_back_and_raises_where_there_is_no_browser(widget):
    heard = []
    widget.on_suggestion(heard.append)
    widget.on_suggestion(lambda key: {}[key])

    with pytest.raises(KeyError):
        widget.suggest("^Inner$")
    widget._handle_custom_msg({"type": "suggestion", "key": "^Inner$"}, [])

    assert heard == ["^Inner$", "^Inner$"]
    assert widget.error == "KeyError: '^Inner$'"


def test_static_twin_stands_beside_the_view():
    model = nn.Sequential()
    model.add_module("<img src=x>", nn.Linear(2, 2))
    widget = TreeWidget(model)
    widget.set_highlight({"<img src=x>": "container"})

    bundle, _ = widget._repr_mimebundle_()

    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "<img" not in bundle["text/html"]
    assert "&lt;img src=x&gt;" in bundle["text/html"]
    assert "container" in bundle["text/html"]
    assert "✕" in bundle["text/plain"]
    assert "payload" not in repr(widget)


def test_real_model_is_small():
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8)
    with torch.device("meta"):
        model = transformers.BertModel(config)

    assert len(TreeWidget(model).payload) < 6_000


def _fixture_writer():
    path = FRONTEND / "test" / "write_fixtures.py"
    spec = importlib.util.spec_from_file_location("write_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_javascript_tests_read_is_what_python_writes():
    """Mended by `python frontend/test/write_fixtures.py`."""
    writer = _fixture_writer()
    found = {path.name: path.read_text("utf-8") for path in writer.FOLDER.glob("*.json")}

    assert found == writer.texts()


def test_bundle_is_under_forty_thousand_bytes():
    sizes = [path.stat().st_size for path in (STATIC / "tree.js", STATIC / "tree.css")]
    assert 1_000 < sum(sizes) < 40_000
