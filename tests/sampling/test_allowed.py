"""What a row may not draw is never drawn, and what it may keeps its bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.engine.api import HLG, SamplingParams
from gnomon.engine.sampling import BatchSampler, RowSampling
from gnomon.engine.sampling.processors import allow

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.5, top_k=5, min_p=0.1),
    SamplingParams(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.01),
    SamplingParams(temperature=1.0, logit_bias=((0, 100.0),), repetition_penalty=1.3, presence_penalty=0.5),
    *(SamplingParams(temperature=1.0, hlg=HLG(pivot=pivot)) for pivot in ("top", "entropy", "median")),
]


def packed(allowed: np.ndarray) -> np.ndarray:
    """Bits by numpy's own packing."""
    size = -(-len(allowed) // 32) * 32
    padded = np.zeros(size, dtype=bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("vocab", [31, 32, 33, 97, 1000])
def test_the_packed_mask_is_numpys(dtype: mx.Dtype, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = mx.array(rng.normal(0, 5, (3, vocab)).astype(np.float32)).astype(dtype)
    allowed = rng.random((3, vocab)) < 0.3
    got = allow(logits, mx.array(np.stack([packed(row) for row in allowed])))
    assert got.dtype == dtype
    expected = np.where(allowed, np.array(logits.astype(mx.float32)), -np.inf)
    assert np.array_equal(np.array(got.astype(mx.float32)), expected)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_draw_only_what_they_may_and_as_they_do_alone(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([33, 97, 320]))
    rows = data.draw(st.lists(st.sampled_from(PARAMS), min_size=1, max_size=5))
    width = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = mx.array(rng.normal(0, 4, (len(rows), width, vocab)).astype(np.float32))
    samplings = [RowSampling(params, seed=7, choice=i, history=[1, 2]) for i, params in enumerate(rows)]
    masks = {i: rng.random(vocab) < 0.1 for i in range(len(rows)) if data.draw(st.booleans())}
    for mask in masks.values():
        mask[rng.integers(vocab)] = True
    words = {i: [packed(mask)] for i, mask in masks.items()}
    drafts = mx.zeros((len(rows), width - 1), dtype=mx.int32) if width > 1 else None
    tokens = np.array(BatchSampler(samplings).draw(logits, drafts, words).tokens)
    for i, row in enumerate(samplings):
        own = {0: words[i]} if i in words else None
        alone = BatchSampler([row]).draw(logits[i : i + 1], None if drafts is None else drafts[:1], own)
        assert tokens[i].tolist() == alone.tokens.tolist()[0]
        if i in masks:
            assert masks[i][tokens[i, 0]]
    # A flat window, of fewer positions in some rows, draws the same at those.
    counts = data.draw(st.lists(st.integers(1, width), min_size=len(rows), max_size=len(rows)))
    counts[0] = width
    real = mx.concatenate([logits[i, :count, None] for i, count in enumerate(counts)])
    flat = np.array(BatchSampler(samplings).draw(real, drafts, words, counts).tokens)
    for i, count in enumerate(counts):
        assert flat[i, :count].tolist() == tokens[i, :count].tolist()
    # The caller's logits are as they were.
    assert np.isfinite(np.array(logits)).all()


def test_ids_beyond_the_words_are_not_drawn() -> None:
    """Logits may be wider than the vocabulary."""
    logits = mx.zeros((1, 1, 100)).at[0, 0, 99].add(9.0)
    words = packed(np.ones(64, dtype=bool))
    assert BatchSampler([RowSampling(SamplingParams(), seed=0)]).draw(logits, allowed={0: [words]}).tokens.item() == 0


def test_logprobs_are_those_of_what_is_left() -> None:
    logits = mx.array([[[1.0, 2.0, 3.0, 4.0]]])
    words = packed(np.array([True, True, False, False]))
    drawn = BatchSampler([RowSampling(SamplingParams(logprobs=3), seed=0)]).draw(logits, allowed={0: [words]})
    assert drawn.logprobs is not None
    score = drawn.logprobs.score(0)
    assert score is not None
    # softmax of (1, 2): 1 / (1 + e) and e / (1 + e)
    assert score.logprob == pytest.approx(-np.log1p(np.exp(-1.0)), abs=1e-6)
    assert [token for token, _ in score.top] == [1, 0]
    assert all(np.isfinite(value) for _, value in score.top)
