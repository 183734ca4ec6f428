"""HLG sampling: a tone curve on log-probabilities, after the hybrid log-gamma curve of high-dynamic-range video.

Around a pivot mu, within `width` nats, the distribution is that of plain temperature; above it the top rolls off
logarithmically with scale `shoulder`, below it the tail sinks ever slower with scale `toe`.
With z = l - mu, the curve is mu + sign(z) (w + b ln(1 + (|z| - w) / b)) beyond the width, b the side's scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from gnomon.engine.api import HLG, HLGPivot


def pivots(logprobs: mx.array, params: Sequence[HLG]) -> mx.array:
    """The pivot of each row of normalised log-probabilities [N, V], in nats: float32 [N, 1].

    `top`: `pivot_offset` below the likeliest token. `entropy`: the mean log-probability. `median`: the log-probability at which
    the cumulated mass, likeliest first, reaches one half.
    """
    logprobs = logprobs.astype(mx.float32)
    result = mx.zeros((len(params), 1), dtype=mx.float32)
    kinds: list[HLGPivot] = [p.pivot for p in params]
    for kind in dict.fromkeys(kinds):
        chosen = mx.array([[k == kind] for k in kinds])
        result = mx.where(chosen, _pivot(logprobs, params, kind), result)
    return result


def _pivot(logprobs: mx.array, params: Sequence[HLG], kind: HLGPivot) -> mx.array:
    if kind == "top":
        return mx.max(logprobs, axis=-1, keepdims=True) - _column([p.pivot_offset for p in params])
    if kind == "entropy":
        probs = mx.exp(logprobs)
        return mx.where(probs > 0, probs * logprobs, 0.0).sum(axis=-1, keepdims=True)
    descending = -mx.sort(-logprobs, axis=-1)
    mass = mx.cumsum(mx.exp(descending), axis=-1)
    first = (mass < 0.5 * mass[:, -1:]).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(descending, first, axis=-1)


def tone_curve(logprobs: mx.array, pivot: mx.array, params: Sequence[HLG]) -> mx.array:
    """Apply each row's curve to log-probabilities [N, V]; the dtype stays. The result is not normalised.

    Non-decreasing; -inf stays -inf. Tokens within the width, and sides whose scale is infinite, keep their bits, so that what
    follows is temperature sampling to the bit.
    """
    level = logprobs.astype(mx.float32)
    width = _column([p.width for p in params])
    distance = level - pivot
    above, below = distance > width, distance < -width
    linear = ~(above | below)
    shoulder = _roll(distance - width, _column([p.shoulder for p in params]))
    toe = _roll(-distance - width, _column([p.toe for p in params]))
    # Rounding of pivot + distance must not carry a token past one of the linear part.
    ceiling = mx.where(linear, level, -mx.inf).max(axis=-1, keepdims=True)
    floor = mx.where(linear, level, mx.inf).min(axis=-1, keepdims=True)
    high = mx.maximum(pivot + width + shoulder, ceiling)
    low = mx.minimum(pivot - width - toe, floor)
    bends_above = above & _finite([p.shoulder for p in params])
    bends_below = below & _finite([p.toe for p in params]) & (level > -mx.inf)
    return mx.where(bends_above, high, mx.where(bends_below, low, level)).astype(logprobs.dtype)


def _roll(excess: mx.array, scale: mx.array) -> mx.array:
    """scale ln(1 + excess / scale); its limit 0 where the scale is 0."""
    return mx.where(scale > 0, scale * mx.log1p(excess / mx.where(scale > 0, scale, 1.0)), 0.0)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, dtype=np.float32)[:, None])


def _finite(values: Sequence[float]) -> mx.array:
    return mx.array(np.isfinite(np.array(values))[:, None])
