"""Logit processors, vectorised over rows. Arithmetic follows mlx-lm's `make_logits_processors` to the bit, in the logits' dtype.

N cells (row x window position), V ids, W remembered tokens. `ids` are int32 [N, W], `seen` bool [N, W] tells which of them count.
"""

from __future__ import annotations

import mlx.core as mx


def add_bias(logits: mx.array, cells: mx.array, ids: mx.array, values: mx.array) -> mx.array:
    """Add values[i] to logits[cells[i], ids[i]]; pairs must be distinct."""
    return logits.at[cells, ids].add(values)


def presence_mask(ids: mx.array, seen: mx.array, vocab: int) -> mx.array:
    """Which ids occur among the seen ones: bool [N, vocab]."""
    marks = mx.zeros((ids.shape[0], vocab + 1), dtype=mx.bool_)
    marks = mx.put_along_axis(marks, mx.where(seen, ids, vocab), mx.array(True), axis=-1)
    return marks[:, :vocab]


def repetition(logits: mx.array, mask: mx.array, penalty: mx.array) -> mx.array:
    """Sign-aware multiplicative penalty of ids in the mask (Keskar et al. 2019, CTRL); penalty is [N, 1]."""
    return mx.where(mask, mx.where(logits < 0, logits * penalty, logits / penalty), logits)


def presence(logits: mx.array, mask: mx.array, penalty: mx.array) -> mx.array:
    """Subtract the penalty [N, 1] once from every id in the mask."""
    return mx.where(mask, logits - penalty, logits)


def frequency(logits: mx.array, ids: mx.array, seen: mx.array, penalty: mx.array) -> mx.array:
    """Subtract the penalty [N, 1] from an id for each of its occurrences, one after the other as mlx-lm does."""
    cells = mx.arange(ids.shape[0])[:, None]
    # Adding -0.0 leaves every float as it is, the sign of a zero included.
    updates = mx.where(seen, -penalty, mx.array(-0.0, penalty.dtype))
    return logits.at[cells, mx.where(seen, ids, 0)].add(updates)


def allow(logits: mx.array, words: mx.array) -> mx.array:
    """Logits [N, V] with every id whose bit in the packed words (uint32 [N, ceil(V / 32)]) is 0 at -inf; the others keep their bits."""
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(bits.reshape(words.shape[0], -1)[:, : logits.shape[-1]].astype(mx.bool_), logits, -mx.inf)
