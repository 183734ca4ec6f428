"""Attention of prompts, in few shapes.

MLX takes it to cuDNN, which makes a plan for each new number of queries and keys: 40 to 50 ms on an H200, and half a second for the
first, where attention itself takes 0.1 to 0.4 ms. Prompts have any length. So queries and keys are filled up to one of a few lengths, at
most a quarter longer, and the mask keeps the filling out. A prompt's full chunks, as the engine cuts them, have such lengths and stay as
they are, and its last one is filled up by as many keys as queries, so neither needs more of a mask than its name: one written out takes 2
bytes for each query and key, as much as the keys and values of some layers, and exists once for all layers of a step.

Contract
    q, k, v   [B, Hq, L, D], [B, Hk, S, D], [B, Hk, S, D] bf16 or f16, L from 17
    mask      "causal", or bool [.., L, S]
    result    stock attention's of the filled up arrays, without the filling: it differs by rounding
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.cuda.products import TYPES
from gnomon.kernels.dispatch import Operation, thread

FEWEST = 17
"""Queries. Fewer are decode steps and windows of proposals."""
LEAST = 64
MOST = 2048
"""Between lengths that are planned for, so that the ends of the engine's chunks are among them at any length."""


def filled(length: int) -> int:
    """The next length that is planned for: 64, 128 to 512 in steps of 64, to 1024 in steps of 128, to 2048 of 256, and so on to 2048."""
    step = min(MOST, max(LEAST, (1 << (length - 1).bit_length()) // 8))
    return -(-length // step) * step


def attend(
    stock: Callable[..., mx.array], q: mx.array, k: mx.array, v: mx.array, *, mask: str | mx.array, **how: Any
) -> mx.array:
    """Attention of a prompt's chunk by `stock`."""
    length, keys = q.shape[2], k.shape[2]
    more = filled(length) - length
    if isinstance(mask, str):
        before = keys - length
        more_keys = more if before == filled(before) else filled(keys) - keys
        # As many of both: "causal" counts from the last key, and what is filled up stays behind all others.
        if more_keys != more:
            mask = _written(before, length + more, keys + more_keys, q.dtype)
    else:
        more_keys = filled(keys) - keys
        mask = _fill(mask, (-2, more), (-1, more_keys))
    out = stock(_fill(q, (2, more)), _fill(k, (2, more_keys)), _fill(v, (2, more_keys)), mask=mask, **how)
    return out[:, :, :length] if more else out


def _written(before: int, length: int, keys: int, dtype: mx.Dtype) -> mx.array:
    """The causal mask of queries behind `before` keys, added to scores, as stock attention makes it of bools for each layer."""
    key = before, length, keys, dtype
    if key not in thread.masks:
        seen = mx.arange(keys)[None] <= mx.arange(before, before + length)[:, None]
        thread.masks[key] = mx.where(seen, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))
    return thread.masks[key]


def _fill(x: mx.array, *ends: tuple[int, int]) -> mx.array:
    """Zeros behind the ends of some axes."""
    if not any(more for _, more in ends):
        return x
    widths = [(0, 0)] * x.ndim
    for axis, more in ends:
        widths[axis] = (0, more)
    return mx.pad(x, widths)


def takes(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> bool:
    """Whether these arguments are a prompt's of the contract."""
    if sinks is not None or not all(isinstance(x, mx.array) and x.ndim == 4 for x in (q, k, v)):
        return False
    if q.dtype not in TYPES or k.dtype != q.dtype or not FEWEST <= q.shape[2] <= k.shape[2]:
        return False
    if isinstance(mask, mx.array):
        return mask.dtype == mx.bool_ and mask.ndim >= 2 and mask.shape[-2:] == (q.shape[2], k.shape[2])
    return mask == "causal"


def _make(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:  # noqa: ARG001  (no extension)
    def scaled_dot_product_attention(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: str | mx.array | None = None,
        sinks: mx.array | None = None,
        **how: Any,
    ) -> mx.array:
        if thread.active and mask is not None and takes(q, k, v, mask, sinks):
            return attend(stock, q, k, v, scale=scale, mask=mask, **how)
        return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, **how)

    return scaled_dot_product_attention


OPERATIONS = (
    Operation(
        "prompt attention",
        mx.fast,
        "scaled_dot_product_attention",
        _make,
        "17 queries and more, causal or bool masks: stock attention, filled up to lengths that it has planned for",
    ),
)
