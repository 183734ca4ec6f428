"""Layers that hold several states: attention beside a convolution, a latent cache beside an indexer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from gnomon.state.layer import LayerState


class CompositeLayer:
    """Layer states by position, as mlx-lm's `CacheList`. `BatchState` addresses the parts themselves."""

    def __init__(self, parts: Sequence[LayerState]) -> None:
        self.caches = tuple(parts)

    def __getitem__(self, index: int) -> LayerState:
        return self.caches[index]

    def __iter__(self) -> Iterator[LayerState]:
        return iter(self.caches)

    @property
    def offset(self) -> int | mx.array:
        """Position of the window's first token."""
        rows = self.caches[0].rows
        return rows.offsets if rows.num_rows > 1 else rows.lengths[0]
