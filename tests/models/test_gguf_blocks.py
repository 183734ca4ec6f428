"""ggml blocks in MLX's affine layout: the same numbers to the bit, judged by the gguf package and by MLX."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gnomon.models.gguf.blocks import AFFINE_BITS, affine, pack, to_bfloat16

KINDS = sorted(AFFINE_BITS, key=lambda kind: kind.name)


def mlx_values(raw: np.ndarray, kind: Kind) -> np.ndarray:
    made = affine(raw, kind)
    return np.array(
        mx.dequantize(
            mx.array(made.weight), mx.array(made.scales), mx.array(made.biases), group_size=32, bits=made.bits
        )
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_blocks_keep_every_bit(kind: Kind, data: st.DataObject) -> None:
    rows, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    size = GGML_QUANT_SIZES[kind][1]
    raw = data.draw(hnp.arrays(np.uint8, (rows, blocks, size)))
    halves = st.floats(-1000, 1000, width=16)
    for at in range(2 if kind in (Kind.Q4_1, Kind.Q5_1) else 1):
        scale = data.draw(hnp.arrays(np.float16, (rows, blocks, 1), elements=halves))
        raw[:, :, 2 * at : 2 * at + 2] = scale.view(np.uint8)
    raw = raw.reshape(rows, blocks * size)
    np.testing.assert_array_equal(mlx_values(raw, kind), dequantize(raw, kind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_quantised_weights_multiply_as_the_dequantised_ones(kind: Kind) -> None:
    random = np.random.default_rng(0)
    weights, x = random.normal(size=(64, 128)).astype(np.float32), random.normal(size=(3, 128)).astype(np.float32)
    raw = quantize(weights, kind)
    made = affine(raw, kind)
    arrays = (mx.array(made.weight), mx.array(made.scales), mx.array(made.biases))
    got = mx.quantized_matmul(mx.array(x), *arrays, transpose=True, group_size=32, bits=made.bits)
    np.testing.assert_allclose(np.array(got), x @ dequantize(raw, kind).T, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bits", [4, 5, 8])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_packing_is_what_mlx_unpacks(bits: int, data: st.DataObject) -> None:
    codes = data.draw(hnp.arrays(np.uint8, (2, 64), elements=st.integers(0, (1 << bits) - 1)))
    ones, zeros = mx.ones((2, 2)), mx.zeros((2, 2))
    unpacked = mx.dequantize(mx.array(pack(codes, bits)), ones, zeros, group_size=32, bits=bits)
    np.testing.assert_array_equal(np.array(unpacked), codes)


@settings(deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)))
def test_bfloat16_rounds_as_mlx_does(values: np.ndarray) -> None:
    got = mx.array(to_bfloat16(values)).view(mx.bfloat16).astype(mx.float32)
    expected = mx.array(values).astype(mx.bfloat16).astype(mx.float32)
    np.testing.assert_array_equal(np.array(got), np.array(expected))
