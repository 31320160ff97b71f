"""PL501: what tensor and expert parallelism would make of a patched model, told by a preview."""

from __future__ import annotations

import textwrap

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

import patchlab
from patchlab.plan import sharded_code
from patchlab.plan.parallel import wildcarded
from tests import toys


def findings(config, mapping):
    return [f for f in patchlab.preview(config, mapping).findings if f.code == "PL501"]


def llama(**changes):
    return toys.llama_config(architectures=["LlamaForCausalLM"], num_hidden_layers=3, **changes)


class SameMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x)


class RenamedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class GateUp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class RenamedAttention(LlamaAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.query, self.key, self.value = self.q_proj, self.k_proj, self.v_proj
        self.out = self.o_proj
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj


class ExpertList(nn.ModuleList):
    def __init__(self, config):
        wide = config.moe_intermediate_size
        super().__init__(
            RenamedMLP(type("C", (), {"hidden_size": 32, "intermediate_size": wide}))
            for _ in range(config.num_experts)
        )

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


def test_subclass_with_the_names_of_the_original_has_no_finding():
    assert findings(llama(), {"^LlamaMLP$": SameMLP}) == []


def test_model_without_a_plan_has_no_finding():
    config = toys.bert_config()
    assert findings(config, {"^BertSelfAttention$": toys.CountingAttention}) == []


def test_renamed_projections_come_with_the_plan_that_splits_them():
    (finding,) = findings(llama(), {"^LlamaMLP$": RenamedMLP})

    assert finding.severity == "info"
    assert "gate_proj, up_proj and down_proj, which RenamedMLP has not" in finding.message
    plan = {f"model.layers.*.mlp.{n}": s for n, s in (("w1", "colwise"), ("w3", "colwise"))}
    assert repr(plan | {"model.layers.*.mlp.w2": "rowwise"}) in finding.message


def test_renamed_attention_of_equal_shapes_is_planned_in_the_order_of_its_projections():
    config = llama(num_key_value_heads=4)

    (finding,) = findings(config, {"^LlamaAttention$": RenamedAttention})

    styles = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}
    assert repr({f"model.layers.*.self_attn.{n}": s for n, s in styles.items()}) in finding.message


def test_fused_projection_stays_whole_and_what_follows_takes_its_part():
    (finding,) = findings(llama(), {"^LlamaMLP$": GateUp})

    assert finding.severity == "info"
    assert "still splits the input of down_proj" in finding.message
    assert "{'model.layers.*.mlp.down_proj': 'rowwise_split_input'}" in finding.message


def test_experts_without_their_parameters_are_summed_and_that_is_a_warning():
    config = toys.qwen2_moe_config(architectures=["Qwen2MoeForCausalLM"])

    found = findings(config, {"^Qwen2MoeExperts$": ExpertList})

    (warning,) = (finding for finding in found if finding.severity == "warning")
    assert "as many times too large" in warning.message
    assert "'model.layers.*.mlp.experts': 'replicate'" in warning.message
    assert "'model.layers.*.mlp.experts.*.w1': 'colwise'" in warning.message
    assert [f.severity for f in found if "ep_plan" in f.message] == ["info"]


def test_experts_with_the_names_of_the_original_have_no_finding():
    config = toys.qwen2_moe_config(architectures=["Qwen2MoeForCausalLM"])
    same = type("SameExperts", (Qwen2MoeExperts,), {"__module__": __name__})

    assert findings(config, {"^Qwen2MoeExperts$": same}) == []


def test_one_finding_for_a_cause_however_many_layers_there_are():
    assert len(findings(llama(), {"^LlamaMLP$": RenamedMLP})) == 1
    assert len(findings(llama(), {"^LlamaMLP$": GateUp})) == 1


def test_no_finding_is_an_error_for_who_never_splits():
    assert patchlab.preview(llama(), {"^LlamaMLP$": RenamedMLP}).ok


def test_patched_model_that_cannot_be_built_has_no_finding_of_this_kind():
    class Refusing(nn.Module):
        def __init__(self, config):
            raise ValueError("no")

    assert findings(llama(), {"^LlamaMLP$": Refusing}) == []


# The code of a replacement


def subclass(path, body, original=LlamaMLP):
    """Return a subclass whose forward has this body, in a file, so that it has a source."""
    source = "\n".join(
        [
            "import torch",
            "from torch.nn import functional as F",
            f"from {original.__module__} import {original.__name__}",
            f"class Mine({original.__name__}):",
            "    def forward(self, x, *args, **kwargs):",
            textwrap.indent(textwrap.dedent(body).strip(), " " * 8),
        ]
    )
    file = path / "mine.py"
    file.write_text(source + "\n")
    namespace = {"__name__": "mine"}
    exec(compile(source, str(file), "exec"), namespace)
    return namespace["Mine"]


OVER_THE_SPLIT_DIMENSION = {
    "mean of a square": """
        h = self.gate_proj(x)
        return self.down_proj(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True)))""",
    "softmax": "return self.down_proj(F.softmax(self.gate_proj(x), dim=-1) * self.up_proj(x))",
    "norm by keyword": """
        h = self.up_proj(x)
        h = h / h.norm(dim=-1, keepdim=True)
        return self.down_proj(h)""",
    "functional": "return self.down_proj(F.rms_norm(self.gate_proj(x), (64,)))",
    "torch.sum": """
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if x.shape[0] > 1:
            h = h - torch.sum(h, -1, keepdim=True)
        return self.down_proj(h)""",
    "over all": """
        h = self.gate_proj(x)
        h /= h.abs().sum()
        return self.down_proj(h)""",
}
ELSEWHERE = {
    "of the input": """
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))""",
    "of the output": """
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y / y.norm(dim=-1, keepdim=True)""",
    "over the tokens": """
        h = self.gate_proj(x)
        return self.down_proj(h - h.mean(1, keepdim=True))""",
    "of each head": """
        h = self.gate_proj(x)
        heads = h.view(*h.shape[:-1], -1, 8)
        heads = heads / heads.norm(dim=-1, keepdim=True)
        return self.down_proj(heads.flatten(-2))""",
    "of a name used again": """
        h = self.gate_proj(x)
        y = self.down_proj(h)
        h = x
        return y + h.mean(-1, keepdim=True)""",
}


@pytest.mark.parametrize("case", OVER_THE_SPLIT_DIMENSION)
def test_reduction_over_what_is_split_is_a_warning_with_its_line(tmp_path, case):
    cls = subclass(tmp_path, OVER_THE_SPLIT_DIMENSION[case])

    (finding,) = findings(llama(), {"^LlamaMLP$": cls})

    assert finding.severity == "warning"
    assert "reduces over what tensor parallelism splits" in finding.message
    line = int(finding.message.partition("(line ")[2].partition(")")[0])
    assert line > 5


@pytest.mark.parametrize("case", ELSEWHERE)
def test_reduction_over_something_else_is_none(tmp_path, case):
    assert findings(llama(), {"^LlamaMLP$": subclass(tmp_path, ELSEWHERE[case])}) == []


COUNTED = {
    "config": "return self.q_proj(x).view(2, 5, self.config.num_attention_heads, -1), None",
    "a name": """
        b, heads = x.shape[0], self.config.num_key_value_heads
        return self.k_proj(x).reshape(b, -1, heads, self.head_dim), None""",
    "a width": """
        return self.o_proj(x.view(2, 5, self.config.num_attention_heads * self.head_dim)), None""",
}
NOT_COUNTED = {
    "the rest": "return self.q_proj(x).view(2, 5, -1, self.head_dim), None",
    "a ratio": """
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        return self.q_proj(x).view(2, 5, -1, groups, self.head_dim), None""",
    "a width by heads": """
        size = self.config.hidden_size // self.config.num_attention_heads
        return self.q_proj(x).view(2, 5, -1, size), None""",
    "a condition": """
        if self.config.num_attention_heads > 1:
            return self.q_proj(x), None
        return x, None""",
}


@pytest.mark.parametrize("case", COUNTED)
def test_shape_by_the_count_of_heads_is_told(tmp_path, case):
    cls = subclass(tmp_path, COUNTED[case], LlamaAttention)

    (finding,) = findings(llama(), {"^LlamaAttention$": cls})

    assert finding.severity == "info"
    assert "Write -1 for the number of heads" in finding.message


@pytest.mark.parametrize("case", NOT_COUNTED)
def test_other_uses_of_the_count_of_heads_are_not(tmp_path, case):
    cls = subclass(tmp_path, NOT_COUNTED[case], LlamaAttention)

    assert findings(llama(), {"^LlamaAttention$": cls}) == []


def test_count_kept_by_the_constructor_is_followed():
    class Kept(LlamaAttention):
        def __init__(self, config, layer_idx):
            super().__init__(config, layer_idx)
            self.h = config.num_attention_heads
            self.size = config.hidden_size // self.h

        def forward(self, hidden_states, **kwargs):
            return self.q_proj(hidden_states).view(2, 5, self.h, self.size), None

    (finding,) = findings(llama(), {"^LlamaAttention$": Kept})

    assert "self.h," in finding.message
    assert "self.size" not in finding.message


def test_class_without_a_source_has_no_finding():
    namespace = {"LlamaMLP": LlamaMLP}
    exec("class NoSource(LlamaMLP):\n    def forward(self, x): return x.mean(-1)", namespace)

    assert findings(llama(), {"^LlamaMLP$": namespace["NoSource"]}) == []


def test_only_own_methods_are_read():
    names = {method.name for method in sharded_code.own_methods(SameMLP)}
    assert names == {"forward"}


def own_wildcards():
    """Return transformers' own function, which 5.23 has moved."""
    try:
        from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
    except ImportError:
        from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard
    return replace_layer_number_by_wildcard


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("model.layers.0.mlp", "model.layers.*.mlp"),
        ("layers.10", "layers.*"),
        ("a.0.1.b", "a.*.1.b"),
        ("mlp.w1", "mlp.w1"),
        ("", ""),
    ],
)
def test_names_are_written_as_plans_write_them(name, written):
    assert wildcarded(name) == written == own_wildcards()(name)


def test_plan_that_is_suggested_names_modules_of_the_patched_model():
    """The oracle: transformers refuses a plan whose names are not there."""
    (finding,) = findings(llama(), {"^LlamaMLP$": RenamedMLP})
    plan = eval(finding.message.partition("tp_plan=")[2].rstrip(".)"))
    with torch.device("meta"), patchlab.patched({"^LlamaMLP$": RenamedMLP}):
        model = transformers.LlamaForCausalLM(llama())

    names = {wildcarded(name) for name, _ in model.named_modules()}

    assert set(plan) <= names
