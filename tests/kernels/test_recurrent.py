from itertools import product
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from gnomon.kernels import recurrent
from kernels.oracle import Array, bits_of, close, wide

TYPES = (mx.float32, mx.float16, mx.bfloat16)
Inputs = tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]


def inputs(
    batch: int, tokens: int, hk: int, hv: int, dk: int, dv: int, dtype: mx.Dtype = mx.float32, each: bool = False
) -> Inputs:
    def random(*shape: int, seed: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed))

    q, k = (random(batch, tokens, hk, dk, seed=s) * dk**-0.5 for s in (0, 1))
    v, beta = random(batch, tokens, hv, dv, seed=2), mx.sigmoid(random(batch, tokens, hv, seed=3))
    g = mx.sigmoid(random(batch, tokens, hv, dk, seed=4) if each else random(batch, tokens, hv, seed=4))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta.astype(dtype), random(batch, hv, dv, dk, seed=5)


def oracle(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: Array | None = None
) -> tuple[Array, Array]:
    repeats = v.shape[2] // q.shape[2]
    wq, wk = (np.repeat(wide(a), repeats, 2) for a in (q, k))
    wv, wg, wb, s = wide(v), wide(g), wide(beta), wide(state)
    ys = []
    for t in range(q.shape[1]):
        gate = wg[:, t, :, None, None] if g.ndim == 3 else wg[:, t, :, None, :]
        after = s * gate
        delta = (wv[:, t] - np.einsum("bhvk,bhk->bhv", after, wk[:, t])) * wb[:, t, :, None]
        after = after + delta[..., None] * wk[:, t, :, None]
        y = np.einsum("bhvk,bhk->bhv", after, wq[:, t])
        if mask is not None:
            after = np.where(mask[:, t, None, None, None], after, s)
            y = np.where(mask[:, t, None, None], y, 0)
        s = after
        ys.append(y)
    return np.stack(ys, 1), s


@pytest.mark.parametrize(("hk", "hv", "dk", "dv"), [(1, 1, 16, 16), (2, 4, 32, 16), (2, 2, 20, 7), (1, 3, 128, 33)])
def test_gated_delta(extension: ModuleType, hk: int, hv: int, dk: int, dv: int) -> None:
    for dtype, each, tokens in product(TYPES, (False, True), (1, 9)):
        given = inputs(2, tokens, hk, hv, dk, dv, dtype, each)
        y, state = extension.gated_delta(*given, None)
        expected, after = oracle(*given)
        assert (y.dtype, state.dtype) == (dtype, mx.float32)
        close(y, expected, np.full_like(expected, 8.0), dk * tokens)
        close(state, after, np.full_like(after, 8.0), dk * tokens)


def test_masked_tokens_leave_the_state(extension: ModuleType) -> None:
    given = inputs(3, 6, 2, 4, 32, 16)
    mask = np.arange(6)[None] < np.array([6, 2, 0])[:, None]
    y, state = extension.gated_delta(*given, mx.array(mask))
    expected, after = oracle(*given, mask)
    close(y, expected, np.full_like(expected, 8.0), 200)
    close(state, after, np.full_like(after, 8.0), 200)
    assert (bits_of(state[2]) == bits_of(given[5][2])).all()


def test_chunks_rows_and_threads_do_not_change_a_bit(kernels: ModuleType) -> None:
    q, k, v, g, beta, state = inputs(3, 40, 2, 4, 48, 24)
    y, after = kernels.gated_delta(q, k, v, g, beta, state, None)
    kernels.set_threads(3)
    parts, s = [], state
    for start, end in ((0, 1), (1, 17), (17, 40)):
        part, s = kernels.gated_delta(*(a[:, start:end] for a in (q, k, v, g, beta)), s, None)
        parts.append(part)
    assert (bits_of(mx.concatenate(parts, axis=1)) == bits_of(y)).all()
    assert (bits_of(s) == bits_of(after)).all()
    one, last = kernels.gated_delta(*(a[1:2] for a in (q, k, v, g, beta, state)), None)
    assert (bits_of(one) == bits_of(y[1:2])).all()
    assert (bits_of(last) == bits_of(after[1:2])).all()


@pytest.mark.parametrize("channels", [1, 7, 16, 40])
def test_short_convolution(extension: ModuleType, channels: int) -> None:
    for dtype, taps, length in product(TYPES, (1, 3, 4), (4, 11)):
        x = mx.random.normal((2, length, channels), key=mx.random.key(taps)).astype(dtype)
        w = mx.random.normal((channels, taps, 1), key=mx.random.key(9)).astype(dtype)
        out = length - taps + 1
        terms = [wide(x)[:, j : j + out] * wide(w)[:, j, 0] for j in range(taps)]
        expected, magnitude = sum(terms), sum(np.abs(t) for t in terms)
        close(extension.short_convolution(x, w, False), expected, magnitude, taps)
        silu = expected / (1 + np.exp(-expected))
        close(extension.short_convolution(x, w, True), silu, magnitude * 2, taps)
        close(extension.short_convolution(x.swapaxes(1, 2).swapaxes(1, 2), w, False), expected, magnitude, taps)


def test_the_references_are_what_mlx_computes() -> None:
    given = inputs(2, 5, 2, 4, 32, 16)
    y, state = recurrent.reference_gated_delta(*given)
    stock_y, stock_state = gated_delta_ops(*given)
    assert mx.allclose(y, stock_y, atol=1e-5)
    assert mx.allclose(state, stock_state, atol=1e-5)
    x, w = mx.random.normal((2, 9, 6)), mx.random.normal((6, 4, 1))
    assert mx.allclose(recurrent.reference_short_convolution(x, w), mx.conv1d(x, w, groups=6), atol=1e-5)


class MixerCase:
    """A mixer's random weights: two key heads, four value heads."""

    K, HK, HV, DK, DV, TAPS = 48, 2, 4, 16, 24, 4

    def __init__(self, e: ModuleType, dtype: mx.Dtype = mx.float32) -> None:
        def random(*shape: int, seed: int) -> mx.array:
            return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

        self.extension = e
        channels, values = 2 * self.HK * self.DK + self.HV * self.DV, self.HV * self.DV
        self.maps = [random(n, self.K, seed=n) / 7 for n in (channels, values, self.HV, self.HV)]
        self.maps[3] = self.maps[3] * 2
        self.rest = [
            random(channels, self.TAPS, 1, seed=1),
            mx.log(mx.array([0.5, 1.0, 4.0, 16.0])),
            random(self.HV, seed=2),
            1 + random(self.DV, seed=3) / 4,
        ]
        self.projections = [e.Projection(m, None, None, None, 0, 0) for m in self.maps]
        self.before = random(3, self.TAPS - 1, channels, seed=4)
        self.state = mx.random.normal((3, self.HV, self.DV, self.DK), key=mx.random.key(5))

    def run(
        self, x: mx.array, before: mx.array | None, state: mx.array | None, counts: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array]:
        y, kept, after = self.extension.delta_mixer(
            x, *self.projections, *self.rest, self.HK, self.HV, 1e-6, before, state, counts
        )
        return y, kept, after

    def exact(self, x: Array, before: Array, state: Array, counts: list[int]) -> tuple[Array, Array, Array]:
        mixed, z, b, a = (x @ wide(m).T for m in self.maps)
        conv, a_log, dt_bias, norm = map(wide, self.rest)
        y, kept, s = np.zeros_like(z), before.copy(), state.copy()
        for row, count in enumerate(counts):
            window = np.concatenate([before[row], mixed[row, :count]])
            kept[row] = window[count:]
            for t in range(count):
                c = (window[t : t + self.TAPS] * conv[:, :, 0].T).sum(0)
                c = c / (1 + np.exp(-c))
                q, k = c[: 2 * self.HK * self.DK].reshape(2, self.HK, self.DK)
                v = c[2 * self.HK * self.DK :].reshape(self.HV, self.DV)
                q, k = (u / np.sqrt((u**2).sum(-1, keepdims=True) + 1e-6) for u in (q, k))
                for h in range(self.HV):
                    own = q[h // 2] / np.sqrt(self.DK), k[h // 2]
                    s[row, h] *= np.exp(-np.exp(a_log[h]) * np.log1p(np.exp(a[row, t, h] + dt_bias[h])))
                    delta = (v[h] - s[row, h] @ own[1]) / (1 + np.exp(-b[row, t, h]))
                    s[row, h] += np.outer(delta, own[1])
                    o = s[row, h] @ own[0]
                    gate = z[row, t, h * self.DV : (h + 1) * self.DV]
                    o = o / np.sqrt((o**2).mean() + 1e-6) * norm * gate / (1 + np.exp(-gate))
                    y[row, t, h * self.DV : (h + 1) * self.DV] = o
        return y, kept, s


@pytest.mark.parametrize(("dtype", "step"), [(mx.float32, 1e-4), (mx.float16, 0.02), (mx.bfloat16, 0.15)])
def test_a_whole_mixer(extension: ModuleType, dtype: mx.Dtype, step: float) -> None:
    case = MixerCase(extension, dtype)
    x = mx.random.normal((3, 9, case.K), key=mx.random.key(8)).astype(dtype)
    for before, state, counts in (
        (None, None, None),
        (case.before, case.state, None),
        (case.before, case.state, [9, 2, 0]),
    ):
        got = case.run(x, before, state, None if counts is None else mx.array(counts))
        empty = np.zeros(case.before.shape), np.zeros(case.state.shape)
        held = empty if before is None or state is None else (wide(before), wide(state))
        expected = case.exact(wide(x), *held, counts or [9, 9, 9])
        real = np.arange(9)[None] < np.array(counts or [9, 9, 9])[:, None]
        # Each head's values are normalised, so the few that were nearly nothing carry all errors: their mean counts for narrow types.
        error = np.abs(wide(got[0]) - expected[0])[real]
        assert (error.max() if dtype == mx.float32 else error.mean()) < step
        assert not wide(got[0])[~real].any()
        assert np.abs(wide(got[1]) - expected[1]).max() < step
        assert np.abs(wide(got[2]) - expected[2]).max() < step


def test_chunks_and_rows_of_a_mixer_do_not_change_a_bit(kernels: ModuleType) -> None:
    case = MixerCase(kernels)
    x = mx.random.normal((3, 40, case.K), key=mx.random.key(8))
    whole = case.run(x, case.before, case.state)
    kernels.set_threads(3)
    parts, before, state = [], case.before, case.state
    for start, end in ((0, 1), (1, 3), (3, 40)):
        part, before, state = case.run(x[:, start:end], before, state)
        parts.append(part)
    assert (bits_of(mx.concatenate(parts, axis=1)) == bits_of(whole[0])).all()
    assert (bits_of(before) == bits_of(whole[1])).all()
    assert (bits_of(state) == bits_of(whole[2])).all()
    for part, all_rows in zip(case.run(x[1:2], case.before[1:2], case.state[1:2]), whole, strict=True):
        assert (bits_of(part) == bits_of(all_rows[1:2])).all()
    padded = case.run(x[:, :30], case.before, case.state, mx.array([30, 7, 3]))
    for part, all_rows in zip(case.run(x[1:2, :7], case.before[1:2], case.state[1:2]), padded, strict=True):
        assert (bits_of(part) == bits_of(all_rows[1:2, :7])).all()
    with pytest.raises(ValueError, match="mixer of 3 and 4 heads"):
        kernels.delta_mixer(x, *case.projections, *case.rest, 3, 4, 1e-6, None, None, None)
