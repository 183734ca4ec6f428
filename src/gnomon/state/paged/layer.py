"""Full attention over pages, plain or in a codec's words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from gnomon.kernels import attention, dispatch
from gnomon.kernels.coded import Mask, View
from gnomon.state.codecs.codec import Codec, Fetched
from gnomon.state.full import full_mask, hides_only_later
from gnomon.state.layer import CodesPair, LayerState, Pages
from gnomon.state.paged.arrays import PAGE, Layout, Writing
from gnomon.state.paged.pool import Hold, PagePart
from gnomon.state.paged.table import PageTable
from gnomon.state.rows import Rows
from gnomon.state.snapshot import LayerKind, LayerSnapshot

Held = mx.array | View


class PagedLayer(LayerState):
    """One layer of the rows of a page table, which decides what is where.

    Under a codec all tokens are written as words at once. A row's first window attends to itself, plain; later ones to the words. Those are
    the bits that `QuantizedLayer` has with a start of 0.
    """

    kind: LayerKind = "full"

    def __init__(
        self, rows: Rows, table: PageTable, number: int, mask_ndim: int = 4, codec: Codec | None = None
    ) -> None:
        """`number` is the layer's place in the pool."""
        self.rows = rows
        self.table = table
        self.number = number
        self._arrays = table.pool.layers[number]
        self.mask_ndim = mask_ndim
        self.codec = codec
        self._fetched: tuple[Held, Held] | None = None
        self._dims: tuple[int, int, mx.Dtype] | None = None
        """Of keys, of values, and their type, once some were appended layer by layer."""

    # What models call.

    @property
    def offset(self) -> int | mx.array:
        """Position of the window's first token: a number for a lone row, int32 `[B]` for several."""
        return self.rows.lengths[0] if self.rows.num_rows == 1 else self.rows.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Held, Held]:
        """Append `[B, heads, width, dim]`; returns all keys and values `[B, heads, n, dim]`, or under a codec views of them.

        Raises RuntimeError in a flat window, which is appended in place only.
        """
        if self.rows.is_flat:
            raise RuntimeError("a flat window is appended in place only")
        codec, table = self.codec, self.table
        self.rows.pace(keys)
        self._dims = keys.shape[3], values.shape[3], keys.dtype
        if codec is None:
            table.pool.write(self.number, table.writing, keys, values)
            self._fetched = self._read(range(self.rows.num_rows))
        else:
            words = codec.encode_keys(keys), codec.encode_values(values)
            table.pool.write(self.number, table.writing, *words)
            self._fetched = self._views(codec, keys, values)
        return self._fetched

    def update_and_view(self, keys: mx.array, values: mx.array) -> tuple[Held, Held]:
        """`update_and_fetch` for who attends to views as well as to arrays: a kernel finds plain keys and values in their pages."""
        rows = self.rows
        is_read = self.codec is None and dispatch.thread.active and not rows.is_flat
        layout = self._layout(range(rows.num_rows))
        if not is_read or layout.run is not None:
            return self.update_and_fetch(keys, values)
        rows.pace(keys)
        self.table.pool.write(self.number, self.table.writing, keys, values)
        shape = rows.num_rows, keys.shape[1], layout.end
        attend = self._attend_plain
        self._fetched = (
            View(attend, (*shape, keys.shape[3]), keys.dtype),
            View(attend, (*shape, values.shape[3]), values.dtype),
        )
        return self._fetched

    def keys_and_values(self) -> tuple[Held, Held]:
        """What the last append returned, for layers that share this one's keys."""
        if self._fetched is None:
            raise ValueError("nothing was appended yet")
        return self._fetched

    def make_mask(self, width: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask of the open forward: mlx-lm's own if all rows are equally long, else bool `[B, 1, width, n]`."""
        return full_mask(self.rows, width, self.mask_ndim, return_array, window_size)

    def size(self) -> int:
        return max(self.rows.lengths)

    def is_trimmable(self) -> bool:
        return True

    def _layout(self, members: Sequence[int]) -> Layout:
        rows, table = self.rows, self.table
        end = max(rows.lengths[row] for row in members) + rows.width
        return rows.memo(("pages", tuple(members)), lambda: table.layout(members, end))

    def _read(self, members: Sequence[int]) -> tuple[mx.array, mx.array]:
        return self._arrays.read(self._layout(members))

    def _views(self, codec: Codec, keys: mx.array, values: mx.array) -> tuple[Held, Held]:
        rows = self.rows
        coded = [row for row, length in enumerate(rows.lengths) if length]
        if not coded:
            return keys, values
        dims = keys.shape[3], values.shape[3], keys.dtype
        if len(coded) == rows.num_rows:
            attend = partial(self._attend_coded, codec, dims)
        else:
            attend = partial(_attend_apart, codec, Fetched(*self._read(coded), *dims), coded, keys, values)
        shape = rows.num_rows, keys.shape[1], self._layout(coded).end
        return View(attend, (*shape, dims[0]), keys.dtype), View(attend, (*shape, dims[1]), keys.dtype)

    def _attend_plain(self, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """All rows attend to what is held, as `_attend_coded`."""
        rows = self.rows
        layout = self._layout(range(rows.num_rows))
        if hides_only_later(rows, self.mask_ndim, mask):
            slots = self._arrays.slots(rows.num_rows)
            made = attention.over_slots(
                queries, *slots, scale=scale, sinks=sinks, starts=rows.offsets, order=layout.slots
            )
            if made is not None:
                return made
        held = self._arrays.read(layout)
        return mx.fast.scaled_dot_product_attention(queries, *held, scale=scale, mask=mask, sinks=sinks)

    def _attend_coded(
        self,
        codec: Codec,
        dims: tuple[int, int, mx.Dtype],
        queries: mx.array,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
    ) -> mx.array:
        """All rows attend to what is held: by a kernel that finds pages where they lie, else to gathered ones."""
        rows = self.rows
        members = range(rows.num_rows)
        layout = self._layout(members)
        if layout.run is None and dispatch.thread.active and hides_only_later(rows, self.mask_ndim, mask):
            words = self._arrays.slots(rows.num_rows)
            held = Fetched(*words, *dims, length=layout.end, starts=rows.offsets, order=layout.slots)
            made = codec.attend_natively(queries, held, scale, mask, sinks)
            if made is not None:
                return made
        return codec.attend(queries, Fetched(*self._read(members), *dims), scale, mask, sinks)

    # What layers that run as one operation call.

    @property
    def codes(self) -> CodesPair | None:
        """How the pages are read; None if they are plain."""
        if self.codec is None or self._dims is None:
            return None
        key_dim, value_dim, dtype = self._dims
        return self.codec.key_codes(key_dim, dtype), self.codec.value_codes(value_dim, dtype)

    @property
    def appending(self) -> mx.array | None:
        """What is computed once a kernel has appended to the pages."""
        return self._arrays.appending

    @property
    def flat_type(self) -> mx.Dtype | None:
        """The type of keys of which a flat window can be appended, in place only; None if none can: it takes several rows of plain ones."""
        return self._arrays.dtype if self.codec is None and self.rows.num_rows > 1 else None

    @property
    def pages(self) -> Pages:
        """Where the open window goes and what its rows attend to."""
        return self.rows.memo("pages to append to", self.table.opened)

    def open_buffers(self, *, settled: bool = False) -> tuple[mx.array, mx.array] | None:
        """The pool's arrays `[heads, pages, PAGE, width]`;
        None before the first write, and where a row attends to its first window plain."""
        if self.codec is not None and (self._dims is None or 0 in self.rows.lengths):
            return None
        return self._arrays.open_buffers(settled=settled)

    def appends(self, appending: mx.array) -> None:
        """A kernel was given the arrays of `open_buffers` and appends the open window."""
        self._arrays.appending = appending

    # What BatchState calls.

    def commit(self) -> None:
        self._fetched = None

    def abort(self) -> None:
        self._fetched = None

    def rollback(self, back: Sequence[int]) -> None:  # noqa: ARG002  (the table does it)
        return

    def keep(self, order: Sequence[int], row_capacity: int) -> None:  # noqa: ARG002  (the table does it)
        return

    def join(self, other: LayerState, row_capacity: int) -> None:  # noqa: ARG002  (the table does it)
        if not isinstance(other, PagedLayer) or other.codec != self.codec:
            raise TypeError(f"a paged layer can't take rows of {other!r}")
        self._dims = self._dims or other._dims

    def snapshot(self, row: int) -> LayerSnapshot:
        return self.cut(row, 0, self.rows.lengths[row])

    def can_cut(self, length: int) -> bool:  # noqa: ARG002  (every position is kept)
        return True

    def cut(self, row: int, start: int, stop: int) -> LayerSnapshot:
        pieces = list[dict[str, mx.array]]()
        at = start
        while at < stop:
            place, offset = divmod(at, PAGE)
            count = min(PAGE - offset, stop - at)
            pieces.append(self._arrays.copy(self.table.held[row][place].page.index, offset, offset + count))
            at += count
        names = pieces[0] if pieces else ()
        whole = {name: mx.concatenate([piece[name] for piece in pieces], axis=2) for name in names}
        self._arrays.remember(list(whole.values()))
        return LayerSnapshot("full", whole, self._numbers(stop - start))

    def part(self, hold: Hold) -> PagePart:
        """This layer's share of a page that is full."""
        return PagePart(hold, self._arrays, self._numbers(PAGE))

    def restore(self, snapshot: LayerSnapshot) -> None:  # noqa: ARG002  (see `fill`)
        raise ValueError("pages are restored for all layers at once")

    def fill(self, writing: Writing, snapshot: LayerSnapshot) -> None:
        """Write the tokens that the table has just taken pages for. Raises ValueError for those of another codec."""
        number = self.codec.number if self.codec is not None else None
        if snapshot.numbers.get("codec") != number:
            raise ValueError(
                f"the snapshot's codec is number {snapshot.numbers.get('codec')}, this layer's is {number}"
            )
        if snapshot.arrays:
            self.table.pool.write(self.number, writing, snapshot.arrays["keys"], snapshot.arrays["values"])

    def arrays(self) -> list[mx.array]:
        return self._arrays.held()

    def bytes_held(self) -> int:
        return self.table.num_held() * self._arrays.page_bytes

    def problems(self) -> list[str]:
        return self.table.problems() if not self.number else []

    def _numbers(self, length: int) -> dict[str, int]:
        numbers = {"length": length}
        if self.codec is not None:
            numbers["codec"] = self.codec.number
        return numbers


def _attend_apart(
    codec: Codec,
    held: Fetched,
    coded: Sequence[int],
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
) -> mx.array:
    """Rows of `coded` attend to what is held, the others to their first window; the results go back to their places."""
    fresh = [row for row in range(queries.shape[0]) if row not in coded]
    found: list[mx.array] = []
    for members in (fresh, coded):
        end = held.end if members is coded else keys.shape[2]
        at, own = mx.array(list(members)), mask
        if isinstance(mask, mx.array) and mask.ndim > 3:
            own = mask[at][..., :end]
        if members is coded:
            found.append(codec.attend(queries[at], held, scale, own, sinks))
        else:
            found.append(
                mx.fast.scaled_dot_product_attention(
                    queries[at], keys[at], values[at], scale=scale, mask=own, sinks=sinks
                )
            )
    order = [*fresh, *coded]
    return mx.concatenate(found)[mx.array([order.index(row) for row in range(len(order))])]
