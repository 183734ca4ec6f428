"""Products in whole numbers: how 4- and 8-bit weights are multiplied, by activations of 16 bits or, with `--kernels int8`, of 8.

Contract of the native versions
    where        wherever `quantized_matmul` and the fused layers multiply affine weights of 4 or 8 bits (other widths stay in float32)
    x            a span of neighbours along K becomes d * q: d = max |x| / L in float32, q the nearest whole number to x * (L / max |x|),
                 ties to even; a span whose largest value is below 2^-100 counts as zeros; one with an infinity or NaN makes its row NaN
    16 bits      a span is a group of the weights, L = 32512 (then both bytes of q have a sign)
    8 bits       a span is 32 values, L = 127

Arithmetic: a span's sum of code * q is exact; span by span, an output takes fma(sum, scale * d, output), then fma(bias, d * sum of
q, output), in float32, and is rounded once to the result's type. So all that `quantized_matmul` promises of rows holds here too, on every
instruction set: AVX-512 with and without VNNI, AVX2 and NEON agree to the bit.

Accuracy: x and d * q differ by at most d / 2 (1.2 % more for the roundings of d and x * (L / max |x|)), so an output differs from the
exact product by at most the sum over spans of d / 2 times its weights' sizes, and float32's growth over code * scale and bias, which are
added apart. With 16 bits that is 2^-16 of a span's largest value, less than the rounding of an activation in bfloat16 or half precision;
with 8 it is 2^-8 (llama.cpp's kernels do the same).
"""

from __future__ import annotations

import mlx.core as mx

from gnomon.kernels.quantized_matmul import reference_rows

BITS = frozenset({4, 8})
BLOCK = 32
LARGEST = {16: 32512, 8: 127}
"""L by the bits of an activation."""
LEAST = 2.0**-100


def span(activation: int, group: int) -> int:
    """How many neighbours share a d where activations have `activation` bits and weights come in groups of `group`."""
    return group if activation == 16 else BLOCK


def _steps(x: mx.array, activation: int, group: int) -> tuple[mx.array, mx.array]:
    """Float32 spans `[..., K / n, n]` of activations, and the largest size in each `[..., K / n, 1]`."""
    spans = x.astype(mx.float32).reshape(*x.shape[:-1], -1, span(activation, group))
    return spans, mx.abs(spans).max(axis=-1, keepdims=True)


def rounded(x: mx.array, activation: int, group: int) -> mx.array:
    """Activations `[..., K]` as the kernels see them, in float32: `d * q`, K a multiple of the group."""
    spans, top = _steps(x, activation, group)
    most = LARGEST[activation]
    by = mx.where(top < LEAST, 0.0, most / mx.where(top < LEAST, 1.0, top))
    return (mx.round(spans * by) * (top / most)).reshape(x.shape)


def error(x: mx.array, activation: int, group: int) -> mx.array:
    """How far every activation `[..., K]` may be from what the kernels see: d / 2 with the roundings on the way, or all of a tiny span."""
    spans, top = _steps(x, activation, group)
    most = mx.where(top < LEAST, top, top / LARGEST[activation] * 0.506)
    return mx.broadcast_to(most, spans.shape).reshape(x.shape)


def reference(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int, activation: int = 16
) -> mx.array:
    """The product in plain MLX operations: rounded activations times the weights, in float32, as MLX's result type."""
    dense = reference_rows(w, scales, biases, group, bits)
    return (rounded(x, activation, group) @ dense.T).astype(mx.result_type(x, scales))
