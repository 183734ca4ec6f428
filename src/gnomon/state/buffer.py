"""Key and value buffers of a batch, with spare rows and spare slots."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

SLOT_STEP = 256
LARGE = 1 << 23
"""Bytes of keys from which on a layer's buffers are not copied in the same breath as the other layers'."""


def round_slots(slots: int) -> int:
    """The next multiple of the slot step, as mlx-lm's caches allocate."""
    return -(-slots // SLOT_STEP) * SLOT_STEP


def is_large(keys: mx.array) -> bool:
    return keys.nbytes >= LARGE


def copied(x: mx.array) -> mx.array:
    """A real copy of `x`, a `[rows, heads, slots, dim]` array or a view of one: it keeps nothing of the source buffer alive."""
    # A concatenation always writes new memory, where `contiguous` may hand the source's buffer on.
    return mx.concatenate([x, x[:, :, :0]], axis=2)


class RowBuffer:
    """Keys and values `[row_capacity, heads, slots, dim]` of up to `row_capacity` rows, written in place.

    Writes are in place only while nobody else holds the arrays, so readers get views that die with the forward, and everything that
    outlives it is copied out. Slots no row has written are zero or finite leftovers of a row that was padded; never another row's.
    """

    def __init__(self, row_capacity: int) -> None:
        self.row_capacity = row_capacity
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def slots(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def reserve(self, slots: int, like_keys: mx.array, like_values: mx.array) -> None:
        """Have at least `slots` slots; arrays that don't exist yet take heads, dim and dtype from the given ones."""
        if self.keys is None or self.values is None:
            self.keys = mx.zeros((self.row_capacity, like_keys.shape[1], slots, like_keys.shape[3]), like_keys.dtype)
            self.values = mx.zeros(
                (self.row_capacity, like_values.shape[1], slots, like_values.shape[3]), like_values.dtype
            )
        elif slots > self.slots:
            self.resize(self.row_capacity, slots, self.row_capacity)

    def resize(self, row_capacity: int, slots: int, num_rows: int) -> None:
        """Move the first `num_rows` rows to new arrays of the given capacity; slots beyond the smaller of old and new are dropped."""
        used = min(slots, self.slots)
        self.keys = _moved(self.keys, row_capacity, slots, num_rows, used)
        self.values = _moved(self.values, row_capacity, slots, num_rows, used)
        self.row_capacity = row_capacity

    def append(self, start: int, keys: mx.array, values: mx.array) -> None:
        """Write `[B, heads, L, dim]` at slots `start..start+L` of the first B rows."""
        if self.keys is None or self.values is None:
            raise ValueError("nothing reserved")
        rows, length = keys.shape[0], keys.shape[2]
        self.keys[:rows, :, start : start + length] = keys
        self.values[:rows, :, start : start + length] = values

    def scatter(self, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write `[B, heads, L, dim]` at the slots given per row as int32 `[row_capacity, 1, L, 1]`."""
        if self.keys is None or self.values is None:
            raise ValueError("nothing reserved")
        self.keys = _scattered(self.keys, slots, keys)
        self.values = _scattered(self.values, slots, values)

    def view(self, num_rows: int, slots: int) -> tuple[mx.array, mx.array]:
        """The first `slots` slots of the first `num_rows` rows, not copied."""
        if self.keys is None or self.values is None:
            raise ValueError("nothing reserved")
        return self.keys[:num_rows, :, :slots], self.values[:num_rows, :, :slots]

    def clear(self, row: int) -> None:
        """Zero a row's slots: what another row left there might be infinite or NaN and would pass through a masked sum."""
        if self.keys is not None and self.values is not None:
            self.keys[row : row + 1] = mx.zeros((), self.keys.dtype)
            self.values[row : row + 1] = mx.zeros((), self.values.dtype)

    def write(self, row: int, start: int, keys: mx.array, values: mx.array) -> None:
        """Write `[N, heads, n, dim]` at slots `start..start+n` of rows `row..row+N`."""
        if self.keys is None or self.values is None:
            raise ValueError("nothing reserved")
        rows, length = keys.shape[0], keys.shape[2]
        self.keys[row : row + rows, :, start : start + length] = keys
        self.values[row : row + rows, :, start : start + length] = values

    def permute(self, order: Sequence[int], slots: int) -> None:
        """Row `i` becomes what row `order[i]` was, in its first `slots` slots; costs only the rows that move."""
        moved = [row for row, source in enumerate(order) if row != source]
        if not moved or self.keys is None or self.values is None:
            return
        sources = mx.array([order[row] for row in moved])
        keys = mx.take(self.keys[:, :, :slots], sources, axis=0)
        values = mx.take(self.values[:, :, :slots], sources, axis=0)
        mx.eval(keys, values)  # read before the writes below, or those would copy the whole buffer
        for i, row in enumerate(moved):
            self.clear(row)
            self.write(row, 0, keys[i : i + 1], values[i : i + 1])

    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes


def _moved(x: mx.array | None, row_capacity: int, slots: int, num_rows: int, used: int) -> mx.array | None:
    if x is None:
        return None
    new = mx.zeros((row_capacity, x.shape[1], slots, x.shape[3]), x.dtype)
    new[:num_rows, :, :used] = x[:num_rows, :, :used]
    return new


def _scattered(buffer: mx.array, slots: mx.array, x: mx.array) -> mx.array:
    if not x.shape[3]:
        return buffer
    missing = buffer.shape[0] - x.shape[0]
    if missing:
        x = mx.pad(x, [(0, missing), (0, 0), (0, 0), (0, 0)])
    return mx.put_along_axis(buffer, mx.broadcast_to(slots, x.shape), x, axis=2)
