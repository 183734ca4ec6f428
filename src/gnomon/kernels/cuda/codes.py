"""Coding of keys and values: to words, and back for attention over many queries.

Contract
    encode     [B, H, n, dim] bf16 or f16, whole vectors together in memory, to words uint32 [B, H, n, words], as `gnomon.kernels.codes`
               describes them; AFFINE has the bits of `mx.quantize`, SHIFTED those of the codec's own operations; of ROTATED a group's scale
               is a sum in another order
    decode     the first `length` slots of words [B or more, H, length or more, words] to [B, H, length, dim], float32 rounded once to bf16
               or f16; ROTATED stays rotated
    unrotate   [rows, dim] bf16 or f16 turned back
    codes      AFFINE of 4 and 8 bits with numbers in bf16 or f16, groups of 32, 64 or 128; SHIFTED and ROTATED of 2 to 8 bits; dim 64, 128,
               256 or 512, a multiple of the group

A vector's words depend on it alone.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from gnomon.kernels.codes import AFFINE, ROTATED, Codes
from gnomon.kernels.cuda.products import GROUPS, TYPES
from gnomon.kernels.cuda.sources import Kernel, make

BLOCK = 128
WARPS = BLOCK // 32
DIMS = frozenset({64, 128, 256, 512})
AFFINE_BITS = frozenset({4, 8})
_NAMES = ("AFFINE", "SHIFTED", "ROTATED")

Key = tuple[int, int, int, int, mx.Dtype]
"""What kernels are made for."""


def key_of(codes: Codes) -> Key:
    return codes.coding, codes.bits, codes.group, codes.dim, codes.dtype


def why_not(codes: Codes) -> str | None:
    """What keeps vectors under these codes from the kernels, or None."""
    if codes.dim not in DIMS or codes.group not in GROUPS or codes.dim % codes.group or codes.dtype not in TYPES:
        return f"heads of {codes.dim} in groups of {codes.group} with numbers of {codes.dtype}"
    if codes.coding == AFFINE and codes.bits not in AFFINE_BITS:
        return f"affine codes of {codes.bits} bits"
    return f"rows of {row_bytes(codes)} bytes" if row_bytes(codes) % 4 else None


def row_bytes(codes: Codes) -> int:
    """Bytes of a vector."""
    numbers = 1 if codes.coding == ROTATED else 2
    return codes.dim * codes.bits // 8 + 2 * numbers * (codes.dim // codes.group)


def named(key: Key) -> str:
    """The codes as a type of the sources."""
    coding, bits, group, dim, dtype = key
    return f"gnomon::Codes<gnomon::{_NAMES[coding]}, {bits}, {group}, {dim}, {TYPES[dtype]}>"


_tables: dict[tuple[float, ...], mx.array] = {}


def table(codes: Codes) -> mx.array:
    """Levels, bounds and signs, float32; a single 0 where there are none."""
    numbers = (*codes.levels, *codes.bounds, *codes.signs) if codes.coding == ROTATED else (0.0,)
    if numbers not in _tables:
        _tables[numbers] = mx.array(numbers, dtype=mx.float32)
        mx.eval(_tables[numbers])
    return _tables[numbers]


_AT = "gnomon::Place{{{0}_strides[0], {0}_strides[1], {0}_strides[2], {0}_strides[3]}}"
_ROWS = "(long long){0}_shape[0] * {0}_shape[1] * {0}_shape[2]"


@cache
def _encode(key: Key, dtype: mx.Dtype) -> Kernel:
    body = f"""
  gnomon::encode<{named(key)}, {TYPES[key[4]]}, {TYPES[dtype]}>(
      x, {_AT.format("x")}, x_shape[1], x_shape[2], {_ROWS.format("x")}, table, words);
"""
    return make("encode", "codes.cuh", ["x", "table"], ["words"], body, block=BLOCK, any_strides=True)


def encode(x: mx.array, codes: Codes) -> mx.array:
    """The words of `[B, H, n, dim]`."""
    shape = (*x.shape[:3], row_bytes(codes) // 4)
    rows = x.size // codes.dim
    if not rows:
        return mx.zeros(shape, mx.uint32)
    return _encode(key_of(codes), x.dtype)(
        inputs=[x, table(codes)],
        output_shapes=[shape],
        output_dtypes=[mx.uint32],
        grid=(-(-rows // WARPS) * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]


@cache
def _decode(key: Key, dtype: mx.Dtype) -> Kernel:
    body = f"""
  gnomon::decode<{named(key)}, {TYPES[dtype]}>(
      words, {_AT.format("words")}, words_shape[1], words_shape[2], {_ROWS.format("words")}, table, out);
"""
    return make("decode", "codes.cuh", ["words", "table"], ["out"], body, block=BLOCK, any_strides=True)


def decode(words: mx.array, codes: Codes, dtype: mx.Dtype) -> mx.array:
    """`[B, H, n, dim]` of `dtype`."""
    shape = (*words.shape[:3], codes.dim)
    threads = words.shape[0] * words.shape[1] * words.shape[2] * (codes.dim // 8)
    if not threads:
        return mx.zeros(shape, dtype)
    return _decode(key_of(codes), dtype)(
        inputs=[words, table(codes)],
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=(-(-threads // BLOCK) * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]


@cache
def _unrotate(dim: int, levels: int, dtype: mx.Dtype) -> Kernel:
    body = f"""
  gnomon::unrotate<{dim}, {TYPES[dtype]}>(
      x, {_ROWS.format("x")}, table + {2 * levels - 1}, out);
"""
    return make("unrotate", "codes.cuh", ["x", "table"], ["out"], body, block=BLOCK)


def unrotate(x: mx.array, codes: Codes) -> mx.array:
    """`[B, H, L, dim]` sums of rotated vectors, turned back."""
    rows = x.size // codes.dim
    if not rows:
        return x
    return _unrotate(codes.dim, len(codes.levels), x.dtype)(
        inputs=[x, table(codes)],
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        grid=(-(-rows // WARPS) * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]
