from itertools import product
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnomon.kernels import dispatch, integer, quantized_matmul
from kernels.oracle import bits_of, close, close_to_rounded, dequantised, most_lost, quantised, rounded, wide

BITS, GROUPS = sorted(quantized_matmul.BITS), sorted(quantized_matmul.GROUPS)
TYPES = (mx.float32, mx.float16, mx.bfloat16)
WHOLE = (4, 8)
"""Widths whose products are taken in whole numbers, by activations of 16 bits."""


def check(extension: ModuleType, x: mx.array, w: mx.array, s: mx.array, b: mx.array, group: int, bits: int) -> mx.array:
    dense = dequantised(w, s, b, group, bits)
    y = extension.quantized_matmul(x, w, s, b, group, bits)
    rows = wide(x)
    assert y.dtype == mx.result_type(x, s)
    if bits in WHOLE:
        close_to_rounded(y, x, w, s, b, group, bits, 16)
    else:
        close(y, rows @ dense.T, np.abs(rows) @ np.abs(dense).T, x.shape[-1])
    return y


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
def test_every_width_group_and_type(extension: ModuleType, bits: int, group: int) -> None:
    for n, (scale_type, x_type) in enumerate(product(TYPES, TYPES)):
        w, s, b = quantised(21 + n, 3 * group, group, bits, scale_type, seed=n)
        x = mx.random.normal((1 + n, 3 * group), key=mx.random.key(9 + n)).astype(x_type)
        check(extension, x, w, s, b, group, bits)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 29, 64, 481])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 50])
def test_every_height_and_odd_widths(extension: ModuleType, rows: int, columns: int) -> None:
    for bits in (4, 5, 8):
        w, s, b = quantised(columns, 128, 64, bits, mx.float32)
        check(extension, mx.random.normal((rows, 128), key=mx.random.key(rows)), w, s, b, 64, bits)


def test_long_rows_are_taken_in_stretches(extension: ModuleType) -> None:
    for bits in (4, 5):
        w, s, b = quantised(7, 64 * 96, 64, bits, mx.float32)
        check(extension, mx.random.normal((7, 64 * 96), key=mx.random.key(1)), w, s, b, 64, bits)


def test_strided_broadcast_and_batched_activations(extension: ModuleType) -> None:
    w, s, b = quantised(33, 64, 32, 4, mx.float32)
    x = mx.random.normal((6, 4, 128), key=mx.random.key(2))
    for view in (x[::2, 1:, 64:], x.swapaxes(0, 1)[..., ::2], mx.broadcast_to(x[:, :1, :64], (6, 5, 64)), x[0, 0, :64]):
        y = extension.quantized_matmul(view, w, s, b, 32, 4)
        assert (bits_of(y) == bits_of(extension.quantized_matmul(mx.contiguous(view), w, s, b, 32, 4))).all()
        close_to_rounded(y, view, w, s, b, 32, 4, 16)


def test_weights_that_are_views(extension: ModuleType) -> None:
    w, s, b = quantised(40, 128, 64, 5, mx.float16)
    x = mx.random.normal((3, 128), key=mx.random.key(3))
    whole = extension.quantized_matmul(x, w, s, b, 64, 5)
    assert (
        bits_of(extension.quantized_matmul(x, w[::3], s[::3], b[::3], 64, 5)) == bits_of(mx.contiguous(whole[:, ::3]))
    ).all()


def test_no_rows_and_no_columns(extension: ModuleType) -> None:
    w, s, b = quantised(8, 64, 64, 4, mx.float32)
    assert extension.quantized_matmul(mx.zeros((0, 64)), w, s, b, 64, 4).shape == (0, 8)
    empty = extension.quantized_matmul(mx.ones((3, 64)), w[:0], s[:0], b[:0], 64, 4)
    mx.eval(empty)
    assert empty.shape == (3, 0)


@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_special_values(extension: ModuleType, rows: int, bits: int) -> None:
    w, s, b = quantised(5, 64, 64, bits, mx.float32)
    x = np.ones((rows, 64), dtype=np.float32)
    x[:, 1], x[0, 7] = 1e-41, np.nan
    y = np.array(extension.quantized_matmul(mx.array(x), w, s, b, 64, bits))
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1:]).all()
    x[0, 7] = np.inf
    y = np.array(extension.quantized_matmul(mx.array(x), w, s, b, 64, bits))
    assert (np.isinf(y[0]) | np.isnan(y[0])).all()
    tiny = extension.quantized_matmul(mx.full((rows, 64), 1e-42), w, s, b, 64, bits)
    if bits in WHOLE:
        assert (np.array(tiny) == 0).all()
    else:
        expected = np.full((rows, 64), float(np.float32(1e-42))) @ dequantised(w, s, b, 64, bits).T
        assert np.abs(wide(tiny) - expected).max() < 64 * 1.5e-45  # nothing is flushed to zero
    far = extension.quantized_matmul(mx.full((rows, 64), 3e38), w, s, b, 64, bits)
    assert not np.isfinite(np.array(far)).all()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_a_row_is_the_same_to_the_bit_whoever_is_beside_it(kernels: ModuleType, data: st.DataObject) -> None:
    bits, group = data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from(GROUPS))
    blocks, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    dtype = data.draw(st.sampled_from(TYPES))
    rows = data.draw(st.integers(1, 40))
    w, s, b = quantised(columns, blocks * group, group, bits, dtype, seed=rows)
    x = mx.random.normal((rows, blocks * group), key=mx.random.key(columns)).astype(dtype)
    alone = mx.concatenate([kernels.quantized_matmul(x[i : i + 1], w, s, b, group, bits) for i in range(rows)])
    kernels.set_threads(data.draw(st.integers(1, 3)))
    assert (bits_of(kernels.quantized_matmul(x, w, s, b, group, bits)) == bits_of(alone)).all()
    cut = data.draw(st.integers(0, rows))
    parts = [kernels.quantized_matmul(p, w, s, b, group, bits) for p in (x[:cut], x[cut:])]
    assert (bits_of(mx.concatenate(parts)) == bits_of(alone)).all()
    order = mx.array(data.draw(st.permutations(range(rows))))
    assert (bits_of(kernels.quantized_matmul(x[order], w, s, b, group, bits)) == bits_of(alone[order])).all()


def test_instruction_sets_agree_to_the_bit(kernels: ModuleType) -> None:
    fused = [isa for isa in kernels.isas() if isa != "portable"]
    if len(fused) < 2:
        pytest.skip("one instruction set with fused multiply-add here")
    for bits, group, rows in product(BITS, GROUPS, (1, 3, 7, 30)):
        w, s, b = quantised(19, 4 * group, group, bits, mx.float16, seed=bits)
        x = mx.random.normal((rows, 4 * group), key=mx.random.key(rows))
        results = []
        for isa in fused:
            kernels.set_isa(isa)
            results.append(bits_of(kernels.quantized_matmul(x, w, s, b, group, bits)))
        kernels.set_isa("auto")
        assert all((r == results[0]).all() for r in results)


@pytest.mark.parametrize("bits", BITS)
def test_experts(extension: ModuleType, bits: int) -> None:
    parts = [quantised(18, 128, 32, bits, mx.float32, seed=e) for e in range(4)]
    w, s, b = (mx.stack([p[i] for p in parts]) for i in range(3))
    x = mx.random.normal((2, 5, 1, 1, 128), key=mx.random.key(4))
    experts = mx.array(np.random.default_rng(0).integers(0, 4, (2, 5, 3)))
    y = extension.gather_qmm(x, w, s, b, None, experts, 32, bits)
    assert y.shape == (2, 5, 3, 1, 18)
    stock = mx.gather_qmm(x, w, s, b, rhs_indices=experts, transpose=True, group_size=32, bits=bits)
    lost = most_lost(x, w, s, b, 32, bits) if bits in WHOLE else 0
    assert mx.allclose(y, stock, rtol=1e-4, atol=1e-4 + lost)
    for i, j, k in product(range(2), range(5), range(3)):
        e = experts[i, j, k].item()
        alone = extension.quantized_matmul(x[i, j, 0], w[e], s[e], b[e], 32, bits)
        assert (bits_of(y[i, j, k]) == bits_of(alone)).all()


def test_experts_of_chosen_rows(extension: ModuleType) -> None:
    parts = [quantised(9, 64, 64, 4, mx.float32, seed=e) for e in range(3)]
    w, s, b = (mx.stack([p[i] for p in parts]) for i in range(3))
    x = mx.random.normal((4, 2, 64), key=mx.random.key(5))
    left, right = mx.array([3, 0, 3, 2]), mx.array([2, 2, 0, 1])
    y = extension.gather_qmm(x, w, s, b, left, right, 64, 4)
    stock = mx.gather_qmm(x, w, s, b, lhs_indices=left, rhs_indices=right, transpose=True, group_size=64, bits=4)
    assert mx.allclose(y, stock, rtol=1e-4, atol=1e-4 + most_lost(x, w, s, b, 64, 4))


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
def test_embedding_rows(extension: ModuleType, bits: int, group: int) -> None:
    for dtype in TYPES:
        w, s, b = quantised(11, 2 * group, group, bits, dtype)
        ids = mx.array([[0, 10], [-1, 4]])
        rows = extension.quantized_embedding(ids, w, s, b, group, bits)
        assert rows.dtype == dtype
        expected = dequantised(w, s, b, group, bits)[np.array(ids)]
        close(rows, expected, 2 * np.abs(wide(b)).max() + np.abs(expected))


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
def test_values_of_codes(extension: ModuleType, bits: int, group: int) -> None:
    for dtype in TYPES:
        w, s, b = quantised(30, 2 * group, group, bits, dtype)
        expected = dequantised(w, s, b, group, bits)
        bound = 2 * np.abs(wide(b)).max() + np.abs(expected)
        close(extension.dequantise(w, s, b, group, bits), expected, bound)
        # As a cache holds them: behind other words, in another order of axes, with room between the rows.
        held = mx.concatenate([mx.zeros((30, 3), mx.uint32), w, w], axis=1)[:, 3 : 3 + w.shape[1]]
        turned = [x.reshape(5, 6, -1).swapaxes(0, 1) for x in (held, s, b)]
        rows = extension.dequantise(*turned, group, bits)
        close(rows.swapaxes(0, 1).reshape(30, -1), expected, bound)
        # Words that don't lie side by side.
        apart = mx.stack([w, w], axis=-1)[..., 0]
        close(extension.dequantise(apart, s, b, group, bits), expected, bound)


def test_the_reference_is_what_mlx_computes() -> None:
    for bits, group in product(BITS, GROUPS):
        w, s, b = quantised(6, 2 * group, group, bits, mx.float32)
        x = mx.random.normal((2, 2 * group), key=mx.random.key(6))
        stock = mx.quantized_matmul(x, w, s, b, group_size=group, bits=bits)
        assert mx.allclose(quantized_matmul.reference(x, w, s, b, group, bits), stock, rtol=1e-4, atol=1e-5)
        if bits in WHOLE:
            seen = rounded(wide(x), group, 32512)
            assert np.abs(wide(integer.rounded(x, 16, group)) - seen).max() <= 2.0**-23 * np.abs(seen).max()
            assert mx.allclose(integer.reference(x, w, s, b, group, bits), stock, rtol=1e-4, atol=1e-3)


def test_what_no_kernel_covers_stays_stock(kernels: ModuleType) -> None:
    dispatch.install(quantized_matmul.OPERATIONS, kernels)
    dispatch.choose(True)
    dispatch.stock_calls.clear()
    try:
        w, s = mx.quantize(mx.random.normal((8, 64)), group_size=32, bits=4, mode="mxfp4")
        x = mx.random.normal((2, 64))
        outside = mx.quantized_matmul(x, w, s, group_size=32, bits=4, mode="mxfp4")
        with dispatch.step():
            inside = mx.quantized_matmul(x, w, s, group_size=32, bits=4, mode="mxfp4")
            wq, sq, bq = mx.quantize(mx.random.normal((64, 64)))
            mx.quantized_matmul(x, wq, sq, bq, transpose=False)
        assert (bits_of(inside) == bits_of(outside)).all()
        assert dispatch.stock_calls == {"quantized_matmul": 2}
    finally:
        dispatch.choose(False)
        dispatch.uninstall()
        dispatch.stock_calls.clear()
