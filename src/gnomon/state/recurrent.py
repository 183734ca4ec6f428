"""Recurrent layers: convolution and state-space arrays that can't be cut at a position."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from gnomon.state.layer import LayerState
from gnomon.state.replay import Call, replay
from gnomon.state.rows import Rows
from gnomon.state.snapshot import LayerKind, LayerSnapshot, shared


class RecurrentLayer(ArraysCache, LayerState):
    """Arrays `[B, ...]` that every forward replaces whole, so joining and leaving cost no more than one step's write.

    An `ArraysCache`, since mamba's model writes its state back only into one. Before a forward the arrays are remembered; taking tokens
    back restores them and, where some tokens of a row stay, replays the layer's mixer on those (see `replay`). `calls` holds the mixer's
    calls of the last forward while they may be needed.
    """

    kind: LayerKind = "recurrent"

    def __init__(self, rows: Rows, size: int, slack: int, pad_safe: bool) -> None:
        self.rows = rows
        self.pad_safe = pad_safe
        self.slack = slack
        self.before: list[mx.array | None] = [None] * size
        self.calls: list[Call] = []
        self.is_recording = False
        super().__init__(size)

    # What models call.

    def __setitem__(self, idx: int, value: mx.array) -> None:
        super().__setitem__(idx, value)
        if idx == 0:
            self.rows.pace(value)

    @property
    def lengths(self) -> mx.array | None:
        """Real tokens per row of the open window, int32 `[B]`; None if no row is padded, as mlx-lm has it."""
        rows = self.rows
        if not rows.is_ragged:
            return None
        return rows.memo("counts", lambda: mx.array(rows.counts, dtype=mx.int32))

    @lengths.setter
    def lengths(self, value: mx.array | None) -> None:
        if value is not None:
            raise ValueError("the lengths of a recurrent layer follow from the rows and can't be set")

    def make_mask(self, N: int) -> mx.array | None:
        """Bool `[B, N]`, true for real tokens; None if no row is padded."""
        lengths = self.lengths
        if lengths is None:
            return None
        return self.rows.memo(("recurrent mask", N), lambda: mx.arange(N)[None] < lengths[:, None])

    def advance(self, N: int) -> None:
        """Nothing: the rows advance when the forward commits."""

    # What BatchState calls.

    def begin(self) -> None:
        self.before = list(self.cache)
        self.calls = []
        # A single token needs no replay, and a window longer than the slack is never taken back.
        self.is_recording = 1 < self.rows.width <= self.slack + 1

    def commit(self) -> None:
        self.is_recording = False

    def abort(self) -> None:
        self.cache = self.before
        self.calls = []
        self.is_recording = False

    def rollback(self, back: Sequence[int]) -> None:
        replay(self, back)

    def keep(self, order: Sequence[int], row_capacity: int) -> None:  # noqa: ARG002  (no buffer to size)
        self._forget()
        if list(order) != list(range(self.rows.num_rows)):
            index = mx.array(list(order))
            self.cache = [None if array is None else array[index] for array in self.cache]

    def join(self, other: LayerState, row_capacity: int) -> None:  # noqa: ARG002  (no buffer to size)
        if not isinstance(other, RecurrentLayer):
            raise TypeError(f"a recurrent layer can't take rows of a {other.kind} layer")
        self._forget()
        mine, theirs = self.rows.num_rows, other.rows.num_rows
        self.cache = [_joined(a, mine, b, theirs) for a, b in zip(self.cache, other.cache, strict=True)]

    def snapshot(self, row: int) -> LayerSnapshot:
        index = mx.array([row])
        arrays = {str(i): mx.take(array, index, axis=0) for i, array in enumerate(self.cache) if array is not None}
        return LayerSnapshot("recurrent", arrays, {"size": len(self.cache)})

    def restore(self, snapshot: LayerSnapshot) -> None:
        self._forget()
        names = [str(i) for i in range(snapshot.numbers["size"])]
        self.cache = [shared(snapshot, name)[0] if name in snapshot.arrays else None for name in names]

    def arrays(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]

    def bytes_held(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def problems(self) -> list[str]:
        rows = self.rows.num_rows
        return [f"array of shape {a.shape} for {rows} rows" for a in self.arrays() if a.shape[0] != rows]

    def _forget(self) -> None:
        self.before = [None] * len(self.cache)
        self.calls = []


def _joined(a: mx.array | None, num_a: int, b: mx.array | None, num_b: int) -> mx.array | None:
    """`a` over `b`; a missing side is zero, which is what models start from."""
    if a is None and b is None:
        return None
    if a is None and b is not None:
        a = mx.zeros((num_a, *b.shape[1:]), b.dtype)
    if b is None and a is not None:
        b = mx.zeros((num_b, *a.shape[1:]), a.dtype)
    return mx.concatenate([x for x in (a, b) if x is not None])
