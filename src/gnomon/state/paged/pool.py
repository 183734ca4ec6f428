"""The pool of pages: which are free, who holds the others, and how much memory they take."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import mlx.core as mx

from gnomon.state.paged.arrays import PAGE, PageArrays, Segment, Writing
from gnomon.state.snapshot import LayerKind, LayerPart

if TYPE_CHECKING:
    from gnomon.state.paged.table import PageTable

__all__ = ["PAGE", "Hold", "Page", "PagePart", "PagePool"]

SLACK = 8
"""Free pages that a pool keeps in any case. It grows by an eighth, and shrinks when less than half is needed."""


class Page:
    """The state of `PAGE` tokens in all layers, at place `index` of every layer's arrays. `holds` and `row_holds` count who needs it."""

    __slots__ = ("holds", "index", "row_holds")

    def __init__(self, index: int) -> None:
        self.index = index
        self.holds = 0
        self.row_holds = 0


class Hold:
    """One holder's claim on a page. When the object goes, the claim goes; a page that nobody claims is free.

    Who writes to a page must be the only one who holds it.
    """

    __slots__ = ("by_row", "page", "pool")

    def __init__(self, pool: PagePool, page: Page, by_row: bool) -> None:
        self.pool = pool
        self.page = page
        self.by_row = by_row
        page.holds += 1
        page.row_holds += by_row

    def __del__(self) -> None:
        # Any thread may be the one that drops the last reference: the pool's own thread settles the books.
        self.pool.dropped.append((self.page, self.by_row))

    def share(self, *, by_row: bool) -> Hold:
        """Another claim on the page."""
        return Hold(self.pool, self.page, by_row)


class PagePart:
    """One layer's share of a page that holds a whole block, in place of a `LayerSnapshot`. `arrays` copies it out."""

    __slots__ = ("_arrays", "hold", "numbers")
    kind: LayerKind = "full"

    def __init__(self, hold: Hold, arrays: PageArrays, numbers: Mapping[str, int]) -> None:
        self.hold = hold
        self.numbers = numbers
        self._arrays = arrays

    @property
    def arrays(self) -> Mapping[str, mx.array]:
        """Copies, evaluated: a lazy one would hold on to the pool's arrays."""
        copies = self._arrays.copy(self.hold.page.index, 0, PAGE)
        mx.eval(list(copies.values()))
        return copies

    @property
    def owned(self) -> Sequence[mx.array]:
        return ()

    @property
    def nbytes(self) -> int:
        """The layer's bytes of one page."""
        return self._arrays.page_bytes


class PagePool:
    """Pages of one model's layers. Use it from one thread, the one that evaluates the states.

    Place 0 is never given away: it holds zeros. Growing copies one layer's arrays at a time.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers = [PageArrays() for _ in range(num_layers)]
        self.tables: WeakSet[PageTable] = WeakSet()
        """What rows hold."""
        self.dropped: deque[tuple[Page, bool]] = deque()
        self.num_moves = 0
        """How often the arrays were made anew, larger or smaller."""
        self._capacity = 1
        self._free: list[int] = []
        self._pages: dict[int, Page] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers; 0 before the first write."""
        return sum(layer.page_bytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, free pages included."""
        return sum(array.nbytes for layer in self.layers for array in layer.lying())

    @property
    def capacity(self) -> int:
        """Pages that there is room for."""
        return self._capacity - 1

    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.held()]

    def pages(self) -> list[Page]:
        """The pages that somebody holds."""
        self.settle()
        return list(self._pages.values())

    def settle(self) -> None:
        """Take back the claims that were dropped."""
        while self.dropped:
            page, by_row = self.dropped.popleft()
            page.holds -= 1
            page.row_holds -= by_row
            # A page of before a failure isn't in the books any more.
            if not page.holds and self._pages.get(page.index) is page:
                del self._pages[page.index]
                insort(self._free, page.index)

    def take(self, count: int, after: Hold | None = None, *, by_row: bool = True) -> list[Hold]:
        """Claims on `count` free pages, which lie behind `after`, or one behind the other, where that can be."""
        if not count:
            return []
        self.settle()
        if count > len(self._free):
            self._resize(len(self._pages) + count)
        start = self._place(count, None if after is None else after.page.index + 1)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        for index in taken:
            self._pages[index] = Page(index)
        return [Hold(self, self._pages[index], by_row) for index in taken]

    def reserve(self, count: int) -> None:
        """Have room for so many more pages, in one go."""
        self.settle()
        if count > len(self._free):
            self._resize(len(self._pages) + count)

    def is_shared(self, hold: Hold) -> bool:
        """Whether somebody else holds the page too."""
        self.settle()
        return hold.page.holds > 1

    def tidy(self) -> None:
        """Give memory back when less than half of it is needed. No forward may be open."""
        self.settle()
        used = len(self._pages)
        if len(self._free) <= max(SLACK, used):
            return
        order = [0, *sorted(self._pages)]
        self._pages = {i: self._pages[index] for i, index in enumerate(order) if index}
        for index, page in self._pages.items():
            page.index = index
        self._move(order, len(order) + used // 8)

    def imported(self, parts: Sequence[LayerPart]) -> list[PagePart]:
        """A page with the content of copies of a whole block, by layer."""
        hold = self.take(1, by_row=False)[0]
        writing = Writing([Segment(0, 0, PAGE, hold.page.index, 0, is_new=True)])
        for layer, part in zip(self.layers, parts, strict=True):
            if part.arrays:
                keys, values = part.arrays["keys"], part.arrays["values"]
                layer.reserve(self._capacity, keys, values)
                layer.write(writing, keys, values)
        mx.eval(self.arrays())
        return [PagePart(hold, layer, part.numbers) for layer, part in zip(self.layers, parts, strict=True)]

    def write(self, number: int, writing: Writing, keys: mx.array, values: mx.array) -> None:
        """Write a layer's window `[B, heads, L, width]`."""
        layer = self.layers[number]
        layer.reserve(self._capacity, keys, values)
        layer.write(writing, keys, values)

    def recover(self) -> bool:
        """After a failure: whether all pages can still be computed. If not, they are gone and the pool is empty."""
        try:
            for layer in self.layers:
                mx.eval(layer.held())
        except RuntimeError:
            self.empty()
            return False
        return True

    def empty(self) -> None:
        """Forget all pages, whoever holds them, and what was to be computed for them; widths and types stay known."""
        self._free, self._pages, self._capacity = [], {}, 1
        for layer in self.layers:
            layer.empty()

    def check_integrity(self) -> None:
        """Raise RuntimeError when the books are wrong."""
        self.settle()
        places = sorted([0, *self._free, *self._pages])
        if places != list(range(self._capacity)):
            raise RuntimeError(f"of {self._capacity} places {len(self._free)} are free and {len(self._pages)} are held")
        for index, page in self._pages.items():
            if page.index != index or not 0 <= page.row_holds <= page.holds or not page.holds:
                raise RuntimeError(
                    f"the page at {index} is at {page.index}, held by {page.holds}, {page.row_holds} rows"
                )
        for array in [array for layer in self.layers for array in layer.lying()]:
            if array.shape[1] != self._capacity:
                raise RuntimeError(f"an array of shape {array.shape} has no room for {self._capacity} places")

    def stats(self) -> dict[str, int]:
        """For /stats."""
        pages = self.pages()
        return {
            "page_tokens": PAGE,
            "page_bytes": self.page_bytes,
            "pool_bytes": self.nbytes,
            "capacity": self.capacity,
            "used": len(pages),
            "shared": sum(page.holds > 1 for page in pages),
            "free": len(self._free),
            "held_by_rows": sum(page.row_holds > 0 for page in pages),
            "moves": self.num_moves,
        }

    def _place(self, count: int, wanted: int | None) -> int:
        """Where in the list of free places to take `count` from."""
        free = self._free
        best, length = 0, 0
        for i, index in enumerate(free):
            length = length + 1 if i and free[i - 1] == index - 1 else 1
            if wanted is not None and index == wanted and free[i : i + count] == list(range(wanted, wanted + count)):
                return i
            if length >= count:
                if wanted is None:
                    return i - count + 1
                best = i - count + 1
        return best

    def _resize(self, used: int) -> None:
        """Have room for `used` pages and some more."""
        capacity = max(1 + used, self._capacity + self._capacity // 8)
        order = list(range(self._capacity))
        self._free += range(self._capacity, capacity)
        self._move(order, capacity, keep_free=True)

    def _move(self, order: Sequence[int], capacity: int, *, keep_free: bool = False) -> None:
        for layer in self.layers:
            layer.move(order, capacity)
        self._capacity = capacity
        if not keep_free:
            self._free = list(range(len(order), capacity))
        self.num_moves += 1
        mx.clear_cache()
