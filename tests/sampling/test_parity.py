"""Processors, filters and draws against mlx_lm.sample_utils, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils as oracle

from gnomon.engine.api import SamplingParams
from gnomon.engine.sampling import BatchSampler, RowSampling, filters, processors
from gnomon.engine.sampling.randomness import Keys, Stream

DTYPES = [mx.float32, mx.bfloat16, mx.float16]
VOCAB = 211


@pytest.fixture(autouse=True, scope="module")
def uncompiled() -> Iterator[None]:
    """mlx-lm compiles its filters anew for every constant, which takes longer than all the tests."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def logits(seed: int, dtype: mx.Dtype, rows: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)).astype(dtype)


def bits(x: mx.array) -> np.ndarray:
    kind = {2: mx.uint16, 4: mx.uint32}[x.dtype.size]
    return np.array(x.view(kind))


def scores(params: SamplingParams, history: list[int], x: mx.array) -> mx.array:
    """What the sampler makes of x [1, V] before it draws: log-probabilities of every id, read through the logprobs it reports."""
    sampler = BatchSampler([RowSampling(params, seed=0, history=history)])
    drawn = sampler.draw(x[None])
    assert drawn.logprobs is not None
    score = drawn.logprobs.score(0)
    assert score is not None
    out = np.empty(VOCAB, dtype=np.float32)
    out[[i for i, _ in score.top]] = [value for _, value in score.top]
    return mx.array(out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_softmax_of_a_row_is_generate_steps_alone_and_in_a_batch(dtype: mx.Dtype) -> None:
    x = mx.array(np.random.default_rng(0).normal(0, 4, (3, 49_153)).astype(np.float32)).astype(dtype)
    together = filters.log_softmax(x)
    for i in range(3):
        row = x[i : i + 1]
        np.testing.assert_array_equal(bits(filters.log_softmax(row)), bits(row - mx.logsumexp(row, keepdims=True)))
        np.testing.assert_array_equal(bits(together[i : i + 1]), bits(filters.log_softmax(row)))


penalties = st.builds(
    SamplingParams,
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5).map(
        lambda d: tuple(d.items())
    ),
    repetition_penalty=st.sampled_from([0.0, 0.5, 1.0, 1.1, 1.7]),
    repetition_context_size=st.integers(0, 25),
    presence_penalty=st.sampled_from([0.0, 0.3, 1.9, -1.1]),
    presence_context_size=st.integers(0, 25),
    frequency_penalty=st.sampled_from([0.0, 0.3, 1.9, -1.1]),
    frequency_context_size=st.integers(0, 25),
    logprobs=st.just(VOCAB),
)


@settings(max_examples=80, deadline=None)
@given(penalties, st.lists(st.integers(0, 30), min_size=1, max_size=40), st.sampled_from(DTYPES), st.integers(0, 99))
def test_processors(params: SamplingParams, history: list[int], dtype: mx.Dtype, seed: int) -> None:
    x = logits(seed, dtype)
    expected = mx.array(x)
    for processor in oracle.make_logits_processors(
        dict(params.logit_bias),
        params.repetition_penalty,
        params.repetition_context_size,
        params.presence_penalty,
        params.presence_context_size,
        params.frequency_penalty,
        params.frequency_context_size,
    ):
        expected = processor(mx.array(history), expected)
    expected = (expected - mx.logsumexp(expected, keepdims=True)).astype(mx.float32)[0]
    np.testing.assert_array_equal(bits(scores(params, history, x)), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_places_of_a_window_that_hold_nothing_change_no_bit(dtype: mx.Dtype) -> None:
    x = mx.array([[-0.0, 0.0, 1.0], [-0.0, 0.0, 1.0]]).astype(dtype)
    ids, seen = mx.array([[2, 2], [2, 0]]), mx.array([[True, True], [True, False]])
    out = processors.frequency(x, ids, seen, mx.full((2, 1), 0.25).astype(dtype))
    expected = mx.array([[-0.0, 0.0, 0.5], [-0.0, 0.0, 0.75]]).astype(dtype)
    np.testing.assert_array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_top_p(dtype: mx.Dtype, value: float) -> None:
    x = filters.log_softmax(logits(1, dtype, 7))
    np.testing.assert_array_equal(bits(filters.top_p(x, mx.full((7, 1), value))), bits(oracle.apply_top_p(x, value)))


def test_top_p_drops_what_comes_after_exactly_enough_mass() -> None:
    # Masses 1, 1/4, 1/4, 1/4, 1/4: the first token alone is half of them.
    x = mx.log(mx.array([[0.25, 0.25, 1.0, 0.25, 0.25]]))
    ours = filters.top_p(x, mx.array([[0.5]]))
    assert np.isfinite(np.array(ours))[0].tolist() == [False, False, True, False, False]
    np.testing.assert_array_equal(bits(ours), bits(oracle.apply_top_p(x, 0.5)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.001, 0.05, 0.3, 1.0])
def test_min_p(dtype: mx.Dtype, value: float) -> None:
    x = filters.log_softmax(logits(2, dtype, 7))
    ratio = mx.full((7, 1), math.log(value)).astype(dtype)
    np.testing.assert_array_equal(bits(filters.min_p(x, ratio)), bits(oracle.apply_min_p(x, value)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 40, VOCAB - 1])
def test_top_k(dtype: mx.Dtype, k: int) -> None:
    x = filters.log_softmax(logits(3, dtype, 7))
    kept = filters.top_k(x, k)
    assert (mx.isfinite(kept).sum(axis=-1) == k).all().item()
    np.testing.assert_array_equal(bits(kept), bits(oracle.apply_top_k(x, k)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("exempt", [[], [5, 17]])
def test_xtc(dtype: mx.Dtype, threshold: float, exempt: list[int]) -> None:
    x = filters.log_softmax(logits(4, dtype, 7))
    x[:, 5] = x.max(axis=-1)
    cells = (mx.repeat(mx.arange(7), len(exempt)), mx.array(exempt * 7)) if exempt else None
    ours = filters.xtc(x, mx.full((7, 1), threshold).astype(dtype), mx.full((7,), True), cells)
    # With probability 1 mlx-lm's own draw doesn't matter.
    np.testing.assert_array_equal(bits(ours), bits(oracle.apply_xtc(x, 1.0, threshold, exempt)))


def test_xtc_by_hand() -> None:
    x = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    on, off = mx.array([True]), mx.array([False])

    def kept(threshold: float, applies: mx.array, exempt: list[int]) -> list[int]:
        cells = (mx.zeros(len(exempt), mx.int32), mx.array(exempt, mx.int32)) if exempt else None
        return np.flatnonzero(np.isfinite(filters.xtc(x, mx.array([[threshold]]), applies, cells)[0])).tolist()

    assert kept(0.15, on, []) == [2, 3]
    assert kept(0.25, on, []) == [1, 2, 3]
    assert kept(0.35, on, []) == [0, 1, 2, 3]
    assert kept(0.5, on, []) == [0, 1, 2, 3]
    assert kept(0.15, on, [0]) == [0, 2, 3]
    assert kept(0.15, off, []) == [0, 1, 2, 3]


samplers = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.2]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    xtc_threshold=st.sampled_from([0.05, 0.2]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    seed=st.none(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(samplers, min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0, 99))
def test_draws_are_mlx_lms_filters_under_gumbel_noise(batch: list[SamplingParams], dtype: mx.Dtype, seed: int) -> None:
    """The whole chain, rows of different parameters in one batch, against mlx-lm's chain row by row with the same noise."""
    x = logits(seed, dtype, len(batch))
    sampler = BatchSampler([RowSampling(p, seed=i, exempt=(3,)) for i, p in enumerate(batch)])
    got = sampler.draw(x[:, None]).tokens[:, 0].tolist()
    for i, p in enumerate(batch):
        row = x[i : i + 1]
        row = row - mx.logsumexp(row, keepdims=True)
        if p.temperature == 0:
            assert got[i] == oracle.greedy_sampler(row).item()
            continue
        if 0 < p.top_p < 1:
            row = oracle.apply_top_p(row, p.top_p)
        if p.min_p:
            row = oracle.apply_min_p(row, p.min_p)
        if p.xtc_probability:
            row = oracle.apply_xtc(row, p.xtc_probability, p.xtc_threshold, [3])
        if p.top_k:
            row = oracle.apply_top_k(row, p.top_k)
        noise = mx.random.gumbel((1, VOCAB), key=mx.array(Keys([i], [0], Stream.TOKEN).at([0])[0]))
        assert got[i] == mx.argmax(row * (1.0 / p.temperature) + noise, axis=-1).item()
