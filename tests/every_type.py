"""A tiny configuration for nearly every model type of mlx-lm: one generous set of settings, and what single types want beside it.

Fields a type doesn't have are ignored by mlx-lm, so one dictionary serves most.
"""

from __future__ import annotations

import json
from typing import Any

import tiny_models

_SMALL = {
    **tiny_models.CONFIGS["llama"],
    **tiny_models.CONFIGS["deepseek_v3"],
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default", "type": "default"}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

GENEROUS: dict[str, Any] = {
    **_SMALL,
    # older names
    "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_ctx": 512, "n_inner": 96, "d_model": 64, "n_heads": 4, "n_layers": 3,
    "hidden_dim": 64, "num_heads": 4, "num_layers": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 1.5, "num_kv_reuse_layers": 2,
    "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-5, "norm_eps": 1e-5, "layer_norm_bias": False, "norm_bias": False,
    # attention
    "layer_types": _ALTERNATING, "sliding_window": 40, "sliding_window_pattern": 2, "sliding_window_size": 40, "window_size": 40,
    "loop_window_size": 40, "attention_window_size": 40, "mixed_attn": True, "use_sliding_window": True, "attention_bias": False,
    "use_bias": False, "mlp_bias": False, "use_qk_norm": True, "query_pre_attn_scalar": 16.0, "partial_rotary_factor": 1.0,
    "partial_rotary_factors": [1.0] * 4, "rotary_pct": 1.0, "rotary_dim": 16, "rope_parameters": _ROPE, "rope_scaling": None,
    "use_parallel_residual": True, "no_rope_layers": [1] * 4, "no_rope_layer_interval": 2, "global_attn_every_n_layers": 2,
    "num_attention_groups": 2, "multi_query": True, "full_attn_idxs": [0, 2], "full_attn": [0], "use_cla": False, "cla_share_factor": 2,
    "swa_head_dim": 16, "swa_v_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_rope_theta": 10000.0,
    "hybrid_layer_pattern": [0, 1, 0, 1], "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 48, "attention_method": "MLA",
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    # scales
    "logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logit_scale": 1.0,
    "dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0, "clip_qkv": None, "hidden_act": "silu",
    # experts
    "num_experts": 4, "num_local_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 32,
    "moe_num_experts": 4, "moe_k": 2, "num_shared_experts": 1, "num_dense_layers": 1, "use_expert_bias": True, "moe_topk": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "zero_expert_num": 1, "zero_expert_type": "identity", "score_func": "sigmoid",
    "route_norm": True, "route_scale": 1.0, "num_expert_groups": 1, "num_limited_groups": 1, "router_bias": False, "mup_enabled": True,
    "norm_head": False, "layer_group_size": 2, "group_norm_size": 1, "interleave_moe_layer_step": 1,
    # recurrent
    "state_size": 16, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4, "time_step_limit": [0.0, 100.0],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64,
    "block_ff_dim": 96, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    "hybrid_override_pattern": "M*-E", "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 16,
    "n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 16,
    "mamba_d_ssm": 64, "mamba_step": 2, "mamba_chunk_size": 32, "mamba_conv_bias": True, "attn_layer_period": 2, "attn_layer_offset": 1,
    "decay_low_rank_dim": 8, "gate_low_rank_dim": 8, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "lru_width": 64,
    "block_types": ["recurrent", "recurrent", "attention"],
}  # fmt: skip

_KDA = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
_BY_LAYER_TYPE = {"sliding_attention": dict(_ROPE), "full_attention": dict(_ROPE)}

WANTED: dict[str, dict[str, Any]] = {
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"topk_method": "greedy", "rope_scaling": {
        "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "gpt_neox": {"rotary_emb_base": 10000, "num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    "hunyuan": {"use_mixed_mlp_moe": True, "num_shared_expert": 1, "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1.0}},
    "kimi_k3": {"hidden_act": "situ", "activation_situ_beta": 1.0, "linear_attn_config": _KDA, "num_experts_per_token": 2},
    "kimi_linear": {"linear_attn_config": _KDA, "model_max_length": 2048, "num_experts_per_token": 2},
    "lille-130m": {"block_size": 512, "n_kv_heads": 2},
    "llama4_text": {"intermediate_size_mlp": 96},
    "mellum": {"rope_parameters": _BY_LAYER_TYPE},
    "mimo_v2_flash": {"layernorm_epsilon": 1e-5, "moe_layer_freq": [0, 1, 1, 1]},
    "minicpm3": {"rope_scaling": {
        "type": "longrope", "original_max_position_embeddings": 2048, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4,
    }},
    "minimax": {"shared_intermediate_size": 96},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1], "dense_intermediate_size": 96, "shared_intermediate_size": 32, "index_block_size": 16,
        "index_topk_blocks": 3, "layer_types": ["sparse"] * 4,
    },
    "ministral3": {"rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 128}},
    "mistral4": {"rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 128}},
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}}] * 4},
    "olmo_hybrid": {
        "linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4,
    },
    "openelm": {
        "num_transformer_layers": 3, "model_dim": 64, "ffn_dim_divisor": 16, "num_query_heads": [4] * 3, "num_kv_heads": [2] * 3,
        "ffn_multipliers": [1.5] * 3,
    },
    "phixtral": {"num_vocab": 320, "model_dim": 64, "num_layers": 2},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 30.0, "num_hidden_layers": 4, "num_key_value_heads": 1},
    "spark2_5": {"rope_parameters": _BY_LAYER_TYPE, "hidden_act": "gelu"},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {"moe_top_k": 2},
}  # fmt: skip

NESTED = (
    "gemma3", "gemma4", "kimi_k25", "kimi_vl", "lfm2-vl", "minimax_m3_vl", "mistral3", "muse_glimmer", "pixtral", "qwen2_vl", "qwen3_5",
    "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
"""Types whose language model has a configuration of its own, and the type it names where that matters."""

NOT_BUILT = {
    "bitnet": "needs Metal",
    "deepseek_v41": "caches of its own kind",
    "gemma3n": "wants twenty more settings",
    "llama4": "caches of its own kind",
    "muse_spark": "needs Metal",
    "olmo": "needs ai2-olmo",
    "phi3small": "crashes on the CPU",
    "prism_hadamard_qwen35": "wants a packed module manifest",
}


def config(model_type: str) -> dict[str, Any]:
    """The configuration of a type, as `tiny_models.CONFIGS` has them."""
    if model_type in tiny_models.CONFIGS:
        return tiny_models.CONFIGS[model_type]
    if model_type == "gemma4_text":
        return tiny_models.CONFIGS["gemma4"]["text_config"]
    made: dict[str, Any] = json.loads(json.dumps({**GENEROUS, **WANTED.get(model_type, {})}))
    if model_type in NESTED:
        inner = {"mistral3": "llama", "pixtral": "llama", "kimi_k25": "kimi_k2"}.get(model_type, "qwen3")
        made["text_config"] = {**made, "model_type": inner}
    return made
