"""What a model needs and how fast it should be: memory and decode speed predicted from config.json and safetensors headers.

usable      the budget, else 0.75 of memory
transient   min(2048, context) * 0.55e6 bytes
KV          full layers * per token * context + sliding layers * per token * min(context, window);
            in pages: full layers * per token * whole pages * 1.125, since pages are got in steps of an eighth
fits        weights + KV + transient <= usable
decode      bandwidth / (weights - experts * (1 - used / all) + KV) * 0.82, or 0.76 with experts
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from gnomon.config.kv import KvScheme
from gnomon.hub.headers import Tensor, read_header, read_json, weight_files
from gnomon.models.kv import LayerBits, element_bytes, read_kv_config

CONTEXT: Final = 8192
MATRIX_CONTEXT: Final = 32_768
UNKNOWN_CHIP_GBPS: Final = 273.0
PREFILL: Final = 2048
TRANSIENT_PER_TOKEN: Final = 0.55e6
USABLE_SHARE: Final = 0.75
PAGE: Final = 256
PAGE_SLACK: Final = 1.125
_EFFICIENCY, _EFFICIENCY_EXPERTS = 0.82, 0.76
_EXPERT: Final = re.compile(r"\.(switch_mlp|switch_glu|experts)\.")


@dataclass(frozen=True, slots=True)
class Sku:
    """A chip, its memory bandwidth in GB/s (1e9), and the memory sizes it is sold with, in GiB."""

    name: str
    gbps: float
    memory: tuple[int, ...]


SKUS: Final = (
    Sku("M1", 68, (8, 16)),
    Sku("M1 Pro", 200, (16, 32)),
    Sku("M1 Max", 400, (32, 64)),
    Sku("M1 Ultra", 800, (64, 128)),
    Sku("M2", 100, (8, 16, 24)),
    Sku("M2 Pro", 200, (16, 32)),
    Sku("M2 Max", 400, (32, 64, 96)),
    Sku("M2 Ultra", 800, (64, 128, 192)),
    Sku("M3", 100, (8, 16, 24)),
    Sku("M3 Pro", 150, (18, 36)),
    Sku("M3 Max", 400, (36, 48, 64, 96, 128)),
    Sku("M3 Ultra", 819, (96, 256, 512)),
    Sku("M4", 120, (16, 24, 32)),
    Sku("M4 Pro", 273, (24, 48, 64)),
    Sku("M4 Max", 546, (36, 48, 64, 128)),
)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model costs. Bytes; `full` and `sliding` are bytes of KV per token summed over the layers of that kind. With `paged`, tokens
    are held in whole pages."""

    weights: int
    full: float
    sliding: float
    window: int
    max_positions: int | None
    experts: int = 0
    expert_share: float = 1.0
    paged: bool = False

    def kv(self, context: int) -> float:
        """Bytes of per-request state at `context` tokens."""
        if self.paged:
            return self.full * -(-context // PAGE) * PAGE * PAGE_SLACK
        return self.full * context + self.sliding * min(context, self.window)

    def total(self, context: int) -> float:
        """Weights, state and transient of one request at `context` tokens, in bytes."""
        return self.weights + self.kv(context) + min(PREFILL, context) * TRANSIENT_PER_TOKEN

    def fits(self, context: int, usable: float) -> bool:
        return self.total(context) <= usable

    def max_context(self, usable: float) -> int:
        """The most tokens of context that fit, at most the model's own limit; 0 when the weights alone don't fit."""
        low, high = 0, self.max_positions or 1 << 24
        if self.fits(high, usable):
            return high
        # `total` grows with the context, so halving finds the solution of the piecewise linear inequality exactly.
        while low < high - 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, usable) else (low, middle)
        return low

    def decode(self, context: int, gbps: float) -> float:
        """Tokens per second of one request at `context` tokens on memory of `gbps` GB/s."""
        read = self.weights - self.experts * (1 - self.expert_share) + self.kv(context)
        return gbps * 1e9 / read * (_EFFICIENCY_EXPERTS if self.experts else _EFFICIENCY)


def usable(ram: int, budget: int | None) -> float:
    """Bytes a model may take: the operator's budget, else 0.75 of `ram`."""
    return float(budget) if budget is not None else ram * USABLE_SHARE


def sku(name: str) -> Sku | None:
    """The table's row for a chip as the system names it ("Apple M4 Pro"); None for one that isn't in it."""
    wanted = name.removeprefix("Apple ").strip().lower()
    return next((row for row in SKUS if row.name.lower() == wanted), None)


def measure_needs(directory: Path, kv: KvScheme | None = None) -> Needs:
    """Read a model directory's needs under a scheme of keys and values; no weight is loaded.

    Raises ValueError when config.json, the weights or a kv_config.json that the scheme needs can't be read.
    """
    config = read_json(directory / "config.json")
    if config is None:
        raise ValueError(f"{directory} has no readable config.json")
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        tensors |= read_header(path)
    if not tensors:
        raise ValueError(f"{directory} has no model*.safetensors")
    layers = read_kv_config(directory) if kv is not None and kv.mode == "config" else None
    return needs_of(config, tensors, kv, layers)


def needs_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kv: KvScheme | None = None,
    layers: Mapping[int, LayerBits] | None = None,
) -> Needs:
    """`measure_needs` on a parsed config.json and headers. A KV element is 2 bytes, 4 where the model computes in float32, or what the
    scheme makes of it; `layers` are the bits of each layer under `config`."""
    text = _text(config)
    weights = sum(tensor.nbytes for tensor in tensors.values())
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if _EXPERT.search(name))
    element = _element(tensors)
    kinds = _layer_kinds(text)
    sliding = [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    used, all_experts = _experts(text)
    return Needs(
        weights=weights,
        full=_per_token(text, True) * sum(element_bytes(kv, index, True, element, layers) for index in full),
        sliding=_per_token(text, False) * sum(element_bytes(kv, index, False, element, layers) for index in sliding),
        window=int(text.get("sliding_window") or 0),
        max_positions=text.get("max_position_embeddings"),
        experts=experts if all_experts else 0,
        expert_share=used / all_experts if all_experts else 1.0,
        paged=kv is not None and kv.paged,
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return {**config, **cast("dict[str, Any]", inner)} if isinstance(inner, dict) else config


def _element(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of one KV element: activations take the type of the norms, which is float32 only where the model computes in it."""
    norms = {tensor.dtype for name, tensor in tensors.items() if name.endswith("norm.weight")}
    return 4 if norms == {"F32"} else 2


def _layer_kinds(text: Mapping[str, Any]) -> Sequence[str]:
    layers = int(text.get("num_hidden_layers") or text.get("n_layers") or text.get("n_layer") or 0)
    shared = int(text.get("num_kv_shared_layers") or 0)
    if not text.get("num_attention_heads"):
        return ["linear_attention"] * layers
    kinds = text.get("layer_types")
    if not isinstance(kinds, list):
        pattern = int(text.get("sliding_window_pattern") or 0)
        interval = int(text.get("full_attention_interval") or 0)
        if pattern and text.get("sliding_window"):
            kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
        elif interval:
            kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
        else:
            kinds = ["full_attention"] * layers
    return [str(kind) for kind in cast("list[Any]", kinds)][: layers - shared]


def _per_token(text: Mapping[str, Any], full: bool) -> int:
    """KV elements one layer keeps per token: the latent's width, or keys and values of every KV head."""
    if text.get("kv_lora_rank"):
        # Models with an indexer keep its keys too, which mlx-lm stores as keys and values.
        index = 2 * int(text.get("index_head_dim") or 0)
        return int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0) + index
    heads = int(text.get("num_attention_heads") or 1)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    if full:
        kv_heads = int(text.get("num_global_key_value_heads") or kv_heads)
        head_dim = int(text.get("global_head_dim") or head_dim)
    return 2 * kv_heads * head_dim


def _experts(text: Mapping[str, Any]) -> tuple[int, int]:
    """Experts used per token, and in all; (0, 0) for a dense model."""
    of = ("num_experts", "num_local_experts", "n_routed_experts")
    per = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")
    everyone = next((int(text[key]) for key in of if text.get(key)), 0)
    chosen = next((int(text[key]) for key in per if text.get(key)), 0)
    return (chosen, everyone) if chosen and everyone else (0, 0)
