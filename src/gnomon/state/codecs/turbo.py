"""TurboQuant: affine keys and rotated values with a codebook for the normal distribution, after vllm-metal.

All arithmetic is float32; scales and zeros are stored as float16. Groups are of 32 elements along a head.

keys    8 bits: scale = (max - min) / 254, zero = round((max + min) / (2 scale)), code = clip(round(x / scale - zero), -127, 127)
        fewer:  M = 2**bits - 1, scale = (max - min) / M, zero = round(min / scale), code = clip(round(x / scale - zero), 0, M)
        decoded (code + zero) * scale
values  y = FWHT(x * signs) / sqrt(dim), scale = sqrt(mean(y**2)) per group, code = the place of y / (scale + 1e-8) among the boundaries
        of a Lloyd-Max quantiser of N(0, 1); decoded FWHT(codebook[code] * scale) / sqrt(dim) * signs

There is no epsilon in the keys, on purpose: a group whose elements are all alike has scale 0, its zero overflows to an infinity (or is
NaN, if they are 0), and it decodes to NaN. The scheme's definition says so, and hiding it would be another codec.

Since the rotation is linear, attention leaves the values rotated and turns its result back, once per query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from gnomon.kernels import codes
from gnomon.kernels.coded import Mask
from gnomon.state.codecs.codebooks import BOUNDARIES, CENTROIDS
from gnomon.state.codecs.codec import Codec, Fetched, packed, taken

GROUP = 32
DIMS = (64, 128, 256, 512)
KEY_BITS = (2, 4, 5, 8)
VALUE_BITS = (2, 3, 4, 5, 8)
SIGNS_KEY = 42
_TINY = 1e-8


@dataclass(frozen=True, slots=True)
class Turbo(Codec):
    """Keys in `key_bits` and values in `value_bits`, as the module describes."""

    key_bits: int = 8
    value_bits: int = 3

    @property
    def name(self) -> str:
        return f"turbo-k{self.key_bits}v{self.value_bits}"

    @property
    def number(self) -> int:
        return 1_000_000 + self.key_bits * 10 + self.value_bits

    def check(self, dim: int) -> None:
        if dim not in DIMS:
            raise ValueError(f"heads of {dim} elements can't be held by turbo: it takes {', '.join(map(str, DIMS))}")

    def key_codes(self, dim: int, dtype: mx.Dtype) -> codes.Codes:  # noqa: ARG002  (numbers are float16 always)
        return _key_codes(self.key_bits, dim)

    def value_codes(self, dim: int, dtype: mx.Dtype) -> codes.Codes:  # noqa: ARG002
        return _value_codes(self.value_bits, dim)

    def encode_keys(self, keys: mx.array) -> mx.array:
        made = codes.encode(keys, _key_codes(self.key_bits, keys.shape[3]))
        return self._keys(keys) if made is None else made

    def encode_values(self, values: mx.array) -> mx.array:
        made = codes.encode(values, _value_codes(self.value_bits, values.shape[3]))
        return self._values(values) if made is None else made

    def _keys(self, keys: mx.array) -> mx.array:
        x = _grouped(keys)
        high, low = mx.max(x, axis=-1, keepdims=True), mx.min(x, axis=-1, keepdims=True)
        if self.key_bits == 8:
            scale = (high - low) / 254
            zero = mx.round((high + low) / (2 * scale))
            first, last = -127, 127
        else:
            last = 2**self.key_bits - 1
            scale = (high - low) / last
            zero = mx.round(low / scale)
            first = 0
        places = mx.round(x / scale - zero)
        # A group without extent has no codes; what stands for them must not depend on how a device casts NaN.
        places = mx.clip(mx.where(mx.isnan(places), 0, places), first, last).astype(mx.int8).reshape(keys.shape)
        return packed(
            [
                places if self.key_bits == 8 else pack(places.astype(mx.uint8), self.key_bits),
                _halves(scale, keys),
                _halves(zero, keys),
            ]
        )

    def _values(self, values: mx.array) -> mx.array:
        y = _grouped(rotate(values))
        scale = mx.sqrt(mx.mean(y * y, axis=-1, keepdims=True))
        places = _places(y / (scale + _TINY), self.value_bits).astype(mx.uint8).reshape(values.shape)
        return packed([pack(places, self.value_bits), _halves(scale, values)])

    def decode_keys(self, words: mx.array, dim: int, dtype: mx.Dtype) -> mx.array:
        size, groups = dim * self.key_bits // 8, dim // GROUP
        stream = taken(words, 0, size, mx.uint8)
        places = stream.view(mx.int8) if self.key_bits == 8 else unpack(stream, self.key_bits)
        scale = taken(words, size, groups, mx.float16).astype(mx.float32)[..., None]
        zero = taken(words, size + 2 * groups, groups, mx.float16).astype(mx.float32)[..., None]
        return ((_grouped(places) + zero) * scale).reshape(*words.shape[:-1], dim).astype(dtype)

    def decode_values(self, words: mx.array, dim: int, dtype: mx.Dtype) -> mx.array:
        return unrotate(self.rotated_values(words, dim)).astype(dtype)

    def rotated_values(self, words: mx.array, dim: int) -> mx.array:
        """The values before they are turned back, float32 `[B, heads, n, dim]`."""
        size, groups = dim * self.value_bits // 8, dim // GROUP
        places = unpack(taken(words, 0, size, mx.uint8), self.value_bits)
        scale = taken(words, size, groups, mx.float16).astype(mx.float32)[..., None]
        levels = mx.take(_table(CENTROIDS[self.value_bits]), places)
        return (levels.reshape(*places.shape[:-1], groups, GROUP) * scale).reshape(places.shape)

    def attend(self, queries: mx.array, held: Fetched, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        made = self.attend_natively(queries, held, scale, mask, sinks)
        if made is not None:
            return made
        held = held.exact(queries.shape[0])
        keys = self.decode_keys(held.keys, held.key_dim, queries.dtype)
        values = self.rotated_values(held.values, held.value_dim).astype(queries.dtype)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return unrotate(out).astype(queries.dtype)


@cache
def _key_codes(bits: int, dim: int) -> codes.Codes:
    return codes.Codes(codes.SHIFTED, bits, GROUP, dim)


@cache
def _value_codes(bits: int, dim: int) -> codes.Codes:
    tables = CENTROIDS[bits], BOUNDARIES[bits], _drawn_signs(dim)
    return codes.Codes(codes.ROTATED, bits, GROUP, dim, mx.float16, *tables)


def rotate(x: mx.array) -> mx.array:
    """FWHT(x * signs) / sqrt(dim) over the last axis, float32."""
    return fwht(x.astype(mx.float32) * signs(x.shape[-1])) / math.sqrt(x.shape[-1])


def unrotate(y: mx.array) -> mx.array:
    """The inverse of `rotate`, float32."""
    return fwht(y.astype(mx.float32)) / math.sqrt(y.shape[-1]) * signs(y.shape[-1])


def fwht(x: mx.array) -> mx.array:
    """The fast Walsh-Hadamard transform of the last axis, a power of two, in natural order and unscaled.

    Sums and differences in a fixed order, so all devices give the same bits; a product with the matrix would not.
    """
    shape, half = x.shape, 1
    while half < shape[-1]:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = mx.stack([a + b, a - b], axis=-2).reshape(shape)
        half *= 2
    return x


@cache
def _drawn_signs(dim: int) -> tuple[float, ...]:
    drawn = mx.random.randint(0, 2, (dim,), key=mx.random.key(SIGNS_KEY))
    return tuple((2 * drawn - 1).astype(mx.float32).tolist())  # pyright: ignore[reportArgumentType]


def signs(dim: int) -> mx.array:
    """The rotation's signs for heads of `dim`, float32 `[dim]`."""
    return _table(_drawn_signs(dim))


def pack(codes: mx.array, bits: int) -> mx.array:
    """uint8 codes below 2**bits `[..., n]`, n a multiple of 8, as a little-endian bit stream, uint8 `[..., n * bits / 8]`."""
    if bits == 8:
        return codes
    each = (codes[..., None] >> mx.arange(bits, dtype=mx.uint8)) & mx.array(1, mx.uint8)
    stream = each.reshape(*codes.shape[:-1], -1, 8)
    return (stream << mx.arange(8, dtype=mx.uint8)).sum(axis=-1).astype(mx.uint8)


def unpack(stream: mx.array, bits: int) -> mx.array:
    """The codes of `pack`, uint8."""
    if bits == 8:
        return stream
    first, second, shift = _places_of(bits)
    eights = stream.reshape(*stream.shape[:-1], -1, bits).astype(mx.uint16)
    wide = mx.take(eights, mx.array(first), axis=-1) | (mx.take(eights, mx.array(second), axis=-1) << 8)
    codes = (wide >> mx.array(shift, mx.uint16)) & (2**bits - 1)
    return codes.astype(mx.uint8).reshape(*stream.shape[:-1], stream.shape[-1] * 8 // bits)


@cache
def _places_of(bits: int) -> tuple[list[int], list[int], list[int]]:
    """Of each of 8 codes in `bits` bytes: the byte it begins in, the one it may reach into, and its first bit there."""
    begins = [i * bits for i in range(8)]
    return [at // 8 for at in begins], [min(at // 8 + 1, bits - 1) for at in begins], [at % 8 for at in begins]


def _places(x: mx.array, bits: int) -> mx.array:
    """How many of the codebook's boundaries lie below each element, by halving."""
    bounds = _table(BOUNDARIES[bits])
    place = mx.zeros(x.shape, mx.uint32)
    step = 2 ** (bits - 1)
    while step:
        is_above = mx.take(bounds, place + (step - 1)) < x
        place = place + is_above.astype(mx.uint32) * step
        step //= 2
    return place


def _table(numbers: tuple[float, ...]) -> mx.array:
    return mx.array(numbers, mx.float32)


def _grouped(x: mx.array) -> mx.array:
    return x.astype(mx.float32).reshape(*x.shape[:-1], -1, GROUP)


def _halves(x: mx.array, like: mx.array) -> mx.array:
    """A number per group, `[..., groups, 1]`, as float16 `[..., groups]`."""
    return x.astype(mx.float16).reshape(*like.shape[:-1], -1)
