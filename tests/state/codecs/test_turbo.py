"""TurboQuant against a slow reference written from its formulas, element by element."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.state.codecs import Turbo
from gnomon.state.codecs.codebooks import BOUNDARIES, CENTROIDS
from gnomon.state.codecs.codec import Fetched
from gnomon.state.codecs.turbo import DIMS, GROUP, KEY_BITS, VALUE_BITS, fwht, pack, rotate, signs, unpack, unrotate

F32 = np.float32


def vectors(dim: int, seed: int, *, scale: float = 1.0, shift: float = 0.0) -> np.ndarray:
    made = np.random.default_rng([dim, seed]).standard_normal((1, 2, 3, dim))
    return (made * scale + shift).astype(F32)


def read_bits(row: bytes, bits: int, count: int) -> list[int]:
    """Little-endian: code i is bits `i * bits` and following of the stream, the lowest first."""
    stream = int.from_bytes(row, "little")
    return [(stream >> (i * bits)) & (2**bits - 1) for i in range(count)]


def key_codes(group: np.ndarray, bits: int) -> tuple[list[int], np.float16, np.float16]:
    """A group's codes, scale and zero from the formulas, in float32."""
    high, low = group.max(), group.min()
    with np.errstate(all="ignore"):
        if bits == 8:
            scale = F32(high - low) / F32(254)
            zero = np.round(F32(high + low) / F32(2 * scale))
            codes = np.clip(np.round(group / scale - zero), -127, 127)
        else:
            last = F32(2**bits - 1)
            scale = F32(high - low) / last
            zero = np.round(low / scale)
            codes = np.clip(np.round(group / scale - zero), 0, last)
        return codes.tolist(), np.float16(scale), np.float16(zero)


def rows_of(words: mx.array) -> list[bytes]:
    return [row.tobytes() for row in np.array(words).reshape(-1, words.shape[-1])]


@pytest.mark.parametrize("bits", KEY_BITS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(dim=st.sampled_from([64, 128]), seed=st.integers(0, 10**6), scale=st.floats(0.01, 30), shift=st.floats(-5, 5))
def test_keys_are_the_formulas(bits: int, dim: int, seed: int, scale: float, shift: float) -> None:
    x = vectors(dim, seed, scale=scale, shift=shift)
    codec = Turbo(key_bits=bits)
    words = codec.encode_keys(mx.array(x))
    decoded = np.array(codec.decode_keys(words, dim, mx.float32)).reshape(-1, dim)
    groups = dim // GROUP
    for row, vector, back in zip(rows_of(words), x.reshape(-1, dim), decoded, strict=True):
        size = dim * bits // 8
        assert len(row) == size + 4 * groups
        codes = np.frombuffer(row[:size], np.int8).tolist() if bits == 8 else read_bits(row[:size], bits, dim)
        scales = np.frombuffer(row[size : size + 2 * groups], np.float16)
        zeros = np.frombuffer(row[size + 2 * groups :], np.float16)
        for g in range(groups):
            part = slice(g * GROUP, (g + 1) * GROUP)
            want, want_scale, want_zero = key_codes(vector[part], bits)
            assert codes[part] == want
            assert (scales[g], zeros[g]) == (want_scale, want_zero)
            exact = (np.array(want, F32) + F32(want_zero)) * F32(want_scale)
            assert np.array_equal(back[part], exact)


@pytest.mark.parametrize("bits", KEY_BITS)
def test_a_group_without_extent_overflows_on_purpose(bits: int) -> None:
    x = vectors(64, 1)
    x[..., :32] = 3.0
    codec = Turbo(key_bits=bits)
    words = codec.encode_keys(mx.array(x))
    zero = np.frombuffer(rows_of(words)[0][64 * bits // 8 + 4 :], np.float16)
    assert np.isposinf(zero[0])
    assert np.isfinite(zero[1])
    back = np.array(codec.decode_keys(words, 64, mx.float32))
    assert np.isnan(back[..., :32]).all()
    assert np.isfinite(back[..., 32:]).all()
    x[..., :32] = -3.0
    zero = np.frombuffer(rows_of(codec.encode_keys(mx.array(x)))[0][64 * bits // 8 + 4 :], np.float16)
    assert np.isneginf(zero[0])


def test_a_zero_beyond_float16_overflows_too() -> None:
    """Far from 0 and nearly alike: 100000 steps of the scale below the first code."""
    x = np.full((1, 1, 1, 64), 1000.0, F32) + np.linspace(0, 1, 64, dtype=F32)
    codec = Turbo(key_bits=8)
    assert np.isposinf(np.array(codec.decode_keys(codec.encode_keys(mx.array(x)), 64, mx.float32))).all()


def hadamard(dim: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@pytest.mark.parametrize("dim", DIMS)
def test_the_transform_is_the_hadamard_matrix_and_the_rotation_keeps_lengths(dim: int) -> None:
    x = vectors(dim, 3)
    assert np.allclose(np.array(fwht(mx.array(x))), x @ hadamard(dim), rtol=0, atol=1e-4)
    assert set(np.array(signs(dim)).tolist()) == {-1.0, 1.0}
    rotated = rotate(mx.array(x))
    assert np.allclose(np.array(rotated), (x * np.array(signs(dim))) @ hadamard(dim) / math.sqrt(dim), atol=1e-5)
    assert np.allclose(np.linalg.norm(np.array(rotated), axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    assert np.allclose(np.array(unrotate(rotated)), x, atol=1e-5)


@pytest.mark.parametrize("bits", VALUE_BITS)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(dim=st.sampled_from([64, 256]), seed=st.integers(0, 10**6), scale=st.floats(0.01, 30))
def test_values_are_the_formulas(bits: int, dim: int, seed: int, scale: float) -> None:
    """In float64; a code may differ from float32's only where the element lies on a boundary."""
    x = vectors(dim, seed, scale=scale)
    codec = Turbo(value_bits=bits)
    words = codec.encode_values(mx.array(x))
    sign = np.array(signs(dim), np.float64)
    wide = (x.astype(np.float64).reshape(-1, dim) * sign) @ hadamard(dim) / math.sqrt(dim)
    boundaries, centroids = BOUNDARIES[bits], np.array(CENTROIDS[bits])
    decoded = np.array(codec.decode_values(words, dim, mx.float32)).reshape(-1, dim)
    size = dim * bits // 8
    for row, y, back in zip(rows_of(words), wide, decoded, strict=True):
        codes = read_bits(row[:size], bits, dim)
        scales = np.frombuffer(row[size:], np.float16).astype(np.float64)
        assert len(scales) == dim // GROUP
        held = np.empty(dim)
        for g, s in enumerate(scales):
            part = slice(g * GROUP, (g + 1) * GROUP)
            rms = math.sqrt((y[part] ** 2).mean())
            assert s == pytest.approx(rms, rel=1e-3)
            for element, code in zip(y[part] / (rms + 1e-8), codes[part], strict=True):
                below = sum(b < element for b in boundaries)
                assert code == below or min(abs(b - element) for b in boundaries) < 1e-5
            held[part] = centroids[codes[part]] * s
        assert np.allclose(back, (held @ hadamard(dim)) / math.sqrt(dim) * sign, atol=1e-4 * (1 + abs(held).max()))


def test_values_of_zero_stay_zero_sized() -> None:
    codec = Turbo()
    words = codec.encode_values(mx.zeros((1, 1, 2, 64)))
    assert not np.array(codec.decode_values(words, 64, mx.float32)).any()


def test_the_frozen_codebook_of_three_bits() -> None:
    assert CENTROIDS[3] == (-2.15195, -1.34391, -0.75601, -0.24509, 0.24509, 0.75601, 1.34391, 2.15195)
    assert BOUNDARIES[3] == pytest.approx((-1.74793, -1.04996, -0.50055, 0, 0.50055, 1.04996, 1.74793), abs=1e-9)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_codebooks_are_lloyd_max_for_the_normal_distribution(bits: int) -> None:
    """Each centroid is the mean of its cell: (pdf(a) - pdf(b)) / (cdf(b) - cdf(a))."""
    assert len(CENTROIDS[bits]) == 2**bits
    edges = [-math.inf, *BOUNDARIES[bits], math.inf]
    for a, b, centroid in zip(edges, edges[1:], CENTROIDS[bits], strict=False):
        density = [0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (a, b)]
        # By the nearer tail, where differences of the cdf would cancel.
        low, high = (a, b) if centroid > 0 else (-b, -a)
        mass = (math.erfc(low / math.sqrt(2)) - (0.0 if math.isinf(high) else math.erfc(high / math.sqrt(2)))) / 2
        assert centroid == pytest.approx((density[0] - density[1]) / mass, abs=2e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(0, 10**6))
def test_bit_streams_are_little_endian_and_straddle_bytes(bits: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, 32)).astype(np.uint8)
    stream = pack(mx.array(codes), bits)
    assert stream.shape == (2, 32 * bits // 8)
    for row, want in zip(np.array(stream), codes, strict=True):
        assert read_bits(row.tobytes(), bits, 32) == want.tolist()
    assert np.array_equal(np.array(unpack(stream, bits)), codes)


@pytest.mark.parametrize("length", [1, 5])
def test_deferred_rotation_is_attention_over_decoded_values(length: int) -> None:
    codec, rng = Turbo(8, 4), np.random.default_rng(0)
    keys, values = (mx.array(rng.standard_normal((2, 2, 40, 64)).astype(F32)) for _ in range(2))
    queries = mx.array(rng.standard_normal((2, 6, length, 64)).astype(F32))
    held = Fetched(codec.encode_keys(keys), codec.encode_values(values), 64, 64, mx.float32)
    mask = "causal" if length > 1 else None
    got = codec.attend(queries, held, 0.125, mask, None)
    want = mx.fast.scaled_dot_product_attention(
        queries,
        codec.decode_keys(held.keys, 64, mx.float32),
        codec.decode_values(held.values, 64, mx.float32),
        scale=0.125,
        mask=mask,
    )
    assert float(mx.abs(got - want).max().item()) < 1e-5


def test_the_contracts_size() -> None:
    """200 bytes per token and head at k8v3 and 128 elements, against 512 plain."""
    codec, x = Turbo(), mx.zeros((1, 1, 1, 128), mx.bfloat16)
    assert codec.encode_keys(x).nbytes + codec.encode_values(x).nbytes == 200


@pytest.mark.parametrize("dim", [16, 80, 96, 1024])
def test_other_widths_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=rf"heads of {dim} elements .* 64, 128, 256, 512"):
        Turbo().check(dim)
