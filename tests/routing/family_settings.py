"""The settings of tiny models of every mixture-of-experts family in transformers.

A family is a model type whose modeling code chooses experts. `SETTINGS` are offered to every config
and taken by those that know them; `OWN` is what a family needs beside; `CLASSES` names the model
where the auto classes know none for a text config alone.
"""

NUM_EXPERTS = 8

SETTINGS = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "moe_num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_groups": 2,
    "num_limited_groups": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "use_cache": True,
    "attention_dropout": 0.0,
    "sliding_window": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "ssm_state_size": 8,
    "n_groups": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}

_ALTERNATING = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_ONE_FULL = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_DENSE_FIRST = ["dense", "sparse", "sparse"]


def _mrope(**more):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], **more}
    return {"rope_parameters": rope}


OWN = {
    "bailing_hybrid": {"num_hidden_layers": 4, "layer_types": _ALTERNATING},
    "beam": {"mlp_layer_types": _DENSE_FIRST},
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 16,
            "moe_num_experts": NUM_EXPERTS,
            "moe_top_k": 2,
        },
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_ocr2_text": {
        "mlp_layer_types": _DENSE_FIRST,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
    },
    "diffusion_gemma_text": {"global_head_dim": 8},
    "doge": {"is_moe": True, "num_experts": 16, "norm_topk_prob": False},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], **_mrope()},
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 16,
        "global_head_dim": 8,
        "num_kv_shared_layers": 0,
    },
    "glm4v_moe_text": _mrope(partial_rotary_factor=1.0),
    "glm5_next_text": {
        "num_hidden_layers": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "index_topk": 4,
        "index_kpool": 2,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 8,
        "qk_head_dim": 8,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
    },
    "hy_v4_vl_text": _mrope(),
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
    },
    "mimo_v2_flash": {
        "num_attention_heads": 8,
        "head_dim": 16,
        "v_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    },
    "nllb-moe": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_sparse_step": 1,
        "decoder_sparse_step": 1,
        "expert_capacity": 64,
        "router_bias": False,
    },
    "qwen3_5_moe_text": {"num_hidden_layers": 4, "layer_types": _ONE_FULL},
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": _ONE_FULL},
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "layer_types": _ONE_FULL,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "step3p5": {"num_hidden_layers": 5},
    "switch_transformers": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "expert_capacity": 64,
        "decoder_start_token_id": 0,
    },
    "unlimited_ocr_text": {
        "mlp_layer_types": _DENSE_FIRST,
        "topk_method": "group_limited_greedy",
    },
    "zaya": {"num_experts_per_tok": 1},
}

CLASSES = {
    "deepseek_ocr2_text": "deepseek_ocr2.modeling_deepseek_ocr2:DeepseekOcr2TextModel",
    "diffusion_gemma_text": (
        "diffusion_gemma.modeling_diffusion_gemma:DiffusionGemmaEncoderTextModel"
    ),
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe.modeling_ernie4_5_vl_moe:Ernie4_5_VLMoeTextModel",
    "glm4v_moe_text": "glm4v_moe.modeling_glm4v_moe:Glm4vMoeTextModel",
    "qwen3_omni_moe_talker_text": "qwen3_omni_moe.modeling_qwen3_omni_moe:Qwen3OmniMoeTalkerModel",
    "qwen3_omni_moe_text": "qwen3_omni_moe.modeling_qwen3_omni_moe:Qwen3OmniMoeThinkerTextModel",
    "step3p5": "step3p7.modeling_step3p7:Step3p7TextModel",
    "unlimited_ocr_text": "unlimited_ocr.modeling_unlimited_ocr:UnlimitedOcrTextModel",
}

_NAMES = """
afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_ocr2_text deepseek_v2
deepseek_v3 deepseek_v32 deepseek_v4 diffusion_gemma_text doge dots1 dots3_note_text
ernie4_5_moe ernie4_5_vl_moe_text exaone_moe flex_olmo flint gemma4_text glm4_moe glm4_moe_lite
glm4v_moe_text glm5_next_text glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid
granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl_text inkling_text inkling2_text
inkling2_loop_text jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2_moe llama4_text
longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mistral4
mistral_large4_text mixtral muse_spark_text nemotron_h nllb-moe olmoe openai_privacy_filter
phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe_talker_text
qwen3_omni_moe_text qwen3_vl_moe_text qwen4_exp_text solar_open step3p5 switch_transformers
unlimited_ocr_text zaya
"""
FAMILIES = tuple(_NAMES.split())
