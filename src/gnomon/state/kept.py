"""What full and sliding attention have alike: a lone row lies in mlx-lm's own cache, two and more in one buffer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from gnomon.state.buffer import RowBuffer
from gnomon.state.layer import LayerState
from gnomon.state.rows import Rows

C = TypeVar("C", KVCache, RotatingKVCache)


class KeptLayer(LayerState, Generic[C]):
    """Keys and values as models and kernels see them, wherever they lie: in `lone`, or in the buffer once that is None."""

    def __init__(self, rows: Rows, lone: C) -> None:
        self.rows = rows
        self._lone: C | None = lone
        self._buffer = RowBuffer(1)
        self.appending: mx.array | None = None
        """What is computed once a kernel has appended to the arrays: they say nothing of it themselves."""

    @property
    def offset(self) -> int | mx.array:
        """Position of the window's first token: a number for a lone row, as mlx-lm has it; int32 `[B]` for several."""
        return self.rows.offsets if self._lone is None else self._lone.offset

    @property
    def keys(self) -> mx.array | None:
        self._settle()
        return self._lying()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        if self._lone is None:
            self._buffer.keys = value
        else:
            self._lone.keys = value

    @property
    def values(self) -> mx.array | None:
        self._settle()
        return self._lying()[1]

    @values.setter
    def values(self, value: mx.array) -> None:
        if self._lone is None:
            self._buffer.values = value
        else:
            self._lone.values = value

    def is_trimmable(self) -> bool:
        return True

    def appends(self, appending: mx.array) -> None:
        """A kernel was given the buffers and appends the open window to them; `appending` is computed once it has."""
        self.appending = appending
        self.advance_in_place()

    def appended(self, keys: mx.array, values: mx.array) -> None:
        """`keys` and `values` are the buffers that a kernel was given, once it has appended the open window."""
        self.keys, self.values = keys, values
        self.advance_in_place()

    @abstractmethod
    def advance_in_place(self) -> None:
        """The kernel was given the buffers and appends the open window."""

    def arrays(self) -> list[mx.array]:
        return [array for array in (*self._lying(), self.appending) if array is not None]

    def bytes_held(self) -> int:
        return sum(array.nbytes for array in self._lying() if array is not None)

    def problems(self) -> list[str]:
        rows, found = self.rows, list[str]()
        if (self._lone is not None) != (rows.num_rows == 1):
            found.append(
                f"{rows.num_rows} rows, but the layout is {'a lone row' if self._lone is not None else 'shared'}"
            )
        if self._lone is not None and self._lone.keys is not None and self._lone.offset != rows.lengths[0]:
            found.append(f"offset is {self._lone.offset}, the row has {rows.lengths[0]} tokens")
        return found

    def _lying(self) -> tuple[mx.array | None, mx.array | None]:
        """The arrays as they lie, settled or not."""
        held = self._buffer if self._lone is None else self._lone
        return held.keys, held.values

    def _settle(self) -> None:
        """Let the arrays depend on the append that a kernel makes to them: called before anybody is given them."""
        keys, values = self._lying()
        if self.appending is not None and keys is not None and values is not None:
            appending, self.appending = self.appending, None
            self.keys, self.values = mx.depends([keys, values], [appending])
