"""Products in whole numbers: `--kernels int8`, off unless asked for.

Contract of the native versions
    where        wherever `quantized_matmul` and the fused layers multiply affine weights of 4 or 8 bits (other widths stay as they are)
    x            a block of 32 neighbours along K becomes d * q: d = max |x| / 127 in float32, q the nearest whole number to
                 x * (127 / max |x|), ties to even; a block whose largest value is below 2^-100 counts as zeros; one with an infinity or NaN
                 makes its row NaN

Arithmetic: a block's sum of code * q is exact; block by block, an output takes fma(sum, scale * d, output), then fma(bias, d * sum of
q, output), in float32, and is rounded once to the result's type. So all that `quantized_matmul` promises of rows holds here too, on every
instruction set: AVX-512 with and without VNNI, AVX2 and NEON agree to the bit. The values are other ones, as activations lose all but 8
bits (llama.cpp's kernels do the same): an output differs from the exact product by at most the sum over blocks of d / 2 times the weights'
sizes.
"""

from __future__ import annotations

import mlx.core as mx

from gnomon.kernels.quantized_matmul import reference_rows

BITS = frozenset({4, 8})
BLOCK = 32
LEAST = 2.0**-100


def rounded(x: mx.array) -> mx.array:
    """Activations `[..., K]` as the kernels see them, in float32: `d * q` in blocks of 32, K a multiple of it."""
    blocks = x.astype(mx.float32).reshape(*x.shape[:-1], -1, BLOCK)
    top = mx.abs(blocks).max(axis=-1, keepdims=True)
    by = mx.where(top < LEAST, 0.0, 127.0 / mx.where(top < LEAST, 1.0, top))
    return (mx.round(blocks * by) * (top / 127.0)).reshape(x.shape)


def reference(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int) -> mx.array:
    """The product in plain MLX operations: rounded activations times the weights, in float32, as MLX's result type."""
    dense = reference_rows(w, scales, biases, group, bits)
    return (rounded(x) @ dense.T).astype(mx.result_type(x, scales))
