"""Rows that come, go, guess and fork in one batch get the tokens each has alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from proposers import ERRORS, Oracle

from engine_fixtures import VOCAB_SIZE, Rig, tiny_engine, tiny_loaded, tiny_tokenizer
from gnomon.config import EngineConfig
from gnomon.engine.api import ChoiceFinished, Delta, Finished, Request, SamplingParams
from gnomon.models.load import LoadedModel
from gnomon.propose import Proposer
from solo import GAP_BOUNDS, Solo, solo, ties_until_equal

TYPES = ("llama", "qwen3", "qwen3_5", "gemma3", "gemma4", "qwen3_moe", "deepseek_v3", "gpt_oss", "mamba2", "mamba")
"""`mamba` is one of those whose windows can't be padded: its prompts prefill one by one and its proposals are cut to equal lengths."""
STEPS = 16
CHUNK = 64
LENGTHS = (1, 2, 3, 9, 25, 39, 40, 41, 64, 65, 66, 130)
"""Around the window (40) and the chunk."""


@cache
def loaded(model_type: str, dtype: str) -> LoadedModel:
    return tiny_loaded(model_type, dtype)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(2, VOCAB_SIZE, length).tolist())


@cache
def alone(model_type: str, dtype: str, length: int) -> Solo:
    model: nn.Module = loaded(model_type, dtype).model
    return solo(model, prompt_of(length), STEPS, CHUNK)


@dataclass(frozen=True)
class Plan:
    """A request: when it comes (turns after the one before), what guesses for it, when it is cancelled (turns after it came)."""

    length: int
    wait: int
    proposer: str | None
    tokens: int
    cancel_after: int | None
    scored: bool = False


plans = st.builds(
    Plan,
    length=st.sampled_from(LENGTHS),
    wait=st.sampled_from([0, 0, 0, 1, 3]),
    proposer=st.sampled_from([None, None, "right", "wrong", "mixed"]),
    tokens=st.integers(1, STEPS),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    scored=st.booleans(),
)
chunks = st.sampled_from([16, CHUNK, 512])
"""The largest groups many prompts into one ragged window."""


def run(model_type: str, dtype: str, rows: int, chunk: int, wanted: list[Plan]) -> tuple[int, int]:
    """Play the plans and hold every request against its solo run; (requests a tie decided, requests)."""

    def propose(request: Request, index: int) -> Proposer | None:
        plan = wanted[int(request.id)]
        if plan.proposer is None:
            return None
        answer = alone(model_type, dtype, plan.length).ids
        return Oracle(answer, VOCAB_SIZE, ERRORS[plan.proposer], seed=int(request.id))

    rig = Rig(loaded(model_type, dtype), EngineConfig(batch=rows, prefill_chunk=chunk), propose)
    cancels: dict[int, list[str]] = {}
    turn = 0
    for i, plan in enumerate(wanted):
        for _ in range(plan.wait):
            rig.turn()
            turn += 1
            for request_id in cancels.pop(turn, ()):
                rig.cancel(request_id)
        sampling = SamplingParams(logprobs=0 if plan.scored else None)
        rig.submit(Request(str(i), prompt_of(plan.length), sampling, plan.tokens, ignore_eos=True))
        if plan.cancel_after is not None:
            cancels.setdefault(turn + 1 + plan.cancel_after, []).append(str(i))
    has_work = True
    while has_work:
        rig.turn()
        turn += 1
        has_work = rig.core.has_work
        rig.core.batch.check_integrity()
        assert rig.core.batch.num_open <= rows
        for request_id in cancels.pop(turn, ()):
            rig.cancel(request_id)
    ties = 0
    for i, plan in enumerate(wanted):
        got = rig.ids(str(i))
        assert isinstance(rig.end(str(i)), Finished)
        if plan.cancel_after is None:
            assert len(got) == plan.tokens
        assert len(got) <= plan.tokens
        own = alone(model_type, dtype, plan.length)
        if ties_until_equal(got, own, GAP_BOUNDS[dtype]):
            ties += 1
        elif plan.scored:
            scores = [s.logprob for e in rig.events[str(i)] if isinstance(e, Delta) for s in e.logprobs]
            expected = [float(own.logprobs[step][token]) for step, token in enumerate(got)]
            assert np.allclose(scores, expected, rtol=0, atol=GAP_BOUNDS[dtype] / 2)
            assert len(scores) == len(got)
    assert rig.counters.accepted_tokens <= rig.counters.proposed_tokens
    return ties, len(wanted)


@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("model_type", TYPES)
def test_batches_give_the_solo_tokens(model_type: str, rows: int) -> None:
    @settings(max_examples=4, deadline=None, derandomize=True, database=None)
    @given(chunks, st.lists(plans, min_size=2, max_size=rows + 3))
    def play(chunk: int, wanted: list[Plan]) -> None:
        # Measured differences between schedules are a few 1e-6 here, and no two candidates that near: no tie should decide.
        ties, _ = run(model_type, "float32", rows, chunk, wanted)
        assert not ties

    play()


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen3_5",
        "gemma3",
        "deepseek_v3",
        "mamba",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma4", "qwen3_moe", "gpt_oss", "mamba2")),
    ],
)
def test_batches_in_bfloat16(model_type: str) -> None:
    """Random models in bfloat16 have exact ties, and mlx-lm's latent attention takes other formulas for windows than for single tokens:
    there up to half of the short runs were seen to meet a tie that decides, elsewhere hardly any."""
    total = [0, 0]

    @settings(max_examples=4, deadline=None, derandomize=True, database=None)
    @given(chunks, st.lists(plans, min_size=4, max_size=9))
    def play(chunk: int, wanted: list[Plan]) -> None:
        ties, requests = run(model_type, "bfloat16", 4, chunk, wanted)
        total[0] += ties
        total[1] += requests

    play()
    assert total[0] <= (0.6 if model_type == "deepseek_v3" else 0.2) * total[1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", TYPES)
def test_many_batches(model_type: str, dtype: str) -> None:
    """The long version of the two above."""

    @settings(max_examples=100, deadline=None, database=None)
    @given(st.integers(1, 8), chunks, st.lists(plans, min_size=2, max_size=14))
    def play(rows: int, chunk: int, wanted: list[Plan]) -> None:
        run(model_type, dtype, rows, chunk, wanted)

    play()


def test_a_model_that_cannot_batch_serves_one_row_at_a_time() -> None:
    binding = replace(loaded("llama", "float32").binding, batchable=False, why_not="a test says so")
    rig = Rig(replace(loaded("llama", "float32"), binding=binding), EngineConfig(batch=8))
    for length in (9, 25, 3):
        rig.submit(Request(str(length), prompt_of(length), max_tokens=STEPS, ignore_eos=True, n=2))
    rig.finish()
    assert rig.counters.step_rows == rig.counters.steps
    for length in (9, 25, 3):
        assert rig.ids(str(length), 0) == rig.ids(str(length), 1) == alone("llama", "float32", length).ids


def test_equal_prompts_in_flight_are_two_requests() -> None:
    rig = Rig(loaded("llama", "float32"))
    for name in ("a", "b"):
        rig.submit(Request(name, prompt_of(40), max_tokens=STEPS, ignore_eos=True))
    rig.turn(5)
    rig.submit(Request("c", prompt_of(40), max_tokens=STEPS, ignore_eos=True))
    rig.finish()
    assert [rig.ids(name) for name in "abc"] == [alone("llama", "float32", 40).ids] * 3


def test_requests_without_a_seed_differ() -> None:
    with tiny_engine() as one, tiny_engine() as other:
        sampled = SamplingParams(temperature=1.0)
        runs = [
            engine.generate(prompt_of(9), max_tokens=12, sampling=sampled, ignore_eos=True).choices[0].ids
            for engine in (one, one, other)
        ]
    assert len(set(map(tuple, runs))) == 3


@pytest.mark.parametrize("guessing", [False, True])
def test_nothing_behind_a_stop_is_delivered_also_inside_a_window(guessing: bool) -> None:
    """With right guesses several tokens come at once; those behind the stop string or the end of sequence must not show."""
    answer = alone("llama", "float32", 40)
    text = tiny_tokenizer().decode(answer.ids)
    stop = text[4:6]

    def propose(request: Request, index: int) -> Proposer | None:
        return Oracle(answer.ids, VOCAB_SIZE, 0.0) if guessing else None

    rig = Rig(loaded("llama", "float32"), propose=propose)
    rig.submit(Request("stop", prompt_of(40), max_tokens=STEPS, stop=(stop,), ignore_eos=True))
    ending = replace(loaded("llama", "float32"), eos_token_ids=(answer.ids[5],))
    rig.finish()
    assert "".join(e.text for e in rig.events["stop"] if isinstance(e, Delta)) == text[: text.index(stop)]
    assert ChoiceFinished("stop", 0, "stop", stop) in rig.events["stop"]
    rig = Rig(ending, propose=propose)
    rig.submit(Request("eos", prompt_of(40), max_tokens=STEPS))
    rig.finish()
    assert rig.ids("eos") == answer.ids[: answer.ids.index(answer.ids[5])]
    end = rig.end("eos")
    assert isinstance(end, Finished)
    assert end.usage.completion_tokens == answer.ids.index(answer.ids[5]) + 1
