"""On every architecture a scope replaces what its rule says, no more and no less, and restores.

A hundred architectures are built in each run; `pytest tests/test_architectures.py
--all-architectures` builds all that the installed transformers has. That nothing is left behind is
asserted after each test by the fixture `nothing_left_behind`.
"""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

import patchlab
from patchlab._upstream import is_transformers_name
from patchlab.apply import construct
from patchlab.model.catalog import Catalog, load_catalog
from patchlab.verify.leaks import find_leaks
from tests.architectures import SAMPLE, UNBUILDABLE, NotInstalledError, build


def pytest_generate_tests(metafunc):
    if "architecture" not in metafunc.fixturenames:
        return
    known = load_catalog(progress=False).configs
    every = metafunc.config.getoption("--all-architectures")
    metafunc.parametrize("architecture", sorted(known if every else set(SAMPLE) & set(known)))


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(progress=False)


@pytest.fixture(scope="module")
def outcomes() -> Counter:
    """How many architectures were built, and how many could not be, by kind."""
    return Counter()


def most_frequent_class(model: nn.Module) -> type[nn.Module] | None:
    """The class of transformers that has most modules below the root; of several, by name.

    Activations are left out: some files make one as they are imported and share it, so that a model
    has modules that were not built with it.
    """
    found = Counter(
        type(module)
        for fqn, module in model.named_modules()
        if fqn
        and is_transformers_name(type(module).__module__)
        and type(module).__module__ != "transformers.activations"
    )
    ranked = sorted(found, key=lambda cls: (-found[cls], cls.__name__, cls.__module__))
    return ranked[0] if ranked else None


def outermost(model: nn.Module, name: str) -> set[str]:
    """FQNs of the modules of a class that lie in no other module of that class.

    What a replacement's constructor builds by the original's name is the original.
    """
    found: set[str] = set()
    # Under every path, since a shared module may lie in one of its own class and also outside.
    for fqn, module in model.named_modules(remove_duplicate=False):
        cls = type(module)
        if cls.__name__ == name and is_transformers_name(cls.__module__):
            parents = fqn.split(".")
            if not any(".".join(parents[:i]) in found for i in range(len(parents))):
                found.add(fqn)
    return found


def test_a_subclass_of_one_class_replaces_just_its_modules(catalog, outcomes, architecture):
    if architecture in UNBUILDABLE:
        outcomes["not from its default config"] += 1
        with pytest.raises((AttributeError, TypeError)):
            build(catalog, architecture)
        return
    try:
        plain = build(catalog, architecture)
    except NotInstalledError:
        outcomes["package missing"] += 1
        return
    cls = most_frequent_class(plain)
    if cls is None:
        outcomes["no class of transformers inside"] += 1
        return
    expected = outermost(plain, cls.__name__)
    replacement = type("Replacement", (cls,), {"__module__": __name__})

    with patchlab.patched({f"^{cls.__name__}$": replacement}, on_finding="ignore") as report:
        model = build(catalog, architecture)

    found = {
        fqn
        for fqn, module in model.named_modules(remove_duplicate=False)
        if type(module) is replacement
    }
    assert found == expected
    assert report.restored
    assert sum(report.counts.values()) == len(
        {id(m) for m in model.modules() if type(m) is replacement}
    )
    assert not construct.open_frame_count()
    assert not hasattr(vars(cls).get("__init__"), "__wrapped__")
    outcomes["replaced"] += 1
    outcomes["modules replaced"] += len(found)


def test_the_sample_was_built(outcomes, pytestconfig, capsys):
    """Guards the test above, which says nothing of an architecture that is not built."""
    with capsys.disabled():
        print("\n" + ", ".join(f"{count} {what}" for what, count in outcomes.items()))

    # With so much loaded, patched and restored, nothing passes for a leak.
    assert find_leaks() == ()
    wanted = 700 if pytestconfig.getoption("--all-architectures") else 75
    assert outcomes["replaced"] >= wanted


def test_the_expected_modules_leave_out_what_lies_inside_their_own_kind():
    """Guards the count that the test above compares with."""
    inner = type("Twin", (nn.Module,), {"__module__": "transformers.models.toy"})
    outer, free = inner(), inner()
    outer.held = inner()
    model = nn.ModuleDict({"outer": outer, "free": free})

    assert outermost(model, "Twin") == {"outer", "free"}
    assert most_frequent_class(model) is inner
