"""One row's state, copied out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import mlx.core as mx

if TYPE_CHECKING:
    from gnomon.state.paged.pool import Hold

LayerKind = Literal["full", "sliding", "recurrent"]


@dataclass(frozen=True)
class LayerSnapshot:
    """One layer's state of one row.

    `arrays`: for a full layer `keys` and `values` `[1, heads, length, dim]`, or with more slots, see `has_room`; for a sliding layer the
    same in mlx-lm's rotating layout, with `index` (next slot), `window` and `length` in `numbers`; for a recurrent layer its arrays
    `[1, ...]` by position, absent ones left out. A layer that has seen no token has no arrays. Under a codec `keys` and `values` hold its
    words, and `codec` in `numbers` is the codec's number.
    """

    kind: LayerKind
    arrays: dict[str, mx.array]
    numbers: dict[str, int]

    @property
    def owned(self) -> Sequence[mx.array]:
        """Arrays that exist for this alone, to evaluate."""
        return list(self.arrays.values())

    @property
    def has_room(self) -> bool:
        """Whether a full layer's arrays were made for one state to go on in: it may write there, so they are restored once only."""
        return "keys" in self.arrays and self.kind == "full" and self.arrays["keys"].shape[2] > self.numbers["length"]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class LayerPart(Protocol):
    """What the prefix cache keeps of a layer: a `LayerSnapshot`, or a share of a page that reads like one."""

    @property
    def kind(self) -> LayerKind: ...
    @property
    def arrays(self) -> Mapping[str, mx.array]: ...
    @property
    def numbers(self) -> Mapping[str, int]: ...
    @property
    def owned(self) -> Sequence[mx.array]: ...
    @property
    def nbytes(self) -> int: ...


def shared(snapshot: LayerSnapshot, *names: str) -> list[mx.array]:
    """Arrays of a snapshot for a state to write to.

    They are new array objects over the same memory: an assignment to a slice changes the object it is made on, and copies the memory first
    as long as the snapshot holds it too.
    """
    return [snapshot.arrays[name][...] for name in names]


def refuse_coded(snapshot: LayerSnapshot) -> None:
    """Raise ValueError for a snapshot that holds a codec's words: a plain layer would take them for keys and values."""
    if "codec" in snapshot.numbers:
        raise ValueError(f"the snapshot is coded (codec number {snapshot.numbers['codec']}), this layer is plain")


@dataclass(frozen=True)
class RowSnapshot:
    """All layers of one row after `length` tokens, the parts of composite layers one by one. It shares no memory with its batch.

    Of a paged row `pages` hold the beginning, whole pages but for the last, which may hold more than the row has; `layers` then hold what
    comes after them, and are empty if nothing does.
    """

    length: int
    layers: tuple[LayerSnapshot, ...]
    pages: tuple[Hold, ...] = ()

    def arrays(self) -> list[mx.array]:
        """What to evaluate."""
        return [array for layer in self.layers for array in layer.arrays.values()]

    def nbytes(self) -> int:
        """Bytes of all arrays. Pages are others' too and not counted."""
        return sum(array.nbytes for array in self.arrays())
