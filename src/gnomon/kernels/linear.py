"""Linear maps as the fused kernels take them, and the classes of single ones: linear layers and quantised tables."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from gnomon.kernels.dispatch import thread
from gnomon.kernels.quantized_matmul import FLOATS, why_not
from gnomon.kernels.tiles import Tiled, TiledLinear, tile_embedding


class Linear:
    """A linear layer's weights as the extension takes them, and what they were made from."""

    def __init__(self, layer: nn.Module, extension: ModuleType, integer: bool) -> None:
        self.layer = layer
        self.extension = extension
        tiled = isinstance(layer, Tiled)
        self.held = "tiled_weight" if tiled else "weight"
        self.arrays = cast("dict[str, mx.array]", layer)
        weight, scales, biases = _packed(layer)
        self.weight = weight
        group, bits = self.form = (0, 0) if scales is None else (layer.group_size, layer.bits)
        self.dtype: mx.Dtype = weight.dtype if scales is None else scales.dtype
        self.projection = extension.Projection(weight, scales, biases, layer.get("bias"), group, bits, integer, tiled)

    @staticmethod
    def covers(layer: object) -> bool:
        """Whether a layer is a plain or quantised linear map that the extension can take. Exact types: a subclass may do more."""
        if not isinstance(layer, nn.Module):
            return False
        bias = layer.get("bias")
        if bias is not None and bias.dtype not in FLOATS:
            return False
        if type(layer) is TiledLinear:
            return layer.tiles is not None and (bias is None or bias.dtype == layer.tiles[1].dtype)
        if type(layer) is nn.QuantizedLinear:
            why = why_not(
                layer["weight"], layer["scales"], layer.get("biases"), layer.group_size, layer.bits, layer.mode, 2
            )
            return why is None and (bias is None or bias.dtype == layer["scales"].dtype)
        return (
            type(layer) is nn.Linear
            and layer["weight"].dtype in FLOATS
            and (bias is None or bias.dtype == layer["weight"].dtype)
        )

    def current(self, layer: object) -> bool:
        """Whether `layer` still is what this was made from."""
        return layer is self.layer and dict.get(self.arrays, self.held) is self.weight


def _packed(layer: nn.Module) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """A layer's weights, with scales and biases if it has them, as they lie."""
    tiles = layer.tiles if isinstance(layer, Tiled) else None
    return tiles or (layer["weight"], layer.get("scales"), layer.get("biases"))


def linear_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """The forward of a linear layer on its own, in place of `own` inside native steps."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        fused = self.fused
        if thread.active and x.ndim and x.dtype == fused.dtype and fused.current(self):
            return fused.extension.project(x, fused.projection, None, 0.0, None)
        return own(self, x)

    return __call__


class NativeQuantizedEmbedding(nn.QuantizedEmbedding):
    """Takes rows of a packed table apart in one operation instead of four.

    Its weights are tiled when it is first used as the head, if they are multiplied in whole numbers: a table that is none stays as it is.
    """

    fused: ModuleType
    integer: bool

    def __call__(self, x: mx.array) -> mx.array:
        if thread.active:
            return self.fused.quantized_embedding(
                x, self["weight"], self["scales"], self["biases"], self.group_size, self.bits
            )
        return super().__call__(x)

    def as_linear(self, x: mx.array) -> mx.array:
        if thread.active and tile_embedding(self, self.fused, self.integer):
            return self.as_linear(x)
        return super().as_linear(x)
