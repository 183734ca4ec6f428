"""The tokens a row's penalties look back on, kept on the device since the newest are not read back yet."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

_STEP = 256


class History:
    """Left-aligned ids of B rows: `ids` int32 [B, capacity], `lengths` on the host. A row that keeps none stays at length 0."""

    def __init__(self, rows: Sequence[Sequence[int]], keeps: Sequence[bool]) -> None:
        self.lengths = [len(row) for row in rows]
        self.keeps = list(keeps)
        block = np.zeros((len(rows), _rounded(max(self.lengths, default=0))), dtype=np.int32)
        for slot, row in zip(block, rows, strict=True):
            slot[: len(row)] = row
        self.ids = mx.array(block)

    @property
    def wanted(self) -> bool:
        return any(self.keeps)

    def join(self, other: History) -> None:
        capacity = max(self.ids.shape[1], other.ids.shape[1])
        self.ids = mx.concatenate([_widened(self.ids, capacity), _widened(other.ids, capacity)])
        self.lengths += other.lengths
        self.keeps += other.keeps

    def keep(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
        self.keeps = [self.keeps[row] for row in rows]
        self.ids = self.ids[mx.array(list(rows), dtype=mx.int32)]

    def with_drafts(self, drafts: mx.array | None) -> mx.array:
        """The ids with each row's drafts [B, L-1] behind them."""
        return self.ids if drafts is None or drafts.shape[1] == 0 else self._written(drafts)

    def append(self, tokens: mx.array, counts: Sequence[int]) -> None:
        """Add the first counts[b] of tokens [B, L]; what is written beyond them is overwritten by the next call."""
        self.ids = self._written(tokens)
        self.lengths = [
            length + count if keeps else 0
            for length, count, keeps in zip(self.lengths, counts, self.keeps, strict=True)
        ]

    def _written(self, tokens: mx.array) -> mx.array:
        width = tokens.shape[1]
        ids = _widened(self.ids, _rounded(max(self.lengths) + width))
        at = np.array(self.lengths, dtype=np.int32)[:, None] + np.arange(width, dtype=np.int32)
        return mx.put_along_axis(ids, mx.array(at), tokens.astype(mx.int32), axis=-1)


def look_back(ids: mx.array, ends: Sequence[int], sizes: Sequence[int], vocab: int) -> tuple[mx.array, mx.array]:
    """The last sizes[i] (0: all) of the first ends[i] ids of each row of [N, capacity]: ids [N, W] and which of them count, bool [N, W].

    Ids outside the vocabulary don't count.
    """
    stops = np.array(ends, dtype=np.int32)[:, None]
    starts = np.array(
        [max(0, end - size) if size else 0 for end, size in zip(ends, sizes, strict=True)], dtype=np.int32
    )
    longest = max(1, int((stops[:, 0] - starts).max()))
    at = mx.array(starts[:, None]) + mx.arange(longest, dtype=mx.int32)
    seen = at < mx.array(stops)
    window = mx.take_along_axis(ids, mx.where(seen, at, 0), axis=-1)
    return window, seen & (window >= 0) & (window < vocab)


def _rounded(length: int) -> int:
    return max(1, -(-length // _STEP)) * _STEP


def _widened(ids: mx.array, capacity: int) -> mx.array:
    missing = capacity - ids.shape[1]
    return mx.pad(ids, [(0, 0), (0, missing)]) if missing > 0 else ids
