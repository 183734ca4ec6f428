"""Putting a row's state together from blocks and a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from gnomon.state.paged.pool import PagePart
from gnomon.state.prefix.block import Block, Checkpoint
from gnomon.state.snapshot import LayerPart, LayerSnapshot, RowSnapshot


def assemble(blocks: Sequence[Block], length: int, checkpoint: Checkpoint | None, slots: int = 0) -> RowSnapshot:
    """The state after the first `length` tokens of the blocks, which reach that far. Its arrays may be the blocks' own, its pages are.

    Full layers get `slots` slots if those are more than `length`, and arrays of their own: for a state that goes on in them.
    """
    pages = [block.parts[0].hold for block in blocks if isinstance(block.parts[0], PagePart)]
    if pages:
        start, rest = blocks[len(pages) - 1].end, blocks[len(pages) :]
        tail = [_joined([cast(LayerPart, part)], length - start) for block in rest for part in block.parts]
        return RowSnapshot(length, tuple(tail), tuple(pages))
    kept = checkpoint.layers if checkpoint is not None else {}
    layers = [
        kept[i] if i in kept else _joined([cast(LayerPart, block.parts[i]) for block in blocks], length, slots)
        for i in range(len(blocks[0].parts))
    ]
    return RowSnapshot(length, tuple(layers))


def _joined(parts: Sequence[LayerPart], length: int, slots: int = 0) -> LayerSnapshot:
    """One layer's parts as the state of `length` tokens; the last part may hold more. See `assemble` for `slots`."""
    first = parts[0]
    numbers = {**first.numbers, "length": length}
    if first.kind == "sliding" and first.arrays:
        numbers["index"] = length
    arrays: dict[str, mx.array] = {}
    for name in first.arrays:
        pieces = [part.arrays[name] for part in parts]
        pieces[-1] = pieces[-1][:, :, : length - sum(piece.shape[2] for piece in pieces[:-1])]
        if first.kind == "full" and slots > length:
            batch, heads, _, dim = pieces[0].shape
            pieces.append(mx.zeros((batch, heads, slots - length, dim), pieces[0].dtype))
        arrays[name] = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)
    return LayerSnapshot(first.kind, arrays, numbers)
