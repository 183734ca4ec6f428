"""Keys and the distribution of draws."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gnomon.engine.api import SamplingParams
from gnomon.engine.sampling import BatchSampler, RowSampling, fresh_seed
from gnomon.engine.sampling.randomness import Keys, Stream, gumbel, uniform

WORD = (1 << 64) - 1


def splitmix(state: int) -> int:
    """One output of SplitMix64, in plain integers."""
    z = (state + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_the_reference_is_splitmix64() -> None:
    # First outputs for seed 1234567, from the test vectors that go round with the published C code.
    state, out = 1234567, []
    for _ in range(3):
        out.append(splitmix(state))
        state = (state + 0x9E3779B97F4A7C15) & WORD
    assert out == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(-(2**80), 2**80), st.integers(0, 7), st.integers(0, 10**6), st.sampled_from(list(Stream)))
def test_keys_absorb_seed_choice_stream_and_step_in_turn(seed: int, choice: int, step: int, stream: Stream) -> None:
    golden = 0x9E3779B97F4A7C15
    state = 0
    for field in (seed & WORD, choice, int(stream), step):
        # splitmix adds the increment first, the key schedule xors the field between increment and mixing
        state = splitmix((((state + golden) & WORD) ^ field) - golden & WORD)
    assert Keys([seed], [choice], stream).at([step]).tolist() == [[state >> 32, state & 0xFFFFFFFF]]


def test_no_two_keys_of_a_run_agree() -> None:
    seeds, choices, steps = (a.ravel().tolist() for a in np.meshgrid(range(20), range(8), range(200)))
    keys = np.concatenate([Keys(seeds, choices, stream).at(steps) for stream in Stream])
    assert len(np.unique(keys, axis=0)) == len(keys)


def test_noise_of_a_row_is_mlx_own_for_its_key() -> None:
    keys = Keys([1, 2, 3], [0, 0, 1], Stream.TOKEN).at([9, 5, 5])
    for size in (1, 2, 7, 1000, 1001):
        rows = gumbel(keys, size)
        for i in range(3):
            assert mx.array_equal(rows[i], mx.random.gumbel((size,), key=mx.array(keys[i]))).item()


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draws(params: SamplingParams, logits: np.ndarray, rows: int = 400, steps: int = 50) -> np.ndarray:
    """Tokens [rows, steps] with seeds 0, 1, 2, … and a window of all steps at once."""
    sampler = BatchSampler([RowSampling(params, seed=i) for i in range(rows)])
    x = mx.broadcast_to(mx.array(logits.astype(np.float32)), (rows, steps, len(logits)))
    return np.array(sampler.draw(x, mx.zeros((rows, steps - 1), mx.int32)).tokens)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


LOGITS = np.array([2.0, 1.5, 0.0, 0.3, -1.0, 1.1, -0.5, 0.8])
# The quantile of chi-square with 7 degrees of freedom at 1 - 1e-4.
LIMIT = 29.88


def test_tokens_follow_the_softmax() -> None:
    for temperature in (0.5, 1.0, 2.0):
        tokens = draws(SamplingParams(temperature=temperature), LOGITS)
        assert chi_square(np.bincount(tokens.ravel(), minlength=8), softmax(LOGITS / temperature)) < LIMIT


def test_steps_of_a_row_and_rows_of_a_step_are_independent() -> None:
    tokens = draws(SamplingParams(temperature=1.0), LOGITS)
    probs = softmax(LOGITS)
    pairs = np.outer(probs, probs).ravel()
    along = tokens[:, :-1] * 8 + tokens[:, 1:]
    across = tokens[:-1] * 8 + tokens[1:]
    # 63 degrees of freedom at 1 - 1e-4; neighbours overlap, which leaves the mean where it is.
    assert chi_square(np.bincount(along.ravel(), minlength=64), pairs) < 112
    assert chi_square(np.bincount(across.ravel(), minlength=64), pairs) < 112


def test_filtered_tokens_never_come_and_the_rest_keep_their_ratios() -> None:
    tokens = draws(SamplingParams(temperature=1.0, top_k=3), LOGITS)
    counts = np.bincount(tokens.ravel(), minlength=8)
    top = np.array([0, 1, 5])
    assert counts.sum() == counts[top].sum()
    # 2 degrees of freedom at 1 - 1e-4
    assert chi_square(counts[top], softmax(LOGITS[top])) < 18.42


def test_xtc_applies_as_often_as_asked_and_independently_of_the_token() -> None:
    # Tokens 0 and 1 are both above the threshold, so XTC excludes exactly token 0.
    logits = np.log(np.array([0.6, 0.3, 0.1]))
    tokens = draws(SamplingParams(temperature=1.0, xtc_probability=0.25, xtc_threshold=0.2), logits)
    expected = 0.75 * np.array([0.6, 0.3, 0.1]) + 0.25 * np.array([0, 0.75, 0.25])
    assert chi_square(np.bincount(tokens.ravel(), minlength=3), expected) < 18.42


def test_uniform_numbers_are_uniform() -> None:
    numbers = np.array(uniform(Keys(range(4000), [0] * 4000, Stream.XTC).at([3] * 4000)))
    assert ((numbers >= 0) & (numbers < 1)).all()
    # 9 degrees of freedom at 1 - 1e-4
    assert chi_square(np.histogram(numbers, 10, (0, 1))[0], np.full(10, 0.1)) < 33.72


def test_choices_of_a_request_differ_and_repeat_with_the_seed() -> None:
    row = RowSampling(SamplingParams(temperature=1.0), seed=7)
    x = mx.zeros((4, 20, 50))
    drafts = mx.zeros((4, 19), mx.int32)
    one = BatchSampler(row.choices(4)).draw(x, drafts).tokens.tolist()
    two = BatchSampler(row.choices(4)).draw(x, drafts).tokens.tolist()
    assert one == two
    assert len({tuple(tokens) for tokens in one}) == 4


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(1000)}) == 1000
