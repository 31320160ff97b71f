"""What a class can hold, in each way in which its source can say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchlab.errors import CatalogError
from patchlab.model.catalog import build_catalog, parse_signature
from patchlab.model.catalog_source import package_root, read_catalog
from patchlab.model.containment import as_mask, numbers_in
from tests.toy_transformers import write_package


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The toy package, with the cache next to it."""
    monkeypatch.setenv("PATCHLAB_CACHE", str(tmp_path / "cache"))
    return write_package(tmp_path)


@pytest.mark.parametrize(
    ("holder", "held"),
    [
        ("Direct", {"x": {"A"}}),
        ("InBranches", {"x": {"A", "B"}, "y": {"C"}}),
        ("InAList", {"layers": {"A"}}),
        ("Dispatched", {"x": {"A", "B"}}),
        ("Helped", {"x": {"B"}}),
        ("ByMethod", {"x": {"A"}, "y": {"B"}}),
        ("ByClassAttribute", {"x": {"A"}}),
        ("Child", {"x": {"B"}}),
        ("Override", {"x": {"B"}}),
        ("Dropped", {}),
        ("Keeper", {"kept": {"A"}}),
        ("Table", {"*": {"A"}}),
        ("Maker", {"made": {"C"}}),
        ("Tester", {}),
        ("Reader", {"keeper": {"Keeper"}}),
        (
            "PartTaker",
            {
                "own": {"Backbone"},
                "part": {"A"},
                "same": {"A"},
                "whole": {"Backbone"},
                "set": {"B"},
            },
        ),
        ("ToyModel", {"tower": {"ToyVision"}}),
    ],
)
def test_children_are_found_however_they_are_built(package, holder, held):
    toy = build_catalog(package)

    (entry,) = toy.named(holder)

    assert {
        attribute: {toy.names[number] for number in numbers}
        for attribute, numbers in entry.children
    } == held


def test_closure_goes_through_classes_of_other_files(package):
    toy = build_catalog(package)
    (model,) = toy.named("ToyModel")

    held = {toy.names[n] for n in numbers_in(toy.containment.closure(model.number))}

    assert held == {"ToyVision", "C"}
    (c,) = toy.named("C")
    assert toy.containment.path_to(model.number, as_mask([c.number])) == ("tower.x", c.number)
    assert {toy.names[n] for n in toy.architecture("ToyConfig")} == held


def test_forward_is_kept_with_its_keywords(package):
    (entry,) = build_catalog(package).named("A")

    assert entry.forward == "hidden_states, *, cache=, **kwargs"
    bound = parse_signature(entry.forward).bind(1, cache=2, other=3)
    assert bound.arguments == {"hidden_states": 1, "cache": 2, "kwargs": {"other": 3}}


def test_file_that_cannot_be_parsed_costs_only_itself(package):
    (package / "models" / "broken").mkdir()
    (package / "models" / "broken" / "modeling_broken.py").write_text("class X(nn.Module:\n")

    toy = build_catalog(package)

    assert toy.named("Direct")
    assert not toy.named("X")


def test_transformers_that_is_not_there_is_reported(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(CatalogError, match="pip install transformers"):
        package_root()


def test_package_without_models_is_refused(tmp_path):
    (tmp_path / "models").mkdir()

    with pytest.raises(CatalogError, match="no modeling file"):
        read_catalog(tmp_path)
