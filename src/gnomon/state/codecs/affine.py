"""Affine codes, as mlx-lm's quantised caches hold them: `mx.quantize` over groups of a head's elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from gnomon.kernels import codes
from gnomon.kernels.coded import Mask
from gnomon.state.codecs.codec import Codec, Fetched, packed, taken

TILE = 512
"""Keys that the tiled attention takes at once, as mlx-optiq's."""

Quantized = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True, slots=True)
class Affine(Codec):
    """Codes of `bits` with a scale and a bias of the model's type per `group` elements.

    Attention is mlx-lm's own quantised function, so a lone row has its bits. With `fused`, windows of several tokens go through the keys
    in tiles with a running softmax (FlashAttention-2), as mlx-optiq does it, so that no window's scores exist whole. In steps with native
    kernels one of them reads the codes. On CUDA without those, a layer's keys and values are unpacked first.
    """

    bits: int
    group: int = 64
    fused: bool = False

    @property
    def name(self) -> str:
        # How attention runs is part of it: later keys depend on it.
        return f"affine{self.bits}g{self.group}{'t' if self.fused else ''}"

    @property
    def number(self) -> int:
        return self.bits * 1000 + self.group

    def check(self, dim: int) -> None:
        if dim % self.group:
            raise ValueError(
                f"heads of {dim} elements can't be held in {self.bits} bits: they must be a multiple of the group of {self.group}"
            )

    def key_codes(self, dim: int, dtype: mx.Dtype) -> codes.Codes:
        return _codes(self.bits, self.group, dim, dtype)

    def value_codes(self, dim: int, dtype: mx.Dtype) -> codes.Codes:
        return _codes(self.bits, self.group, dim, dtype)

    def encode_keys(self, keys: mx.array) -> mx.array:
        made = codes.encode(keys, self.key_codes(keys.shape[3], keys.dtype))
        if made is not None:
            return made
        return packed(mx.quantize(keys, group_size=self.group, bits=self.bits))

    def encode_values(self, values: mx.array) -> mx.array:
        return self.encode_keys(values)

    def decode_keys(self, words: mx.array, dim: int, dtype: mx.Dtype) -> mx.array:
        return mx.dequantize(*self._parts(words, dim, dtype), group_size=self.group, bits=self.bits)

    def decode_values(self, words: mx.array, dim: int, dtype: mx.Dtype) -> mx.array:
        return self.decode_keys(words, dim, dtype)

    def attend(self, queries: mx.array, held: Fetched, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        if sinks is not None:
            raise ValueError("attention sinks can't be combined with keys and values in 4 or 8 bits")
        made = self.attend_natively(queries, held, scale, mask, None)
        if made is not None:
            return made
        held = held.exact(queries.shape[0])
        if mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu):
            # MLX's products for CUDA don't take such shapes, so mlx-lm's function fails there.
            whole = (
                self.decode_keys(words, dim, held.dtype)
                for words, dim in ((held.keys, held.key_dim), (held.values, held.value_dim))
            )
            return mx.fast.scaled_dot_product_attention(queries, *whole, scale=scale, mask=mask)
        keys = self._parts(held.keys, held.key_dim, held.dtype)
        values = self._parts(held.values, held.value_dim, held.dtype)
        if self.fused and queries.shape[2] > 1:
            return self._tiled(queries, keys, values, scale, mask)
        return quantized_scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=scale,
            mask=mask,  # pyright: ignore[reportArgumentType]  (strings are taken, the annotation forgets them)
            group_size=self.group,
            bits=self.bits,
        )

    def _parts(self, words: mx.array, dim: int, dtype: mx.Dtype) -> Quantized:
        """Codes, scales and biases."""
        size, groups = dim * self.bits // 8, dim // self.group
        return (
            taken(words, 0, size // 4, mx.uint32),
            taken(words, size, groups, dtype),
            taken(words, size + groups * dtype.size, groups, dtype),
        )

    def _tiled(self, queries: mx.array, keys: Quantized, values: Quantized, scale: float, mask: Mask) -> mx.array:
        """The running softmax: `out` and `total` are sums of exponentials below `best`, the largest score so far, row by row."""
        batch, heads, length, dim = queries.shape
        groups, end = keys[0].shape[1], keys[0].shape[2]
        queries = (queries * scale).reshape(batch, groups, heads // groups, length, dim)
        seen = _as_array(mask, length, end)
        out = best = total = None
        for start in range(0, end, TILE):
            tile = slice(start, start + TILE)
            k, v = ([part[:, :, None, tile] for part in one] for one in (keys, values))
            scores = self._product(queries, k, transpose=True)
            if seen is not None:
                part = seen[..., tile]
                small = mx.finfo(scores.dtype).min
                scores = mx.where(part, scores, small) if part.dtype == mx.bool_ else scores + part
            highest = mx.max(scores, axis=-1, keepdims=True)
            if out is None or best is None or total is None:
                best = highest
                weights = mx.exp(scores - best)
                total = mx.sum(weights, axis=-1, keepdims=True)
                out = self._product(weights, v, transpose=False)
                continue
            higher = mx.maximum(best, highest)
            shrink = mx.exp(best - higher)
            weights = mx.exp(scores - higher)
            total = shrink * total + mx.sum(weights, axis=-1, keepdims=True)
            out = out * shrink + self._product(weights, v, transpose=False)
            best = higher
        if out is None or total is None:
            raise ValueError("attention over no keys")
        return (out / total).reshape(batch, heads, length, -1)

    def _product(self, x: mx.array, parts: list[mx.array], *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(x, *parts, transpose=transpose, group_size=self.group, bits=self.bits)


@cache
def _codes(bits: int, group: int, dim: int, dtype: mx.Dtype) -> codes.Codes:
    return codes.Codes(codes.AFFINE, bits, group, dim, dtype)


def _as_array(mask: Mask, length: int, end: int) -> mx.array | None:
    """A mask that broadcasts to scores `[B, groups, repeats, length, end]`."""
    if isinstance(mask, str):
        return mx.arange(end - length, end)[:, None] >= mx.arange(end)[None]
    if mask is not None and mask.ndim > 3:
        return mx.expand_dims(mask, -3)
    return mask
