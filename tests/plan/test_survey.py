"""Surveys: every architecture at once, from the catalog alone."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from torch import nn

from patchlab.errors import MappingError, MappingTypeError, TargetError
from patchlab.mapping.rules import PatchMapping
from patchlab.plan.containers import find_containers
from patchlab.plan.survey import Survey, survey


class Replacement(nn.Module):
    """Takes the place of anything."""


@pytest.fixture(scope="module")
def attention() -> Survey:
    return survey(".*Attention", progress=False)


def codes(found: Survey) -> list[str]:
    return [finding.code for finding in found.findings]


def test_row_for_each_class_that_the_rule_decides(attention):
    expected = [name for name in attention.catalog.names if "Attention" in name]

    assert sorted(row.class_name for row in attention.rows) == sorted(expected)
    assert attention.counts == {".*Attention": len(expected)}
    assert {"bert", "t5", "llama"} <= set(attention.model_types)


def test_containers_are_those_of_the_analysis(attention):
    expected = find_containers(attention.mapping, attention.catalog)

    assert {c.full_name for c in attention.containers} == {c.full_name for c in expected}
    assert "BertAttention" in {c.class_name for c in attention.containers}


def test_finding_is_given_once_for_its_cause(attention):
    assert codes(attention) == ["PL101", "PL103"]
    container, other = attention.findings
    assert container.severity == "error"
    assert f"{len(attention.rows)} classes" in container.message
    assert "AttentionInterface" in other.message
    assert not attention.ok


def test_mapping_keys_and_one_key_ask_the_same():
    by_dict = survey({"^BertLayer$": Replacement})

    assert by_dict.rows == survey("^BertLayer$").rows == survey(["^BertLayer$"]).rows
    assert by_dict.rows == survey(PatchMapping.of({"^BertLayer$": Replacement})).rows
    assert [row.class_name for row in by_dict.rows] == ["BertLayer"]
    assert by_dict.ok


def test_dead_key_is_explained_with_the_nearest_name():
    found = survey(["LlamaMPL", "^BertLayer$"])

    assert found.counts == {"LlamaMPL": 0, "^BertLayer$": 1}
    assert codes(found) == ["PL104"]
    assert found.findings[0].suggestion == "LlamaMLP"


def test_rule_behind_another_is_named():
    found = survey(["BertLayer", "^BertLayer$"])

    assert [(f.code, f.key) for f in found.findings] == [("PL105", "^BertLayer$")]


def test_exact_name_reports_no_names_that_it_cannot_match():
    assert survey("BertModel").other_names == {}
    assert codes(survey("BertModel")) == []


def test_suggestion_is_in_the_finding_of_one_model_type(attention):
    bert = attention.filter(model_type="bert")

    assert {row.model_type for row in bert.rows} == {"bert"}
    (finding,) = bert.findings
    assert finding.suggestion == "^Bert(?:Cross|Self)Attention$"


def test_model_type_that_a_finding_names_is_one():
    """The library's own classes have none, and come first in the alphabet."""
    message = next(f.message for f in survey(".*").findings if f.code == "PL101")
    named = re.search(r"filter\(model_type='(.*?)'\)", message)

    assert named is not None
    assert survey(".*").filter(model_type=named[1]).rows


def test_filter_keeps_the_parts_that_a_model_type_takes_from_others(attention):
    assert {r.class_name for r in attention.filter(model_type="llava").rows} == {
        "LlamaAttention",
        "CLIPAttention",
    }


def test_filter_takes_a_configs_own_model_type(attention):
    found = attention.filter(model_type="clip_vision_model")

    assert {row.class_name for row in found.rows} == {"CLIPAttention"}


def test_filters_narrow_down_together():
    found = survey([".*Attention", ".*Layer$"])

    both = found.filter(model_type="bert", key=".*Attention", containers_only=True)

    assert [row.class_name for row in both.rows] == ["BertAttention"]
    assert both.suggestions(".*Attention")["bert"].key == "^Bert(?:Cross|Self)Attention$"
    assert (
        both.rows
        == found.filter(containers_only=True)
        .filter(key=".*Attention")
        .filter(model_type="bert")
        .rows
    )


def test_filter_by_what_is_not_there_says_what_was_meant(attention):
    with pytest.raises(TargetError, match="Did you mean 'bert'"):
        attention.filter(model_type="brt")
    with pytest.raises(MappingError, match=r"its keys are '\.\*Attention'"):
        attention.filter(key="Attention")


def test_text_is_a_summary_of_a_screen(attention):
    text = attention.to_text(width=100)

    lines = text.splitlines()
    assert len(lines) < 40
    # The findings are sentences, and wrap where they are shown.
    assert max(len(line) for line in lines if not line.startswith("PL")) <= 100
    assert "784 classes" in lines[0] or str(len(attention.rows)) in lines[0]
    assert "more model types" in text


def test_many_keys_share_the_screen():
    found = survey([f"{part}$" for part in ("Layer", "Attention", "MLP", "Model", "Encoder")])

    assert len(found.to_table().rows) <= 5 * (1 + 4 + 1)


def test_every_class_is_counted_in_the_rows_that_are_shown(attention):
    rows = attention.to_table(limit=5).rows

    total = int(rows[0].cells[0].replace(",", ""))
    assert total == sum(int(row.cells[0].replace(",", "")) for row in rows[1:])
    assert len(rows) == 1 + 5 + 1


def test_frame_has_a_line_for_each_class(attention):
    frame = attention.to_frame()

    assert len(frame) == len(attention.rows)
    assert int(frame["is_container"].sum()) == len(attention.containers)
    assert "BertSelfAttention" in frame.set_index("class_name").loc["BertAttention", "inner"]


def test_same_survey_shows_the_same_bytes(attention):
    again = survey(".*Attention")

    assert again.to_text() == attention.to_text()
    assert again.to_html() == attention.to_html()
    assert repr(again) == repr(attention)
    assert set(attention._repr_mimebundle_()) >= {"text/plain", "text/html"}


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        ("*Attention", MappingError),
        ("", MappingError),
        (3, MappingTypeError),
        ({"BertLayer": 3}, MappingTypeError),
        (["BertLayer", "*x"], MappingError),
    ],
)
def test_keys_that_can_never_match_are_refused(mapping, error):
    with pytest.raises(error):
        survey(mapping)


def test_empty_mapping_matches_nothing_and_is_fine():
    found = survey({})

    assert found.rows == ()
    assert found.ok
    assert "0 classes" in found.to_text()


def test_survey_imports_no_modeling_file():
    code = (
        "import sys\nfrom patchlab.plan.survey import survey\n"
        "survey('.*', progress=False).to_text()\n"
        "print([m for m in sys.modules if m.startswith('transformers.models')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "[]"


def test_classes_of_several_kinds_are_named_where_a_key_for_them_would_be_long():
    (found,) = [f for f in survey("Deberta.*").findings if f.code == "PL101"]

    assert "for deberta name the classes you mean, of DebertaIntermediate, " in found.message
    assert "(?" not in found.message
    assert "PreTrainedModel" not in found.message


def test_one_kind_of_class_is_given_as_a_key():
    """Guards the test above: the key is what is said elsewhere."""
    (found,) = [f for f in survey("^Bert.*Attention$").findings if f.code == "PL101"]

    assert "for bert use '^Bert(?:Cross|Self)Attention$'" in found.message
