"""Which GGUF architectures become which mlx-lm model types: names, hyperparameters, and what the file format changed about the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gnomon.models.gguf.errors import UnsupportedGGUF

Metadata = Mapping[str, Any]

_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER: Final = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Fields:
    """The hyperparameters of one file, read as `<architecture>.<name>`."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `<architecture>.<name>`, or `default`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """As `get`, but raises `UnsupportedGGUF` when the file lacks the field."""
        value = self.get(name)
        if value is None:
            raise UnsupportedGGUF(f"the file has no field {self.architecture}.{name}")
        return value

    def real(self, name: str) -> float:
        """A float as its author wrote it: the shortest decimal that rounds to the stored f32."""
        return float(str(np.float32(self.need(name))))

    @property
    def heads(self) -> int:
        return int(self.need("attention.head_count"))

    @property
    def kv_heads(self) -> int:
        return int(self.get("attention.head_count_kv", self.heads))

    @property
    def head_dim(self) -> int:
        return int(self.get("attention.key_length", int(self.need("embedding_length")) // self.heads))


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture maps to an mlx-lm model type.

    `permuted`: q and k rows of each head are stored as interleaved rotary pairs. `norm_offset`: stored norms minus this are the
    model's.
    """

    model_type: str
    class_name: str
    extras: Callable[[Fields], dict[str, Any]]
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    permuted: bool = False
    norm_offset: float = 0.0

    def rename(self, name: str) -> str | None:
        """The mlx-lm name of a GGUF tensor; None for one that has none here."""
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        if (match := re.fullmatch(r"blk\.(\d+)\.(.+)", stem)) and match[2] in self.layer:
            return f"model.layers.{match[1]}.{self.layer[match[2]]}.{kind}"
        return None


def _nothing(_: Fields) -> dict[str, Any]:
    return {}


def _gemma3(fields: Fields) -> dict[str, Any]:
    # Gemma 3 scales its queries by the head width, except the 27B, which scales by hidden / heads (Gemma 3 report; also llama.cpp).
    big = int(fields.need("block_count")) == 62
    return {
        "rope_local_base_freq": float(fields.get("rope.freq_base_swa", 10_000.0)),
        "query_pre_attn_scalar": int(fields.need("embedding_length")) // fields.heads if big else fields.head_dim,
        "sliding_window": int(fields.need("attention.sliding_window")),
        "sliding_window_pattern": int(fields.get("attention.sliding_window_pattern", 6)),
    }


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _nothing, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _nothing),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _nothing),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, layer=_GEMMA_LAYER, norm_offset=1.0),
}


def architecture_of(metadata: Metadata) -> tuple[str, Architecture]:
    """The file's architecture. Raises `UnsupportedGGUF` naming it and the supported ones when it isn't among them."""
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedGGUF(
            f"general.architecture {name!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    if metadata.get(f"{name}.expert_count"):
        raise UnsupportedGGUF(
            f"{name}.expert_count is {metadata[f'{name}.expert_count']}: mixture-of-experts GGUF files are not supported"
        )
    return name, ARCHITECTURES[name]


def config_of(
    metadata: Metadata, tied: bool, vocab_size: int, rope_factors: NDArray[np.float32] | None
) -> dict[str, Any]:
    """config.json for the file, without the quantisation part. `rope_factors` is the file's rope_freqs tensor, if any."""
    name, architecture = architecture_of(metadata)
    fields = Fields(metadata, name)
    if isinstance(fields.need("attention.head_count"), Sequence):
        raise UnsupportedGGUF(
            f"{name}.attention.head_count differs by layer, which {architecture.model_type} can't express"
        )
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": int(fields.need("embedding_length")),
        "num_hidden_layers": int(fields.need("block_count")),
        "intermediate_size": int(fields.need("feed_forward_length")),
        "num_attention_heads": fields.heads,
        "num_key_value_heads": fields.kv_heads,
        "head_dim": fields.head_dim,
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "max_position_embeddings": int(fields.need("context_length")),
        "rope_theta": float(fields.get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": tied,
    }
    rope_dim = int(fields.get("rope.dimension_count", fields.head_dim))
    if rope_dim != fields.head_dim:
        raise UnsupportedGGUF(f"{name}.rope.dimension_count {rope_dim} is not the head width {fields.head_dim}")
    scaling = _rope_scaling(fields, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | architecture.extras(fields)


def _rope_scaling(fields: Fields, factors: NDArray[np.float32] | None) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(fields, factors)
    kind = fields.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = fields.real("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and (original := fields.get("rope.scaling.original_context_length")):
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
    raise UnsupportedGGUF(
        f"{fields.architecture}.rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn"
    )


def _llama3_scaling(fields: Fields, factors: NDArray[np.float32]) -> dict[str, Any]:
    """The Llama 3.1 scaling whose per-frequency factors the file's rope_freqs tensor holds."""
    base = float(fields.get("rope.freq_base", 10_000.0))
    largest = float(factors.max())
    for original in (8192, int(fields.get("rope.scaling.original_context_length", 8192))):
        if np.allclose(factors, llama3_factors(base, fields.head_dim, largest, original), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedGGUF(
        "rope_freqs.weight holds frequency factors that are not Llama 3.1's (low 1, high 4); they can't be expressed"
    )


def llama3_factors(base: float, head_dim: int, factor: float, original: int) -> NDArray[np.float32]:
    """By what Llama 3.1 divides each rotary frequency, f32 [head_dim / 2] (Meta's `apply_scaling`, low 1, high 4)."""
    frequency = base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
    between = 1.0 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / 4.0, 1.0, np.where(wavelength > original, factor, between)).astype(
        np.float32
    )


def unpermute(heads: int, head_dim: int) -> NDArray[np.intp]:
    """The order of rows that undoes the interleaving of rotary pairs: new row i of a head is stored row `order[i]`."""
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
