"""Tiny random models of mlx-lm's own classes: parity needs the same arithmetic, not meaning."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

VOCAB = 160
CONTEXT = 1024

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_GEMMA4 = {
    **_BASE,
    "num_hidden_layers": 6,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE},
    "qwen3": {**_BASE},
    "qwen3_5": {
        **_BASE,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
    },
    "gemma3_text": {
        **_BASE,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 8,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
    },
    "gemma3": {
        "vocab_size": VOCAB,
        "text_config": {
            **_BASE,
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 8,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
        },
    },
    "gemma4_text": _GEMMA4,
    "gemma4": {"vocab_size": VOCAB, "text_config": {**_GEMMA4, "model_type": "gemma4_text"}},
    "qwen3_moe": {
        **_BASE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        **_BASE,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        **_BASE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": "auto",
    },
}
"""Model type to config. Windows are 24 tokens, so that short tests cross them."""


def config(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **CONFIGS[model_type]}


def model(model_type: str, dtype: mx.Dtype = mx.float32, seed: int = 7) -> nn.Module:
    """A random model, the same for the same arguments. Evaluated, so it may be used on any thread."""
    settings = config(model_type)
    model_class, args_class = _get_classes(settings)
    built = model_class(args_class.from_dict(settings))
    flat = tree_flatten(built.parameters())
    keys = mx.random.split(mx.random.key(seed), len(flat))
    new = []
    for (name, value), key in zip(flat, keys, strict=True):
        # Wide enough that two tokens seldom share the top, and no parameter is left at zero or one.
        noise = mx.random.normal(value.shape, key=key)
        if value.ndim >= 2:
            noise = noise * (2.0 / value.shape[-1] ** 0.5)
        elif name.endswith(("A_log", "dt_bias")):
            noise = noise * 0.3
        else:
            noise = 1.0 + 0.2 * noise if "norm" in name else 0.2 * noise
        new.append((name, noise.astype(dtype)))
    built.update(tree_unflatten(new))
    built.eval()
    mx.eval(built.parameters())
    return built
