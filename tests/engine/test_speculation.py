"""Whatever guesses, and in whatever company: a request gets the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import speculative_generate_step
from proposers import ERRORS, Oracle
from speculating import DEAR, FREE, rig_of

import tiny_models
from engine_fixtures import CONTEXT, VOCAB_SIZE, Rig, tiny_loaded, tiny_tokenizer
from gnomon.config import EngineConfig, KvScheme, SpeculationConfig
from gnomon.engine.api import ChoiceFinished, Delta, Finished, Request, SamplingParams
from gnomon.engine.drafting import DraftMismatch, check_draft, check_tokenizers
from gnomon.models.load import LoadedModel

KINDS = ("llama", "gemma3", "mamba2", "qwen3_5", "mamba")
"""Full, sliding (window 40), recurrent, recurrent beside full, and recurrent that takes no padding."""
NGRAM = SpeculationConfig(draft_kind="ngram")
DRAFT = SpeculationConfig(draft_model="tiny")
BOTH = SpeculationConfig(draft_model="tiny", draft_kind="ngram")
UNTRIMMED = ("gemma3", "qwen3_5")
"""Models with layers that don't hold what they were: sliding windows, recurrent states."""


@cache
def loaded(model_type: str) -> LoadedModel:
    return tiny_loaded(model_type)


@cache
def draft() -> LoadedModel:
    """Another tiny llama: mostly wrong."""
    return tiny_loaded("llama", model=tiny_models.make("llama", seed=1, num_hidden_layers=1))


def prompt_of(length: int) -> tuple[int, ...]:
    """Repeats itself, so that something is found in it."""
    part = np.random.default_rng(length).integers(2, VOCAB_SIZE, max(1, length // 3))
    return tuple(np.resize(part, length).tolist())


@dataclass(frozen=True)
class Plan:
    """A request: when it comes (turns after the one before), how it is drawn, when it is cancelled (turns after it came)."""

    length: int
    wait: int
    tokens: int
    seed: int | None
    penalty: float
    cancel_after: int | None

    def request(self, name: str) -> Request:
        drawn = {} if self.seed is None else {"temperature": 0.6, "seed": self.seed, "top_k": 5}
        sampling = SamplingParams(**drawn, repetition_penalty=self.penalty, logprobs=0)
        return Request(name, prompt_of(self.length), sampling, self.tokens, ignore_eos=True)


plans = st.builds(
    Plan,
    length=st.sampled_from([1, 2, 9, 25, 39, 41, 66, 130]),
    wait=st.sampled_from([0, 0, 1, 3]),
    tokens=st.integers(1, 40),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    penalty=st.sampled_from([1.0, 1.0, 1.3]),
    cancel_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)),
)


@cache
def alone(model_type: str, plan: Plan) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of plain decoding in a core of its own."""
    rig = Rig(loaded(model_type))
    rig.submit(plan.request("0"))
    rig.finish()
    return rig.ids("0"), scores(rig, "0")


def scores(rig: Rig, name: str) -> list[float]:
    return [s.logprob for e in rig.events[name] if isinstance(e, Delta) for s in e.logprobs]


def play(rig: Rig, model_type: str, wanted: Sequence[Plan]) -> None:
    """Run the plans in one core and hold each against plain decoding."""
    cancels: dict[int, list[str]] = {}
    turn, coming = 0, list(enumerate(wanted))
    due = 0
    while coming or rig.core.has_work or cancels:
        while coming and turn >= due + coming[0][1].wait:
            i, plan = coming.pop(0)
            due = turn
            rig.submit(plan.request(str(i)))
            if plan.cancel_after is not None:
                cancels.setdefault(turn + 1 + plan.cancel_after, []).append(str(i))
        for name in cancels.pop(turn, ()):
            rig.cancel(name)
        rig.turn()
        rig.core.batch.check_integrity()
        turn += 1
    for i, plan in enumerate(wanted):
        ids, own = alone(model_type, replace(plan, wait=0, cancel_after=None))
        got = rig.ids(str(i))
        end = rig.end(str(i))
        assert isinstance(end, Finished)
        assert got == ids[: len(got)]
        assert plan.cancel_after is not None or len(got) == plan.tokens
        assert np.allclose(scores(rig, str(i)), own[: len(got)], rtol=0, atol=1e-4)
        said = end.usage.speculation
        if said is None:
            assert not got, "cancelled before it had a row"
            continue
        assert said.accepted == sum(said.accepted_at)
        assert said.drafted == sum(said.drafted_at)
        if plan.cancel_after is None:
            assert said.target_calls <= end.usage.completion_tokens


@pytest.mark.parametrize("pinned", [2, None])
@pytest.mark.parametrize("model_type", KINDS)
def test_prompt_lookup_changes_no_token(model_type: str, pinned: int | None) -> None:
    @settings(max_examples=3, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from([1, 2, 8]), st.lists(plans, min_size=2, max_size=5))
    def run(rows: int, wanted: list[Plan]) -> None:
        rig = rig_of(loaded(model_type), replace(NGRAM, num_draft_tokens=pinned), EngineConfig(batch=rows))
        play(rig, model_type, wanted)

    run()


@pytest.mark.parametrize("model_type", KINDS)
def test_a_draft_model_changes_no_token(model_type: str) -> None:
    @settings(max_examples=2, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from([1, 2, 8]), st.booleans(), st.lists(plans, min_size=2, max_size=5))
    def run(rows: int, with_lookup: bool, wanted: list[Plan]) -> None:
        config = replace(BOTH if with_lookup else DRAFT, num_draft_tokens=3)
        # The llama drafts for itself: always right where nothing else disturbs.
        other = loaded("llama") if model_type == "llama" else draft()
        play(rig_of(loaded(model_type), config, EngineConfig(batch=rows), draft=other), model_type, wanted)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("config", [NGRAM, DRAFT, BOTH], ids=["ngram", "two-model", "both"])
@pytest.mark.parametrize("model_type", KINDS)
def test_many_mixed_batches(model_type: str, config: SpeculationConfig, rows: int) -> None:
    """The long version of the two above, with every way of choosing the depth."""

    @settings(max_examples=25, deadline=None, database=None)
    @given(
        st.sampled_from([None, 1, 3, 16]),
        st.sampled_from([None, FREE, DEAR]),
        st.booleans(),
        st.sampled_from([16, 512]),
        st.lists(plans, min_size=1, max_size=rows + 4),
    )
    def run(pinned: int | None, curve: object, right: bool, chunk: int, wanted: list[Plan]) -> None:
        other = (loaded("llama") if right else draft()) if config.draft_model else None
        rig = rig_of(
            loaded(model_type),
            replace(config, num_draft_tokens=pinned),
            EngineConfig(batch=rows, prefill_chunk=chunk),
            draft=other,
            curve=curve,  # pyright: ignore[reportArgumentType]
        )
        play(rig, model_type, wanted)

    run()


@pytest.mark.parametrize("rows", [1, 3])
def test_coded_keys_and_values_are_taken_back_too(rows: int) -> None:
    """Also where the coding begins within the answer."""
    scheme, plan = KvScheme("affine", bits=8, start=70), Plan(66, 0, 30, None, 1.0, None)
    wide = tiny_loaded("llama", model=tiny_models.make("llama", num_hidden_layers=2, head_dim=64))
    plain = Rig(wide, kv=scheme)
    plain.submit(plan.request("0"))
    plain.finish()
    rig = rig_of(wide, replace(NGRAM, num_draft_tokens=4), kv=scheme)
    for row in range(rows):
        rig.submit(plan.request(str(row)))
    rig.finish()
    assert rig.counters.window_steps
    assert [rig.ids(str(row)) for row in range(rows)] == [plain.ids("0")] * rows


# A draft model


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("number", [1, 3])
def test_two_models_give_what_mlx_lm_gives(right: bool, number: int) -> None:
    target, other = loaded("llama"), loaded("llama") if right else draft()
    for length in (2, 25, 66):
        prompt = prompt_of(length)
        own = speculative_generate_step(
            mx.array(prompt), target.model, other.model, num_draft_tokens=number, max_tokens=24
        )
        expected = [(token, from_draft) for token, _, from_draft in own]
        rig = rig_of(target, replace(DRAFT, num_draft_tokens=number), draft=other)
        rig.submit(Request("0", prompt, max_tokens=24, ignore_eos=True))
        rig.finish()
        assert rig.ids("0") == [token for token, _ in expected]
        end = rig.end("0")
        assert isinstance(end, Finished)
        assert end.usage.speculation is not None
        assert end.usage.lane == "serial+spec"
        # As many accepted drafts, up to those that mlx-lm makes behind its last token.
        assert abs(end.usage.speculation.accepted - sum(drafted for _, drafted in expected)) <= 1
        assert (end.usage.speculation.accepted >= 12) == right


def test_a_draft_that_is_always_right_draws_with_the_rows_own_randomness() -> None:
    sampling = SamplingParams(temperature=1.0, seed=7, repetition_penalty=1.2)
    rig = rig_of(loaded("llama"), replace(DRAFT, num_draft_tokens=4), draft=loaded("llama"))
    rig.submit(Request("0", prompt_of(25), sampling, 41, ignore_eos=True))
    rig.finish()
    end = rig.end("0")
    assert isinstance(end, Finished)
    said = end.usage.speculation
    assert said is not None
    assert said.accepted == said.drafted
    assert said.lengths[:8] == (4,) * 8
    assert said.target_calls == 9


def settled_at_first(rig: Rig) -> tuple[int, int]:
    """Tokens of a prompt of 700, and of the same with three more, that the draft model's state holds when each is first seen there."""
    proposer = rig.core.speculation and rig.core.speculation.draft
    fed: list[int] = []
    prompt = prompt_of(700)
    for name, text in (("0", prompt), ("1", (*prompt, 5, 6, 7))):
        rig.submit(Request(name, text, max_tokens=8, ignore_eos=True))
        while not rig.closed or rig.closed[-1] != name:
            rig.turn()
            known = list(getattr(proposer, "known", {}).values())
            if known and len(fed) <= int(name):
                fed.append(known[0].settled)
    first, second = fed
    return first, second


def test_a_draft_models_states_are_reused_with_the_targets() -> None:
    rig = rig_of(loaded("llama"), replace(DRAFT, num_draft_tokens=3), draft=loaded("llama"))
    proposer = rig.core.speculation and rig.core.speculation.draft
    first, second = settled_at_first(rig)
    assert first == 700 - 1, "computed: a chunk holds it whole"
    assert second >= 690, "lent: all that the first request left"
    assert not getattr(proposer, "known", None)
    assert rig.core.reuse.stats()["failures"] == 0
    rig.core.check_integrity()


def test_tokenizers_that_differ_are_refused_with_the_difference() -> None:
    own = tiny_tokenizer()

    class Other:
        vocab_size = own.vocab_size

        def piece(self, token: int) -> str:
            return "elsewhere" if token == 300 else own.piece(token)

    check_tokenizers(own, own)
    with pytest.raises(DraftMismatch, match=f"id 300 is 'elsewhere' there and {own.piece(300)!r} in the model's"):
        check_tokenizers(own, Other())  # pyright: ignore[reportArgumentType]
    Other.vocab_size = 7
    with pytest.raises(DraftMismatch, match=f"has 7 ids, the model's has {own.vocab_size}"):
        check_tokenizers(own, Other())  # pyright: ignore[reportArgumentType]


def test_a_draft_model_that_padding_disturbs_is_refused() -> None:
    with pytest.raises(DraftMismatch, match="must take ragged batches, mamba models don't"):
        check_draft(loaded("mamba"))


@pytest.mark.parametrize("model_type", UNTRIMMED)
def test_a_draft_with_windows_or_recurrent_layers_is_as_right_as_its_model(model_type: str) -> None:
    rig = rig_of(loaded(model_type), replace(DRAFT, num_draft_tokens=4), draft=loaded(model_type))
    rig.submit(Request("0", prompt_of(66), max_tokens=41, ignore_eos=True))
    rig.finish()
    end = rig.end("0")
    assert isinstance(end, Finished)
    said = end.usage.speculation
    assert said is not None
    assert rig.ids("0") == alone(model_type, Plan(66, 0, 41, None, 1.0, None))[0]
    assert (said.accepted, said.target_calls) == (said.drafted, 9)


@pytest.mark.parametrize("model_type", UNTRIMMED)
def test_a_draft_with_windows_or_recurrent_layers_changes_no_token(model_type: str) -> None:
    @settings(max_examples=3, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from([1, 2, 8]), st.booleans(), st.booleans(), st.lists(plans, min_size=2, max_size=5))
    def run(rows: int, with_lookup: bool, own: bool, wanted: list[Plan]) -> None:
        config = replace(BOTH if with_lookup else DRAFT, num_draft_tokens=3)
        target = model_type if own else "llama"
        play(rig_of(loaded(target), config, EngineConfig(batch=rows), draft=loaded(model_type)), target, wanted)

    run()


@pytest.mark.parametrize("model_type", UNTRIMMED)
def test_states_of_such_a_draft_are_reused(model_type: str) -> None:
    rig = rig_of(loaded("llama"), replace(DRAFT, num_draft_tokens=3), draft=loaded(model_type))
    assert settled_at_first(rig)[1] >= 512
    assert rig.core.reuse.stats()["failures"] == 0
    rig.core.check_integrity()


def test_a_draft_model_that_fails_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(loaded("llama"), replace(DRAFT, num_draft_tokens=3), draft=draft())
    speculation = rig.core.speculation
    assert speculation is not None

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(speculation.draft, "_draft", broken)
    plan = Plan(25, 0, 20, None, 1.0, None)
    rig.submit(plan.request("0"))
    rig.finish()
    assert rig.ids("0") == alone("llama", plan)[0]
    assert speculation.stats(0)["draft_failed"] == "injected"


# The depth


def test_what_does_not_pay_is_not_done_and_what_pays_is() -> None:
    plan = Plan(66, 0, 40, None, 1.0, None)
    for curve, windows in ((FREE, True), (DEAR, False)):
        rig = rig_of(loaded("llama"), NGRAM, curve=curve)
        play(rig, "llama", [plan])
        assert (rig.counters.window_steps > 0) == windows
    assert rig.core.speculation is not None
    assert not rig.core.speculation.stats(0)["acceptance"], "where none could pay none is looked for"


def test_rows_whose_guesses_do_not_pay_keep_the_pace_of_plain_steps() -> None:
    """A step is built before the one before it is read back, and no step is waited for."""
    rig = rig_of(loaded("llama"), NGRAM, EngineConfig(early_first_token=False), curve=DEAR)
    rig.submit(Request("0", prompt_of(66), max_tokens=30, ignore_eos=True))
    in_flight = 0
    while rig.core.has_work or not rig.events["0"]:
        rig.turn()
        in_flight += rig.core.stepper.flight is not None
    assert in_flight == 30


def test_a_draft_model_that_does_not_pay_is_tried_ever_more_rarely() -> None:
    rig = rig_of(loaded("llama"), DRAFT, draft=draft(), curve=DEAR)
    rig.submit(Request("0", prompt_of(25), max_tokens=200, ignore_eos=True))
    rig.finish()
    # At 0, 64, 192 tokens.
    assert rig.counters.window_steps == 3
    assert rig.counters.proposed_tokens == 3


# What comes at the end of a row


class Beyond(Oracle):
    """Proposes as much as it is let, past every end."""

    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        at = len(generated)
        return [*self.answer[at : at + limit], *[0] * limit][:limit]


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_end_of_the_context_inside_a_window(model_type: str, rows: int) -> None:
    prompt = prompt_of(50)
    short = replace(loaded(model_type), context_length=len(prompt) + 9)
    plain = Rig(short)
    plain.submit(Request("0", prompt, ignore_eos=True))
    plain.finish()
    answer = plain.ids("0")
    rig = Rig(short, propose=lambda request, index: Beyond(answer, VOCAB_SIZE, 0.0))
    for row in range(rows):
        rig.submit(Request(str(row), prompt, ignore_eos=True))
    rig.finish()
    for row in range(rows):
        assert rig.ids(str(row)) == answer
        assert rig.events[str(row)][-2] == ChoiceFinished(str(row), 0, "length")
    assert len(answer) == 9
    assert len(prompt) + 9 < CONTEXT


@pytest.mark.parametrize("model_type", KINDS)
def test_a_row_cancelled_between_windows_harms_no_other(model_type: str) -> None:
    plan = Plan(66, 0, 40, None, 1.0, None)
    answer = alone(model_type, plan)[0]
    rig = Rig(loaded(model_type), propose=lambda request, index: Beyond(answer, VOCAB_SIZE, 0.0))
    for name in ("0", "1", "2"):
        rig.submit(plan.request(name))
    rig.turn(4)
    rig.cancel("1")
    rig.finish()
    assert rig.ids("0") == rig.ids("2") == answer
    assert rig.ids("1") == answer[: len(rig.ids("1"))]


@pytest.mark.parametrize("error", ["right", "wrong", "mixed"])
@pytest.mark.parametrize("model_type", KINDS)
def test_the_state_after_windows_is_the_state_recomputed(model_type: str, error: str) -> None:
    plans_ = [Plan(length, 0, 30, None, 1.0, None) for length in (66, 25, 9)]
    answers = {str(i): alone(model_type, plan)[0] for i, plan in enumerate(plans_)}
    rig = Rig(
        loaded(model_type),
        EngineConfig(prompt_cache=0),
        propose=lambda request, index: Oracle(answers[request.id], VOCAB_SIZE, ERRORS[error], seed=1),
    )
    for name, plan in enumerate(plans_):
        rig.submit(plan.request(str(name)))
    while rig.counters.window_steps < 3:
        rig.turn()
    rig.core.stepper.land()
    batch = rig.core.batch
    assert batch.state is not None
    for b, row in enumerate(batch.rows):
        held = batch.state.lengths[b]
        text = [*row.prompt, *row.tokens]
        assert held == len(text) - 1
        fresh = rig.core.runner.prefill_alone(text).state
        for mine, own in zip(batch.state.snapshot(b).layers, fresh.snapshot(0).layers, strict=True):
            assert mine.arrays.keys() == own.arrays.keys()
            if mine.kind == "sliding" and held > 40:
                # Both layouts turn at other places: their keys are the same set.
                continue
            for name, array in mine.arrays.items():
                assert np.allclose(np.array(array), np.array(own.arrays[name]), rtol=1e-3, atol=2e-4), (mine.kind, name)


def test_usage_counts_by_hand() -> None:
    """The first window gets all of three guesses, the second none of two (as many as are left), then there are no more."""

    class Scripted(Oracle):
        def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
            at = len(generated)
            if at == 1:
                return self.answer[1:4]
            return [(self.answer[5] + 1) % VOCAB_SIZE, 9, 9][:limit] if at == 5 else ()

    plan = Plan(25, 0, 8, None, 1.0, None)
    answer = alone("llama", plan)[0]
    rig = Rig(loaded("llama"), propose=lambda request, index: Scripted(answer, VOCAB_SIZE, 0.0))
    rig.submit(plan.request("0"))
    rig.finish()
    end = rig.end("0")
    assert isinstance(end, Finished)
    said = end.usage.speculation
    assert said is not None
    # Tokens: 1 plain, 4 of the first window, 1 of the second, 2 plain.
    assert (said.drafted, said.accepted, said.target_calls, said.rounds) == (5, 3, 5, 2)
    assert said.lengths == (3, 0)
    assert said.drafted_at == (2, 2, 1)
    assert said.accepted_at == (1, 1, 1)
    assert rig.counters.proposed_at == [2, 2, 1]
