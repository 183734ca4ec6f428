"""Filters of a distribution, vectorised over rows, equal to the bit to those of `mlx_lm.sample_utils`.

They take and give log-probabilities [N, V] of any float dtype; a token filtered out becomes -inf.
"""

from __future__ import annotations

import mlx.core as mx


def log_softmax(logits: mx.array) -> mx.array:
    """logits - logsumexp per row of [N, V], in the logits' dtype, with the operations of mlx-lm's `generate_step`."""
    if logits.shape[0] == 1:
        return logits - mx.logsumexp(logits, keepdims=True)
    # Two reduced axes keep the composed form that a lone row gets; one axis alone would take MLX's fused kernel.
    return logits - mx.logsumexp(logits[:, None, :], axis=(1, 2), keepdims=True)[:, 0]


def top_p(logprobs: mx.array, mass: mx.array) -> mx.array:
    """Nucleus filter: drop the tokens that come after the first ones reaching `mass` (float32 [N, 1], 0 < mass < 1)."""
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending.astype(mx.float32))
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = above[:, :1] + probs[:, :1]
    dropped = (above >= mass * total).sum(axis=-1, keepdims=True)
    threshold = mx.take_along_axis(ascending, dropped, axis=-1)
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


def min_p(logprobs: mx.array, log_ratio: mx.array) -> mx.array:
    """Drop tokens less likely than exp(log_ratio) times the likeliest; log_ratio is [N, 1] in the dtype of logprobs."""
    return mx.where(logprobs < mx.max(logprobs, axis=-1, keepdims=True) + log_ratio, -mx.inf, logprobs)


def xtc(
    logprobs: mx.array, threshold: mx.array, applies: mx.array, exempt: tuple[mx.array, mx.array] | None = None
) -> mx.array:
    """Exclude top choices: of the tokens more likely than `threshold` [N, 1] all but the least likely, where `applies` (bool [N]).

    `exempt` are index arrays (cells, ids) of tokens never excluded.
    """
    probs = mx.softmax(logprobs, axis=-1)
    least = mx.where(probs > threshold, probs, mx.inf).min(axis=-1, keepdims=True)
    excluded = (probs > least) & applies[:, None]
    if exempt is not None:
        excluded[exempt] = mx.array(False)
    return mx.where(excluded, -mx.inf, logprobs)


def top_k(logprobs: mx.array, k: int) -> mx.array:
    """Keep exactly k tokens, 0 < k < V, the likeliest; among equals MLX's `argpartition` decides, as in mlx-lm."""
    rest = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[..., k:]
    return mx.put_along_axis(logprobs, rest, mx.array(-mx.inf, logprobs.dtype), axis=-1)
