"""Tiny random models of mlx-lm's own classes: parity needs the same arithmetic, not meaning.

`make` builds one in memory, `save` writes an ordinary model directory (config, weights, byte-level tokenizer with a ChatML template).
Weights depend on the model type and the seed alone.
"""

from __future__ import annotations

import importlib
import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
EOS = "<|im_end|>"
SPECIALS = ("<|endoftext|>", "<|im_start|>", EOS)
EOS_ID = SPECIALS.index(EOS)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "attention_bias": False,
}
_GEMMA4_TEXT = {
    **_SMALL,
    "model_type": "gemma4_text",
    "num_hidden_layers": 8,
    "global_head_dim": 32,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 40,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL},
    "qwen3": {**_SMALL, "num_hidden_layers": 3},
    "qwen3_5": {
        "text_config": {
            **_SMALL,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        }
    },
    "gemma2": {**_SMALL, "num_hidden_layers": 2, "query_pre_attn_scalar": 16.0},
    "gemma3": {
        "vocab_size": VOCAB_SIZE,
        "text_config": {
            **_SMALL,
            "model_type": "gemma3_text",
            "sliding_window": 40,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 16,
        },
    },
    "gemma4": {"vocab_size": VOCAB_SIZE, "text_config": _GEMMA4_TEXT},
    "qwen3_moe": {
        **_SMALL,
        "num_hidden_layers": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {**_SMALL, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**_SMALL, **_LATENT, "num_hidden_layers": 3},
    "glm_moe_dsa": {
        **_SMALL,
        **_LATENT,
        "num_hidden_layers": 3,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 48,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt_oss": {
        **_SMALL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 32,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "max_position_embeddings": 2048,
    },
    "falcon_h1": {
        **_SMALL,
        "num_hidden_layers": 2,
        "mamba_chunk_size": 32,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
    },
    "mamba": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
}


def config(model_type: str) -> dict[str, Any]:
    """The configuration as `config.json` has it."""
    return {**json.loads(json.dumps(CONFIGS[model_type])), "model_type": model_type, "eos_token_id": EOS_ID}


def make(model_type: str, dtype: str = "float32", seed: int = 0, **overrides: Any) -> nn.Module:
    """A model with evaluated random weights of the given dtype; `overrides` change its (text) configuration.

    mlx multiplies gathered expert matrices on the CPU in float32 only, so experts of other dtypes are quantised to 8 bits.
    """
    args = config(model_type)
    args.get("text_config", args).update(overrides)
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(zlib.crc32(f"{model_type}.{seed}".encode()))  # some parameters keep their random initial values
    model = module.Model(module.ModelArgs.from_dict(args))
    model.eval()
    weights = [(name, _weight(f"{model_type}.{seed}.{name}", x)) for name, x in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    model.set_dtype(DTYPES[dtype])
    if dtype != "float32":
        nn.quantize(model, group_size=32, bits=8, class_predicate=lambda _, m: isinstance(m, SwitchLinear))
    mx.eval(model.parameters())
    return model


def _weight(name: str, x: mx.array) -> mx.array:
    key = mx.random.key(zlib.crc32(name.encode()))
    if x.ndim >= 2 and not name.endswith(("A_log", "layer_scalar")):
        fan_in = 1 if "embed" in name else x.size // x.shape[0] if x.ndim < 3 or "conv" in name else x.shape[-1]
        return mx.random.normal(x.shape, key=key) * fan_in**-0.5
    if name.endswith(("bias", "sinks")):
        return x + 0.3 * mx.random.normal(x.shape, key=key)
    if "norm" in name:
        return x + 0.1 * mx.random.normal(x.shape, key=key)
    return x


def tokenizer() -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` tokens: three special ones, all bytes, a few merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    text = [
        "the cat sat on the mat and the dog ran after the cat around the old house by the river",
        "there is nothing in here that is not there already, said the captain to his sailors",
    ] * 8
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(text, trainer)
    return made


def save(model_type: str, directory: str | Path, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a model directory that mlx-lm and Gnomon load; returns its path."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    model = make(model_type, dtype, seed)
    settings = config(model_type)
    quantized = {
        name: {"group_size": 32, "bits": 8}
        for name, module in model.named_modules()
        if hasattr(module, "scales") and hasattr(module, "bits")
    }
    if quantized:
        settings["quantization"] = {"group_size": 32, "bits": 8, **quantized}
    (path / "config.json").write_text(json.dumps(settings, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, 0]}))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    tokenizer().save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": SPECIALS[0],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    return path
