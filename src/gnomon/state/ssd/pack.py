"""Arrays to bytes and back, on the thread that evaluates them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import mlx.core as mx
import numpy as np

from gnomon.state.prefix.block import Block, Checkpoint
from gnomon.state.snapshot import LayerKind, LayerPart, LayerSnapshot
from gnomon.state.ssd.format import Entry, Layer, Packed, Tensor

_NAMES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float64: "F64",
    mx.complex64: "C64",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def entry_of(held: Block | Checkpoint, identity: str) -> Entry:
    """What a file of this block or checkpoint would be."""
    block = held.block if isinstance(held, Checkpoint) else held
    root = block
    while root.parent is not None:
        root = root.parent
    if block.parent is None:
        raise ValueError("the root of a tree holds no state")
    if isinstance(held, Checkpoint):
        tokens, layers = block.tokens[: held.position - block.start], tuple(sorted(held.layers))
    else:
        tokens, layers = block.tokens, tuple(i for i, part in enumerate(block.parts) if part is not None)
    kind = "checkpoint" if isinstance(held, Checkpoint) else "block"
    return Entry(identity, root.key.hex(), kind, block.parent.key, block.start, tokens, layers, len(block.parts))


def pack(held: Block | Checkpoint, entry: Entry) -> Packed:
    """Copy the arrays out, which must be evaluated."""
    parts = held.layers if isinstance(held, Checkpoint) else dict(enumerate(held.parts))
    return Packed(entry, [_packed(cast("LayerPart", parts[number])) for number in entry.layers])


def unpack(packed: Packed) -> dict[int, LayerSnapshot]:
    """The layers by number, evaluated."""
    layers = {
        number: LayerSnapshot(
            cast("LayerKind", layer.kind),
            {name: _array(tensor) for name, tensor in layer.tensors.items()},
            dict(layer.numbers),
        )
        for number, layer in zip(packed.entry.layers, packed.layers, strict=True)
    }
    mx.eval(list(_arrays(layers.values())))
    return layers


def _packed(snapshot: LayerPart) -> Layer:
    return Layer(
        snapshot.kind, dict(snapshot.numbers), {name: _tensor(array) for name, array in snapshot.arrays.items()}
    )


def _tensor(array: mx.array) -> Tensor:
    data = bytes(memoryview(cast("Any", array.reshape(-1).view(mx.uint8)))) if array.size else b""
    return Tensor(_NAMES[array.dtype], tuple(array.shape), data)


def _array(tensor: Tensor) -> mx.array:
    dtype = _TYPES[tensor.dtype]
    if not tensor.data:
        return mx.zeros(tensor.shape, dtype)
    return mx.array(np.frombuffer(tensor.data, np.uint8)).view(dtype).reshape(tensor.shape)


def _arrays(layers: Iterable[LayerPart]) -> Iterable[mx.array]:
    for layer in layers:
        yield from layer.arrays.values()
