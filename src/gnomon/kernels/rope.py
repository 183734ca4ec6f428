"""Rotary position embedding.

Contract of the native version
    a         [B, ..., L, D] f32, f16 or bf16, any strides; the first `dims` (even) of D are turned
    offset    a number, or int [1] or [B]: the position of each row's first token
    base      or freqs [dims / 2] (wavelengths), with `scale` on positions
    result    a's type

Arithmetic: angles are (position * scale) * frequency in float32, as MLX has them; their cosines and sines are rounded once from double
precision. A token's result depends on its position and its own values alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.dispatch import Operation, thread, uncovered
from gnomon.kernels.quantized_matmul import FLOATS


def reference(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
) -> mx.array:
    """Turn the pairs (i, i + dims / 2), or (2i, 2i + 1) if `traditional`, in plain MLX operations in float32."""
    half = dims // 2
    if freqs is None:
        step = math.log(base or 1.0) / half
        inverse = mx.exp(-mx.arange(half, dtype=mx.float32) * step)
    else:
        inverse = 1 / freqs.astype(mx.float32)
    start = mx.array(offset).reshape(-1, *([1] * (a.ndim - 1))) if isinstance(offset, mx.array) else offset
    angle = (mx.arange(a.shape[-2])[:, None] + start).astype(mx.float32) * scale * inverse
    cos, sin = mx.cos(angle), mx.sin(angle)
    x = a.astype(mx.float32)
    turned = x[..., :dims]
    if traditional:
        p, q = turned[..., ::2], turned[..., 1::2]
        y = mx.stack([p * cos - q * sin, p * sin + q * cos], axis=-1).reshape(turned.shape)
    else:
        p, q = turned[..., :half], turned[..., half:]
        y = mx.concatenate([p * cos - q * sin, p * sin + q * cos], axis=-1)
    return mx.concatenate([y, x[..., dims:]], axis=-1).astype(a.dtype)


_offsets: dict[int, mx.array] = {}


def offset_array(offset: int | mx.array) -> mx.array:
    """A number as an array; the last one is kept, as all layers of a step ask for the same."""
    if isinstance(offset, mx.array):
        return offset if offset.ndim else offset.reshape(1)
    known = _offsets.get(offset)
    if known is None:
        _offsets.clear()
        known = _offsets[offset] = mx.array([offset], dtype=mx.int32)
    return known


def _make(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.rope

    def rope(
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        if thread.active:
            rows = offset.size if isinstance(offset, mx.array) else 1
            if (
                a.ndim >= 3
                and a.dtype in FLOATS
                and 0 < dims <= a.shape[-1]
                and dims % 2 == 0
                and (freqs is None) != (base is None)
                and (freqs is None or freqs.size == dims // 2)
                and rows in (1, a.shape[0])
            ):
                return native(a, dims, traditional, base, scale, offset_array(offset), freqs, stream)
            uncovered("rope", f"{a.shape} of {a.dtype}, {dims} dimensions, {rows} offsets")
        return stock(
            a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, stream=stream
        )

    return rope


OPERATIONS = (Operation("rope", mx.fast, "rope", _make, "base or freqs, scalar or per-row offsets, both layouts"),)
