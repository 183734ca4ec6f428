"""Attention of windows of a few queries, for models without a compiled step: masks, sliding windows, sinks.

Contract
    q, k, v  [B, Hq, L, D], [B, Hk, S, D], [B, Hk, S, D] bf16 or f16, L from 1 to 16, D 64, 128 or 256, Hq a multiple of Hk; k and v have
             strides but whole vectors, which begin at multiples of 16 bytes
    mask     None, "causal", bool or of those types or f32, broadcasting to [B, Hq, L, S]
    sinks    [Hq] or None
    result   q's type; a query that sees no key gives zeros

Arithmetic: float32, one rounding at the end. Keys are added up in stretches of 256 by where they lie, so a query depends, to the bit, on
the keys it sees and their slots alone: not on other rows and queries, or on how many more slots there are. What is masked counts for
nothing, whatever it is.

Stock attention takes a mask to cuDNN, which makes a plan for every new number of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels import attention as contract
from gnomon.kernels.attention import ADDITIVE, BOOLEAN, CAUSAL, NONE
from gnomon.kernels.coded import View
from gnomon.kernels.cuda.products import TYPES
from gnomon.kernels.cuda.sources import Kernel, make
from gnomon.kernels.dispatch import Operation, thread

HEAD_SIZES = frozenset({64, 128, 256})
MOST_WIDTH = 16
BLOCK, STRETCH = 128, 256
_MASKS = ("NO_MASK", "CAUSAL", "BOOLEAN", "ADDITIVE")
_OTHERS = {**TYPES, mx.float32: "float", mx.bool_: "bool"}


def heads_per_block(q_heads: int, kv_heads: int, size: int) -> int:
    """The largest part of a group of query heads, up to 4 (2 for heads of 256), that cuts it evenly."""
    group = q_heads // kv_heads
    return next(n for n in range(2 if size > 128 else 4, 0, -1) if group % n == 0)


_AT = "gnomon::At{{{0}_strides[0], {0}_strides[1], {0}_strides[2], {0}_strides[3]}}"


@cache
def _kernel(
    dtype: mx.Dtype, size: int, heads: int, kind: int, mask: mx.Dtype | None, sinks: mx.Dtype | None, scale: float
) -> Kernel:
    t = TYPES[dtype]
    masks = "static_cast<const bool*>(nullptr), gnomon::At{}" if mask is None else f"mask, {_AT.format('mask')}"
    types = f"{t}, {size}, {heads}, gnomon::{_MASKS[kind]}, {_OTHERS[mask or mx.bool_]}, {_OTHERS[sinks or dtype]}"
    body = f"""
  gnomon::attend_window<{types}>(
      q, {_AT.format("q")}, q_shape[1], q_shape[2], keys, {_AT.format("keys")}, values, {_AT.format("values")}, keys_shape[1],
      keys_shape[2], {masks}, {"nullptr" if sinks is None else "sinks"}, {scale!r}f, const_cast<int*>(counters), out, parts);
"""
    names = [
        "q",
        "keys",
        "values",
        "counters",
        *([] if mask is None else ["mask"]),
        *([] if sinks is None else ["sinks"]),
    ]
    return make("window", "windows.cuh", names, ["out", "parts"], body, block=BLOCK, any_strides=True)


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of a short window."""
    rows, q_heads, width, size = q.shape
    kv_heads, slots = k.shape[1:3]
    heads = heads_per_block(q_heads, kv_heads, size)
    kind, masks = NONE, list[mx.array]()
    if isinstance(mask, str):
        kind = CAUSAL
    elif mask is not None:
        kind = BOOLEAN if mask.dtype == mx.bool_ else ADDITIVE
        masks = [mx.broadcast_to(mask, (rows, q_heads, width, slots))]
    blocks, stretches = q_heads // heads, -(-slots // STRETCH)
    count = rows * width * blocks
    kernel = _kernel(
        q.dtype,
        size,
        heads,
        kind,
        masks[0].dtype if masks else None,
        None if sinks is None else sinks.dtype,
        float(scale),
    )
    return kernel(
        inputs=[q, k, v, mx.zeros(count, dtype=mx.int32), *masks, *([] if sinks is None else [sinks])],
        output_shapes=[q.shape, (count, stretches, heads, size + 2)],
        output_dtypes=[q.dtype, mx.float32],
        grid=(stretches * BLOCK, blocks, rows * width),
        threadgroup=(BLOCK, 1, 1),
    )[0]


def takes(q: mx.array, k: mx.array, v: mx.array, mask: str | mx.array | None, sinks: mx.array | None) -> bool:
    """Whether these arguments are a short window of the contract's."""
    return (
        contract.why_not(q, k, v, mask, sinks) is None
        and q.dtype in TYPES
        and 1 <= q.shape[2] <= MOST_WIDTH
        and q.shape[0] > 0
        and k.shape[2] > 0
        and q.shape[3] in HEAD_SIZES
        and v.shape[3] == q.shape[3]
    )


def _make(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:  # noqa: ARG001  (no extension)
    def scaled_dot_product_attention(
        q: mx.array,
        k: mx.array | View,
        v: mx.array,
        *,
        scale: float,
        mask: str | mx.array | None = None,
        sinks: mx.array | None = None,
        force_fused: bool = False,
        stream: Any = None,
    ) -> mx.array:
        # Views are for the function below this one. Longer windows are prompts: stock attention is made for those.
        if thread.active and not isinstance(k, View) and takes(q, k, v, mask, sinks):
            return attend(q, k, v, scale=scale, mask=mask, sinks=sinks)
        return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream)

    return scaled_dot_product_attention


OPERATIONS = (
    Operation(
        "attention",
        mx.fast,
        "scaled_dot_product_attention",
        _make,
        "windows of 1 to 16, heads of 64 128 256; causal, bool and additive masks, sinks; prompts stay stock",
    ),
)
