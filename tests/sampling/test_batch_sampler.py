"""Draws: greedy as mlx-lm, seeded ones the same alone, in any batch and in any window."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.engine.api import HLG, InvalidRequest, SamplingParams
from gnomon.engine.sampling import BatchSampler, RowSampling, check

VOCAB = 97


def logits_for(seed: int, positions: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Logits [positions, VOCAB] that depend on (seed, position) alone, as a row's model state does."""
    rows = [np.random.default_rng([seed, i]).normal(0, 3, VOCAB) for i in range(positions)]
    return mx.array(np.array(rows, dtype=np.float32)).astype(dtype)


def params(draw: st.DrawFn) -> SamplingParams:
    some = st.sampled_from
    return SamplingParams(
        temperature=draw(some([0.0, 0.4, 1.0, 1.7])),
        top_p=draw(some([0.0, 0.3, 0.9, 1.0])),
        top_k=draw(some([0, 1, 5, 40, 500])),
        min_p=draw(some([0.0, 0.05, 0.5])),
        xtc_probability=draw(some([0.0, 0.5, 1.0])),
        xtc_threshold=draw(some([0.0, 0.1, 0.3])),
        logit_bias=draw(some([(), ((3, 5.0), (7, -2.5))])),
        repetition_penalty=draw(some([1.0, 1.3, 0.8])),
        repetition_context_size=draw(some([0, 1, 4, 20])),
        presence_penalty=draw(some([0.0, 0.7, -0.3])),
        presence_context_size=draw(some([0, 3, 20])),
        frequency_penalty=draw(some([0.0, 0.4])),
        frequency_context_size=draw(some([0, 2, 20])),
        logprobs=draw(some([None, 0, 1, 5])),
        hlg=draw(some([None, None, HLG(), HLG(pivot="entropy", width=1.0), HLG(pivot="median", toe=2.0)])),
    )


@st.composite
def rows(draw: st.DrawFn) -> RowSampling:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30))
    return RowSampling(
        params(draw), seed=draw(st.integers(-5, 2**70)), choice=draw(st.integers(0, 3)), history=prompt, exempt=(2, 11)
    )


def alone(row: RowSampling, logits: mx.array) -> list[tuple[int, object]]:
    """The row's tokens and scores, one step at a time."""
    sampler = BatchSampler([row])
    out: list[tuple[int, object]] = []
    for i in range(logits.shape[0]):
        drawn = sampler.draw(logits[i][None, None])
        sampler.commit(drawn.tokens, [1])
        out.append((drawn.tokens.item(), drawn.logprobs.score(0) if drawn.logprobs else None))
    return out


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_greedy_takes_mlx_lms_argmax(dtype: mx.Dtype) -> None:
    from mlx_lm.sample_utils import greedy_sampler

    logits = logits_for(1, 50, dtype)
    sampler = BatchSampler([RowSampling(SamplingParams(), seed=0)])
    for i in range(50):
        x = logits[i : i + 1]
        expected = greedy_sampler(x - mx.logsumexp(x, keepdims=True))
        assert sampler.draw(x[None]).tokens.item() == expected.item()


def test_ties_go_to_the_lowest_id() -> None:
    logits = mx.zeros((1, 1, VOCAB)).at[0, 0, mx.array([60, 13, 77])].add(1.0)
    assert BatchSampler([RowSampling(SamplingParams(), seed=0)]).draw(logits).tokens.item() == 13


@settings(max_examples=40, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=5), st.sampled_from([mx.float32, mx.bfloat16]), st.data())
def test_a_batch_draws_what_its_rows_draw_alone(batch: list[RowSampling], dtype: mx.Dtype, data: st.DataObject) -> None:
    steps = 6
    logits = [logits_for(i, steps, dtype) for i in range(len(batch))]
    expected = [alone(row, x) for row, x in zip(batch, logits, strict=True)]
    waiting, got = list(range(len(batch))), [[] for _ in batch]
    sampler, here = BatchSampler(), []
    while waiting or here:
        joining = data.draw(st.integers(0 if here else 1, len(waiting))) if waiting else 0
        sampler.join([batch[i] for i in waiting[:joining]])
        here, waiting = here + waiting[:joining], waiting[joining:]
        # A flat window has as many positions as each row needs.
        held = data.draw(st.none() | st.lists(st.integers(1, 4), min_size=len(here), max_size=len(here)))
        width = max(held) if held else data.draw(st.integers(1, 4))
        # Windows reach past the end of the known logits; what is drawn there is never committed.
        windows = [[logits[i][min(len(got[i]) + at, steps - 1)] for at in range(width)] for i in here]
        truth = [[expected[i][min(len(got[i]) + at, steps - 1)][0] for at in range(width - 1)] for i in here]
        real = [mx.stack(w)[None] if held is None else mx.stack(w[: held[b]])[:, None] for b, w in enumerate(windows)]
        drawn = sampler.draw(
            mx.concatenate(real),
            mx.array(np.array(truth, dtype=np.int32).reshape(len(here), width - 1)) if width > 1 else None,
            counts=held,
        )
        most = held or [width] * len(here)
        counts = [
            data.draw(st.integers(0 if width > 1 else 1, min(n, steps - len(got[i]))))
            for n, i in zip(most, here, strict=True)
        ]
        sampler.commit(drawn.tokens, counts)
        tokens = drawn.tokens.tolist()
        for b, i in enumerate(here):
            for at in range(counts[b]):
                got[i].append((tokens[b][at], drawn.logprobs.score(b, at) if drawn.logprobs else None))
        staying = data.draw(st.permutations([b for b, i in enumerate(here) if len(got[i]) < steps]))
        sampler.keep(staying)
        here = [here[b] for b in staying]
    assert got == expected


def everything() -> SamplingParams:
    return SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        xtc_probability=1.0,
        xtc_threshold=0.05,
        logit_bias=((3, 1.0),),
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logprobs=3,
    )


def test_a_draw_changes_neither_the_logits_nor_the_sampler() -> None:
    rows = [RowSampling(everything(), seed=1, history=[1, 2, 3]), RowSampling(SamplingParams(), seed=2)]
    sampler = BatchSampler(rows)
    logits = mx.stack([logits_for(1, 1), logits_for(2, 1)])
    before = np.array(logits)
    first = sampler.draw(logits).tokens.tolist()
    np.testing.assert_array_equal(np.array(logits), before)
    assert sampler.draw(logits).tokens.tolist() == first
    assert sampler.steps == [0, 0]


def test_rows_without_a_stage_keep_their_bits_beside_rows_with_it() -> None:
    plain = RowSampling(SamplingParams(logprobs=VOCAB), seed=1)
    logits = logits_for(5, 1)[None]
    lone = BatchSampler([plain]).draw(logits).logprobs
    beside = BatchSampler([RowSampling(everything(), seed=1, history=[4, 5]), plain]).draw(
        mx.concatenate([logits_for(6, 1)[None], logits])
    )
    assert lone is not None
    assert beside.logprobs is not None
    assert beside.logprobs.score(1) == lone.score(0)


def test_logprobs_are_the_likeliest_tokens_in_order_and_only_for_who_asked() -> None:
    asks = [None, 0, 2, 5]
    sampler = BatchSampler([RowSampling(SamplingParams(logprobs=k), seed=0) for k in asks])
    logits = mx.stack([logits_for(i, 1) for i in range(4)])
    logits[3, 0, :10] = logits[3, 0, 0] + 20.0
    drawn = sampler.draw(logits)
    assert drawn.logprobs is not None
    assert drawn.logprobs.score(0) is None
    x = np.array(logits)[:, 0].astype(np.float64)
    exact = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    for row in (1, 2, 3):
        score = drawn.logprobs.score(row)
        assert score is not None
        assert score.logprob == pytest.approx(exact[row].max(), abs=1e-5)
        best = sorted(range(VOCAB), key=lambda i, row=row: (-exact[row, i], i))[: asks[row]]
        if row < 3:
            assert [i for i, _ in score.top] == best
        assert [value for _, value in score.top] == pytest.approx(exact[row, best].tolist(), abs=1e-5)
    # Ten tokens tie for row 3's five places: which of them come is argpartition's choice, their order is not.
    ids = [i for i, _ in drawn.logprobs.score(3).top]
    assert ids == sorted(ids)


def test_penalties_see_tokens_not_yet_read_back_and_nothing_beyond_the_accepted() -> None:
    """A strong presence penalty walks greedily through the tokens in order, whatever windows deliver them."""
    params = SamplingParams(presence_penalty=100.0, presence_context_size=0)
    sampler = BatchSampler([RowSampling(params, seed=0, history=[0])])
    logits = mx.arange(10, 0, -1).astype(mx.float32)[None, None]
    drawn = sampler.draw(logits)
    assert drawn.tokens.item() == 1
    sampler.commit(drawn.tokens, [1])
    # Proposals 2 and 7: the second is wrong, so position 2 looks back on a token that is never accepted.
    window = sampler.draw(mx.broadcast_to(logits, (1, 3, 10)), mx.array([[2, 7]]))
    assert window.tokens.tolist() == [[2, 3, 3]]
    sampler.commit(window.tokens, [2])
    assert sampler.draw(logits).tokens.item() == 4
    assert sampler.steps == [3]


def test_a_row_can_leave_and_come_back_at_its_step() -> None:
    row = RowSampling(everything(), seed=5, history=[1, 2, 3])
    logits = logits_for(9, 8)
    whole = [token for token, _ in alone(row, logits)]
    back = RowSampling(everything(), seed=5, step=4, history=[1, 2, 3, *whole[:4]])
    assert [token for token, _ in alone(back, logits[4:])] == whole[4:]


def test_shapes_that_do_not_fit_are_refused() -> None:
    sampler = BatchSampler([RowSampling(SamplingParams(), seed=0)])
    with pytest.raises(ValueError, match="2 rows"):
        sampler.draw(mx.zeros((2, 1, VOCAB)))
    with pytest.raises(ValueError, match="2 drafts"):
        sampler.draw(mx.zeros((1, 3, VOCAB)), mx.zeros((1, 1), mx.int32))
    with pytest.raises(ValueError, match="2 drafts"):
        sampler.draw(mx.zeros((1, 3, VOCAB)))


@pytest.mark.parametrize(
    ("params", "field", "limit"),
    [
        (SamplingParams(logit_bias=((VOCAB, 1.0),)), "logit_bias", "0 to 96"),
        (SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias", "0 to 96"),
        (SamplingParams(logit_bias=((1, float("inf")),)), "logit_bias", "finite"),
        (SamplingParams(repetition_penalty=-0.5), "repetition_penalty", "at least 0"),
        (SamplingParams(temperature=float("inf")), "temperature", "finite"),
        (SamplingParams(presence_penalty=float("nan")), "presence_penalty", "finite"),
        (SamplingParams(frequency_penalty=float("-inf")), "frequency_penalty", "finite"),
        (SamplingParams(frequency_context_size=-1), "frequency_context_size", "at least 0"),
        (SamplingParams(top_k=-1), "top_k", "at least 0"),
    ],
)
def test_values_it_cannot_honour_are_refused_by_name(params: SamplingParams, field: str, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=limit) as error:
        check(params, VOCAB)
    assert error.value.param == field
    assert field in str(error.value)


def test_odd_history_ids_are_harmless() -> None:
    """Placeholders of media may lie outside the logits."""
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=2.0)
    logits = logits_for(3, 1)[None]
    odd = BatchSampler([RowSampling(params, seed=0, history=[5, VOCAB + 3, -200, 6])]).draw(logits)
    plain = BatchSampler([RowSampling(params, seed=0, history=[5, 6])]).draw(logits)
    assert odd.tokens.item() == plain.tokens.item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
def test_a_tiny_temperature_is_as_good_as_greedy(dtype: mx.Dtype, temperature: float) -> None:
    logits = mx.zeros((1, 1, 50_000), dtype=dtype)
    logits[0, 0, 777] = 0.5
    assert (
        BatchSampler([RowSampling(SamplingParams(temperature=temperature), seed=0)]).draw(logits).tokens.item() == 777
    )


HUGE = 1e308


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(logit_bias=((7, HUGE),)), {7: 0.0}),
        (SamplingParams(logit_bias=((7, HUGE), (9, HUGE))), {7: 0.0, 9: 0.0}),  # ln 2 is below the spacing there
        (SamplingParams(logit_bias=tuple((i, -HUGE) for i in range(VOCAB) if i != 5)), {5: 0.0}),
        (SamplingParams(logit_bias=((3, HUGE),), presence_penalty=HUGE, presence_context_size=0), {}),
        (SamplingParams(presence_penalty=HUGE, frequency_penalty=-HUGE), {}),
        (SamplingParams(presence_penalty=-HUGE), {3: 0.0}),
        (SamplingParams(frequency_penalty=-HUGE), {3: 0.0}),
        (SamplingParams(repetition_penalty=HUGE), {}),
        (SamplingParams(repetition_penalty=1 / HUGE), {3: 0.0}),
    ],
)
def test_extreme_parameters_leave_a_distribution(
    dtype: mx.Dtype, params: SamplingParams, expected: dict[int, float]
) -> None:
    """Values beyond the dtype act as its largest: neither NaN nor an infinite log-probability of what was drawn."""
    wanted = dataclasses.replace(params, logprobs=20)
    logits = mx.abs(logits_for(1, 1)).astype(dtype)[None] + 1
    drawn = BatchSampler([RowSampling(wanted, seed=0, history=[3, 3, 3])]).draw(logits)
    assert drawn.logprobs is not None
    token = int(drawn.tokens.item())
    score = drawn.logprobs.score(0)
    assert score is not None
    assert np.isfinite(score.logprob)
    assert not np.isnan([logprob for _, logprob in score.top]).any()
    if expected:
        assert token in expected
        assert score.logprob == pytest.approx(expected[token], abs=0.01)
