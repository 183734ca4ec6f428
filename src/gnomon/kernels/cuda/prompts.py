"""Attention of prompts, in few shapes.

MLX takes it to cuDNN, which makes a plan for each new number of queries and keys: 40 to 50 ms on an H200, and half a second for the
first, where attention itself takes 0.1 to 0.4 ms. Prompts have any length. So queries and keys are filled up to one of a few lengths, at
most a quarter longer, and the mask keeps the filling out.

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


def filled(length: int) -> int:
    """The next length that is planned for: 64, 128 to 512 in steps of 64, to 1024 in steps of 128, to 2048 of 256, and so on."""
    step = max(LEAST, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def attend(
    stock: Callable[..., mx.array], q: mx.array, k: mx.array, v: mx.array, *, mask: str | mx.array, **how: Any
) -> mx.array:
    """Attention of a prompt's chunk by `stock`."""
    length, keys = q.shape[2], k.shape[2]
    more = filled(length) - length
    if isinstance(mask, str):
        before = keys - length
        more_keys = more if before == 0 else filled(keys) - keys
        # As many of both: "causal" counts from the last key, and what is filled up stays behind all others.
        if more_keys != more:
            mask = mx.arange(keys + more_keys)[None] <= mx.arange(before, before + length + more)[:, None]
    else:
        more_keys = filled(keys) - keys
        mask = _fill(mask, (-2, more), (-1, more_keys))
    out = stock(_fill(q, (2, more)), _fill(k, (2, more_keys)), _fill(v, (2, more_keys)), mask=mask, **how)
    return out[:, :, :length] if more else out


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
