"""Scaled dot-product attention.

Contract of the native version
    q, k, v   [B, Hq, L, D], [B, Hk, S, D], [B, Hk, S, Dv] of one type (f32, f16, bf16), any strides, Hq a multiple of Hk
    mask      None, "causal", bool or of any of those types, broadcasting to [B, Hq, L, S]; or `lengths` and `window`, see `attention`
    sinks     [Hq] or None
    order     None, or [B, S]: the order in which keys are added up (see `dispatch.walk`)
    result    q's type; a row that sees no key gives zeros (stock: NaN, or the mean of all values)

Arithmetic: float32. A score is 16 partial sums over D in a fixed order; the sum of exponentials is 16 partial sums that start at the
first key the row sees; values are added one key after the other. So a row depends on the keys it sees and their order alone: not on how
many more there are, on the other queries, on chunks or threads. Masked keys are not read, except between seen ones, where they count as
zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.coded import View
from gnomon.kernels.dispatch import Operation, order_of, thread, uncovered
from gnomon.kernels.quantized_matmul import FLOATS

NONE, CAUSAL, BOOLEAN, ADDITIVE = range(4)


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """The same in plain MLX operations, in float32."""
    batch, heads, length, _ = q.shape
    groups, keys = k.shape[1], k.shape[2]
    repeats = heads // groups
    wide_k, wide_v = (mx.repeat(a.astype(mx.float32), repeats, axis=1) for a in (k, v))
    scores = (q.astype(mx.float32) @ wide_k.swapaxes(-1, -2)) * scale
    if isinstance(mask, str):
        mask = mx.arange(keys)[None] <= mx.arange(keys - length, keys)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask.astype(mx.float32)
    best = scores.max(axis=-1, keepdims=True)
    sink = None
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, heads, 1, 1), (batch, heads, length, 1))
        best = mx.maximum(best, sink)
    weights = mx.exp(scores - mx.where(best == -mx.inf, 0, best))
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + mx.exp(sink - best)
    return (mx.where(total == 0, 0, weights / mx.where(total == 0, 1, total)) @ wide_v).astype(q.dtype)


def over_slots(
    q: mx.array,  # noqa: ARG001  (the native version's)
    k: mx.array,  # noqa: ARG001
    v: mx.array,  # noqa: ARG001
    *,
    scale: float,  # noqa: ARG001
    sinks: mx.array | None,  # noqa: ARG001
    starts: mx.array,  # noqa: ARG001
    order: mx.array,  # noqa: ARG001
) -> mx.array | None:
    """Native attention `[B, Hq, L, Dv]` over keys and values `[B, Hk, slots, D]` of which row b has the slots that `order` `[B, S]` names,
    in that order; its query i sees those up to place starts[b] + i. None where there is no native version, or it doesn't take these."""
    return None


def why_not(q: mx.array, k: mx.array, v: mx.array, mask: str | mx.array | None, sinks: mx.array | None) -> str | None:
    """What keeps these arguments from the native version, or None."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q {q.shape} of {q.dtype}, k {k.shape} of {k.dtype}, v {v.shape} of {v.dtype}"
    if (
        k.shape[1] == 0
        or q.shape[1] % k.shape[1]
        or k.shape[:3] != v.shape[:3]
        or q.shape[3] != k.shape[3]
        or q.shape[0] != k.shape[0]
    ):
        return f"q {q.shape}, k {k.shape}, v {v.shape}"
    if isinstance(mask, str):
        if mask != "causal":
            return f"mask {mask!r}"
    elif mask is not None and mask.dtype != mx.bool_ and mask.dtype not in FLOATS:
        return f"a mask of {mask.dtype}"
    if sinks is not None and (sinks.dtype not in FLOATS or sinks.size != q.shape[1]):
        return f"sinks {sinks.shape} of {sinks.dtype}"
    return None


def _make(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.attention

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
        # Views are for the function below this one.
        if thread.active and not isinstance(k, View):
            why = why_not(q, k, v, mask, sinks)
            if why is None:
                order = order_of(k)
                if mask is None:
                    return native(q, k, v, scale, NONE, None, None, 0, sinks, order, stream)
                if isinstance(mask, str):
                    return native(q, k, v, scale, CAUSAL, None, None, 0, sinks, order, stream)
                kind = BOOLEAN if mask.dtype == mx.bool_ else ADDITIVE
                return native(q, k, v, scale, kind, mask, None, 0, sinks, order, stream)
            uncovered("attention", why)
        return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused, stream=stream)

    return scaled_dot_product_attention


def _make_over_slots(stock: Callable[..., mx.array | None], extension: ModuleType) -> Callable[..., mx.array | None]:
    native = extension.attention

    def over_slots(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        starts: mx.array,
        order: mx.array,
    ) -> mx.array | None:
        if not thread.active or why_not(q, k, v, None, sinks) is not None:
            return stock(q, k, v, scale=scale, sinks=sinks, starts=starts, order=order)
        return native(q, k, v, scale, CAUSAL, None, starts, 0, sinks, order)

    return over_slots


OPERATIONS = (
    Operation(
        "attention_over_slots",
        sys.modules[__name__],
        "over_slots",
        _make_over_slots,
        "keys and values in pages, each row's own, as attention",
    ),
    Operation(
        "attention",
        mx.fast,
        "scaled_dot_product_attention",
        _make,
        "causal, bool and additive masks, windows, sinks, grouped heads, any head size",
    ),
)
