"""HLG sampling: the curve by hand, its identities and its shape."""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.engine.api import HLG, SamplingParams
from gnomon.engine.sampling import BatchSampler, RowSampling
from gnomon.engine.sampling.hlg import pivots, tone_curve

INF = math.inf


def test_the_curve_by_hand() -> None:
    # max -0.5, so the pivot is -6.5 and z = 6, 3.5, -4, -8.
    x = mx.array([[-0.5, -3.0, -10.5, -14.5, -INF]])
    pivot = pivots(x, [HLG()])
    assert pivot.item() == -6.5
    curve = tone_curve(x, pivot, [HLG()])[0].tolist()
    # 4 + 4 ln(1 + 2/4) = 5.6218604; 4 + 6 ln(1 + 4/6) = 7.0649537
    assert curve == pytest.approx([-6.5 + 5.6218604, -3.0, -10.5, -6.5 - 7.0649537, -INF], abs=1e-5)


def test_pivots_by_hand() -> None:
    p = np.array([[0.5, 0.25, 0.125, 0.125], [0.4, 0.3, 0.2, 0.1]])
    x = mx.array(np.log(p).astype(np.float32))
    top = pivots(x, [HLG(pivot_offset=2.0), HLG(pivot_offset=0.0)])
    assert top[:, 0].tolist() == pytest.approx([math.log(0.5) - 2, math.log(0.4)], abs=1e-6)
    # Entropy of (1/2, 1/4, 1/8, 1/8) is 1.75 bits.
    entropy = pivots(x, [HLG(pivot="entropy")] * 2)
    assert entropy[0].item() == pytest.approx(-1.75 * math.log(2), abs=1e-6)
    # The first token of row 0 holds half the mass alone; in row 1 the second is needed.
    median = pivots(x, [HLG(pivot="median")] * 2)
    assert median[:, 0].tolist() == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)
    mixed = pivots(x, [HLG(pivot="median"), HLG(pivot="entropy")])
    assert mixed[:, 0].tolist() == [median[0].item(), entropy[1].item()]


def test_pivots_ignore_excluded_tokens() -> None:
    x = mx.log(mx.array([[0.5, 0.5, 0.0]]))
    for kind in ("top", "entropy", "median"):
        assert pivots(x, [HLG(pivot=kind, pivot_offset=0.0)]).item() == pytest.approx(math.log(0.5), abs=1e-6)


curves = st.builds(
    HLG,
    width=st.sampled_from([0.0, 0.5, 4.0, 100.0]),
    shoulder=st.sampled_from([0.0, 0.1, 4.0, INF]),
    toe=st.sampled_from([0.0, 0.1, 6.0, INF]),
    pivot=st.sampled_from(["top", "entropy", "median"]),
    pivot_offset=st.sampled_from([0.0, 1.0, 6.0]),
)


def normalised(values: list[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    x = mx.array([values], dtype=mx.float32)
    return (x - mx.logsumexp(x, axis=-1, keepdims=True)).astype(dtype)


@settings(max_examples=200, deadline=None)
@given(curves, st.lists(st.floats(-60, 60, width=32) | st.just(-INF), min_size=2, max_size=60))
def test_the_curve_is_monotone_and_keeps_minus_infinity(params: HLG, values: list[float]) -> None:
    values[0] = 1.0
    x = normalised(values)
    out = np.array(tone_curve(x, pivots(x, [params]), [params]))[0]
    level = np.array(x)[0]
    assert (np.isneginf(out) == np.isneginf(level)).all()
    assert not np.isnan(out).any()
    order = np.argsort(level)
    kept = order[np.isfinite(level[order])]
    # log1p itself may be off by a rounding; nothing else may.
    assert (np.diff(out[kept]) >= -2e-6 * np.maximum(1, np.abs(out[kept[1:]]))).all()


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("scale", [0.0, 4.0])
def test_no_rounding_at_a_border_turns_the_order_round(side: int, scale: float) -> None:
    params = HLG(width=4.0, shoulder=scale, toe=scale, pivot_offset=6.0)
    for top in np.linspace(-0.001, -3.0, 40, dtype=np.float32):
        border = np.float32(top - np.float32(6.0) + np.float32(side * 4))
        level = np.sort(border + np.arange(-20, 21, dtype=np.float32) * np.spacing(border))
        x = mx.array(np.append(level, top)[None])
        out = np.array(tone_curve(x, pivots(x, [params]), [params]))[0, :-1]
        assert (np.diff(out) >= 0).all()


def test_a_tie_in_rounding_at_the_lower_border_keeps_the_order() -> None:
    # -5 - 2^-21 counts as linear since its distance rounds to -4; pivot - width rounds to -5, above it.
    pivot, level = mx.array([[-1 - 2.0**-22]]), mx.array([[-5 - 2.0**-20, -5 - 2.0**-21, -5.0]])
    out = np.array(tone_curve(level, pivot, [HLG(width=4.0, toe=0.0)]))[0]
    assert out[1] == level[0, 1].item()
    assert (np.diff(out) >= 0).all()


@settings(max_examples=100, deadline=None)
@given(curves, st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=60), st.booleans())
def test_an_infinite_width_or_scale_changes_no_bit(params: HLG, values: list[float], by_width: bool) -> None:
    flat = replace(params, width=INF) if by_width else replace(params, shoulder=INF, toe=INF)
    for dtype in (mx.float32, mx.bfloat16):
        x = normalised(values, dtype)
        out = tone_curve(x, pivots(x, [flat]), [flat])
        assert out.dtype == dtype
        assert mx.array_equal(out, x).item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_flat_curves_draw_as_temperature_does(dtype: mx.Dtype) -> None:
    x = mx.array(np.random.default_rng(0).normal(0, 4, (1, 200, 100)).astype(np.float32)).astype(dtype)
    drafts = mx.zeros((1, 199), mx.int32)

    def tokens(hlg: HLG | None) -> list[int]:
        params = SamplingParams(temperature=1.3, hlg=hlg)
        return BatchSampler([RowSampling(params, seed=3)]).draw(x, drafts).tokens[0].tolist()

    assert tokens(HLG(width=INF)) == tokens(HLG(shoulder=INF, toe=INF)) == tokens(None)
    assert tokens(HLG()) != tokens(None)


def test_the_curve_takes_the_place_of_top_p_top_k_and_leaves_greedy_alone() -> None:
    x = mx.array(np.random.default_rng(1).normal(0, 2, (1, 100, 50)).astype(np.float32))
    drafts = mx.zeros((1, 99), mx.int32)

    def tokens(params: SamplingParams) -> list[int]:
        return BatchSampler([RowSampling(params, seed=3)]).draw(x, drafts).tokens[0].tolist()

    bent = SamplingParams(temperature=1.0, hlg=HLG(width=1.0))
    assert tokens(replace(bent, top_p=0.1, top_k=2)) == tokens(bent)
    assert tokens(replace(bent, temperature=0.0)) == tokens(SamplingParams())


def test_draws_follow_the_curve() -> None:
    params = HLG(width=0.5, shoulder=0.5, toe=1.0, pivot_offset=1.0)
    level = np.log(np.array([0.7, 0.15, 0.1, 0.04, 0.01]))
    mu = level.max() - 1.0
    bent = []
    for z in (level - mu) / 1.0:
        if z > 0.5:
            bent.append(0.5 + 0.5 * math.log(1 + (z - 0.5) / 0.5))
        elif z < -0.5:
            bent.append(-0.5 - 1.0 * math.log(1 + (-z - 0.5) / 1.0))
        else:
            bent.append(z)
    weights = np.exp(np.array(bent) / 0.8)
    probs = weights / weights.sum()
    sampler = BatchSampler([RowSampling(SamplingParams(temperature=0.8, hlg=params), seed=i) for i in range(400)])
    x = mx.broadcast_to(mx.array(level.astype(np.float32)), (400, 50, 5))
    counts = np.bincount(np.array(sampler.draw(x, mx.zeros((400, 49), mx.int32)).tokens).ravel(), minlength=5)
    expected = probs * counts.sum()
    # chi-square with 4 degrees of freedom at 1 - 1e-4
    assert ((counts - expected) ** 2 / expected).sum() < 23.51
