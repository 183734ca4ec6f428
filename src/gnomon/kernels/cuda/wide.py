"""Products of 33 to 64 rows with quantised weights, which are taken apart in registers instead of in memory.

Contract
    x          [M, K] of any M (each 64 rows read all weights), K a multiple of 64; weights of x's type, bf16 or f16, 4 and 8 bits in
               groups of 32, 64 or 128
    result     [M, N] of x's type

Arithmetic: a weight is fma(code, scale, bias), rounded once to the type; products in the tensor cores with float32 sums; as many splits of
K as N and K say, added in order; one rounding. An output depends, to the bit, on its row of x and its row of the weights alone, for every
M; fewer rows elsewhere (`products`) have other bits.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from gnomon.kernels.cuda.products import TYPES, Weights
from gnomon.kernels.cuda.sources import Kernel, make

OUTPUTS, ROWS, CHUNK, BLOCK = 128, 64, 64, 128
FULL = 264
"""Blocks that fill an H200: two for each multiprocessor."""
MOST_SPLITS = 8


def splits_of(outputs: int, inputs: int) -> int:
    """Into how many parts K is cut: as many as fill the card where there are few outputs, each of 8 chunks at least."""
    return max(1, min(FULL // -(-outputs // OUTPUTS), inputs // (8 * CHUNK), MOST_SPLITS))


@cache
def _wide(bits: int, group: int, biased: bool, dtype: mx.Dtype, whole: bool) -> Kernel:
    t, bias = TYPES[dtype], "c0" if biased and whole else "nullptr"
    body = f"""
  const gnomon::Weights<{t}> part{{w0, s0, b0, {bias}, w0_shape[0]}};
  gnomon::wide<{t}, {bits}, {group}>(part, x, x_shape[0], x_shape[1], out);
"""
    names = ["x", "w0", "s0", "b0", *(["c0"] if biased and whole else [])]
    return make(
        "wide" if whole else "wide_split", "wide.cuh", names, ["out"], body, block=BLOCK, blocks_per_processor=2
    )


@cache
def _join(biased: bool, dtype: mx.Dtype) -> Kernel:
    t = TYPES[dtype]
    body = f"""
  gnomon::join<{t}>(parts, parts_shape[0], {"c0" if biased else "nullptr"}, parts_shape[2],
      (long long)parts_shape[1] * parts_shape[2], out);
"""
    return make("join", "wide.cuh", ["parts", *(["c0"] if biased else [])], ["out"], body, block=256)


def wide(x: mx.array, weights: Weights) -> mx.array:
    """x @ w.T (+ bias) for x [M, K]."""
    rows, outputs, bias = x.shape[0], weights.outputs, weights.bias
    splits = splits_of(outputs, weights.inputs)
    whole = splits == 1
    y = _wide(weights.bits, weights.group, bias is not None, weights.dtype, whole)(
        inputs=[x, *weights.arrays()[:3], *([bias] if bias is not None and whole else [])],
        output_shapes=[(rows, outputs) if whole else (splits, rows, outputs)],
        output_dtypes=[weights.dtype if whole else mx.float32],
        grid=(-(-outputs // OUTPUTS) * BLOCK, -(-rows // ROWS), splits),
        threadgroup=(BLOCK, 1, 1),
    )[0]
    if whole:
        return y
    return _join(bias is not None, weights.dtype)(
        inputs=[y, *([bias] if bias is not None else [])],
        output_shapes=[(rows, outputs)],
        output_dtypes=[weights.dtype],
        grid=(-(-rows * outputs // 256) * 256, 1, 1),
        threadgroup=(256, 1, 1),
    )[0]
