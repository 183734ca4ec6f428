"""GGUF files made for tests from mlx-lm's own tiny random models, as llama.cpp's converter lays them out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import quantize
from mlx.utils import tree_flatten

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS, VOCAB = 64, 4, 2, 96, 3, 272
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def architecture(name: str, head_dim: int = 32, tied: bool = False) -> tuple[Any, dict[str, Any]]:
    """A tiny random model of mlx-lm's for one GGUF architecture, and its configuration."""
    model_type = {"gemma3": "gemma3_text"}.get(name, name)
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS if name == "qwen2" else head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "tie_word_embeddings": tied,
    }
    if name == "gemma3":
        config |= {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": head_dim}
        config |= {"rope_local_base_freq": 10_000.0}
    module = import_module(f"mlx_lm.models.{model_type}")
    accepted = inspect.signature(module.ModelArgs).parameters
    model = module.Model(module.ModelArgs(**{key: value for key, value in config.items() if key in accepted}))
    if name == "gemma3" and tied:
        # mlx-lm ties this one when the weights have no head.
        model.sanitize({})
    mx.random.seed(7)
    model.load_weights([(key, mx.random.normal(value.shape) * 0.1) for key, value in tree_flatten(model.parameters())])
    return model, config


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter stores q and k of llama models (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    path: Path,
    name: str,
    model: Any,
    config: dict[str, Any],
    kind: Callable[[str], Kind] = lambda name: Kind.F32,
    extra: Callable[[GGUFWriter], None] = lambda writer: None,
) -> dict[str, np.ndarray]:
    """Write `model` as a GGUF file whose matrices have the kinds that `kind` names. Returns the values stored, by mlx-lm's names."""
    writer = GGUFWriter(path, name)
    writer.add_block_count(LAYERS)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if name == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    add_vocabulary(writer)
    extra(writer)
    stored: dict[str, np.ndarray] = {}
    for key, value in tree_flatten(model.parameters()):
        array = np.array(value.astype(mx.float32))
        of = _kind_of(key, array, kind)
        raw = quantize(_as_stored(name, key, array), of)
        writer.add_tensor(_rename(name, key), raw, raw_dtype=of)
        stored[key] = array
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _kind_of(key: str, array: np.ndarray, kind: Callable[[str], Kind]) -> Kind:
    return kind(key) if array.ndim == 2 else Kind.F32


def _as_stored(name: str, key: str, array: np.ndarray) -> np.ndarray:
    if name == "llama" and ".q_proj." in key:
        return permute(array, HEADS)
    if name == "llama" and ".k_proj." in key:
        return permute(array, KV_HEADS)
    return array + np.float32(1) if name == "gemma3" and "norm" in key else array


def _rename(name: str, key: str) -> str:
    names = _GEMMA if name == "gemma3" else _NAMES
    module, _, kind = key.rpartition(".")
    if module in names:
        return f"{names[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{kind}"


def add_vocabulary(writer: GGUFWriter) -> None:
    """A byte-level vocabulary with a few merges and special tokens, of VOCAB tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    merged = ["he", "the", "in", "Ġt", "Ġthe"]
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    tokens = letters + merged + special
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    types = [1] * (len(letters) + len(merged)) + [3] * len(special) + [5] * (VOCAB - len(letters + merged + special))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "t he", "i n", "Ġ t", "Ġt he"])
    writer.add_bos_token_id(tokens.index("<|end|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
