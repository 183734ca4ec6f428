from itertools import product
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnomon.kernels import attention
from gnomon.kernels.attention import ADDITIVE, BOOLEAN, CAUSAL, NONE
from kernels.oracle import Array, bits_of, close, wide

TYPES = (mx.float32, mx.float16, mx.bfloat16)


def inputs(
    batch: int,
    heads: int,
    groups: int,
    length: int,
    keys: int,
    d: int,
    dv: int | None = None,
    dtype: mx.Dtype = mx.float32,
) -> tuple[mx.array, mx.array, mx.array]:
    key = [mx.random.key(i) for i in range(3)]
    return (
        mx.random.normal((batch, heads, length, d), key=key[0]).astype(dtype),
        mx.random.normal((batch, groups, keys, d), key=key[1]).astype(dtype),
        mx.random.normal((batch, groups, keys, dv or d), key=key[2]).astype(dtype),
    )


def oracle(
    q: mx.array, k: mx.array, v: mx.array, scale: float, bias: Array, sinks: mx.array | None = None
) -> tuple[Array, Array]:
    """Result and the sum of magnitudes behind it. `bias` [B, H, L, S] has -inf where a key is hidden."""
    repeats = q.shape[1] // k.shape[1]
    keys, values = np.repeat(wide(k), repeats, 1), np.repeat(wide(v), repeats, 1)
    scores = wide(q) @ keys.swapaxes(-1, -2) * scale + bias
    best = scores.max(-1, keepdims=True) if scores.shape[-1] else np.full((*scores.shape[:-1], 1), -np.inf)
    if sinks is not None:
        best = np.maximum(best, wide(sinks).reshape(1, -1, 1, 1))
    e = np.exp(scores - np.where(np.isneginf(best), 0, best))
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(wide(sinks).reshape(1, -1, 1, 1) - best)
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    magnitude = (p @ np.abs(values)) * (1 + np.abs(np.where(np.isfinite(scores), scores, 0)).max(initial=0))
    return p @ values, magnitude


def causal(length: int, keys: int, window: int = 0) -> Array:
    at = np.arange(keys - length, keys)[:, None]
    seen = np.arange(keys)[None] <= at
    if window:
        seen &= np.arange(keys)[None] > at - window
    return np.where(seen, 0.0, -np.inf)


SHAPES = [
    (1, 3, 1, 1, 1, 64),
    (2, 6, 2, 1, 77, 64),
    (1, 4, 4, 13, 13, 32),
    (2, 4, 2, 9, 150, 80),
    (1, 2, 1, 70, 70, 16),
    (1, 9, 3, 5, 200, 20),
    (1, 8, 1, 3, 66, 8),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_no_mask_and_causal(extension: ModuleType, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    batch, heads, groups, length, keys, d = shape
    q, k, v = inputs(batch, heads, groups, length, keys, d, dtype=dtype)
    close(
        extension.attention(q, k, v, 0.3, NONE, None, None, 0, None),
        *oracle(q, k, v, 0.3, np.zeros((length, keys))),
        terms=keys,
    )
    close(
        extension.attention(q, k, v, 0.3, CAUSAL, None, None, 0, None),
        *oracle(q, k, v, 0.3, causal(length, keys)),
        terms=keys,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_mask_arrays_sinks_and_windows(extension: ModuleType, shape: tuple[int, ...]) -> None:
    batch, heads, groups, length, keys, d = shape
    q, k, v = inputs(batch, heads, groups, length, keys, d)
    rng = np.random.default_rng(0)
    seen = rng.random((batch, 1, length, keys)) < 0.6
    hidden = np.where(seen, 0.0, -np.inf)
    sinks = mx.random.normal((heads,), key=mx.random.key(7))
    for sink in (None, sinks):
        expected = oracle(q, k, v, 0.2, hidden, sink)
        close(extension.attention(q, k, v, 0.2, BOOLEAN, mx.array(seen), None, 0, sink), *expected, terms=keys)
        close(
            extension.attention(q, k, v, 0.2, ADDITIVE, mx.array(hidden.astype(np.float32)), None, 0, sink),
            *expected,
            terms=keys,
        )
        added = rng.normal(size=(length, keys)).astype(np.float32)
        close(
            extension.attention(q, k, v, 0.2, ADDITIVE, mx.array(added), None, 0, sink),
            *oracle(q, k, v, 0.2, added.astype(np.float64), sink),
            terms=keys,
        )
        for window in (1, 4, 100):
            close(
                extension.attention(q, k, v, 0.2, CAUSAL, None, None, window, sink),
                *oracle(q, k, v, 0.2, causal(length, keys, window), sink),
                terms=keys,
            )


def test_masks_of_half_types_and_every_broadcast(extension: ModuleType) -> None:
    q, k, v = inputs(2, 4, 2, 3, 17, 16)
    for shape, dtype in product([(17,), (3, 17), (1, 1, 3, 17), (2, 1, 1, 17), (2, 4, 3, 17)], TYPES):
        mask = mx.random.normal(shape, key=mx.random.key(len(shape))).astype(dtype)
        y = extension.attention(q, k, v, 0.25, ADDITIVE, mask, None, 0, None)
        close(y, *oracle(q, k, v, 0.25, wide(mx.broadcast_to(mask, (2, 4, 3, 17)))), terms=17)


def test_values_of_another_width_than_keys(extension: ModuleType) -> None:
    q, k, v = inputs(1, 4, 2, 5, 30, 48, dv=24)
    y = extension.attention(q, k, v, 0.1, CAUSAL, None, None, 0, None)
    assert y.shape == (1, 4, 5, 24)
    close(y, *oracle(q, k, v, 0.1, causal(5, 30)), terms=30)


@pytest.mark.parametrize("length", [1, 5])
def test_rows_that_see_nothing_are_zero(extension: ModuleType, length: int) -> None:
    q, k, v = inputs(1, 2, 1, length, 8, 16)
    nothing = mx.zeros((length, 8), dtype=mx.bool_)
    assert (np.array(extension.attention(q, k, v, 1.0, BOOLEAN, nothing, None, 0, None)) == 0).all()
    minus = mx.full((length, 8), -mx.inf)
    assert (np.array(extension.attention(q, k, v, 1.0, ADDITIVE, minus, None, 0, None)) == 0).all()
    empty = extension.attention(q, k[:, :, :0], v[:, :, :0], 1.0, NONE, None, None, 0, None)
    assert (np.array(empty) == 0).all()
    more = extension.attention(q, k[:, :, : length - 1], v[:, :, : length - 1], 1.0, CAUSAL, None, None, 0, None)
    assert (np.array(more[:, :, 0]) == 0).all()


def test_hidden_keys_at_the_ends_are_not_read(extension: ModuleType) -> None:
    q, k, v = inputs(1, 2, 1, 2, 20, 16)
    spoilt_k, spoilt_v = np.array(k), np.array(v)
    spoilt_k[:, :, 12:], spoilt_v[:, :, 12:] = np.nan, np.inf
    starts = mx.array([10])
    y = extension.attention(q, mx.array(spoilt_k), mx.array(spoilt_v), 1.0, CAUSAL, None, starts, 0, None)
    assert (
        bits_of(y) == bits_of(extension.attention(q, k[:, :, :12], v[:, :, :12], 1.0, CAUSAL, None, None, 0, None))
    ).all()
    seen = mx.arange(20)[None] < 12
    y = extension.attention(
        q, mx.array(spoilt_k), mx.array(spoilt_v), 1.0, BOOLEAN, mx.broadcast_to(seen, (2, 20)), None, 0, None
    )
    assert (
        bits_of(y) == bits_of(extension.attention(q, k[:, :, :12], v[:, :, :12], 1.0, NONE, None, None, 0, None))
    ).all()


def test_nan_and_infinite_inputs_show(extension: ModuleType) -> None:
    q, k, v = inputs(1, 2, 1, 3, 20, 16)
    bad = np.array(k)
    bad[0, 0, 19, 3] = np.nan
    y = np.array(extension.attention(q, mx.array(bad), v, 1.0, CAUSAL, None, None, 0, None))
    assert np.isnan(y[:, :, 2]).all()
    assert np.isfinite(y[:, :, :2]).all()
    bad_v = np.array(v)
    bad_v[0, 0, 0, 5] = np.inf
    y = np.array(extension.attention(q, k, mx.array(bad_v), 0.1, NONE, None, None, 0, None))
    assert np.isinf(y[..., 5]).all()


def test_strided_inputs(extension: ModuleType) -> None:
    x = mx.random.normal((2, 7, 6, 64), key=mx.random.key(3))
    q, k, v = x[:, :, :4].transpose(0, 2, 1, 3), x[:, :, 4:5].transpose(0, 2, 1, 3), x[:, :, 5:].transpose(0, 2, 1, 3)
    y = extension.attention(q, k, v, 0.125, CAUSAL, None, None, 0, None)
    dense = extension.attention(
        mx.contiguous(q), mx.contiguous(k), mx.contiguous(v), 0.125, CAUSAL, None, None, 0, None
    )
    assert (bits_of(y) == bits_of(dense)).all()
    odd = extension.attention(q[..., ::2], k[..., ::2], v[..., ::2], 0.125, CAUSAL, None, None, 0, None)
    close(odd, *oracle(q[..., ::2], k[..., ::2], v[..., ::2], 0.125, causal(7, 7)), terms=7)


def test_the_result_transposes_without_a_copy(extension: ModuleType) -> None:
    q, k, v = inputs(2, 3, 1, 5, 5, 16)
    y = extension.attention(q, k, v, 1.0, CAUSAL, None, None, 0, None)
    merged = y.transpose(0, 2, 1, 3).reshape(2, 5, 48)
    assert (np.array(merged) == np.array(y).transpose(0, 2, 1, 3).reshape(2, 5, 48)).all()
    assert (np.array(y + 0) == np.array(y)).all()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_a_row_is_the_same_to_the_bit_however_it_is_asked(kernels: ModuleType, data: st.DataObject) -> None:
    groups, repeats = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    length, past = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 90))
    dtype, d = data.draw(st.sampled_from(TYPES)), data.draw(st.sampled_from([16, 24, 64]))
    window = data.draw(st.sampled_from([0, 0, 3, 50]))
    keys = length + past
    q, k, v = inputs(1, groups * repeats, groups, length, keys, d, dtype=dtype)
    kernels.set_threads(data.draw(st.integers(1, 3)))
    whole = kernels.attention(q, k, v, 0.2, CAUSAL, None, None, window, None)
    i = data.draw(st.integers(0, length - 1))
    end = past + i + 1
    # Alone, over the keys it sees.
    alone = kernels.attention(q[:, :, i : i + 1], k[:, :, :end], v[:, :, :end], 0.2, CAUSAL, None, None, window, None)
    assert (bits_of(alone) == bits_of(whole[:, :, i : i + 1])).all()
    # In a batch of rows of other lengths, without a mask array and with one, and with the window cut off the buffer's start.
    more = data.draw(st.integers(0, 20))
    wide_k, wide_v = (
        mx.concatenate([a[:, :, :end], mx.ones((1, groups, more, d), dtype=dtype)], axis=2) for a in (k, v)
    )
    two_q, two_k, two_v = (mx.concatenate([a, a * 2]) for a in (q[:, :, i : i + 1], wide_k, wide_v))
    starts = mx.array([end - 1, end + more - 1])
    ragged = kernels.attention(two_q, two_k, two_v, 0.2, CAUSAL, None, starts, window, None)
    assert (bits_of(ragged[:1]) == bits_of(alone)).all()
    slots = mx.arange(end + more)[None, None, None]
    seen = slots <= starts.reshape(2, 1, 1, 1)
    if window:
        seen = seen & (slots > starts.reshape(2, 1, 1, 1) - window)
    masked = kernels.attention(two_q, two_k, two_v, 0.2, BOOLEAN, seen, None, 0, None)
    assert (bits_of(masked[:1]) == bits_of(alone)).all()
    if window:
        low = max(0, end - window)
        cut = kernels.attention(q[:, :, i : i + 1], k[:, :, low:end], v[:, :, low:end], 0.2, NONE, None, None, 0, None)
        assert (bits_of(cut) == bits_of(alone)).all()


def test_the_reference_is_what_mlx_computes() -> None:
    q, k, v = inputs(2, 4, 2, 3, 9, 16)
    sinks = mx.random.normal((4,), key=mx.random.key(1))
    for mask, sink in product((None, "causal", mx.random.normal((3, 9))), (None, sinks)):
        stock = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask, sinks=sink)
        assert mx.allclose(attention.reference(q, k, v, scale=0.3, mask=mask, sinks=sink), stock, atol=1e-5)


def test_keys_are_added_up_in_the_order_that_is_told(extension: ModuleType) -> None:
    q, k, v = (mx.random.normal((2, heads, n, 32), key=mx.random.key(n)) for heads, n in ((4, 3), (2, 150), (2, 150)))
    seen = mx.arange(150)[None] > mx.array([[20], [90]])
    for mask, kind in ((None, NONE), (seen[:, None, None], BOOLEAN)):
        whole = extension.attention(q, k, v, 0.2, kind, mask, None, 0, None)
        for start in (1, 75, 149):
            # Slot s holds key (s - start) modulo 150; the second row lies elsewhere than the first.
            order = (mx.arange(150)[None] + mx.array([[start], [start // 2]])) % 150
            where = mx.argsort(order, axis=1)
            ring = [mx.take_along_axis(a, where[:, None, :, None], axis=2) for a in (k, v)]
            lying = None if mask is None else mx.take_along_axis(mask, where[:, None, None], axis=3)
            turned = extension.attention(q, *ring, 0.2, kind, lying, None, 0, None, order)
            assert np.array_equal(bits_of(turned), bits_of(whole))
            if start != 75:
                continue  # what the mask shows may lie together
            asis = extension.attention(q, *ring, 0.2, kind, lying, None, 0, None)
            assert not np.array_equal(bits_of(asis), bits_of(whole))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_keys_shared_among_threads_change_no_bit(extension: ModuleType, dtype: mx.Dtype) -> None:
    """Few heads over many keys: threads share keys, then rows, then columns."""
    keys = 1500
    for heads, groups, length, d in ((9, 3, 1, 64), (4, 1, 3, 80), (3, 3, 2, 100)):
        q = mx.random.normal((1, heads, length, d), key=mx.random.key(1)).astype(dtype)
        k, v = (mx.random.normal((1, groups, keys, d), key=mx.random.key(s)).astype(dtype) for s in (2, 3))
        sinks = mx.random.normal((heads,), key=mx.random.key(4))
        hidden = mx.random.uniform(shape=(1, 1, length, keys), key=mx.random.key(5)) < 0.3
        cases = (
            (attention.CAUSAL, None, None, 0, None),
            (attention.CAUSAL, None, mx.array([1400]), 1200, sinks),
            (attention.BOOLEAN, hidden, None, 0, None),
        )
        for case in cases:
            results = []
            for threads in (1, 2, 4):
                extension.set_threads(threads)
                results.append(bits_of(extension.attention(q, k, v, d**-0.5, *case, None)))
            assert all((r == results[0]).all() for r in results)
