from itertools import product
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from gnomon.kernels import matmul
from kernels.oracle import bits_of, close, wide

TYPES = (mx.float32, mx.float16, mx.bfloat16)


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize("k", [1, 7, 31, 32, 33, 64, 100, 1000])
def test_every_type_and_odd_sizes(extension: ModuleType, k: int) -> None:
    for (x_type, w_type), rows, columns in product(product(TYPES, TYPES), (1, 4, 9), (1, 6, 37)):
        x, w = random(rows, k, dtype=x_type), random(columns, k, seed=1, dtype=w_type)
        y = extension.dense_matmul(x, w)
        assert y.dtype == mx.result_type(x, w)
        close(y, wide(x) @ wide(w).T, np.abs(wide(x)) @ np.abs(wide(w)).T, k)


def test_views_and_empty_dimensions(extension: ModuleType) -> None:
    x, w = random(6, 5, 64), random(40, 128, seed=1)
    for weight in (w[:, :64], w[::2, 64:], w[:, ::2], random(64, 12, seed=2).T):
        y = extension.dense_matmul(x[::2, 1:], weight)
        plain = extension.dense_matmul(mx.contiguous(x[::2, 1:]), mx.contiguous(weight))
        assert (bits_of(y) == bits_of(plain)).all()
    assert (np.array(extension.dense_matmul(mx.zeros((3, 0)), mx.zeros((4, 0)))) == 0).all()
    assert extension.dense_matmul(mx.zeros((0, 8)), mx.zeros((4, 8))).shape == (0, 4)


def test_nan_stays_in_its_row(extension: ModuleType) -> None:
    x = np.ones((14, 40), dtype=np.float32)
    x[5, 39] = np.nan
    y = np.array(extension.dense_matmul(mx.array(x), random(9, 40)))
    assert np.isnan(y[5]).all()
    assert np.isfinite(np.delete(y, 5, 0)).all()


def test_rows_are_the_same_to_the_bit_in_any_number(kernels: ModuleType) -> None:
    for dtype, k in product(TYPES, (48, 77)):
        x, w = random(50, k, dtype=dtype), random(33, k, seed=1, dtype=dtype)
        whole = bits_of(kernels.dense_matmul(x, w))
        for start, end in ((0, 1), (3, 5), (7, 10), (20, 24), (24, 29), (30, 49)):
            assert (bits_of(kernels.dense_matmul(x[start:end], w)) == whole[start:end]).all()


def test_dense_experts(extension: ModuleType) -> None:
    x, w = random(2, 5, 1, 1, 48), random(4, 10, 48, seed=1)
    experts = mx.array(np.random.default_rng(0).integers(0, 4, (2, 5, 3)))
    stock = mx.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=experts)
    y = extension.gather_mm(x, w.swapaxes(-1, -2), None, experts)
    assert mx.allclose(y, stock, rtol=1e-5, atol=1e-5)
    assert (bits_of(extension.gather_mm(x, mx.contiguous(w.swapaxes(-1, -2)), None, experts)) == bits_of(y)).all()
    alone = extension.dense_matmul(x[1, 2, 0], w[experts[1, 2, 0].item()])
    assert (bits_of(y[1, 2, 0]) == bits_of(alone)).all()
    half = extension.gather_mm(x.astype(mx.bfloat16), w.astype(mx.bfloat16).swapaxes(-1, -2), None, experts)
    assert half.dtype == mx.bfloat16
    assert mx.allclose(half.astype(mx.float32), stock, rtol=0.05, atol=0.2)


def test_the_reference_is_what_mlx_computes() -> None:
    x, w = random(3, 20), random(4, 20, seed=1)
    assert mx.allclose(matmul.reference(x, w), x @ w.T, atol=1e-5)
