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


def close(result: mx.array, expected: Array, magnitude: Array | float, terms: int = 1) -> None:
    """`result` within one rounding to its type, and `terms` ** 0.5 float32 roundings of what was added up (`magnitude`)."""
    got = wide(result)
    assert got.shape == expected.shape
    bound = (
        EPSILON[result.dtype] * np.abs(expected) + 8 * 2.0**-23 * max(terms, 1) ** 0.5 * magnitude + STEP[result.dtype]
    )
    wrong = ~((np.abs(got - expected) <= bound) | (np.isnan(got) & np.isnan(expected)) | (got == expected))
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} beyond the bound, worst {np.nanmax(np.abs(got - expected) / bound):.2f} of it"
    )
