"""What every layer state answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx

from gnomon.kernels.codes import Codes
from gnomon.state.rows import Rows
from gnomon.state.snapshot import LayerKind, LayerSnapshot

CodesPair = tuple[Codes, Codes]
"""How buffers of keys and of values are read, where they hold codes."""
Pages = tuple[int, list[list[int]], list[int], list[tuple[int, int, int, int]]]
"""Tokens of a page, the pages of each row, how many tokens of the open window each row writes, and the pages it is the first to write to:
the page, the one to copy from or -1, how many tokens of that, and where the window's tokens end."""

# A layer state is what mlx-lm's models take for a cache. They test `if cache:` and select quantised attention by an attribute `bits`,
# so no layer state may define `__len__`, `__bool__` or `bits`.


class LayerState(ABC):
    """State of one layer for all rows of a batch.

    `BatchState` calls the verbs below between forwards and before it changes the rows they share; the model calls the rest of the
    cache's interface during a forward.
    """

    rows: Rows
    kind: LayerKind

    def begin(self) -> None:
        """A forward over the window described by `rows` opens."""
        return

    def commit(self) -> None:
        """The forward ended well. `rows` still has the lengths before it."""
        return

    def land(self) -> None:
        """Compute large buffers that were made from others: in a step's graph the old ones of all layers would exist beside the new."""
        return

    @abstractmethod
    def abort(self) -> None:
        """The forward failed: go back to the state before it. `rows` still has the lengths before it."""

    @abstractmethod
    def rollback(self, back: Sequence[int]) -> None:
        """Take back `back[b]` of the tokens the last forward gave row `b`. `rows` still has the lengths after the forward."""

    @abstractmethod
    def keep(self, order: Sequence[int], row_capacity: int) -> None:
        """Row `i` becomes what row `order[i]` was; others go. Buffers get room for `row_capacity` rows."""

    @abstractmethod
    def join(self, other: LayerState, row_capacity: int) -> None:
        """Append the rows of `other`, which is used up. Buffers get room for `row_capacity` rows."""

    @abstractmethod
    def snapshot(self, row: int) -> LayerSnapshot:
        """A copy of one row's state."""

    def can_cut(self, length: int) -> bool:  # noqa: ARG002  (most kinds either always can or never)
        """Whether the state after `length` tokens holds every earlier state: `cut` then gives any stretch of it."""
        return False

    def cut(self, row: int, start: int, stop: int) -> LayerSnapshot:
        """A copy of what the row's positions `start..stop` added. Raises ValueError where `can_cut` is false."""
        raise ValueError(f"a {self.kind} layer can't be cut at {start}..{stop} of row {row}")

    @abstractmethod
    def restore(self, snapshot: LayerSnapshot) -> None:
        """Become the one row of the snapshot; this state must be a lone empty row."""

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """All arrays held, to evaluate."""

    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes held, spare capacity included."""

    @abstractmethod
    def problems(self) -> list[str]:
        """What is inconsistent between this state and `rows`; empty if all is well."""
