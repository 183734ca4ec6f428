"""A layer of experts as one operation: router, choice, the experts' gated MLPs and their weighted sum.

Contract
    router       a linear map to [experts]; each row takes the k largest logits, the first ones of equals
    weights      softmax over all logits, of those k, rounded to the activations' type; divided by their sum where the model does so
    experts      matrices [experts, N, K] without biases: of 4 and 8 bits, tiled, or of another width, or dense
    result       sum over the chosen ones, the likeliest first, in float32, rounded once

A row's result depends on that row alone, as in all products here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchLinear

from gnomon.kernels.linear import Linear
from gnomon.kernels.quantized_matmul import FLOATS, why_not
from gnomon.kernels.tiles import TiledSwitchLinear

SILU = 0


def covers(layer: Any) -> bool:
    """Whether a `SwitchLinear` of mlx-lm, or what `tiles` made of one, has matrices that the extension can take."""
    if "bias" in layer or getattr(layer, "global_scale", None) is not None:
        return False
    if type(layer) is TiledSwitchLinear:
        return layer.tiles is not None
    if type(layer) is QuantizedSwitchLinear:
        w, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
        return why_not(w, scales, biases, layer.group_size, layer.bits, layer.mode, 3) is None
    return type(layer) is SwitchLinear and layer["weight"].dtype in FLOATS


@dataclass(slots=True)
class Experts:
    """A swapped block of experts that are gated by SiLU."""

    router: Linear
    gate: Linear
    up: Linear
    down: Linear
    extension: ModuleType = field(repr=False)
    dtype: mx.Dtype = mx.float32

    @classmethod
    def of(cls, layer: Any, extension: ModuleType, integer: bool) -> Self | None:
        """What a block with a `gate` and a `switch_mlp` becomes, or None if the extension can't take it."""
        inner = layer.switch_mlp
        parts = (inner.gate_proj, inner.up_proj, inner.down_proj)
        if not (Linear.covers(layer.gate) and all(map(covers, parts)) and isinstance(inner.activation, SwiGLU)):
            return None
        router, gate, up, down = (Linear(part, extension, integer) for part in (layer.gate, *parts))
        if len({part.dtype for part in (router, gate, up, down)}) != 1 or gate.form != up.form:
            return None
        return cls(router, gate, up, down, extension, router.dtype)

    def is_current(self, layer: Any) -> bool:
        """Whether a block's parts and weights still are what this was made from, and all on this machine."""
        inner = layer.switch_mlp
        parts = ((self.gate, inner.gate_proj), (self.up, inner.up_proj), (self.down, inner.down_proj))
        whole = layer.sharding_group is None and isinstance(inner.activation, SwiGLU)
        return whole and self.router.current(layer.gate) and all(linear.current(part) for linear, part in parts)

    def compute(self, layer: Any, x: mx.array, norm: mx.array | None, eps: float, residual: bool) -> mx.array:
        """The block over x, RMS-normalised by `norm` if that is given, plus x if `residual`."""
        return self.extension.experts(
            x,
            norm,
            eps,
            self.router.projection,
            self.gate.projection,
            self.up.projection,
            self.down.projection,
            layer.top_k,
            bool(layer.norm_topk_prob),
            SILU,
            residual,
        )
