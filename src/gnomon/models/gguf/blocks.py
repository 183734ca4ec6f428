"""ggml's quantisation blocks, repacked into MLX's affine layout without changing a value.

A block holds 32 weights of one row. Its affine reading `w = scale * q + bias` has, with q unsigned:

    Q4_0  f16 d, 16 nibble bytes          scale d, bias -8 d
    Q4_1  f16 d, f16 m, 16 nibble bytes   scale d, bias m
    Q5_0  f16 d, u32 high bits, nibbles   scale d, bias -16 d
    Q5_1  f16 d, f16 m, u32, nibbles      scale d, bias m
    Q8_0  f16 d, 32 signed bytes          scale d, bias -128 d, q stored + 128

Nibble byte j carries weight j in its low half and weight j + 16 in its high half. Scales and biases are widened to f32, because MLX
dequantises in their type: in f16 `scale * q + bias` rounds twice, in f32 it gives ggml's numbers to the bit. (Layouts: ggml-common.h of
the ggml project.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
GROUP: Final = 32
AFFINE_BITS: Final[dict[Kind, int]] = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q5_0: 5, Kind.Q5_1: 5, Kind.Q8_0: 8}
_HAS_MINIMUM: Final = (Kind.Q4_1, Kind.Q5_1)
_HAS_HIGH_BITS: Final = (Kind.Q5_0, Kind.Q5_1)


@dataclass(frozen=True, slots=True)
class Affine:
    """Rows of a matrix as MLX stores them: `weight` u32 [rows, cols * bits / 32], `scales` and `biases` f32 [rows, cols / 32]."""

    weight: NDArray[np.uint32]
    scales: NDArray[np.float32]
    biases: NDArray[np.float32]
    bits: int


def pack(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """Unsigned codes [rows, cols] as MLX's little-endian bit stream, u32 [rows, cols * bits / 32]. `cols` is a multiple of 32."""
    rows, cols = codes.shape
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(codes[:, 0::2] | (codes[:, 1::2] << 4)).view(np.uint32)
    octets = codes.reshape(rows, cols // 8, 8).astype(np.uint64)
    stream = np.zeros((rows, cols // 8), np.uint64)
    for place in range(8):
        stream |= octets[:, :, place] << np.uint64(bits * place)
    packed = stream.astype("<u8").view(np.uint8).reshape(rows, cols // 8, 8)[:, :, :bits]
    return np.ascontiguousarray(packed).reshape(rows, cols * bits // 8).view(np.uint32)


def affine(data: Bytes, kind: Kind) -> Affine:
    """Repack rows of raw blocks, u8 [rows, bytes per row], of one of `AFFINE_BITS`'s kinds."""
    bits = AFFINE_BITS[kind]
    size = 2 + 2 * (kind in _HAS_MINIMUM) + 4 * (kind in _HAS_HIGH_BITS) + (32 if bits == 8 else 16)
    rows = data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(rows, -1, size)
    scales = _halves(blocks[:, :, :2])
    at = 2
    if kind in _HAS_MINIMUM:
        biases = _halves(blocks[:, :, 2:4])
        at = 4
    else:
        biases = scales * np.float32(-(1 << (bits - 1)))
    codes: Bytes
    if bits == 8:
        codes = np.asarray(blocks[:, :, at:] ^ 0x80, np.uint8)
    else:
        nibbles = blocks[:, :, -16:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.uint8)
        if bits == 5:
            high = np.unpackbits(np.ascontiguousarray(blocks[:, :, at : at + 4]), axis=-1, bitorder="little")
            codes |= (high << 4).astype(np.uint8)
    return Affine(pack(codes.reshape(rows, -1), bits), scales, biases, bits)


def _halves(pairs: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(pairs).view(np.float16)[:, :, 0].astype(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round f32 to bfloat16, ties to even, returned as raw bits. NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
