"""Packed weights as the products in whole numbers read them: 16 rows side by side, put so once, when a model is loaded.

Layout
    matrices   words [.., N, K * bits / 32], scales and biases [.., N, K / group]; every 16 rows [16, width] are stored as [width, 16], in
               the same bytes; the N % 16 rows after them as they were
    widths     4 and 8 bits, of linear layers, experts and tied tables; others stay as they are

A tiled layer holds its arrays under other names (`tiled_weight`, ..), in place of its own: nothing can take them for rows. Whoever asks
it for `weight`, `scales` or `biases` gets them as they were, put back by plain operations at every use: its own forward, outside native
steps, computes what it computed before, slower. An array that is assigned to one of the three names takes that one's place.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from gnomon.kernels.dispatch import thread
from gnomon.kernels.integer import BITS
from gnomon.kernels.quantized_matmul import FLOATS, why_not

TILE = 16
NAMES = ("weight", "scales", "biases")
_HELD = {name: f"tiled_{name}" for name in NAMES}


def rows(tiled: mx.array) -> mx.array:
    """What a tiled array `[.., N, width]` holds, as rows."""
    *batch, n, width = tiled.shape
    whole = n // TILE * TILE
    turned = tiled[..., :whole, :].reshape(*batch, -1, width, TILE).swapaxes(-1, -2).reshape(*batch, whole, width)
    return turned if whole == n else mx.concatenate([turned, tiled[..., whole:, :]], axis=-2)


class Tiled(nn.Module):
    """A layer whose packed weights are tiled. Mixed into classes of MLX, before them."""

    fused: ClassVar[ModuleType]
    integer: ClassVar[bool]

    def __missing__(self, key: str) -> mx.array:
        return rows(dict.__getitem__(cast("dict[str, mx.array]", self), _HELD[key]))

    def get(self, key: str, default: Any = None) -> Any:
        held = _HELD.get(key)
        if held is not None and key not in self and held in self:
            return self[key]
        return super().get(key, default)

    def __setattr__(self, key: str, val: Any) -> None:
        if key in _HELD and isinstance(val, mx.array):
            self[key] = val
            self.pop(_HELD[key], None)
        else:
            super().__setattr__(key, val)

    @property
    def tiles(self) -> tuple[mx.array, mx.array, mx.array] | None:
        """Words, scales and biases as they lie, or None if one was replaced by rows."""
        if all(name in self for name in _HELD.values()):
            return self["tiled_weight"], self["tiled_scales"], self["tiled_biases"]
        return None


class TiledLinear(Tiled, nn.QuantizedLinear):
    """A quantised linear layer."""

    def __call__(self, x: mx.array) -> mx.array:
        tiles = self.tiles
        if tiles is not None and _takes(self, x):
            if "bias" in self and x.dtype == tiles[1].dtype == self["bias"].dtype:
                made = self.fused.Projection(*tiles, self["bias"], self.group_size, self.bits, self.integer, True)
                return self.fused.project(x, made, None, 0.0, None)
            y = self.fused.quantized_matmul(x, *tiles, self.group_size, self.bits, self.integer, True)
            return y + self["bias"] if "bias" in self else y
        return nn.QuantizedLinear.__call__(self, x)


class TiledSwitchLinear(Tiled, QuantizedSwitchLinear):
    """A quantised linear layer of experts."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        tiles = self.tiles
        if tiles is not None and x.ndim >= 2 and _takes(self, x):
            y = self.fused.gather_qmm(x, *tiles, None, indices, self.group_size, self.bits, self.integer, True)
            return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y
        return QuantizedSwitchLinear.__call__(self, x, indices, sorted_indices)


class TiledEmbedding(Tiled, nn.QuantizedEmbedding):
    """A quantised table that is the head too."""

    def __call__(self, x: mx.array) -> mx.array:
        tiles = self.tiles
        if tiles is not None and thread.active:
            return self.fused.quantized_embedding(x, *tiles, self.group_size, self.bits, True)
        return nn.QuantizedEmbedding.__call__(self, x)

    def as_linear(self, x: mx.array) -> mx.array:
        tiles = self.tiles
        if tiles is not None and _takes(self, x):
            return self.fused.quantized_matmul(x, *tiles, self.group_size, self.bits, self.integer, True)
        return nn.QuantizedEmbedding.as_linear(self, x)


def _takes(layer: Tiled, x: mx.array) -> bool:
    inputs = layer["tiled_scales"].shape[-1] * layer.group_size
    return thread.active and x.ndim > 0 and x.dtype in FLOATS and x.shape[-1] == inputs


_CLASSES: dict[type[nn.Module], type[Tiled]] = {
    nn.QuantizedLinear: TiledLinear,
    QuantizedSwitchLinear: TiledSwitchLinear,
}


def tile(layer: nn.Module, extension: ModuleType, integer: bool) -> bool:
    """Tile the weights of a layer, in place, and say whether that was done: for an exact class of MLX with weights that the products take.

    At its end only the tiled arrays are there; while it works, both are. `integer` is what its products will be called with. An embedding
    is tiled by `tile_embedding`.
    """
    become = _CLASSES.get(type(layer))
    if become is None:
        return False
    return _tile(layer, become, extension, integer, 3 if become is TiledSwitchLinear else 2)


def tile_embedding(layer: nn.Module, extension: ModuleType, integer: bool) -> bool:
    """The same for a quantised table, worth it once it is a head: one row is gathered from 16 times as many lines."""
    return _tile(layer, TiledEmbedding, extension, integer, 2)


def _tile(layer: nn.Module, become: type[Tiled], extension: ModuleType, integer: bool, ndim: int) -> bool:
    held: Any = layer
    w, scales, biases = (held.get(name) for name in NAMES)
    if held.bits not in BITS or why_not(w, scales, biases, held.group_size, held.bits, held.mode, ndim) is not None:
        return False
    made = [extension.tiled(array) for array in (w, scales, biases)]
    mx.eval(made)
    for name, array in zip(NAMES, made, strict=True):
        del held[name]
        held[_HELD[name]] = array
    layer.__class__ = become
    object.__setattr__(layer, "fused", extension)
    object.__setattr__(layer, "integer", integer)
    return True
