"""Which pages each row of a batch has."""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.state.layer import Pages
from gnomon.state.paged.arrays import PAGE, Layout, Segment, Writing
from gnomon.state.paged.pool import Hold, PagePool
from gnomon.state.rows import Rows


def num_pages(length: int) -> int:
    """Pages of so many tokens."""
    return -(-length // PAGE)


class PageTable:
    """Pages of all rows, the same for all layers: position `p` of row `b` is in slot `p % PAGE` of page `held[b][p // PAGE]`.

    `BatchState` calls these verbs once, where it calls those of each layer. Between forwards a row holds exactly the pages of its length.
    A page that somebody else holds too is not written to: the row takes another one, into which the layers copy what comes before.
    """

    def __init__(self, rows: Rows, pool: PagePool) -> None:
        self.rows = rows
        self.pool = pool
        self.held: list[list[Hold]] = [[] for _ in rows.lengths]
        self.writing = Writing(())
        """What the open forward writes."""
        self._replaced: list[tuple[int, int, Hold]] = []
        pool.tables.add(self)

    def begin(self) -> None:
        """`rows` has just opened a forward: have pages for its real tokens."""
        rows, segments = self.rows, list[Segment]()
        self._replaced = []
        for row, (length, count) in enumerate(zip(rows.lengths, rows.counts, strict=True)):
            segments += self._extended(row, length, count)
        self.writing = Writing(segments)

    def commit(self) -> None:
        """The forward ended well."""
        self._replaced = []

    def abort(self) -> None:
        """The forward failed; `rows` has the lengths before it."""
        for row, place, hold in self._replaced:
            self.held[row][place] = hold
        self._replaced = []
        self.cut()

    def cut(self) -> None:
        """Give up the pages behind the rows' lengths."""
        for held, length in zip(self.held, self.rows.lengths, strict=True):
            del held[num_pages(length) :]

    def keep(self, order: Sequence[int]) -> None:
        """Row `i` becomes what row `order[i]` was; others go."""
        self.held = [self.held[row] for row in order]

    def join(self, other: PageTable) -> None:
        """Append the rows of `other`, which is used up. Raises ValueError for one of another pool."""
        if other.pool is not self.pool:
            raise ValueError("only rows of the same pool of pages can join")
        self.held += other.held
        other.held = []

    def shares(self, row: int) -> list[Hold]:
        """Claims on the row's pages, for a copy of the row."""
        return [hold.share(by_row=True) for hold in self.held[row]]

    def adopt(self, pages: Sequence[Hold], length: int) -> Writing:
        """Become a lone row of `length` tokens that begins with these pages; what it must write to have the rest."""
        kept = num_pages(min(length, len(pages) * PAGE))
        self.held = [[hold.share(by_row=True) for hold in pages[:kept]]]
        start = min(length, kept * PAGE)
        segments = self._extended(0, start, length - start)
        return Writing(segments)

    def layout(self, members: Sequence[int], end: int) -> Layout:
        """Where the first `end` positions of these rows are."""
        pages = num_pages(end)
        return Layout([[hold.page.index for hold in self.held[row][:pages]] for row in members], end)

    def opened(self) -> Pages:
        """Where the open window goes and what its rows attend to, for a kernel that appends it."""
        rows = self.rows
        counts = [1] * sum(rows.counts) if rows.is_flat else rows.counts
        fresh = [
            (one.page, -1 if one.source is None or not one.offset else one.source, one.offset, one.offset + one.count)
            for one in self.writing.segments
            if one.is_new
        ]
        return PAGE, [[hold.page.index for hold in held] for held in self.held], counts, fresh

    def num_held(self) -> int:
        """Different pages of all rows."""
        return len({hold.page for held in self.held for hold in held})

    def whole(self) -> list[Hold]:
        """Claims on pages that their rows have filled: none of them will be written to as long as they are held."""
        return [
            hold for held, length in zip(self.held, self.rows.lengths, strict=True) for hold in held[: length // PAGE]
        ]

    def problems(self) -> list[str]:
        """What contradicts `rows`."""
        if len(self.held) != self.rows.num_rows:
            return [f"{len(self.held)} rows have pages, there are {self.rows.num_rows}"]
        return [
            f"row {row} of {length} tokens has {len(held)} pages"
            for row, (held, length) in enumerate(zip(self.held, self.rows.lengths, strict=True))
            if len(held) != num_pages(length)
        ]

    def _extended(self, row: int, length: int, count: int) -> list[Segment]:
        """Pages for `count` tokens behind the row's `length`, and where these go."""
        if not count:
            return []
        held, pool = self.held[row], self.pool
        first, source, num_old = length // PAGE, None, len(held)
        if length % PAGE and pool.is_shared(held[first]):
            old = held[first]
            self._replaced.append((row, first, old))
            source, num_old = old.page.index, first
            held[first] = pool.take(1, held[first - 1] if first else None)[0]
        missing = num_pages(length + count) - len(held)
        held += pool.take(missing, held[-1] if held else None)
        segments = list[Segment]()
        start = 0
        while start < count:
            place, offset = divmod(length + start, PAGE)
            taken = min(PAGE - offset, count - start)
            is_new = place >= num_old
            copied = source if place == first else None
            segments.append(Segment(row, start, taken, held[place].page.index, offset, is_new, copied))
            start += taken
        return segments
