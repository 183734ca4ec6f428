"""A 4-bit MLX directory of a Llama as a GGUF file of Q4_1 tensors with the same codes, scales (rounded to float16) and biases.

uv run python benchmarks/mlx_to_gguf.py DIRECTORY LIKE.gguf OUT.gguf

The vocabulary is that of LIKE. Groups of more than 32 become several blocks with one scale; matrices of queries and keys are reordered for
llama.cpp's layout of rotated pairs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

BLOCK = 32
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def q4_1(words: mx.array, scales: mx.array, biases: mx.array) -> NDArray[np.uint8]:
    """Rows of Q4_1 blocks (scale, minimum, 16 bytes of codes) of rows of 4-bit codes `[N, K / 8]` in groups of 32 or a multiple."""
    rows, blocks = words.shape[0], words.shape[1] * 8 // BLOCK
    raw = np.array(words.view(mx.uint8)).reshape(rows, blocks, BLOCK // 2)
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(rows, blocks, BLOCK)
    low, high = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
    pairs = [np.array(mx.repeat(part, blocks // part.shape[1], axis=1).astype(mx.float16)) for part in (scales, biases)]
    head = np.stack(pairs, axis=-1).view(np.uint8).reshape(rows, blocks, 4)
    packed = np.bitwise_or(low, high << 4, dtype=np.uint8)
    return np.concatenate([head, packed], axis=-1, dtype=np.uint8).reshape(rows, -1)


def turned(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Rows of a projection to `heads` heads in llama.cpp's order: the two halves of a head take turns."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def convert(directory: Path, like: Path, out: Path) -> None:
    """Write `out`. Raises KeyError for a tensor that such a model doesn't have, OSError if a file can't be read or written."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    weights: dict[str, mx.array] = mx.load(str(directory / "model.safetensors"))  # pyright: ignore[reportAssignmentType]
    writer = GGUFWriter(out, "llama")
    for field in GGUFReader(like).fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_file_type(3)  # mostly Q4_1
    for name, array in weights.items():
        stem, _, part = name.removeprefix("model.").rpartition(".")
        if part != "weight":
            continue
        if stem in ("embed_tokens", "norm"):
            target = {"embed_tokens": "token_embd", "norm": "output_norm"}[stem]
        else:
            _, layer, inner = stem.split(".", 2)
            target = f"blk.{layer}.{NAMES[inner]}"
        base = name.removesuffix(".weight")
        if f"{base}.scales" not in weights:
            writer.add_tensor(f"{target}.weight", np.array(array.astype(mx.float32)))
            continue
        packed = q4_1(array, weights[f"{base}.scales"], weights[f"{base}.biases"])
        if target.endswith(("attn_q", "attn_k")):
            packed = turned(packed, heads if target.endswith("attn_q") else groups)
        writer.add_tensor(f"{target}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    convert(*map(Path, sys.argv[1:]))
