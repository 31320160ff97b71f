"""Every finding code has a page, and what the page shows is what happens."""

from __future__ import annotations

import ast
import dataclasses
import importlib.resources
import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchlab
from patchlab.errors import FindingsError, UnknownCodeError
from patchlab.plan.explain import SECTIONS, finding_lines, more_about
from patchlab.plan.findings import SEVERITIES, TITLES, Finding
from tests.toys import CountingAttention, SubMLP, bert_config, llama_config

PAGES = importlib.resources.files("patchlab.plan").joinpath("codes")


def run(source, names):
    """Run an example and return the value of its last line."""
    body = ast.parse(source).body
    last = body.pop()
    assert isinstance(last, ast.Expr), "an example ends with a value"
    exec(compile(ast.Module(body, []), "example", "exec"), names)
    return eval(compile(ast.Expression(last.value), "example", "eval"), names)


def run_examples(wrong, right):
    """Run two examples as two cells of one notebook, and return the findings of each."""
    names = {"__name__": "example"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(wrong, names).findings, run(right, names).findings


def worst(findings, code):
    """Return the gravest severity of a code, as a place in `SEVERITIES`; None without any."""
    return min((SEVERITIES.index(f.severity) for f in findings if f.code == code), default=None)


def is_mended(before, after, code):
    """Tell whether the first findings have a code and the second have it no more, or milder."""
    was, now = worst(before, code), worst(after, code)
    return was is not None and (now is None or now > was)


@pytest.fixture
def cleared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    patchlab.clear_patch_mapping()


def test_every_code_has_a_page_and_every_page_a_code():
    assert sorted(page.name for page in PAGES.iterdir()) == [f"{code}.md" for code in TITLES]


@pytest.mark.parametrize("code", TITLES)
def test_page_has_its_sections_and_fits_on_a_screen(code):
    page = patchlab.explain(code).markdown

    assert page.startswith(f"# {code}: {TITLES[code]}\n")
    assert tuple(re.findall(r"^## (.+)$", page, re.M)) == SECTIONS
    assert page.count("```python\n") == 2
    assert page.count("\n") < 45
    assert max(map(len, page.splitlines())) <= 100


@pytest.mark.leaks
@pytest.mark.parametrize("code", TITLES)
def test_wrong_example_gives_the_finding_and_right_one_does_not(code, cleared):
    page = patchlab.explain(code)

    wrong, right = run_examples(page.wrong, page.right)

    assert is_mended(wrong, right, code), [*map(str, wrong), "---", *map(str, right)]
    assert not any(finding.severity == "error" for finding in right)


def test_example_that_mends_nothing_is_told(cleared):
    """Guards the test above."""
    page = patchlab.explain("PL104")

    assert not is_mended(*run_examples(page.wrong, page.wrong), "PL104")
    assert not is_mended(*run_examples("import patchlab\npatchlab.status()", page.wrong), "PL104")


@given(st.sampled_from(sorted(TITLES)), st.booleans(), st.text(" \t", max_size=2))
def test_code_may_be_written_in_any_case_or_be_a_finding(code, lower, space):
    finding = Finding(code, "info", "", "", "")

    assert patchlab.explain(space + (code.lower() if lower else code) + space).code == code
    assert patchlab.explain(finding) == patchlab.explain(code)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("PL1O1", "PL101"),
        ("101", "PL101 (container)"),
        ("PL999", "PL109"),
        ("contaner", "PL101"),
        ("tied weights under a module", "PL304"),
    ],
)
def test_unknown_code_is_an_error_with_near_ones(asked, near):
    with pytest.raises(UnknownCodeError, match=re.escape(near)) as raised:
        patchlab.explain(asked)
    assert repr(asked) in str(raised.value)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("asked", ["", "quite another thing", 101, object, b"PL101", "../PL101"])
def test_what_is_no_code_is_an_error_that_says_where_they_are(asked):
    with pytest.raises(UnknownCodeError, match=r"patchlab\.explain\(\) lists all"):
        patchlab.explain(asked)


def test_without_a_code_all_are_listed():
    listed = patchlab.explain()

    assert listed.codes == tuple(TITLES)
    assert all(f"{code}  {title}" in str(listed) for code, title in TITLES.items())
    assert all(title in listed.to_html() for title in TITLES.values())
    assert len(listed.to_frame()) == len(TITLES)


def test_explanation_is_frozen_and_shows_itself_in_every_form():
    page = patchlab.explain("PL101")
    bundle = page._repr_mimebundle_()

    with pytest.raises(dataclasses.FrozenInstanceError):
        page.code = "PL102"
    assert bundle["text/plain"] == bundle["text/markdown"] == str(page) == page.markdown
    assert ">PL101: container</h3>" in bundle["text/html"]
    assert "BertSelfAttention" in page.to_html()
    assert "```" not in page.to_html()
    assert repr(page) == "<Explanation: PL101 container>"


# The way there from a finding


def test_list_of_findings_says_once_where_to_read_on():
    preview = patchlab.preview(bert_config(), {".*Attention": CountingAttention})
    pointer = 'patchlab.explain("PL101") says more.'

    assert len(preview.findings) > 1
    assert str(preview).splitlines()[-1] == pointer
    assert str(preview).count("patchlab.explain") == 1
    with pytest.raises(FindingsError, match=re.escape(pointer)):
        preview.check()


def test_finding_opens_in_static_html():
    preview = patchlab.preview(bert_config(), {".*Attention": CountingAttention})
    html = preview.to_html()

    assert html.count("<details") == len(preview.findings)
    assert f'<summary style="cursor:pointer">{preview.findings[0].code} container' in html
    assert more_about(preview.findings[0]) in html


def test_where_nothing_was_found_nothing_is_said():
    preview = patchlab.preview(llama_config(), {"^LlamaMLP$": SubMLP})

    assert preview.findings == ()
    assert finding_lines(()) == ()
    assert "patchlab.explain" not in str(preview)


def test_every_code_has_a_paragraph_without_markup():
    for code in TITLES:
        told = more_about(Finding(code, "info", "", "", ""))
        assert told.endswith(".")
        assert not {"`", "\n", "#"} & set(told)
