"""Full attention: every position keeps its keys and values. Latent attention (MLA) is the same with other widths."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from gnomon.state.buffer import RowBuffer, copied, is_large, round_slots
from gnomon.state.kept import KeptLayer
from gnomon.state.layer import CodesPair, LayerState, Pages
from gnomon.state.rows import Rows
from gnomon.state.snapshot import LayerKind, LayerSnapshot, refuse_coded, shared

KeysValues = tuple[mx.array, mx.array]


class FullLayer(KeptLayer[KVCache]):
    """Keys and values of row `b`, position `p`, at slot `p` of row `b`.

    A lone row is an mlx-lm `KVCache`, so the operations and shapes are mlx-lm's. Two rows and more share a `RowBuffer`: an append
    writes each row at its own length, and a mask made from the lengths hides what lies beyond them.
    """

    kind: LayerKind = "full"
    codes: CodesPair | None = None
    pages: Pages | None = None

    def __init__(self, rows: Rows, mask_ndim: int = 4) -> None:
        super().__init__(rows, KVCache())
        self.mask_ndim = mask_ndim
        self._is_shared = False
        """The lone row's arrays belong to a snapshot too."""

    # What models call.

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[B, heads, width, dim]` and return all keys and values `[B, heads, n, dim]`, n being the longest row's end.

        Raises RuntimeError in a flat window, which is appended in place only.
        """
        if self.rows.is_flat:
            raise RuntimeError("a flat window is appended in place only")
        self._settle()
        rows = self.rows
        rows.pace(keys)
        if self._lone is not None:
            if not rows.is_wide and self._lone.keys is not None and is_large(self._lone.keys):
                # mlx-lm's cache would grow in the step's graph, as all layers' do.
                self.room()
            return cast(KeysValues, self._lone.update_and_fetch(keys, values))
        if rows.end > self._buffer.slots:
            # A quarter of slack keeps the copies of all growing rows a constant share of the work.
            self._buffer.reserve(round_slots(max(rows.end, self._buffer.slots * 5 // 4)), keys, values)
            if not rows.is_wide:
                self.land()
        if rows.is_even:
            self._buffer.append(rows.lengths[0], keys, values)
        else:
            self._buffer.scatter(rows.slots(self._buffer.row_capacity), keys, values)
        return self.keys_and_values()

    def in_place(self, mask: mx.array | str | None = None, *, settled: bool = True) -> KeysValues | None:
        """Whole buffers `[rows or more, heads, slots, dim]` with room for the open window, for a kernel that writes at the rows' lengths.

        None before the first append, and for a `mask` that hides more than later positions. Nobody else reads these buffers beyond the
        rows' lengths: copies are made of what lies before, and a snapshot's arrays are copied first. `advance_in_place` follows,
        `appended` with the kernel's arrays in place of these, or `appends`. Unless `settled`, the kernel waits for `appending` itself.
        """
        if not self.hides_only_later(mask):
            return None
        if settled:
            self._settle()
        return self.room()

    def open_buffers(self, *, settled: bool = False) -> KeysValues | None:
        """`in_place` for layers that run as one operation, of which each query sees all positions up to its own."""
        return self.in_place("causal", settled=settled)

    def hides_only_later(self, mask: mx.array | str | None) -> bool:
        """Whether a mask of the open forward hides nothing but each query's later positions."""
        return hides_only_later(self.rows, self.mask_ndim, mask)

    def room(self) -> KeysValues | None:
        """The buffers of `in_place`, whatever the mask."""
        rows = self.rows
        if self._lone is None:
            if self._buffer.keys is None or self._buffer.values is None:
                return None
            if rows.end > self._buffer.slots:
                self._settle()
                slots = round_slots(max(rows.end, self._buffer.slots * 5 // 4))
                self._buffer.resize(self._buffer.row_capacity, slots, rows.num_rows)
                self.land()
            return self._buffer.keys, self._buffer.values
        lone = self._lone
        if lone.keys is None or lone.values is None:
            return None
        if self._is_shared or lone.offset + rows.width > lone.keys.shape[2]:
            self._settle()
            own = RowBuffer(1)
            own.reserve(round_slots(lone.offset + rows.width), lone.keys, lone.values)
            own.write(0, 0, lone.keys[..., : lone.offset, :], lone.values[..., : lone.offset, :])
            lone.keys, lone.values, self._is_shared = own.keys, own.values, False
            self.land()
        return cast("KeysValues", (lone.keys, lone.values))

    def make_room(self, heads: int, dim: int, dtype: mx.Dtype) -> bool:
        """Have buffers for the open window where there are none before the first append; whether some were made."""
        like = mx.zeros((1, heads, 0, dim), dtype)
        if self._lone is None:
            if self._buffer.keys is not None:
                return False
            self._buffer.reserve(round_slots(self.rows.end), like, like)
            return True
        if self._lone.keys is not None:
            return False
        own = RowBuffer(1)
        own.reserve(round_slots(self.rows.end), like, like)
        self._lone.keys, self._lone.values = own.keys, own.values
        return True

    @property
    def flat_type(self) -> mx.Dtype | None:
        """The type of keys of which a flat window can be appended, in place only; None if none can: it takes several rows."""
        keys = self._buffer.keys
        return keys.dtype if self._lone is None and keys is not None else None

    def whole(self) -> KeysValues | None:
        """The buffers `[rows or more, heads, slots, dim]`; what lies beyond the open window's end means nothing."""
        self._settle()
        keys, values = self.keys, self.values
        return None if keys is None or values is None else (keys, values)

    def advance_in_place(self) -> None:
        if self._lone is not None:
            self._lone.offset += self.rows.width

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last append returned, for layers that share this one's keys."""
        self._settle()
        if self._lone is not None:
            return cast(KeysValues, self._lone.keys_and_values())
        return self._buffer.view(self.rows.num_rows, self.rows.end)

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the open forward: mlx-lm's own if all rows are equally long, else bool `[B, 1, width, n]`."""
        if self._lone is not None:
            return self._lone.make_mask(width, return_array=return_array, window_size=window_size)
        return full_mask(self.rows, width, self.mask_ndim, return_array, window_size)

    def size(self) -> int:
        return max(self.rows.lengths)

    # What BatchState calls.

    def land(self) -> None:
        keys, _ = self._lying()
        if keys is not None and is_large(keys):
            mx.eval(self.arrays())

    def abort(self) -> None:
        if self._lone is not None:
            self._lone.trim(max(0, self._lone.offset - self.rows.lengths[0]))

    def rollback(self, back: Sequence[int]) -> None:
        if self._lone is not None:
            self._lone.trim(back[0])

    def keep(self, order: Sequence[int], row_capacity: int) -> None:
        if self._lone is not None:
            return
        self._settle()
        lengths = self.rows.lengths
        if len(order) == 1:
            self._separate(order[0])
            return
        self._buffer.permute(order, max((lengths[s] for i, s in enumerate(order) if i != s), default=0))
        needed = round_slots(max(lengths[row] for row in order) + 1)
        # Far too large after a long row left: shrinking costs the rows' own lengths.
        slots = needed if needed * 4 <= self._buffer.slots else self._buffer.slots
        if row_capacity != self._buffer.row_capacity or slots != self._buffer.slots:
            self._buffer.resize(row_capacity, slots, len(order))

    def join(self, other: LayerState, row_capacity: int) -> None:
        if not isinstance(other, FullLayer):
            raise TypeError(f"a full layer can't take rows of a {other.kind} layer")
        first, num_new = self.rows.num_rows, other.rows.num_rows
        mine = self._share(row_capacity)
        keys, values, length = other._used()
        slots = max(round_slots(length), mine.slots)
        if row_capacity != mine.row_capacity or slots > mine.slots:
            mine.resize(row_capacity, slots, first)
        if keys is not None and values is not None:
            mine.reserve(slots, keys, values)
        for row in range(first, first + num_new):
            mine.clear(row)
        if keys is not None and values is not None:
            mine.write(first, 0, keys, values)

    def snapshot(self, row: int) -> LayerSnapshot:
        length = self.rows.lengths[row]
        keys, values = self.keys, self.values
        if not length or keys is None or values is None:
            return LayerSnapshot("full", {}, {"length": 0})
        arrays = {
            "keys": copied(keys[row : row + 1, :, :length]),
            "values": copied(values[row : row + 1, :, :length]),
        }
        return LayerSnapshot("full", arrays, {"length": length})

    def can_cut(self, length: int) -> bool:  # noqa: ARG002  (every position is kept)
        return True

    def cut(self, row: int, start: int, stop: int) -> LayerSnapshot:
        keys, values = self.keys, self.values
        numbers = {"length": stop - start}
        if keys is None or values is None:
            return LayerSnapshot("full", {}, numbers)
        part = (slice(row, row + 1), slice(None), slice(start, stop))
        return LayerSnapshot("full", {"keys": copied(keys[part]), "values": copied(values[part])}, numbers)

    def restore(self, snapshot: LayerSnapshot) -> None:
        refuse_coded(snapshot)
        self._lone, self._buffer, self.appending = KVCache(), RowBuffer(1), None
        if snapshot.arrays:
            self._is_shared = not snapshot.has_room
            self._lone.state = *shared(snapshot, "keys", "values"), snapshot.numbers["length"]

    def problems(self) -> list[str]:
        rows, found = self.rows, super().problems()
        for name, array in (("keys", self.keys), ("values", self.values)):
            # Some models make a cache for a layer that never uses it.
            if array is not None and (array.shape[0] < rows.num_rows or array.shape[2] < max(rows.lengths)):
                found.append(f"{name} of shape {array.shape} are too small for rows of lengths {rows.lengths}")
        return found

    def _used(self) -> tuple[mx.array | None, mx.array | None, int]:
        """Views of all rows' slots up to the longest row's end, and that end; None before the first token."""
        length = max(self.rows.lengths)
        if self.keys is None or self.values is None:
            return None, None, 0
        rows = self.rows.num_rows
        return self.keys[:rows, :, :length], self.values[:rows, :, :length], length

    def _separate(self, row: int) -> None:
        """Become the lone row that `row` is."""
        length, shared = self.rows.lengths[row], self._buffer
        self._lone, self._buffer = KVCache(), RowBuffer(1)
        if length and shared.keys is not None and shared.values is not None:
            own = RowBuffer(1)
            own.reserve(round_slots(length + 1), shared.keys, shared.values)
            own.write(0, 0, shared.keys[row : row + 1, :, :length], shared.values[row : row + 1, :, :length])
            self._lone.state = own.keys, own.values, length

    def _share(self, row_capacity: int) -> RowBuffer:
        """The buffer, with a lone row moved into it."""
        self._settle()
        if self._lone is not None:
            lone, self._lone = self._lone, None
            self._buffer = RowBuffer(row_capacity)
            if lone.keys is not None and lone.values is not None:
                self._buffer.reserve(round_slots(lone.offset + 1), lone.keys, lone.values)
                self._buffer.write(0, 0, lone.keys[..., : lone.offset, :], lone.values[..., : lone.offset, :])
        return self._buffer


def full_mask(
    rows: Rows, width: int, mask_ndim: int, return_array: bool = False, window_size: int | None = None
) -> mx.array | str | None:
    """The mask of the open forward over slots that are positions: mlx-lm's own if all rows are equally long, else bool
    `[B, 1, width, n]`, or with `mask_ndim` 5 `[B, 1, 1, width, n]`."""
    if rows.is_even:
        return create_attention_mask(width, rows.lengths[0], return_array, window_size)

    def make() -> mx.array:
        queries = rows.positions[:, None, :, None]
        slots = mx.arange(rows.end, dtype=mx.int32)[None, None, None]
        mask = slots <= queries
        if window_size is not None:
            mask = mask & (slots > queries - window_size)
        return mask if mask_ndim == 4 else mask[:, :, None]

    return rows.memo(_mask_key(mask_ndim, window_size), make)


def hides_only_later(rows: Rows, mask_ndim: int, mask: mx.array | str | None) -> bool:
    """Whether a mask of the open forward, over slots that are positions, hides nothing but each query's later ones."""
    if isinstance(mask, str):
        return mask == "causal"
    return rows.width == 1 if mask is None else mask is rows.known(_mask_key(mask_ndim))


def _mask_key(mask_ndim: int, window_size: int | None = None) -> Hashable:
    return "full mask", window_size, mask_ndim
