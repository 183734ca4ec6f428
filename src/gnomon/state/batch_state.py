"""The state of all layers for all rows of one batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from gnomon.state.codecs.codec import Codec
from gnomon.state.codecs.coding import Coding
from gnomon.state.composite import CompositeLayer
from gnomon.state.full import FullLayer
from gnomon.state.layer import LayerState
from gnomon.state.paged.layer import PagedLayer
from gnomon.state.paged.pool import PAGE, PagePool
from gnomon.state.paged.table import PageTable
from gnomon.state.quantized import QuantizedLayer
from gnomon.state.recurrent import RecurrentLayer
from gnomon.state.replay import watch
from gnomon.state.rows import Rows
from gnomon.state.sliding import SlidingLayer
from gnomon.state.snapshot import LayerPart, LayerSnapshot, RowSnapshot

DEFAULT_SLACK = 16


class UnsupportedCache(ValueError):
    """A cache type, or a use of one, that no layer state stands in for."""


class BatchState:
    """Layer states of the rows of one batch. It starts with one empty row.

    A forward over a window `[B, width]`:

        state.begin(width, counts)               row b's first counts[b] tokens are real; all of them if counts is None
        logits = model(tokens, cache=state.caches)
        state.commit()                           or abort(), if the forward raised
        state.rollback(back)                     optional: takes back[b] of those tokens off row b

    Between forwards rows come and go: `join`, `keep`, `fork`, `snapshot`, `restore`. Row b's tokens are at positions `0..lengths[b]`
    whatever the others do. One row alone is held by mlx-lm's own caches, so it issues the same operations on the same shapes.
    Nothing is evaluated except copies of rows that change places; evaluate `arrays()` with the step's other results.
    """

    def __init__(
        self,
        model: nn.Module,
        templates: Sequence[Any],
        *,
        pad_safe: bool = True,
        slack: int = DEFAULT_SLACK,
        mask_ndim: int = 4,
        coding: Coding | None = None,
        pages: PagePool | None = None,
    ) -> None:
        """`templates` are the caches `mlx_lm` makes for the model; `slack` is how many tokens beyond the first a window may have and still
        be taken back; `mask_ndim` 5 gives ragged masks `[B, 1, 1, width, n]` to models that split heads into groups; `coding` names the
        codec of each template's keys and values (None: all plain); `pages` is where they are held, in place of buffers of the state's own.

        Raises `UnsupportedCache` for a cache type that isn't one of mlx-lm's `KVCache`, `RotatingKVCache`, `ArraysCache` or a
        `CacheList` of those, for a codec of a cache that holds no keys and values of its own, and with `pages` for all but full attention
        and a coding that starts later than at the first token.
        """
        if slack < 0:
            raise ValueError(f"slack must not be negative, got {slack}")
        self.model = model
        self.templates = list(templates)
        self.pad_safe = pad_safe
        self.slack = slack
        self.mask_ndim = mask_ndim
        self.rows = Rows()
        self.coding = coding
        self.table = None if pages is None else PageTable(self.rows, pages)
        codecs = coding.codecs if coding is not None else [None] * len(self.templates)
        self.caches: list[LayerState | CompositeLayer] = [
            self._state_for(template, codec, number)
            for number, (template, codec) in enumerate(zip(self.templates, codecs, strict=True))
        ]
        self.layers: list[LayerState] = list(_leaves(self.caches))
        self._row_capacity = 1
        self._has_moved = False
        """Buffers may have been made from others, and not be computed."""
        self.has_recurrent = any(isinstance(layer, RecurrentLayer) for layer in self.layers)
        self.has_sliding = any(layer.kind == "sliding" for layer in self.layers)
        if self.has_recurrent:
            watch(model)

    def _state_for(self, template: object, codec: Codec | None = None, number: int = 0) -> LayerState | CompositeLayer:
        # Exact types: a subclass may behave differently in ways that can't be seen from here.
        if type(template) is RotatingKVCache and template.keep:
            raise UnsupportedCache(f"a rotating cache that keeps its first {template.keep} tokens is not supported")
        if self.table is not None:
            if type(template) is not KVCache:
                raise UnsupportedCache(f"a cache of type {type(template).__name__} can't be held in pages")
            if self.coding is not None and self.coding.start:
                raise UnsupportedCache(f"pages are coded from the first token on, not from token {self.coding.start}")
            return PagedLayer(self.rows, self.table, number, self.mask_ndim, codec)
        if codec is not None:
            start = self.coding.start if self.coding is not None else 0
            if type(template) is KVCache:
                return QuantizedLayer(self.rows, lambda rows: FullLayer(rows, self.mask_ndim), codec, start)
            if type(template) is RotatingKVCache:
                window, slack = template.max_size, self.slack
                return QuantizedLayer(self.rows, lambda rows: SlidingLayer(rows, window, slack), codec, start)
            raise UnsupportedCache(f"a cache of type {type(template).__name__} can't be coded as {codec.name}")
        if type(template) is KVCache:
            return FullLayer(self.rows, self.mask_ndim)
        if type(template) is RotatingKVCache:
            return SlidingLayer(self.rows, template.max_size, self.slack)
        if type(template) is ArraysCache:
            return RecurrentLayer(self.rows, len(template.cache), self.slack, self.pad_safe)
        if type(template) is CacheList:
            parts = [self._state_for(part) for part in template.caches]
            return CompositeLayer([part for part in parts if isinstance(part, LayerState)])
        raise UnsupportedCache(f"caches of type {type(template).__name__} are not supported")

    @property
    def lengths(self) -> list[int]:
        """Tokens per row."""
        return list(self.rows.lengths)

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    def begin(self, width: int, counts: Sequence[int] | None = None, *, flat: bool = False) -> None:
        """Open a forward over a window `[B, width]` whose first `counts[b]` tokens of row b are real.

        A `flat` window is `[tokens, 1]`, the real ones alone, row by row; only models of which `blocks.flat_test` says so take it.

        Raises `ValueError` for counts outside 0..width, for a padded window of a lone row or of a model that isn't `pad_safe`, and for
        a flat one of states that don't take it.
        """
        if flat and any(getattr(cache, "flat_type", None) is None for cache in self.caches):
            raise ValueError("a flat window takes several rows of keys and values, all in full and held alike")
        if counts is not None and any(count != width for count in counts):
            if self.num_rows == 1:
                raise ValueError(f"a lone row takes whole windows: width is {width}, counts are {list(counts)}")
            if not self.pad_safe:
                raise ValueError(
                    f"padding disturbs this model: all counts must equal the width {width}, got {list(counts)}"
                )
        if self._has_moved:
            self._has_moved = False
            for layer in self.layers:
                layer.land()
        self.rows.begin(width, counts, flat)
        if self.table is not None:
            self.table.begin()
        for layer in self.layers:
            layer.begin()

    def commit(self) -> None:
        """The open forward's real tokens now belong to their rows."""
        for layer in self.layers:
            layer.commit()
        if self.table is not None:
            self.table.commit()
        self.rows.commit()

    def abort(self) -> None:
        """The open forward raised: every row is as it was before `begin`. Does nothing if none is open."""
        if self.rows.is_open:
            for layer in self.layers:
                layer.abort()
            if self.table is not None:
                self.table.abort()
            self.rows.abort()

    def rollback(self, back: Sequence[int]) -> None:
        """Take `back[b]` of the tokens the last forward gave row b off it again. May be repeated; joining or keeping rows ends it.

        Raises `ValueError` if a row has fewer tokens of the last forward left, and for recurrent or shared sliding layers if
        that forward was wider than `slack + 1`.
        """
        rows = self.rows
        if rows.is_open:
            raise ValueError("a forward is open: commit or abort it first")
        if len(back) != rows.num_rows:
            raise ValueError(f"back has {len(back)} entries for {rows.num_rows} rows")
        for row, (n, count) in enumerate(zip(back, rows.counts, strict=True)):
            if n < 0 or n > count:
                raise ValueError(f"row {row}: back must lie in 0..{count}, the tokens of the last forward, got {n}")
        if not any(back):
            return
        bounded = self.has_recurrent or (self.has_sliding and rows.num_rows > 1)
        if bounded and rows.width > self.slack + 1:
            raise ValueError(
                f"a window of {rows.width} tokens can't be taken back: the limit is slack + 1 = {self.slack + 1}"
            )
        for layer in self.layers:
            layer.rollback(back)
        rows.rollback(back)
        if self.table is not None:
            self.table.cut()

    @property
    def can_trim(self) -> bool:
        """Whether `trim` takes tokens off rows of any length."""
        return all(layer.kind == "full" for layer in self.layers)

    def trim(self, back: Sequence[int]) -> None:
        """Take the last `back[b]` tokens off row `b`, whichever forwards gave them.

        Raises `ValueError` if a row has fewer, and for layers other than full attention, which don't hold what they were.
        """
        self._must_be_closed()
        rows = self.rows
        if not self.can_trim:
            raise ValueError(f"only full attention can be trimmed, not {sorted({layer.kind for layer in self.layers})}")
        if len(back) != rows.num_rows or any(
            n < 0 or n > length for n, length in zip(back, rows.lengths, strict=False)
        ):
            raise ValueError(f"back must lie in 0..length for rows of lengths {rows.lengths}, got {list(back)}")
        if any(back):
            for layer in self.layers:
                layer.rollback(back)
            rows.trim(back)
            if self.table is not None:
                self.table.cut()

    def keep(self, order: Sequence[int]) -> None:
        """Row `i` becomes what row `order[i]` was; rows not named go.

        Only rows that change places are copied, so `order_without` is the cheap way to let rows go. Raises `ValueError` for an empty
        order, an unknown row, or one named twice.
        """
        self._must_be_closed()
        if not order or len(set(order)) != len(order) or any(row < 0 or row >= self.num_rows for row in order):
            raise ValueError(
                f"order must name at least one of the rows 0..{self.num_rows - 1}, each once; got {list(order)}"
            )
        # Half of the capacity stays free at most, so that rows coming and going don't resize every time.
        capacity = self._row_capacity
        while capacity > 1 and len(order) * 4 <= capacity:
            capacity //= 2
        self._row_capacity = 1 if len(order) == 1 else capacity
        self._has_moved = True
        for layer in self.layers:
            layer.keep(order, self._row_capacity)
        if self.table is not None:
            self.table.keep(order)
        self.rows.keep(order)

    def order_without(self, leaving: Collection[int]) -> list[int]:
        """The order for `keep` that lets the given rows go and moves the fewest others: last rows fill the holes."""
        staying = [row for row in range(self.num_rows) if row not in leaving]
        order = list(range(len(staying)))
        movers = [row for row in staying if row >= len(staying)]
        for row in order:
            if row in leaving:
                order[row] = movers.pop()
        return order

    def join(self, other: BatchState) -> None:
        """Append the rows of `other`, a state of the same model, which must not be used afterwards. The rows here are not copied unless
        their buffers are full or the newcomers are longer than those."""
        self._must_be_closed()
        other._must_be_closed()
        if other is self:
            raise ValueError("a state can't join itself")
        if len(other.layers) != len(self.layers) or other.slack != self.slack or other.coding != self.coding:
            raise ValueError("only states of the same model, slack and coding can join")
        if (self.table is None) != (other.table is None):
            raise ValueError("rows in pages and rows in buffers of their own can't join")
        total = self.num_rows + other.num_rows
        if total > self._row_capacity:
            self._row_capacity = 1 << (total - 1).bit_length()
        self._has_moved = True
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs, self._row_capacity)
        if self.table is not None and other.table is not None:
            self.table.join(other.table)
        self.rows.join(other.rows)

    def snapshot(self, row: int) -> RowSnapshot:
        """A copy of one row that shares no memory with this state but pages, which nobody writes to as long as two hold them.

        Lazy: evaluate its `arrays()` before the next forward, or that forward's appends copy whole buffers."""
        self._must_be_closed()
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row must lie in 0..{self.num_rows - 1}, got {row}")
        if self.table is not None:
            return RowSnapshot(self.rows.lengths[row], (), tuple(self.table.shares(row)))
        return RowSnapshot(self.rows.lengths[row], tuple(layer.snapshot(row) for layer in self.layers))

    def can_cut(self, length: int) -> bool:
        """Whether the state of a row of `length` tokens holds all its earlier states."""
        return all(layer.can_cut(length) for layer in self.layers)

    def cut(self, row: int, start: int, stop: int) -> list[LayerPart | None]:
        """What positions `start..stop` of a row added, by layer, copied out; None for layers that can't be cut at the row's length. A whole
        page is not copied but shared.

        Lazy, like `snapshot`. Raises `ValueError` for positions the row doesn't have.
        """
        self._must_be_closed()
        length = self.rows.lengths[row]
        if not 0 <= start < stop <= length:
            raise ValueError(f"positions {start}..{stop} are not within the row's {length} tokens")
        if self.table is not None and not start % PAGE and stop - start == PAGE:
            hold = self.table.held[row][start // PAGE].share(by_row=False)
            return [layer.part(hold) for layer in self.layers if isinstance(layer, PagedLayer)]
        return [layer.cut(row, start, stop) if layer.can_cut(length) else None for layer in self.layers]

    def uncut(self, row: int) -> dict[int, LayerSnapshot]:
        """Copies of the states of a row's layers that can't be cut at its length, by number of the layer. Lazy, like `snapshot`."""
        self._must_be_closed()
        length = self.rows.lengths[row]
        return {i: layer.snapshot(row) for i, layer in enumerate(self.layers) if not layer.can_cut(length)}

    def fork(self, row: int) -> BatchState:
        """An independent copy of one row. Lazy, like `snapshot`."""
        return self._revived(self.snapshot(row))

    @classmethod
    def restore(
        cls,
        model: nn.Module,
        templates: Sequence[Any],
        snapshot: RowSnapshot,
        *,
        pad_safe: bool = True,
        slack: int = DEFAULT_SLACK,
        mask_ndim: int = 4,
        coding: Coding | None = None,
        pages: PagePool | None = None,
    ) -> BatchState:
        """A state of one row with the captured bits. The snapshot stays as it is and can be restored again, unless a layer `has_room`.

        Raises `ValueError` if the snapshot's layers are not this model's, or hold another codec's words.
        """
        state = cls(model, templates, pad_safe=pad_safe, slack=slack, mask_ndim=mask_ndim, coding=coding, pages=pages)
        state._adopt(snapshot)
        return state

    def arrays(self) -> list[mx.array]:
        """What to evaluate so that the whole state is computed."""
        return [array for layer in self.layers for array in layer.arrays()]

    def nbytes(self) -> int:
        """Bytes held by all layers, spare capacity included."""
        return sum(layer.bytes_held() for layer in self.layers)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` naming every layer whose state contradicts the rows."""
        problems = [f"layer {i}: {problem}" for i, layer in enumerate(self.layers) for problem in layer.problems()]
        if self.rows.is_open:
            problems.append("a forward is open")
        if self._row_capacity < self.num_rows:
            problems.append(f"capacity for {self._row_capacity} rows, but there are {self.num_rows}")
        if problems:
            raise RuntimeError("inconsistent batch state: " + "; ".join(problems))

    def _revived(self, snapshot: RowSnapshot) -> BatchState:
        return BatchState.restore(
            self.model,
            self.templates,
            snapshot,
            pad_safe=self.pad_safe,
            slack=self.slack,
            mask_ndim=self.mask_ndim,
            coding=self.coding,
            pages=None if self.table is None else self.table.pool,
        )

    def _adopt(self, snapshot: RowSnapshot) -> None:
        if self.table is not None:
            self._adopt_pages(self.table, snapshot)
            return
        if snapshot.pages:
            raise ValueError("the snapshot's tokens are in pages, this state has none")
        kinds = [layer.kind for layer in self.layers]
        if [layer.kind for layer in snapshot.layers] != kinds:
            raise ValueError(
                f"the snapshot's layers are not this model's: {len(snapshot.layers)} against {len(kinds)} states"
            )
        self.rows.lengths = [snapshot.length]
        for layer, taken in zip(self.layers, snapshot.layers, strict=True):
            layer.restore(taken)

    def _adopt_pages(self, table: PageTable, snapshot: RowSnapshot) -> None:
        rest = snapshot.length - PAGE * len(snapshot.pages)
        if rest > 0 and [layer.kind for layer in snapshot.layers] != [layer.kind for layer in self.layers]:
            raise ValueError(
                f"the snapshot's layers are not this model's: {len(snapshot.layers)} against {len(self.layers)} states"
            )
        writing = table.adopt(snapshot.pages, snapshot.length)
        self.rows.lengths = [snapshot.length]
        if rest > 0:
            for layer, taken in zip(self.layers, snapshot.layers, strict=True):
                if isinstance(layer, PagedLayer):
                    layer.fill(writing, taken)

    def _must_be_closed(self) -> None:
        if self.rows.is_open:
            raise ValueError("a forward is open: commit or abort it first")


def _leaves(caches: Sequence[LayerState | CompositeLayer]) -> Iterator[LayerState]:
    for cache in caches:
        if isinstance(cache, CompositeLayer):
            yield from cache
        else:
            yield cache
