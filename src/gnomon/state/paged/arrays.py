"""One layer's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

PAGE = 256
"""Tokens of a page: a whole block of the prefix cache."""
MOST_SLICES = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start..start+count` of row `row` in a window, which go to a page from slot `offset` on.

    A new page is written whole: what the page `source` has before `offset`, the tokens, zeros. So nothing of whoever had it before is left.
    """

    row: int
    start: int
    count: int
    page: int
    offset: int
    is_new: bool
    source: int | None = None


class Writing:
    """The segments of a window, and the index arrays that its layers share."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        old = [one for one in segments if not one.is_new]
        # One operation for many rows; a few slices are cheaper for one or two.
        self.scattered = old if len(old) > MOST_SLICES else []
        self.sliced = [one for one in segments if one.is_new or not self.scattered]
        self._index: tuple[mx.array, mx.array, mx.array] | None = None

    def index(self, width: int) -> tuple[mx.array, mx.array, mx.array]:
        """Of each scattered token: its page, its slot there, and its place among the tokens of a window of this width."""
        if self._index is None:
            parts = self.scattered
            pages = [one.page for one in parts for _ in range(one.count)]
            slots = [one.offset + i for one in parts for i in range(one.count)]
            places = [one.row * width + one.start + i for one in parts for i in range(one.count)]
            self._index = mx.array(pages), mx.array(slots), mx.array(places)
        return self._index


class Layout:
    """Where rows' tokens are: all pages of each row, in order, and how many positions to read. Page 0 stands where a row has none."""

    def __init__(self, pages: Sequence[Sequence[int]], end: int) -> None:
        self.num_rows = len(pages)
        self.end = end
        self.num_pages = -(-end // PAGE)
        first, lone = pages[0][0] if pages[0] else 0, pages[0]
        is_run = len(pages) == 1 and list(lone) == list(range(first, first + self.num_pages))
        self.run = first if is_run else None
        """The first page of a lone row whose pages lie one behind the other."""
        self._pages = pages
        self._index: dict[tuple[int, int], mx.array] = {}
        self._slots: mx.array | None = None

    @property
    def slots(self) -> mx.array:
        """Places of all positions in pages that lie one behind the other, int32 `[B, end]`."""
        if self._slots is None:
            pages = mx.array(self._filled(), mx.int32)[:, :, None]
            slots = pages * PAGE + mx.arange(PAGE, dtype=mx.int32)
            self._slots = mx.contiguous(slots.reshape(self.num_rows, -1)[:, : self.end])
        return self._slots

    def _filled(self) -> list[list[int]]:
        return [[*row, *[0] * (self.num_pages - len(row))] for row in self._pages]

    def index(self, heads: int, capacity: int) -> mx.array:
        """Places in `[heads * capacity, PAGE, width]`, int32 `[B, heads, num_pages]`."""
        key = heads, capacity
        if key not in self._index:
            ids = mx.array(self._filled())
            self._index[key] = mx.arange(heads)[None, :, None] * capacity + ids[:, None]
        return self._index[key]


class PageArrays:
    """Keys and values `[heads, pages, PAGE, width]` of one layer, written in place.

    Writes are in place only while nobody else holds the arrays, so what is read is a copy, or a view that dies with the forward. A kernel
    that was given `open_buffers` writes in place whoever holds them; `appending` is computed once it has.
    """

    def __init__(self) -> None:
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self._copies: list[mx.array] = []
        self.appending: mx.array | None = None

    @property
    def keys(self) -> mx.array | None:
        self._settle()
        return self._keys

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._keys = value

    @property
    def values(self) -> mx.array | None:
        self._settle()
        return self._values

    @values.setter
    def values(self, value: mx.array) -> None:
        self._values = value

    @property
    def dtype(self) -> mx.Dtype | None:
        """The type of keys; None before the first write."""
        return None if self._keys is None else self._keys.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; 0 before the first write."""
        return sum(array.nbytes // array.shape[1] for array in self.lying())

    def held(self) -> list[mx.array]:
        """What to evaluate so that all writes are done."""
        return [array for array in (self._keys, self._values, self.appending) if array is not None]

    def lying(self) -> list[mx.array]:
        """Keys and values, whether or not a kernel still writes to them; none before the first write."""
        return [array for array in (self._keys, self._values) if array is not None]

    def open_buffers(self, *, settled: bool) -> tuple[mx.array, mx.array] | None:
        """The arrays, for a kernel that writes to them; None before the first write. Unless `settled`, it waits for `appending` itself."""
        if settled:
            self._settle()
        if self._keys is None or self._values is None:
            return None
        self.remember([])
        return self._keys, self._values

    def remember(self, copies: Sequence[mx.array]) -> None:
        """Copies that may not be evaluated yet: they are before a kernel writes, since their pages may be free by then."""
        if self._copies:
            mx.eval(self._copies)
        self._copies = list(copies)

    def _settle(self) -> None:
        """Let the arrays depend on the append that a kernel makes to them."""
        if self.appending is not None and self._keys is not None and self._values is not None:
            appending, self.appending = self.appending, None
            self._keys, self._values = mx.depends([self._keys, self._values], [appending])

    def reserve(self, capacity: int, keys: mx.array, values: mx.array) -> None:
        """Arrays that don't exist yet take heads, width and type from `[B, heads, n, width]`."""
        if self._keys is None or self._values is None:
            self.keys = mx.zeros((keys.shape[1], capacity, PAGE, keys.shape[3]), keys.dtype)
            self.values = mx.zeros((values.shape[1], capacity, PAGE, values.shape[3]), values.dtype)

    def empty(self) -> None:
        """Keep the place of zeros only."""
        self.appending, self._copies = None, []
        if self._keys is not None and self._values is not None:
            keys, values = self._keys, self._values
            self.keys = mx.zeros((keys.shape[0], 1, *keys.shape[2:]), keys.dtype)
            self.values = mx.zeros((values.shape[0], 1, *values.shape[2:]), values.dtype)

    def move(self, order: Sequence[int], capacity: int) -> None:
        """Page `i` becomes what page `order[i]` was; pages behind are zero. Evaluated, an array at a time."""
        if self.keys is not None and self.values is not None:
            self.keys = _moved(self.keys, order, capacity)
            self.values = _moved(self.values, order, capacity)

    def write(self, writing: Writing, keys: mx.array, values: mx.array) -> None:
        """Write the segments of `[B, heads, L, width]`."""
        if self.keys is None or self.values is None:
            raise ValueError("nothing reserved")
        _write(self.keys, writing, keys)
        _write(self.values, writing, values)

    def read(self, layout: Layout) -> tuple[mx.array, mx.array]:
        """The first positions of all rows, `[B, heads, end, width]`: a view of a run, else gathered."""
        if self.keys is None or self.values is None:
            raise ValueError("nothing was written yet")
        return _read(self.keys, layout), _read(self.values, layout)

    def slots(self, rows: int) -> tuple[mx.array, mx.array]:
        """All pages of all heads, one behind the other, as each of so many rows sees them: `[rows, heads, slots, width]`, not copied."""
        if self.keys is None or self.values is None:
            raise ValueError("nothing was written yet")
        return _spread(self.keys, rows), _spread(self.values, rows)

    def copy(self, page: int, start: int, stop: int) -> dict[str, mx.array]:
        """Slots `start..stop` of a page as arrays `[1, heads, n, width]` of their own; none before the first write."""
        if self.keys is None or self.values is None:
            return {}
        part = slice(page, page + 1), slice(start, stop)
        return {
            name: mx.concatenate([array[:, *part], array[:, *part][:, :, :0]], axis=2).swapaxes(0, 1)
            for name, array in (("keys", self.keys), ("values", self.values))
        }


def _moved(x: mx.array, order: Sequence[int], capacity: int) -> mx.array:
    kept = x if list(order) == list(range(x.shape[1])) else mx.take(x, mx.array(list(order)), axis=1)
    spare = mx.zeros((x.shape[0], capacity - len(order), *x.shape[2:]), x.dtype)
    moved = mx.concatenate([kept, spare], axis=1)
    mx.eval(moved)
    return moved


def _write(pool: mx.array, writing: Writing, x: mx.array) -> None:
    for one in writing.sliced:
        part = x[one.row, :, one.start : one.start + one.count]
        if not one.is_new:
            pool[:, one.page, one.offset : one.offset + one.count] = part
            continue
        pieces = [part]
        if one.source is not None and one.offset:
            pieces.insert(0, pool[:, one.source, : one.offset])
        if rest := PAGE - one.offset - one.count:
            pieces.append(mx.zeros((x.shape[1], rest, x.shape[3]), x.dtype))
        pool[:, one.page] = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
    if writing.scattered:
        pages, slots, places = writing.index(x.shape[2])
        tokens = x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3])
        pool[:, pages, slots] = tokens[:, places]


def _spread(pool: mx.array, rows: int) -> mx.array:
    heads, capacity, _, width = pool.shape
    return mx.broadcast_to(pool.reshape(1, heads, capacity * PAGE, width), (rows, heads, capacity * PAGE, width))


def _read(pool: mx.array, layout: Layout) -> mx.array:
    heads, capacity, _, width = pool.shape
    if layout.run is not None:
        first = layout.run * PAGE
        return pool.reshape(1, heads, capacity * PAGE, width)[:, :, first : first + layout.end]
    found = mx.take(pool.reshape(heads * capacity, PAGE, width), layout.index(heads, capacity), axis=0)
    return found.reshape(layout.num_rows, heads, layout.num_pages * PAGE, width)[:, :, : layout.end]
