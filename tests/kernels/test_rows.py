"""Norms, activations, reductions and rope against float64."""

import math
from itertools import product
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnomon.kernels import dispatch, norm, rope, vocabulary
from kernels.oracle import EPSILON, Array, bits_of, close, wide

TYPES = (mx.float32, mx.float16, mx.bfloat16)
WIDTHS = (1, 3, 15, 16, 17, 33, 64, 100, 576)


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def rms(x: Array, w: Array | float, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(extension: ModuleType, width: int) -> None:
    for x_type, w_type in product(TYPES, TYPES):
        x, w = random(5, width, dtype=x_type), random(width, seed=1, dtype=w_type)
        y = extension.rms_norm(x, w, 1e-5)
        assert y.dtype == mx.result_type(x, w)
        expected = rms(wide(x), wide(w), 1e-5)
        close(y, expected, np.abs(expected))
        close(extension.rms_norm(x, None, 1e-6), rms(wide(x), 1.0, 1e-6), np.abs(rms(wide(x), 1.0, 1e-6)))


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(extension: ModuleType, width: int) -> None:
    for dtype in TYPES:
        x, w, b = random(4, width, dtype=dtype), random(width, seed=1, dtype=dtype), random(width, seed=2, dtype=dtype)
        rows = wide(x)
        unit = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
        scale = np.abs(unit) + np.abs(rows).max(-1, keepdims=True) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
        for weight, bias in product((w, None), (b, None)):
            factor = 1.0 if weight is None else wide(weight)
            expected = unit * factor + (0.0 if bias is None else wide(bias))
            magnitude = scale * np.abs(factor) + np.abs(expected)
            close(extension.layer_norm(x, weight, bias, 1e-5), expected, magnitude)


def test_norms_of_strided_empty_and_special_rows(extension: ModuleType) -> None:
    x = random(4, 6, 64)
    for view in (x[::2, 1:, ::2], x.transpose(1, 0, 2), mx.broadcast_to(x[:, :1], (4, 3, 64)), x[0, 0]):
        dense = mx.contiguous(view)
        w = random(view.shape[-1], seed=3)
        assert (bits_of(extension.rms_norm(view, w, 1e-5)) == bits_of(extension.rms_norm(dense, w, 1e-5))).all()
        assert (
            bits_of(extension.layer_norm(view, w, w, 1e-5)) == bits_of(extension.layer_norm(dense, w, w, 1e-5))
        ).all()
    assert extension.rms_norm(mx.zeros((0, 8)), mx.ones(8), 1e-5).shape == (0, 8)
    rows = np.ones((3, 20), dtype=np.float32)
    rows[0, 3], rows[1] = np.nan, 1e-42
    y = np.array(extension.rms_norm(mx.array(rows), mx.ones(20), 0.0))
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[2]).all()


def gate_reference(name: int, g: Array, u: Array) -> Array:
    if name == 0:
        return g / (1 + np.exp(-g)) * u
    if name == 1:
        return 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    erf = np.vectorize(math.erf)
    return 0.5 * g * (1 + erf(g / math.sqrt(2))) * u


@pytest.mark.parametrize("activation", [0, 1, 2])
def test_gated_activations(extension: ModuleType, activation: int) -> None:
    for dtype, width in product(TYPES, (1, 7, 16, 200)):
        g = (random(3, width, seed=1) * 4).astype(dtype)
        u = random(3, width, seed=2, dtype=dtype)
        expected = gate_reference(activation, wide(g), wide(u))
        # gelu cancels where 1 + erf does: the bound is absolute there.
        magnitude = np.abs(expected) + (np.abs(wide(g) * wide(u)) * (0.0 if activation == 0 else 0.3))
        close(extension.gated(g, u, activation), expected, magnitude)
    special = mx.array([[mx.inf, -mx.inf, mx.nan, 0.0, -0.0, 1e-42, 200.0, -200.0]])
    y = np.array(extension.gated(special, mx.ones((1, 8)), activation))[0]
    assert y[0] == np.inf
    assert np.isnan(y[2])
    assert (y[3:5] == 0).all()
    assert y[6] == 200
    assert abs(y[7]) < 1e-37


@pytest.mark.parametrize("width", [1, 5, 16, 31, 1000, 4099])
def test_softmax_and_logsumexp(extension: ModuleType, width: int) -> None:
    for dtype in TYPES:
        x = (random(3, width, dtype=dtype) * 5).astype(dtype)
        rows = wide(x)
        shifted = np.exp(rows - rows.max(-1, keepdims=True))
        total = shifted.sum(-1, keepdims=True)
        close(extension.softmax(x), shifted / total, (shifted / total) * (1 + np.abs(rows).max()), width)
        lse = rows.max(-1, keepdims=True) + np.log(total)
        close(extension.logsumexp(x, True), lse, np.abs(lse) + 1, width)
        assert extension.logsumexp(x, False).shape == (3,)


def test_reductions_of_infinite_and_nan_rows(extension: ModuleType) -> None:
    x = np.zeros((5, 40), dtype=np.float32)
    x[0, 7], x[1], x[2, 5], x[3, 39] = np.inf, -np.inf, np.nan, -np.inf
    lse = np.array(extension.logsumexp(mx.array(x), False))
    assert lse[0] == np.inf
    assert lse[1] == -np.inf
    assert np.isnan(lse[2])
    assert lse[3] == pytest.approx(math.log(39))
    soft = np.array(extension.softmax(mx.array(x)))
    assert np.isnan(soft[2]).all()
    assert soft[3, 39] == 0


def test_reductions_are_dispatched_over_the_last_axis_alone(kernels: ModuleType) -> None:
    x = random(2, 2048)
    taken: list[str] = []
    spy = SimpleNamespace(
        softmax=lambda x, s: taken.append("softmax"),
        logsumexp=lambda x, k, s: taken.append("logsumexp"),
        argmax=lambda x, k, s: taken.append("argmax"),
    )
    dispatch.install(vocabulary.OPERATIONS, spy)  # pyright: ignore[reportArgumentType]
    dispatch.choose(True)
    try:
        with dispatch.step():
            mx.softmax(x, axis=-1), mx.logsumexp(x, axis=[1]), mx.argmax(x, axis=1), mx.logsumexp(x[:1], keepdims=True)
            assert taken == ["softmax", "logsumexp", "argmax", "logsumexp"]
            mx.logsumexp(x[:, None], axis=(1, 2), keepdims=True)
            assert taken.pop(4) == "logsumexp"
            shapes = [mx.softmax(x).shape, mx.logsumexp(x).shape, mx.logsumexp(x[:1]).shape, mx.argmax(x).shape]
            shapes += [
                mx.logsumexp(x[None], axis=(1, 2), keepdims=True).shape,
                mx.logsumexp(x[:, None], axis=(1, 2)).shape,
            ]
            assert shapes == [(2, 2048), (), (), (), (1, 1, 1), (2,)]
            assert mx.softmax(x, axis=0).shape == (2, 2048)
            assert mx.argmax(x[:, :100], axis=-1).shape == (2,)
        assert len(taken) == 4
    finally:
        dispatch.choose(False)
        dispatch.uninstall()


@pytest.mark.parametrize("width", [1, 15, 16, 17, 5000])
def test_argmax_takes_the_first(extension: ModuleType, width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.integers(0, 4, (20, width)).astype(np.float32)
    assert (np.array(extension.argmax(mx.array(x), False)) == x.argmax(-1)).all()
    assert extension.argmax(mx.array(x), True).shape == (20, 1)
    x[3] = -np.inf
    x[4, width // 2] = np.nan
    assert (np.array(extension.argmax(mx.array(x), False)) == x.argmax(-1)).all()


def rope_reference(x: Array, dims: int, traditional: bool, frequencies: Array, positions: Array) -> Array:
    angle = (positions.astype(np.float32)[..., None] * frequencies.astype(np.float32)).astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    y = x.copy()
    if traditional:
        p, q = x[..., 0:dims:2], x[..., 1:dims:2]
        y[..., 0:dims:2], y[..., 1:dims:2] = p * cos - q * sin, p * sin + q * cos
    else:
        p, q = x[..., : dims // 2], x[..., dims // 2 : dims]
        y[..., : dims // 2], y[..., dims // 2 : dims] = p * cos - q * sin, p * sin + q * cos
    return y


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("width", "dims"), [(8, 8), (64, 64), (20, 12), (96, 64)])
def test_rope(extension: ModuleType, width: int, dims: int, traditional: bool) -> None:
    half = dims // 2
    for dtype in TYPES:
        x = random(2, 3, 5, width, dtype=dtype)
        frequencies = np.exp(-np.arange(half, dtype=np.float32) * np.float32(math.log(10000.0) / half))
        for offset, scale in product((0, 11, 5000), (1.0, 0.25)):
            positions = np.float32(scale) * np.arange(offset, offset + 5, dtype=np.float32)
            expected = rope_reference(wide(x), dims, traditional, frequencies, positions)
            y = extension.rope(x, dims, traditional, 10000.0, scale, mx.array([offset]), None)
            magnitude = np.abs(wide(x)).max() * (
                1 + 0.3 * offset * scale
            )  # the frequencies' last bits, times the position
            close(y, expected, magnitude)
        wavelengths = mx.array(1 / frequencies)
        starts = mx.array([3, 400])
        y = extension.rope(x, dims, traditional, None, 1.0, starts, wavelengths)
        for b, start in enumerate((3, 400)):
            positions = np.arange(start, start + 5, dtype=np.float32)
            inverse = np.float32(1) / np.array(wavelengths)
            close(y[b], rope_reference(wide(x)[b], dims, traditional, inverse, positions), np.abs(wide(x)).max())


def test_rope_is_what_mlx_computes(extension: ModuleType) -> None:
    x = random(2, 4, 7, 64)
    for traditional, offset in product((False, True), (0, 900)):
        stock = mx.fast.rope(x, 64, traditional=traditional, base=1e4, scale=1.0, offset=offset)
        assert mx.allclose(extension.rope(x, 64, traditional, 1e4, 1.0, mx.array([offset]), None), stock, atol=1e-4)
        plain = rope.reference(x, 64, traditional=traditional, base=1e4, scale=1.0, offset=offset)
        assert mx.allclose(plain, stock, atol=1e-4)


def test_rope_of_a_token_depends_on_its_position_alone(extension: ModuleType) -> None:
    x = random(1, 3, 9, 32)
    whole = extension.rope(x, 32, False, 1e4, 1.0, mx.array([4090]), None)  # over the end of the ring of kept angles
    for t in range(9):
        one = extension.rope(x[:, :, t : t + 1], 32, False, 1e4, 1.0, mx.array([4090 + t]), None)
        assert (bits_of(one) == bits_of(whole[:, :, t : t + 1])).all()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(rows=st.integers(1, 50), width=st.integers(1, 80), dtype=st.sampled_from(TYPES), threads=st.integers(1, 3))
def test_a_row_is_the_same_to_the_bit_whoever_is_beside_it(
    kernels: ModuleType, rows: int, width: int, dtype: mx.Dtype, threads: int
) -> None:
    kernels.set_threads(threads)
    x, w = random(rows, width, dtype=dtype), random(width, seed=1)
    operations = (
        lambda a: kernels.rms_norm(a, w, 1e-5),
        lambda a: kernels.layer_norm(a, w, w, 1e-5),
        lambda a: kernels.gated(a, a, 0),
        kernels.softmax,
        lambda a: kernels.logsumexp(a, True),
    )
    for operation in operations:
        whole = operation(x)
        assert (bits_of(operation(x[rows // 2 : rows // 2 + 1])) == bits_of(whole[rows // 2 : rows // 2 + 1])).all()


def test_instruction_sets_agree_to_the_bit(kernels: ModuleType) -> None:
    fused = [isa for isa in kernels.isas() if isa != "portable"]
    if len(fused) < 2:
        pytest.skip("one instruction set with fused multiply-add here")
    x = random(7, 83) * 3
    results: list[list[np.ndarray]] = []
    for isa in fused:
        kernels.set_isa(isa)
        outputs = [kernels.rms_norm(x, None, 1e-5), kernels.layer_norm(x, None, None, 1e-5), kernels.softmax(x)]
        outputs += [kernels.gated(x, x, a) for a in range(3)]
        results.append([bits_of(y) for y in outputs])
    kernels.set_isa("auto")
    for one, other in zip(*results[:2], strict=True):
        assert (one == other).all()


def test_the_references_are_what_mlx_computes() -> None:
    x, w = random(3, 40), random(40, seed=1)
    assert mx.allclose(norm.reference_rms_norm(x, w, 1e-5), mx.fast.rms_norm(x, w, 1e-5), atol=1e-5)
    assert mx.allclose(norm.reference_layer_norm(x, w, w, 1e-5), mx.fast.layer_norm(x, w, w, 1e-5), atol=1e-5)
    assert mx.allclose(vocabulary.reference_softmax(x), mx.softmax(x, axis=-1), atol=1e-6)
    assert mx.allclose(vocabulary.reference_logsumexp(x), mx.logsumexp(x, axis=-1, keepdims=True), atol=1e-5)
    assert EPSILON[mx.float32] == 2.0**-23
