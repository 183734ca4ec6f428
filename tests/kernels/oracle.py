"""Float64 references in numpy, written from the formats and formulas alone."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
STEP = {mx.float32: 2.0**-149, mx.float16: 2.0**-24, mx.bfloat16: 2.0**-133}
"""Distance of subnormal numbers."""
EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def wide(a: mx.array) -> Array:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def bits_of(a: mx.array) -> NDArray[np.uint8]:
    """The array's bytes: equality to the bit, NaN and signed zeros included."""
    mx.eval(a)
    return np.array(mx.contiguous(a).view(mx.uint8))


def codes(w: mx.array, bits: int) -> NDArray[np.int64]:
    """[N, K] codes of packed weights [N, K * bits / 32]: a little-endian stream of bits."""
    stream = np.unpackbits(np.ascontiguousarray(np.array(w)).view(np.uint8), axis=-1, bitorder="little")
    return stream.reshape(*stream.shape[:-1], -1, bits).astype(np.int64) @ (1 << np.arange(bits))


def dequantised(w: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int) -> Array:
    return codes(w, bits) * np.repeat(wide(scales), group, -1) + np.repeat(wide(biases), group, -1)


def quantised(
    rows: int, k: int, group: int, bits: int, dtype: mx.Dtype, seed: int = 0
) -> tuple[mx.array, mx.array, mx.array]:
    w = mx.random.normal((rows, k), key=mx.random.key(seed)).astype(dtype)
    packed = mx.quantize(w, group, bits)
    mx.eval(packed)
    return packed[0], packed[1], packed[2]


def sizes(w: mx.array, s: mx.array, b: mx.array, group: int, bits: int) -> Array:
    """What is added up for a weight of 4 or 8 bits: code times scale and bias come apart there."""
    return codes(w, bits) * np.abs(np.repeat(wide(s), group, -1)) + np.abs(np.repeat(wide(b), group, -1))


def _largest(x: Array, span: int) -> NDArray[np.float32]:
    blocks = np.abs(x.astype(np.float32)).reshape(*x.shape[:-1], -1, span)
    return np.repeat(blocks.max(-1), span, -1)


def rounded(x: Array, span: int, most: int) -> Array:
    """Spans of activations as d * q with |q| <= most, written from the contract: float32 where it says so."""
    top = _largest(x, span)
    tiny = top < np.float32(2.0**-100)
    top[tiny] = 1
    q = np.rint(x.astype(np.float32) * (np.float32(most) / top))
    return np.where(tiny, 0, q.astype(np.float64) * (top / np.float32(most)).astype(np.float64))


def close_to_rounded(
    result: mx.array, x: mx.array, w: mx.array, s: mx.array, b: mx.array, group: int, bits: int, activation: int
) -> None:
    """A product with 4- or 8-bit weights against what rounded activations give, and, within what rounding may cost, the exact one.

    An activation is off by half a step at most, which is the largest one by 127 (in spans of 32) or 32512 (in a group of the weights).
    """
    span, most = (32, 127) if activation == 8 else (group, 32512)
    dense, seen, exact = dequantised(w, s, b, group, bits), rounded(wide(x), span, most), wide(x)
    magnitude = np.abs(seen) @ sizes(w, s, b, group, bits).T
    close(result, seen @ dense.T, magnitude, x.shape[-1])
    # d and x / d are rounded to float32 on the way: at most 1.2 % of half a step.
    step = _largest(exact, span).astype(np.float64) / most / 2 * 1.012
    close(result, exact @ dense.T, magnitude, x.shape[-1], step @ np.abs(dense).T)


def most_lost(x: mx.array, w: mx.array, s: mx.array, b: mx.array, group: int, bits: int) -> float:
    """What activations of 16 bits may cost any product: half a step of the largest, times the largest row of weights' sizes."""
    step = np.abs(wide(x)).max() / 32512 / 2 * 1.012
    return float(step * np.abs(dequantised(w, s, b, group, bits)).sum(-1).max())


def close(
    result: mx.array, expected: Array, magnitude: Array | float, terms: int = 1, beyond: Array | float = 0.0
) -> None:
    """`result` within one rounding to its type, `terms` ** 0.5 float32 roundings of what was added up (`magnitude`), and `beyond`."""
    got = wide(result)
    assert got.shape == expected.shape
    bound = (
        EPSILON[result.dtype] * np.abs(expected)
        + 8 * 2.0**-23 * max(terms, 1) ** 0.5 * magnitude
        + STEP[result.dtype]
        + beyond
    )
    wrong = ~((np.abs(got - expected) <= bound) | (np.isnan(got) & np.isnan(expected)) | (got == expected))
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} beyond the bound, worst {np.nanmax(np.abs(got - expected) / bound):.2f} of it"
    )
