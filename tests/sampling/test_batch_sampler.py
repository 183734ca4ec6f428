"""Draws: greedy as mlx-lm, seeded ones the same alone, in any batch and in any window."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.engine.api import HLG, SamplingParams
from gnomon.engine.sampling import BatchSampler, RowSampling

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
@given(st.lists(rows(), min_size=1, max_size=5), st.data())
def test_a_batch_draws_what_its_rows_draw_alone(batch: list[RowSampling], data: st.DataObject) -> None:
    steps = 6
    logits = [logits_for(i, steps) for i in range(len(batch))]
    expected = [alone(row, x) for row, x in zip(batch, logits, strict=True)]
    waiting, got = list(range(len(batch))), [[] for _ in batch]
    sampler, here = BatchSampler(), []
    while waiting or here:
        joining = data.draw(st.integers(0 if here else 1, len(waiting))) if waiting else 0
        sampler.join([batch[i] for i in waiting[:joining]])
        here, waiting = here + waiting[:joining], waiting[joining:]
        width = data.draw(st.integers(1, 4))
        # Windows reach past the end of the known logits; what is drawn there is never committed.
        windows = [[logits[i][min(len(got[i]) + at, steps - 1)] for at in range(width)] for i in here]
        truth = [[expected[i][min(len(got[i]) + at, steps - 1)][0] for at in range(width - 1)] for i in here]
        drawn = sampler.draw(
            mx.stack([mx.stack(w) for w in windows]),
            mx.array(np.array(truth, dtype=np.int32).reshape(len(here), width - 1)) if width > 1 else None,
        )
        counts = [data.draw(st.integers(0 if width > 1 else 1, min(width, steps - len(got[i])))) for i in here]
        sampler.commit(drawn.tokens, counts)
        tokens = drawn.tokens.tolist()
        for b, i in enumerate(here):
            for at in range(counts[b]):
                got[i].append((tokens[b][at], drawn.logprobs.score(b, at) if drawn.logprobs else None))
        staying = data.draw(st.permutations([b for b, i in enumerate(here) if len(got[i]) < steps]))
        sampler.keep(staying)
        here = [here[b] for b in staying]
    assert got == expected
