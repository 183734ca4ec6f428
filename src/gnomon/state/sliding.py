"""Sliding-window attention: a position sees the last `window` positions only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from gnomon.kernels import dispatch
from gnomon.state.buffer import RowBuffer, copied, round_slots
from gnomon.state.kept import KeptLayer
from gnomon.state.layer import LayerState
from gnomon.state.rows import Rows
from gnomon.state.snapshot import LayerKind, LayerSnapshot, refuse_coded, shared

KeysValues = tuple[mx.array, mx.array]


@dataclass(frozen=True, slots=True)
class Ring:
    """Buffers `[rows or more, heads, slots, dim]` in which position `p` of row `b` is at slot `(p - phases[b]) % size`, and of which a
    query sees the last `window` positions up to its own. There are `size` slots, or fewer before any position stands on an older one."""

    keys: mx.array
    values: mx.array
    size: int
    window: int
    phases: tuple[int, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """What kernels are told of it."""
        return self.size, self.window, *self.phases


class SlidingLayer(KeptLayer[RotatingKVCache]):
    """Keys and values of the last `window` positions of each row.

    A lone row is an mlx-lm `RotatingKVCache`, so the operations and shapes are mlx-lm's. Two rows and more share a ring of
    `window + slack` slots, position `p` at slot `p % ring`: a window of up to `slack + 1` tokens is written without losing a key that its
    own queries, or those after taking tokens back, still need. A longer window (prompts prefilled together) attends to the ring and
    the new keys side by side, and the ring is rebuilt when it commits.

    The ring lies in another order than mlx-lm's layout, so with stock operations a batch agrees with lone rows up to rounding; native ones
    are told of the order. `_phase[b]` remembers where row
    `b` stood in mlx-lm's layout (position `p` at slot `(p - phase) % window`): a row that is alone again continues in the very layout that
    it would have had if it had never shared.
    """

    kind: LayerKind = "sliding"

    def __init__(self, rows: Rows, window: int, slack: int) -> None:
        super().__init__(rows, RotatingKVCache(max_size=window))
        self.window = window
        self.slack = slack
        self.ring = window + slack
        self._phase: list[int] = [0]
        self._joint: tuple[mx.array, mx.array] | None = None  # ring and new keys of a long window, until it commits
        # Whether nobody but kernels that append in place, and `_readers`, ever read the arrays as they lie.
        self._is_own = False
        self._readers: list[mx.array] = []

    # What models call.

    @property
    def max_size(self) -> int:
        return self.window

    @property
    def _is_long(self) -> bool:
        return self.rows.width > self.slack + 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[B, heads, width, dim]`; returns the keys and values that `make_mask` describes."""
        self._lend()
        self.rows.pace(keys)
        if self._lone is not None:
            found = cast(KeysValues, self._lone.update_and_fetch(keys, values))
            return self._walked(found, self._order_alone)
        rows, buffer = self.rows, self._buffer
        if self._is_long:
            if buffer.keys is not None:
                old_keys, old_values = buffer.view(rows.num_rows, self._used)
                keys = mx.concatenate([old_keys, keys], axis=2)
                values = mx.concatenate([old_values, values], axis=2)
            self._joint = keys, values
            return self._walked(self._joint, self._order_joint)
        end = min(rows.end, self.ring)
        if end > buffer.slots:
            buffer.reserve(min(round_slots(max(end, buffer.slots * 5 // 4)), self.ring), keys, values)
        buffer.scatter(rows.slots(buffer.row_capacity, self.ring), keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last append returned, for layers that share this one's keys."""
        self._lend()
        if self._lone is not None:
            return self._walked(cast(KeysValues, self._lone.keys_and_values()), self._order_alone)
        if self._joint is not None:
            return self._walked(self._joint, self._order_joint)
        return self._walked(self._buffer.view(self.rows.num_rows, min(self.rows.end, self.ring)), self._order_ring)

    def ring_in_place(self, mask: mx.array | str | None = None, *, settled: bool = True) -> Ring | None:
        """Buffers with room for the open window, for a kernel that writes there, as `FullLayer.in_place`.

        An append overwrites what the oldest positions left, so these arrays are read by such kernels alone, and by copies that they
        wait for. None before the first append, for a window of a lone row or one that is longer than the ring's slack, and for a `mask`
        that hides other than later positions and those that are out of the window.
        """
        rows = self.rows
        if self._lone is not None:
            if rows.width > 1 or mask is not None or self._lone.keys is None:
                return None
        elif (
            self._is_long or self._buffer.keys is None or (mask is not None and mask is not rows.known(self._mask_key))
        ):
            return None
        if settled:
            self._settle()
        if not (self._is_own and self._has_room()):
            self._own()
        keys, values = self._lying()
        if keys is None or values is None:
            return None
        if self._readers:
            # Until an append is made: what is asked for may not be used.
            keys, values = mx.depends([keys, values], self._readers)
        if self._lone is None:
            return Ring(keys, values, self.ring, self.window, (0,) * rows.num_rows)
        return Ring(keys, values, self.window, self.window, (_phase(self._lone),))

    def advance_in_place(self) -> None:
        self._readers = []
        if self._lone is not None:
            keys, values, offset, keep, window, index = _parts(self._lone)
            self._lone.state = keys, values, offset + 1, keep, window, index % window + 1

    def _has_room(self) -> bool:
        keys = self._lying()[0]
        if keys is None or self._lone is None:
            return keys is not None and keys.shape[2] >= min(self.rows.end, self.ring)
        return keys.shape[2] > self._lone.offset or keys.shape[2] == self.window

    def _own(self) -> None:
        """Copy the arrays for kernels that append in place, with room for the open window and more."""
        self._settle()
        rows, held = self.rows, self._buffer
        if self._lone is not None:
            keys, values, offset, keep, window, index = _parts(self._lone)
            used = min(offset, window)
            # mlx-lm keeps more than the window behind a long one, in order.
            keys, values = (a[:, :, :used] if a.shape[2] <= window else a[:, :, -window:] for a in (keys, values))
            room = min(round_slots(used + 1), window) - used
            keys, values = (mx.concatenate([a, _zeros(a, room)], axis=2) for a in (keys, values))
            self._lone.state = keys, values, offset, keep, window, min(index, window)
        elif held.slots < min(rows.end, self.ring):
            slots = min(round_slots(max(rows.end, held.slots * 5 // 4)), self.ring)
            held.resize(held.row_capacity, slots, rows.num_rows)
        elif held.keys is not None and held.values is not None:
            held.keys, held.values = copied(held.keys), copied(held.values)
        self._is_own, self._readers = True, []

    def _reads(self, copies: Iterable[mx.array]) -> None:
        """Copies are made of the arrays as they now are: the next append waits for them."""
        if self._is_own:
            self._readers += copies

    def _lend(self) -> None:
        """The arrays may be read by anybody from now on, and as they now are."""
        self._settle()
        self._is_own, self._readers = False, []

    def _walked(self, found: KeysValues, order: Callable[[], mx.array | None]) -> KeysValues:
        """`found`, of which native attention knows that it is to add up from the oldest key to the newest: so its sums don't depend on
        where in the ring a row stands."""
        if dispatch.thread.active and (slots := order()) is not None:
            dispatch.walk(found[0], slots)
        return found

    def _order_alone(self) -> mx.array | None:
        if self._lone is None or self._lone.keys is None:
            return None
        keys, _, offset, _, window, index = _parts(self._lone)
        if keys.shape[2] != window or offset < window or index % window == 0:
            return None
        slots = mx.arange(window, dtype=mx.int32)
        return self.rows.memo(("lone order", window, index), lambda: ((slots + index) % window)[None])

    def _order_ring(self) -> mx.array | None:
        rows, ring = self.rows, self.ring
        if rows.end <= ring:
            return None
        slots = mx.arange(ring, dtype=mx.int32)
        return rows.memo(("ring order", ring), lambda: (rows.offsets[:, None] + rows.width + slots[None]) % ring)

    def _order_joint(self) -> mx.array:
        def make() -> mx.array:
            # Slots that hold nothing come first, so that no gap is between those that do.
            held = mx.concatenate([self._held(self.rows.offsets, self._used), self.rows.positions], axis=1)
            return mx.argsort(held, axis=1).astype(mx.int32)

        return self.rows.memo(("joint order", self.ring, self._used), make)

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the open forward: mlx-lm's for a lone row, else bool `[B, 1, width, slots]` over absolute positions."""
        if self._lone is not None:
            return self._lone.make_mask(width, window_size=window_size, return_array=return_array)
        rows = self.rows
        window = min(window_size or self.window, self.window)
        key = self._mask_key if window == self.window else ("sliding mask", window, self._mask_key)

        def make() -> mx.array:
            if self._is_long:
                held = mx.concatenate([self._held(rows.offsets, self._used), rows.positions], axis=1)
            else:
                held = self._held(rows.offsets + width, min(rows.end, self.ring))
            held = held[:, None, None]
            queries = rows.positions[:, None, :, None]
            return (held >= 0) & (held <= queries) & (held > queries - window)

        return rows.memo(key, make)

    @property
    def _mask_key(self) -> Hashable:
        return "sliding mask", self.window, self.ring, self._used if self._is_long else None

    def size(self) -> int:
        return min(max(self.rows.lengths), self.window)

    # What BatchState calls.

    def commit(self) -> None:
        if self._lone is None and self.rows.width > 1:
            self._rephase([length + count for length, count in zip(self.rows.lengths, self.rows.counts, strict=True)])
        if self._joint is not None:
            self._rebuild(*self._joint)
            self._joint = None

    def abort(self) -> None:
        self._lend()
        self._joint = None
        if self._lone is not None and self._lone.keys is not None:
            _take_back(self._lone, self._lone.offset - self.rows.lengths[0], self.rows.width)

    def rollback(self, back: Sequence[int]) -> None:
        if self._lone is not None:
            if self._lone.keys is not None:
                _take_back(self._lone, back[0], self.rows.width)
        elif self.rows.width > 1:
            self._rephase([length - n for length, n in zip(self.rows.lengths, back, strict=True)])

    def keep(self, order: Sequence[int], row_capacity: int) -> None:
        if self._lone is not None:
            return
        self._lend()
        lengths = self.rows.lengths
        if len(order) == 1:
            self._separate(order[0])
        else:
            moved = max((lengths[s] for i, s in enumerate(order) if i != s), default=0)
            self._buffer.permute(order, min(moved, self._buffer.slots))
            if row_capacity != self._buffer.row_capacity:
                self._buffer.resize(row_capacity, self._buffer.slots, len(order))
        self._phase = [self._phase[row] for row in order]

    def join(self, other: LayerState, row_capacity: int) -> None:
        if not isinstance(other, SlidingLayer) or other.ring != self.ring:
            raise TypeError(f"a sliding layer of window {self.window} can't take rows of {other!r}")
        first, num_new = self.rows.num_rows, other.rows.num_rows
        self._lend()
        other._lend()
        theirs = other._share(other._buffer.row_capacity)
        mine = self._share(row_capacity)
        slots = max(mine.slots, theirs.slots)
        if row_capacity != mine.row_capacity or slots > mine.slots:
            mine.resize(row_capacity, slots, first)
        if theirs.keys is not None and theirs.values is not None:
            mine.reserve(slots, theirs.keys, theirs.values)
        for row in range(first, first + num_new):
            mine.clear(row)
        if theirs.keys is not None and theirs.values is not None:
            mine.write(first, 0, *theirs.view(num_new, theirs.slots))
        self._phase = self._phase + other._phase

    def snapshot(self, row: int) -> LayerSnapshot:
        self._settle()
        lone = self._as_lone(row)
        numbers = {"length": self.rows.lengths[row], "window": self.window}
        if lone is None or not numbers["length"]:
            return LayerSnapshot("sliding", {}, numbers)
        keys, values, offset, _, _, index = _parts(lone)
        # An unwrapped row's buffer may have free slots: they are not part of the state.
        used = index if offset < keys.shape[2] else keys.shape[2]
        arrays = {"keys": copied(keys[:, :, :used]), "values": copied(values[:, :, :used])}
        self._reads(arrays.values())
        return LayerSnapshot("sliding", arrays, numbers | {"index": index})

    def can_cut(self, length: int) -> bool:
        # A row of just `window` tokens may have had tokens taken back, and then its oldest slot holds anything.
        return length < self.window

    def cut(self, row: int, start: int, stop: int) -> LayerSnapshot:
        length = self.rows.lengths[row]
        if not self.can_cut(length):
            raise ValueError(f"a row of {length} tokens has lost keys of a window of {self.window}: it can't be cut")
        numbers = {"length": stop - start, "window": self.window}
        keys, values = self.keys, self.values
        if keys is None or values is None:
            return LayerSnapshot("sliding", {}, numbers)
        # Before it wraps, position p is at slot p in either layout.
        part = (slice(row, row + 1), slice(None), slice(start, stop))
        arrays = {"keys": copied(keys[part]), "values": copied(values[part])}
        self._reads(arrays.values())
        return LayerSnapshot("sliding", arrays, numbers)

    def restore(self, snapshot: LayerSnapshot) -> None:
        refuse_coded(snapshot)
        numbers = snapshot.numbers
        if numbers["window"] != self.window:
            raise ValueError(f"the snapshot's window is {numbers['window']}, this layer's is {self.window}")
        self._lone, self._buffer, self.appending = RotatingKVCache(max_size=self.window), RowBuffer(1), None
        self._is_own, self._readers = False, []
        if snapshot.arrays:
            self._lone.state = *shared(snapshot, "keys", "values"), numbers["length"], 0, self.window, numbers["index"]
        self._phase = [0]

    def problems(self) -> list[str]:
        rows, found = self.rows, super().problems()
        if len(self._phase) != rows.num_rows:
            found.append(f"{len(self._phase)} phases for {rows.num_rows} rows")
        if self._joint is not None:
            found.append("a long window was left open")
        needed = min(max(rows.lengths), self.window)
        if self.keys is not None and (self.keys.shape[0] < rows.num_rows or self.keys.shape[2] < needed):
            found.append(
                f"keys of shape {self.keys.shape} are too small for rows of lengths {rows.lengths}, window {self.window}"
            )
        return found

    @property
    def _used(self) -> int:
        """Ring slots that hold something before the open window is written."""
        return min(max(self.rows.lengths), self.ring, self._buffer.slots)

    def _held(self, ends: mx.array, slots: int) -> mx.array:
        """The position each of the first `slots` ring slots holds in a row whose next position is `ends[b]`, int32 `[B, slots]`; negative
        where nothing was written yet."""
        last = ends[:, None] - 1
        return last - (last - mx.arange(slots, dtype=mx.int32)[None]) % self.ring

    def _rebuild(self, keys: mx.array, values: mx.array) -> None:
        """Make the ring hold the last positions of the long window given beside the old ring's slots."""
        rows, used = self.rows, self._used
        slots = min(self.ring, max(length + count for length, count in zip(rows.lengths, rows.counts, strict=True)))
        if not slots:
            return

        def make() -> mx.array:
            starts = rows.offsets[:, None]
            held = self._held(rows.offsets + mx.array(rows.counts, dtype=mx.int32), slots)
            source = mx.where(held >= starts, held - starts + used, mx.arange(slots, dtype=mx.int32)[None])
            return mx.minimum(source, used + rows.width - 1)[:, None, :, None]

        source = rows.memo(("ring sources", self.ring, used), make)
        keys = mx.take_along_axis(keys, mx.broadcast_to(source, (*keys.shape[:2], slots, keys.shape[3])), axis=2)
        values = mx.take_along_axis(
            values, mx.broadcast_to(source, (*values.shape[:2], slots, values.shape[3])), axis=2
        )
        self._buffer.reserve(min(round_slots(slots), self.ring), keys, values)
        self._buffer.write(0, 0, keys, values)

    def _rephase(self, ends: Sequence[int]) -> None:
        """mlx-lm puts a window of several tokens in order: the next single step then goes to slot 0."""
        self._phase = [end % self.window if end >= self.window else 0 for end in ends]

    def _share(self, row_capacity: int) -> RowBuffer:
        """The ring, with a lone row moved into it."""
        if self._lone is None:
            return self._buffer
        lone, self._lone = self._lone, None
        self._buffer = RowBuffer(row_capacity)
        length = self.rows.lengths[0]
        if not length or lone.keys is None:
            self._phase = [0]
            return self._buffer
        self._phase = [_phase(lone)]
        keys, values = _in_order(lone)
        held = min(keys.shape[2], self.ring)
        keys, values = keys[:, :, -held:], values[:, :, -held:]
        self._buffer.reserve(min(round_slots(length), self.ring), keys, values)
        start = (length - held) % self.ring
        first = min(held, self.ring - start)
        self._buffer.write(0, start, keys[:, :, :first], values[:, :, :first])
        if first < held:
            self._buffer.write(0, 0, keys[:, :, first:], values[:, :, first:])
        return self._buffer

    def _as_lone(self, row: int) -> RotatingKVCache | None:
        """A row as mlx-lm would hold it: the lone row's own cache, or a gathered copy of a ring's row."""
        if self._lone is not None:
            return self._lone if self._lone.keys is not None else None
        length, window, phase = self.rows.lengths[row], self.window, self._phase[row]
        if not length or self._buffer.keys is None or self._buffer.values is None:
            return None
        if length < window:
            positions, index = mx.arange(length), length
        else:
            positions = length - 1 - (length - 1 - phase - mx.arange(window)) % window
            index = (length - phase) % window or window
        slots = positions % self.ring
        lone = RotatingKVCache(max_size=window)
        keys = mx.take(self._buffer.keys[row : row + 1], slots, axis=2)
        values = mx.take(self._buffer.values[row : row + 1], slots, axis=2)
        lone.state = keys, values, length, 0, window, index
        return lone

    def _separate(self, row: int) -> None:
        """Become the lone row that `row` is."""
        self._lone = self._as_lone(row) or RotatingKVCache(max_size=self.window)
        self._buffer = RowBuffer(1)


def _zeros(like: mx.array, slots: int) -> mx.array:
    return mx.zeros((*like.shape[:2], slots, like.shape[3]), like.dtype)


def _parts(lone: RotatingKVCache) -> tuple[mx.array, mx.array, int, int, int, int]:
    """A rotating cache's keys, values, offset, kept prefix, window and index of the next slot; it must have seen tokens."""
    return cast("tuple[mx.array, mx.array, int, int, int, int]", lone.state)


def _in_order(lone: RotatingKVCache) -> tuple[mx.array, mx.array]:
    """Keys and values of a rotating cache from oldest to newest."""
    keys, values, offset, _, _, index = _parts(lone)
    if index == keys.shape[2]:
        return keys, values
    if index < offset:
        return (
            mx.concatenate([keys[:, :, index:], keys[:, :, :index]], axis=2),
            mx.concatenate([values[:, :, index:], values[:, :, :index]], axis=2),
        )
    return keys[:, :, :index], values[:, :, :index]


def _phase(lone: RotatingKVCache) -> int:
    """The phase of the layout a rotating cache has, or gets at its next single step."""
    keys, _, offset, _, window, index = _parts(lone)
    if offset < window:
        return 0
    return offset % window if keys.shape[2] > window else (offset - index) % window


def _take_back(lone: RotatingKVCache, count: int, width: int) -> None:
    """Take back `count` tokens of the last update, which was of `width` tokens (mlx-lm trims only unwrapped caches).

    A single step overwrote the oldest slot, whose position no later query sees, so stepping the index back is enough. A longer
    window was appended to at least the last `window - 1` positions, in order, so cutting its end is enough.
    """
    if not count:
        return
    keys, values, offset, keep, window, index = _parts(lone)
    offset -= count
    if width == 1:
        lone.state = keys, values, offset, keep, window, index - count
        return
    left = keys.shape[2] - count
    if not left:
        lone.state = None, None, 0, keep, window, 0
        return
    keys_left, values_left = keys[:, :, :left], values[:, :, :left]
    if left < min(offset, window):
        # A full cache must have `window` slots; the oldest one is never seen, so any finite content does.
        keys_left = mx.concatenate([keys[:, :, :1], keys_left], axis=2)
        values_left = mx.concatenate([values[:, :, :1], values_left], axis=2)
        left += 1
    lone.state = keys_left, values_left, offset, keep, window, left
