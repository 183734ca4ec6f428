"""Attention state under a codec: full or sliding, each row plain at first and coded from its threshold on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import mlx.core as mx

from gnomon.kernels import dispatch
from gnomon.kernels.coded import Mask, View
from gnomon.kernels.codes import Pair
from gnomon.state.codecs.codec import Codec, Fetched
from gnomon.state.full import FullLayer, full_mask
from gnomon.state.layer import CodesPair, LayerState
from gnomon.state.rows import Rows
from gnomon.state.sliding import SlidingLayer
from gnomon.state.snapshot import LayerKind, LayerSnapshot

Storage = FullLayer | SlidingLayer


@dataclass
class Part:
    """Rows of the batch that are held alike: `members`, ascending, in this order in `storage`."""

    storage: Storage
    members: list[int]
    is_coded: bool


class QuantizedLayer(LayerState):
    """A storage for the rows that are plain still, and one of the same kind, which holds words, for those that are coded.

        rows of the batch      0      1      2      3
        plain  FullLayer       .      0      .      .        row 1 is shorter than `start`, or has not ended its first window
        coded  FullLayer       0      .      1      2        keys and values are the codec's words

    A row is coded before its next window once it has `start` tokens, at least one; so what a window added can be taken back whichever
    side of the threshold it ends on. As long as all rows are alike their storage works on the batch's own `rows`. Else each has rows of
    its own, and attention runs over each part and is put together.
    """

    def __init__(self, rows: Rows, make: Callable[[Rows], Storage], codec: Codec, start: int = 0) -> None:
        """`make` makes an empty storage of one row. `start` is in tokens."""
        self.rows = rows
        self.codec = codec
        self.start = start
        self._make = make
        self._parts = [Part(make(rows), [0], is_coded=False)]
        self.kind: LayerKind = self._parts[0].storage.kind
        self.window = self._parts[0].storage.window if isinstance(self._parts[0].storage, SlidingLayer) else None
        self._dims: tuple[int, int, mx.Dtype] | None = None

    # What models call.

    @property
    def offset(self) -> int | mx.array:
        """Position of the window's first token: a number for a lone row, int32 `[B]` for several."""
        return self.rows.lengths[0] if self.rows.num_rows == 1 else self.rows.offsets

    @property
    def max_size(self) -> int | None:
        """The window of a sliding layer."""
        return self.window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array | View, mx.array | View]:
        """Append `[B, heads, width, dim]`; returns arrays where all rows are plain, else views that attend over what is held."""
        self._dims = keys.shape[3], values.shape[3], keys.dtype
        for part in self._parts:
            own_keys, own_values = keys, values
            if not self._is_whole(part):
                members = mx.array(part.members)
                own_keys, own_values = keys[members], values[members]
            if part.is_coded:
                if self._appended(part, keys, values):
                    continue
                own_keys, own_values = self.codec.encode_keys(own_keys), self.codec.encode_values(own_values)
            part.storage.update_and_fetch(own_keys, own_values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array | View, mx.array | View]:
        """What the last append returned, for layers that share this one's keys."""
        if self._dims is None:
            raise ValueError("nothing was appended yet")
        first = self._parts[0]
        if len(self._parts) == 1 and not first.is_coded:
            return first.storage.keys_and_values()
        key_dim, value_dim, dtype = self._dims
        held = [self._held(part, self._dims) for part in self._parts]
        attend = partial(self._attend, held) if len(held) > 1 else partial(self._attend_part, first, held[0])
        heads, length = held[0].keys.shape[1], max(one.end for one in held)
        shape = (self.rows.num_rows, heads, length)
        return View(attend, (*shape, key_dim), dtype), View(attend, (*shape, value_dim), dtype)

    def codes_in_place(self, dim: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, CodesPair | None] | None:
        """As `FullLayer.in_place`, and how the buffers' words of heads of `dim` elements of `dtype` are read, or None where they are plain.
        `appends` follows. None while rows are held in different ways, and for other storages."""
        part = self._parts[0]
        storage = part.storage
        buffers = (
            storage.in_place("causal", settled=False)
            if len(self._parts) == 1 and isinstance(storage, FullLayer)
            else None
        )
        if buffers is None:
            return None
        self._dims = dim, dim, dtype
        pair = (self.codec.key_codes(dim, dtype), self.codec.value_codes(dim, dtype)) if part.is_coded else None
        return *buffers, pair

    def make_room(self, heads: int, dim: int, dtype: mx.Dtype) -> bool:
        """As `FullLayer.make_room`: a first window is plain."""
        part, *others = self._parts
        if others or part.is_coded or not isinstance(part.storage, FullLayer):
            return False
        return part.storage.make_room(heads, dim, dtype)

    def make_mask(self, width: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of the open forward: the storage's own; where parts of a sliding layer differ, None, since each masks itself."""
        if len(self._parts) == 1:
            return self._parts[0].storage.make_mask(width, return_array, window_size)
        if self.window is not None:
            return None
        storage = cast(FullLayer, self._parts[0].storage)
        return full_mask(self.rows, width, storage.mask_ndim, return_array, window_size)

    def size(self) -> int:
        return max(part.storage.size() for part in self._parts)

    def is_trimmable(self) -> bool:
        return True

    def _attend(
        self, held: Sequence[Fetched], queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array:
        """Each part's rows attend over what it holds; the results go back to their places."""
        found: list[mx.array] = []
        for part, one in zip(self._parts, held, strict=True):
            members = mx.array(part.members)
            own = mask
            if self.window is not None:
                own = part.storage.make_mask(queries.shape[2], window_size=self.window)
            elif isinstance(mask, mx.array) and mask.ndim > 3:
                own = mask[members][..., : one.end]
            found.append(self._attend_part(part, one, queries[members], scale, own, sinks))
        order = [row for part in self._parts for row in part.members]
        return mx.concatenate(found)[mx.array([order.index(row) for row in range(len(order))])]

    def _attend_part(
        self, part: Part, held: Fetched, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array:
        if part.is_coded:
            storage = part.storage
            if isinstance(mask, mx.array) and isinstance(storage, FullLayer) and storage.hides_only_later(mask):
                held = replace(held, starts=storage.rows.offsets)
            return self.codec.attend(queries, held, scale, mask, sinks)
        return mx.fast.scaled_dot_product_attention(
            queries, held.keys, held.values, scale=scale, mask=mask, sinks=sinks
        )

    def _held(self, part: Part, dims: tuple[int, int, mx.Dtype]) -> Fetched:
        storage = part.storage
        whole = storage.whole() if part.is_coded and isinstance(storage, FullLayer) else None
        if whole is not None:
            return Fetched(*whole, *dims, length=storage.rows.end)
        return Fetched(*storage.keys_and_values(), *dims)

    def _appended(self, part: Part, keys: mx.array, values: mx.array) -> bool:
        """Whether a kernel coded all rows' tokens into the buffers in place."""
        storage = part.storage
        if not (dispatch.thread.active and self._is_whole(part) and isinstance(storage, FullLayer)):
            return False
        buffers = storage.room()
        made = self.codec.append(keys, values, self.rows.offsets, buffers) if buffers is not None else None
        if made is not None:
            storage.appended(*made)
        return made is not None

    # What layers that run as one operation call.

    pages = None

    @property
    def codes(self) -> CodesPair | None:
        """How the buffers of `open_buffers` are read; None if they are plain."""
        if not self._parts[0].is_coded or self._dims is None:
            return None
        key_dim, value_dim, dtype = self._dims
        return self.codec.key_codes(key_dim, dtype), self.codec.value_codes(value_dim, dtype)

    @property
    def flat_type(self) -> mx.Dtype | None:
        """As `FullLayer.flat_type`; None unless one storage holds all rows as words."""
        part, *others = self._parts
        if others or not part.is_coded or not isinstance(part.storage, FullLayer):
            return None
        return part.storage.flat_type

    @property
    def appending(self) -> mx.array | None:
        """What is computed once a kernel has appended to the buffers."""
        storage = self._parts[0].storage
        return storage.appending if isinstance(storage, FullLayer) else None

    def open_buffers(self, *, settled: bool = False) -> Pair | None:
        """Those of the storage, where one holds all rows and what its elements stand for is known."""
        part, *others = self._parts
        if others or not isinstance(part.storage, FullLayer) or (part.is_coded and self._dims is None):
            return None
        return part.storage.open_buffers(settled=settled)

    def appends(self, appending: mx.array) -> None:
        """A kernel was given the buffers of `open_buffers` or `codes_in_place` and appends the open window."""
        storage = self._parts[0].storage
        if isinstance(storage, FullLayer):
            storage.appends(appending)

    # What BatchState calls.

    def begin(self) -> None:
        self._code_due()
        for part in self._parts:
            if not self._is_whole(part):
                part.storage.rows.begin(self.rows.width, [self.rows.counts[row] for row in part.members])
            part.storage.begin()

    def commit(self) -> None:
        for part in self._parts:
            storage, rows = part.storage, part.storage.rows
            storage.commit()
            if self._is_whole(part):
                continue
            if rows.num_rows == 1 and rows.counts[0] < rows.width:
                # A row that has a part to itself takes whole windows, padding too.
                storage.rollback([rows.width - rows.counts[0]])
            rows.commit()

    def land(self) -> None:
        for part in self._parts:
            part.storage.land()

    def abort(self) -> None:
        for part in self._parts:
            part.storage.abort()
            if not self._is_whole(part):
                part.storage.rows.abort()

    def rollback(self, back: Sequence[int]) -> None:
        for part in self._parts:
            own = [back[row] for row in part.members]
            part.storage.rollback(own)
            if not self._is_whole(part):
                part.storage.rows.rollback(own)

    def keep(self, order: Sequence[int], row_capacity: int) -> None:
        lengths = [self.rows.lengths[row] for row in order]
        parts: list[Part] = []
        for part in self._parts:
            places = [place for place, row in enumerate(order) if row in part.members]
            if places:
                sources = [part.members.index(order[place]) for place in places]
                part.storage.keep(sources, _capacity(len(places), len(order), row_capacity))
                parts.append(replace(part, members=places))
        self._settle(parts, lengths)

    def join(self, other: LayerState, row_capacity: int) -> None:
        if not isinstance(other, QuantizedLayer) or other.codec != self.codec or other.window != self.window:
            raise TypeError(f"a {self.kind} layer coded as {self.codec.name} can't take rows of {other!r}")
        first, total = self.rows.num_rows, self.rows.num_rows + other.rows.num_rows
        parts = {part.is_coded: part for part in self._parts}
        for theirs in other._parts:
            members = [first + row for row in theirs.members]
            mine = parts.get(theirs.is_coded)
            if mine is None:
                parts[theirs.is_coded] = replace(theirs, members=members)
            else:
                members = mine.members + members
                mine.storage.join(theirs.storage, _capacity(len(members), total, row_capacity))
                parts[mine.is_coded] = replace(mine, members=members)
        self._dims = self._dims or other._dims
        self._settle(list(parts.values()), self.rows.lengths + other.rows.lengths)

    def snapshot(self, row: int) -> LayerSnapshot:
        part, at = self._place(row)
        return self._coded_if_due(part, row, part.storage.snapshot(at))

    def can_cut(self, length: int) -> bool:
        # Below a threshold rows are plain and above it coded: no stretch of one serves the other.
        return self.start == 0 and self._parts[0].storage.can_cut(length)

    def cut(self, row: int, start: int, stop: int) -> LayerSnapshot:
        if not self.can_cut(self.rows.lengths[row]):
            raise ValueError(f"a {self.kind} layer coded from token {self.start} on can't be cut at {start}..{stop}")
        part, at = self._place(row)
        return self._coded_if_due(part, row, part.storage.cut(at, start, stop))

    def restore(self, snapshot: LayerSnapshot) -> None:
        numbers = dict(snapshot.numbers)
        number = numbers.pop("codec", None)
        if number not in (None, self.codec.number):
            raise ValueError(f"the snapshot's codec is number {number}, this layer's is {self.codec.number}")
        storage = self._make(self.rows)
        storage.restore(replace(snapshot, numbers=numbers))
        self._parts = [Part(storage, [0], is_coded=number is not None)]

    def arrays(self) -> list[mx.array]:
        return [array for part in self._parts for array in part.storage.arrays()]

    def bytes_held(self) -> int:
        return sum(part.storage.bytes_held() for part in self._parts)

    def problems(self) -> list[str]:
        found = [problem for part in self._parts for problem in part.storage.problems()]
        if sorted(row for part in self._parts for row in part.members) != list(range(self.rows.num_rows)):
            found.append(f"parts hold rows {[part.members for part in self._parts]} of {self.rows.num_rows}")
        for part in self._parts:
            own = part.storage.rows
            if own.lengths != [self.rows.lengths[row] for row in part.members]:
                found.append(f"a part's rows are {own.lengths} long, the batch's are {self.rows.lengths}")
            if (own is self.rows) != (len(self._parts) == 1):
                found.append("a part has the wrong rows")
        return found

    def _is_whole(self, part: Part) -> bool:
        return part.storage.rows is self.rows

    def _is_due(self, row: int) -> bool:
        return self.rows.lengths[row] >= max(1, self.start)

    def _place(self, row: int) -> tuple[Part, int]:
        part = next(part for part in self._parts if row in part.members)
        return part, part.members.index(row)

    def _coded_if_due(self, part: Part, row: int, snapshot: LayerSnapshot) -> LayerSnapshot:
        """A snapshot of a row as it will be once its next window begins."""
        if not part.is_coded:
            return self._coded(snapshot) if self._is_due(row) else snapshot
        return replace(snapshot, numbers=snapshot.numbers | {"codec": self.codec.number})

    def _coded(self, snapshot: LayerSnapshot) -> LayerSnapshot:
        """A plain snapshot's content in words."""
        arrays = dict[str, mx.array]()
        if snapshot.arrays:
            keys, values = snapshot.arrays["keys"], snapshot.arrays["values"]
            self.codec.check(keys.shape[3])
            self.codec.check(values.shape[3])
            arrays = {"keys": self.codec.encode_keys(keys), "values": self.codec.encode_values(values)}
        return replace(snapshot, arrays=arrays, numbers=snapshot.numbers | {"codec": self.codec.number})

    def _code_due(self) -> None:
        """Move the plain rows that are due to the coded part."""
        plain = next((part for part in self._parts if not part.is_coded), None)
        due = [row for row in plain.members if self._is_due(row)] if plain is not None else []
        if plain is None or not due:
            return
        coded = next((part for part in self._parts if part.is_coded), None)
        members = list(coded.members) if coded is not None else []
        storage = coded.storage if coded is not None else None
        for row in due:
            taken = self._coded(plain.storage.snapshot(plain.members.index(row)))
            lone = Rows()
            lone.lengths = [self.rows.lengths[row]]
            fresh = self._make(lone)
            numbers = dict(taken.numbers)
            del numbers["codec"]
            fresh.restore(replace(taken, numbers=numbers))
            members.append(row)
            if storage is None:
                storage = fresh
                continue
            storage.join(fresh, _power_of_two(len(members)))
            storage.rows.join(lone)
        if storage is None:
            return
        order = sorted(range(len(members)), key=members.__getitem__)
        if order != list(range(len(members))):
            storage.keep(order, _power_of_two(len(members)))
            storage.rows.keep(order)
        parts = [Part(storage, sorted(members), is_coded=True)]
        if staying := [place for place, row in enumerate(plain.members) if row not in due]:
            plain.storage.keep(staying, _power_of_two(len(staying)))
            parts.append(Part(plain.storage, [plain.members[place] for place in staying], is_coded=False))
        self._settle(parts, self.rows.lengths)

    def _settle(self, parts: list[Part], lengths: Sequence[int]) -> None:
        """Take these parts, which together hold rows of these lengths, and give each the rows to work on."""
        self._parts = parts
        for part in parts:
            if len(parts) == 1:
                part.storage.rows = self.rows
            else:
                part.storage.rows = Rows()
                part.storage.rows.lengths = [lengths[row] for row in part.members]
                part.storage.rows.counts = [0] * len(part.members)


def _power_of_two(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _capacity(rows: int, total: int, row_capacity: int) -> int:
    """Rows a part makes room for: the batch's capacity if it holds all rows."""
    return row_capacity if rows == total else _power_of_two(rows)
