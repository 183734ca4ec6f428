"""RMS and layer norm over the last axis.

Contract of the native versions
    x            [..., N] f32, f16 or bf16, any strides
    weight, bias [N] of any of those types, or None
    result       MLX's result type of all three

Arithmetic: float32; sums are 16 partial sums over N added by a fixed tree, one rounding to the result's type at the end. MLX rounds
bf16 and f16 once more before it multiplies by the weight, so those results may differ from stock by a rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.dispatch import Operation, thread, uncovered
from gnomon.kernels.quantized_matmul import FLOATS


def reference_rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight in float32, as the result type."""
    wide = x.astype(mx.float32)
    y = wide * mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is None:
        return y.astype(x.dtype)
    return (y * weight.astype(mx.float32)).astype(mx.result_type(x, weight))


def reference_layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """(x - mean) / sqrt(var + eps) * weight + bias in float32, as the result type."""
    wide = x.astype(mx.float32)
    centred = wide - mx.mean(wide, axis=-1, keepdims=True)
    y = centred * mx.rsqrt(mx.mean(centred * centred, axis=-1, keepdims=True) + eps)
    parts = [p for p in (weight, bias) if p is not None]
    if weight is not None:
        y = y * weight.astype(mx.float32)
    if bias is not None:
        y = y + bias.astype(mx.float32)
    return y.astype(mx.result_type(x, *parts))


def _covered(x: mx.array, *parts: mx.array | None) -> bool:
    return (
        x.ndim > 0
        and x.dtype in FLOATS
        and all(p is None or (p.dtype in FLOATS and p.ndim == 1 and p.shape[0] == x.shape[-1]) for p in parts)
    )


def _make_rms(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.rms_norm

    def rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
        if thread.active:
            if _covered(x, weight):
                return native(x, weight, eps, stream)
            uncovered("rms_norm", f"{x.shape} of {x.dtype}")
        return stock(x, weight, eps, stream=stream)

    return rms_norm


def _make_layer(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.layer_norm

    def layer_norm(
        x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, *, stream: Any = None
    ) -> mx.array:
        if thread.active:
            if _covered(x, weight, bias):
                return native(x, weight, bias, eps, stream)
            uncovered("layer_norm", f"{x.shape} of {x.dtype}")
        return stock(x, weight, bias, eps, stream=stream)

    return layer_norm


OPERATIONS = (
    Operation("rms_norm", mx.fast, "rms_norm", _make_rms, "any rows; weight or none"),
    Operation("layer_norm", mx.fast, "layer_norm", _make_layer, "any rows; weight and bias or none"),
)
