"""The rows of a batch: how long each is, what the forward in progress adds, and the index arrays that follow from both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import mlx.core as mx

from gnomon.kernels import native

T = TypeVar("T")

WIDE = 512
"""Tokens of a window from which on its layers' temporary arrays are too large to exist all at once."""


class Rows:
    """Lengths of a batch's rows, shared by all its layer states.

    Row `b` holds tokens at positions `0..lengths[b]`. Between `begin` and `commit` a forward over a `[B, width]` window is open, whose
    first `counts[b]` tokens are real. A flat window holds the real tokens alone, `[tokens, 1]`, row by row. Index arrays and masks depend
    only on these numbers, so layers share them through `memo`.
    """

    def __init__(self, num_rows: int = 1) -> None:
        self.lengths: list[int] = [0] * num_rows
        self.counts: list[int] = [0] * num_rows
        self.width: int = 0
        self.is_open: bool = False
        self.is_flat: bool = False
        self._memo: dict[Hashable, object] = {}
        self._paced: mx.array | None = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_even(self) -> bool:
        """All rows are equally long, so one contiguous append serves them all."""
        return len(set(self.lengths)) == 1

    @property
    def is_ragged(self) -> bool:
        """Some row of the open window is padded."""
        return any(count != self.width for count in self.counts)

    @property
    def end(self) -> int:
        """Slots the longest row may touch in the open forward, padding included."""
        return max(self.lengths) + self.width

    def begin(self, width: int, counts: Sequence[int] | None = None, flat: bool = False) -> None:
        """Open a forward over a window of `width` tokens per row, `counts[b]` of them real (all of them if None), those alone if `flat`."""
        if self.is_open:
            raise ValueError("a forward is already open: commit or abort it first")
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        new = [width] * self.num_rows if counts is None else list(counts)
        if len(new) != self.num_rows:
            raise ValueError(f"counts has {len(new)} entries for {self.num_rows} rows")
        if any(count < 0 or count > width for count in new):
            raise ValueError(f"counts must lie in 0..{width}, got {new}")
        self.width, self.counts, self.is_open, self.is_flat = width, new, True, flat
        self._memo, self._paced = {}, None

    def commit(self) -> None:
        """The open forward's real tokens now belong to their rows."""
        if not self.is_open:
            raise ValueError("no forward is open")
        self.lengths = [length + count for length, count in zip(self.lengths, self.counts, strict=True)]
        self.is_open = self.is_flat = False
        self._memo, self._paced = {}, None

    def abort(self) -> None:
        """The open forward adds nothing."""
        self.counts = [0] * self.num_rows
        self.is_open = self.is_flat = False
        self._memo, self._paced = {}, None

    def rollback(self, back: Sequence[int]) -> None:
        """Take `back[b]` tokens of the last forward off row `b`."""
        self.lengths = [length - n for length, n in zip(self.lengths, back, strict=True)]
        self.counts = [count - n for count, n in zip(self.counts, back, strict=True)]
        self._memo = {}

    def trim(self, back: Sequence[int]) -> None:
        """Take `back[b]` tokens of any forwards off row `b`. Nothing of the last one can be rolled back afterwards."""
        self.lengths = [length - n for length, n in zip(self.lengths, back, strict=True)]
        self.counts = [0] * len(self.lengths)
        self._memo = {}

    def keep(self, order: Sequence[int]) -> None:
        """Row `i` becomes what row `order[i]` was. Nothing can be rolled back afterwards."""
        self.lengths = [self.lengths[row] for row in order]
        self.counts = [0] * len(order)
        self._memo = {}

    def join(self, other: Rows) -> None:
        """Append the rows of `other`. Nothing can be rolled back afterwards."""
        self.lengths = self.lengths + other.lengths
        self.counts = [0] * len(self.lengths)
        self._memo = {}

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made once per forward."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # pyright: ignore[reportReturnType]

    def known(self, key: Hashable) -> object:
        """What was made under `key` in this forward, or None."""
        return self._memo.get(key)

    @property
    def is_wide(self) -> bool:
        return self.width * self.num_rows >= WIDE

    def pace(self, x: mx.array) -> None:
        """Layers of the open forward tell what they are about to append, `x`, so that no more than two of a wide window run at once.

        MLX's CUDA backend keeps what an operation read until the graph of up to 100 operations that it is part of has run, and its host
        is up to ten graphs ahead: copies and activations of all layers would exist at once. So everything before `x` is handed to the
        device here, and waited for when the next layer has been.
        """
        if not self.is_wide or not native.is_cuda():
            return
        mx.async_eval(x)
        if self._paced is not None:
            mx.eval(self._paced)
        self._paced = x

    @property
    def offsets(self) -> mx.array:
        """Row lengths before the open forward, int32 `[B]`."""
        return self.memo("offsets", lambda: mx.array(self.lengths, dtype=mx.int32))

    @property
    def positions(self) -> mx.array:
        """Absolute positions of the open window, int32 `[B, width]`."""
        return self.memo("positions", lambda: self.offsets[:, None] + mx.arange(self.width, dtype=mx.int32)[None])

    @property
    def homes(self) -> list[int]:
        """The row of each token of a flat window."""
        return [row for row, count in enumerate(self.counts) for _ in range(count)]

    @property
    def flat_positions(self) -> list[int]:
        """The absolute position of each token of a flat window."""
        return [length + i for length, count in zip(self.lengths, self.counts, strict=True) for i in range(count)]

    def slots(self, capacity: int, modulus: int | None = None) -> mx.array:
        """Buffer slots of the open window for `capacity` rows, int32 `[capacity, 1, width, 1]`; spare rows get slots 0..width."""

        def make() -> mx.array:
            starts = mx.array(self.lengths + [0] * (capacity - self.num_rows), dtype=mx.int32)
            slots = starts[:, None] + mx.arange(self.width, dtype=mx.int32)[None]
            return (slots if modulus is None else slots % modulus)[:, None, :, None]

        return self.memo(("slots", capacity, modulus), make)
