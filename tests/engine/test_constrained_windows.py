"""Constrained rows whose proposals share windows: the tokens are those of one step at a time, whatever is proposed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proposers import ERRORS, Oracle
from speculating import rig_of

from engine_fixtures import EOS_ID, VOCAB_SIZE, Rig, tiny_compiler, tiny_loaded, tiny_tokenizer
from gnomon.chat import constraint
from gnomon.chat.constraint import Constraint, json_schema
from gnomon.chat.reasoning import HarmonyFormat, TagFormat, Thinking, split
from gnomon.config import EngineConfig, SpeculationConfig
from gnomon.engine.api import ChoiceFinished, Delta, Finished, Request, SamplingParams
from gnomon.engine.constrained import RowConstraint
from gnomon.engine.step import Flight, Stepper
from gnomon.grammar import GrammarFailed
from gnomon.propose import Proposer
from gnomon.state.batch_state import BatchState

TYPES = ("llama", "gemma3", "qwen3_5", "mamba2", "mamba")
"""Full, sliding and recurrent layers; windows of the last can't be padded."""
PROMPT = tuple(tiny_tokenizer().encode("the cat sat on the"))
CLOSED = {"additionalProperties": False}
FORMS: list[Constraint] = [
    json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "address": {
                    "type": "object",
                    "properties": {
                        "street": {"enum": ["north", "south"]},
                        "number": {"type": "integer", "maximum": 99},
                    },
                    "required": ["street", "number"],
                    **CLOSED,
                },
                "married": {"type": "boolean"},
            },
            "required": ["name", "address", "married"],
            **CLOSED,
        }
    ),
    json_schema({"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 1, "maxItems": 3}),
    constraint.regex("[a-f]{3,9}-[0-9]{2}"),
    constraint.choice(["yes", "no", "the cat sat on the mat"]),
    constraint.regex("the cat( sat)+"),
]
GREEDY = SamplingParams()
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=1.4, seed=9, top_p=0.95, presence_penalty=0.4),
)


def request(name: str, form: int | None, sampling: int = 1, tokens: int = 120, **more: object) -> Request:
    wanted = None if form is None else FORMS[form]
    return Request(name, PROMPT, replace(SAMPLINGS[sampling], logprobs=2), tokens, constraint=wanted, **more)  # pyright: ignore


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    text: str
    scores: tuple[float, ...]
    end: tuple[str, str | None]


def answer_of(rig: Rig, name: str) -> Answer:
    deltas = [e for e in rig.events[name] if isinstance(e, Delta)]
    (end,) = [e for e in rig.events[name] if isinstance(e, ChoiceFinished)]
    return Answer(
        tuple(i for e in deltas for i in e.ids),
        "".join(e.text for e in deltas),
        tuple(s.logprob for e in deltas for s in e.logprobs),
        (end.reason, end.stop),
    )


@cache
def plain(model_type: str, form: int | None, sampling: int, tokens: int) -> Answer:
    """One step at a time."""
    rig = Rig(tiny_loaded(model_type))
    rig.submit(request("r", form, sampling, tokens))
    rig.finish()
    return answer_of(rig, "r")


@dataclass(frozen=True)
class Plan:
    form: int | None
    sampling: int
    proposer: str | None
    tokens: int
    wait: int
    cancel_after: int | None


plans = st.builds(
    Plan,
    form=st.sampled_from([None, *range(len(FORMS))]),
    sampling=st.sampled_from(range(len(SAMPLINGS))),
    proposer=st.sampled_from([None, *ERRORS]),
    tokens=st.sampled_from([5, 23, 60]),
    wait=st.sampled_from([0, 0, 1, 4]),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 8)),
)


def play(model_type: str, rows: int, wanted: Sequence[Plan]) -> Rig:
    def propose(asked: Request, index: int) -> Proposer | None:
        plan = wanted[int(asked.id)]
        if plan.proposer is None:
            return None
        # Behind the answer's end there is always more to propose.
        known = (*plain(model_type, plan.form, plan.sampling, plan.tokens).ids, EOS_ID, 5, 6, 7)
        return Oracle(known, VOCAB_SIZE, ERRORS[plan.proposer], seed=int(asked.id))

    rig = Rig(tiny_loaded(model_type), EngineConfig(batch=rows), propose)
    for i, plan in enumerate(wanted):
        rig.turn(plan.wait)
        rig.submit(request(str(i), plan.form, plan.sampling, plan.tokens))
    turn = 0
    while rig.core.has_work or not turn:
        for i, plan in enumerate(wanted):
            if plan.cancel_after == turn:
                rig.cancel(str(i))
        rig.turn()
        rig.core.batch.check_integrity()
        turn += 1
    return rig


@pytest.mark.parametrize("rows", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", TYPES)
def test_windows_give_the_tokens_of_single_steps(model_type: str, rows: int) -> None:
    @settings(max_examples=3, deadline=None, derandomize=True, database=None)
    @given(st.lists(plans, min_size=rows, max_size=rows + 2))
    def check(wanted: list[Plan]) -> None:
        rig = play(model_type, rows, wanted)
        for i, plan in enumerate(wanted):
            got = answer_of(rig, str(i))
            own = plain(model_type, plan.form, plan.sampling, plan.tokens)
            assert isinstance(rig.end(str(i)), Finished)
            if got.end[0] == "cancelled":
                assert got.ids == own.ids[: len(got.ids)]
                continue
            assert (got.ids, got.text, got.end) == (own.ids, own.text, own.end)
            assert got.scores == pytest.approx(own.scores, abs=2e-4)

    check()


def test_right_guesses_of_a_grammar_are_taken_many_at_a_time() -> None:
    own = plain("llama", 0, 1, 120)
    rig = play("llama", 1, [Plan(0, 1, "right", 120, 0, None)])
    assert answer_of(rig, "0").ids == own.ids
    assert rig.counters.steps < len(own.ids) / 2
    assert rig.counters.accepted_tokens == rig.counters.proposed_tokens > 0
    # A mask for each position of each window, and none besides.
    assert rig.counters.masks == rig.counters.steps + rig.counters.proposed_tokens


class Fixed(Proposer):
    """Proposes the same ids whatever was written."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids

    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        return self.ids[:limit]


def test_what_the_grammar_forbids_is_not_even_asked() -> None:
    wanted = plain("llama", 2, 1, 60)
    rig = Rig(tiny_loaded(), propose=lambda asked, index: Fixed(tiny_tokenizer().encode("zzz")))
    rig.submit(request("r", 2, 1, 60))
    rig.finish()
    assert answer_of(rig, "r") == wanted
    assert rig.counters.proposed_tokens == rig.counters.window_steps == 0


def test_nothing_is_proposed_past_the_end_of_a_grammar() -> None:
    encode = tiny_tokenizer().encode
    rig = Rig(tiny_loaded(), propose=lambda asked, index: Fixed(encode("the cat sat on the mat, and then")))
    rig.submit(Request("r", PROMPT, GREEDY, constraint=constraint.regex("the cat sat on the mat")))
    rig.finish()
    got = answer_of(rig, "r")
    assert (got.text, got.end) == ("the cat sat on the mat", ("stop", None))
    # The last token needs no place in a window: it is drawn behind the one before.
    assert rig.counters.proposed_tokens == len(encode("the cat sat on the mat")) - 1
    assert rig.counters.steps == 1


def test_a_stop_string_inside_what_was_proposed_ends_there() -> None:
    encode = tiny_tokenizer().encode
    whole = "the cat sat on the mat"
    rig = Rig(tiny_loaded(), propose=lambda asked, index: Fixed(encode(whole)))
    rig.submit(Request("r", PROMPT, GREEDY, constraint=constraint.regex(whole), stop=(" on",)))
    rig.finish()
    got = answer_of(rig, "r")
    assert (got.text, got.end) == ("the cat sat", ("stop", " on"))


def test_a_grammar_that_gives_up_beyond_the_row_cuts_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    own = plain("llama", 0, 1, 120)
    along = RowConstraint.along

    def short(self: RowConstraint, draft: Sequence[int]) -> list[object]:
        return along(self, draft)[:2]  # type: ignore[return-value]

    monkeypatch.setattr(RowConstraint, "along", short)
    rig = play("llama", 1, [Plan(0, 1, "right", 120, 0, None)])
    assert answer_of(rig, "0").ids == own.ids
    assert rig.counters.accepted_tokens < rig.counters.proposed_tokens


# The walk of one row


def walker(wanted: Constraint, thinking: Thinking | None = None) -> RowConstraint:
    return RowConstraint(tiny_compiler().compile(wanted).start(), tiny_tokenizer(), thinking)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(0, len(FORMS) - 1), st.integers(0, 2**16), st.integers(0, 12))
def test_looking_ahead_leaves_the_row_where_it_was(form: int, seed: int, most: int) -> None:
    """The masks along a draft are those of a row that goes there, and looking does not move it."""
    rng = random.Random(seed)
    row, again = walker(FORMS[form]), walker(FORMS[form])

    def ids(words: Sequence[int]) -> list[int]:
        return [32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1]

    for _ in range(6):
        scout, draft = row.fork(), list[int]()
        while len(draft) < most and not scout.finished:
            draft.append(rng.choice([token for token in ids(scout.allowed().tolist()) if token != EOS_ID] or [EOS_ID]))
            scout.advance(draft[-1])
        draft = draft[: row.num_legal(draft)]
        masks = row.along(draft)
        assert len(masks) == len(draft) + 1
        for token, mask in zip(draft[: rng.randint(0, len(draft))], masks, strict=False):
            assert mask.tolist() == row.allowed().tolist() == again.allowed().tolist()
            row.advance(token)
            again.advance(token)
        if row.finished:
            break
        # A token that no draft foresaw.
        token = rng.choice(ids(row.allowed().tolist()))
        row.advance(token)
        again.advance(token)
        if row.finished:
            break


def test_a_draft_that_breaks_off_counts_up_to_there() -> None:
    encode = tiny_tokenizer().encode
    row = walker(constraint.regex("the cat( sat)+"))
    draft = encode("the cat sat")
    assert row.num_legal([*draft, *encode(" mat")]) == len(draft)
    assert row.num_legal([*draft, EOS_ID, *encode(" sat")]) == len(draft)
    assert row.num_legal([EOS_ID]) == 0
    assert row.num_legal([VOCAB_SIZE + 5]) == 0
    assert row.along(draft)[-1][EOS_ID // 32] >> EOS_ID % 32 & 1
    with pytest.raises(GrammarFailed):
        row.fork().advance(EOS_ID)
    assert row.num_legal(draft) == len(draft)


# Thinking

ANGLES = TagFormat("<", ">")
CLOSING = ((tiny_tokenizer().encode(">")[0], 4.0),)


@pytest.mark.parametrize(("generation_prompt", "may_open"), [("<", True), ("", True), ("<>", True), ("", False)])
def test_thinking_and_its_end_may_lie_inside_a_window(generation_prompt: str, may_open: bool) -> None:
    def asked(seed: int) -> Request:
        params = SamplingParams(temperature=1.0, seed=seed, logit_bias=CLOSING)
        thinking = Thinking(ANGLES, generation_prompt, may_open)
        return Request(str(seed), PROMPT, params, 400, constraint=FORMS[0], thinking=thinking)

    own: list[Answer] = []
    for seed in range(3):
        rig = Rig(tiny_loaded())
        rig.submit(asked(seed))
        rig.finish()
        own.append(answer_of(rig, str(seed)))
    known = {str(seed): own[seed].ids for seed in range(3)}
    rig = Rig(tiny_loaded(), propose=lambda each, index: Oracle(known[each.id], VOCAB_SIZE, 0.1, seed=1))
    for seed in range(3):
        rig.submit(asked(seed))
    rig.finish()
    assert [answer_of(rig, str(seed)) for seed in range(3)] == own
    assert rig.counters.accepted_tokens > 0
    for each in own:
        content = split(ANGLES, each.text, generation_prompt)[1]
        jsonschema.validate(json.loads(content), json.loads(FORMS[0].source))


def test_a_copy_of_a_splitter_goes_its_own_way() -> None:
    for made, first, second in (
        (TagFormat("<think>", "</think>").splitter(), "<think>a</th", "ink>b"),
        (
            HarmonyFormat().splitter(),
            "<|channel|>analysis<|message|>a<|end|><|start|>assist",
            "ant<|channel|>final<|message|>b",
        ),
    ):
        made.feed(first)
        other = copy.copy(made)
        kept = other.stage
        told = made.feed(second)
        assert (other.stage, made.stage) == (kept, "content")
        assert other.feed(second) == told


def test_a_copy_of_a_detokenizer_goes_its_own_way() -> None:
    tokenizer = tiny_tokenizer()
    first, *rest = tokenizer.encode("ü€")
    made = tokenizer.stream()
    assert (made.push(first), made.pending) == ("", True)
    other = copy.copy(made)
    text = "".join(map(made.push, rest))
    assert text == "ü€"
    assert other.pending
    assert "".join(map(other.push, rest)) == text


@pytest.mark.parametrize(("pipeline", "ahead"), [(True, 2), (False, 1)])
def test_a_forward_starts_before_the_token_before_is_read(
    monkeypatch: pytest.MonkeyPatch, pipeline: bool, ahead: int
) -> None:
    rig = Rig(tiny_loaded(), EngineConfig(pipeline=pipeline))
    rig.submit(request("r", 2, 1, 60))
    rig.turn()  # the prompt
    started, read, most = 0, 0, 0
    begin, deliver = BatchState.begin, Stepper._deliver

    def counted(state: BatchState, *window: object) -> None:
        nonlocal started
        started += 1
        begin(state, *window)  # pyright: ignore

    def reading(stepper: Stepper, flight: Flight) -> None:
        nonlocal read, most
        most = max(most, started - read)
        read += 1
        deliver(stepper, flight)

    monkeypatch.setattr(BatchState, "begin", counted)
    monkeypatch.setattr(Stepper, "_deliver", reading)
    rig.finish()
    assert read > 3
    assert most == ahead
    assert answer_of(rig, "r") == plain("llama", 2, 1, 60)


@pytest.mark.parametrize("draft", ["llama", "qwen3_5"])
def test_drafts_of_a_model_are_held_against_the_grammar(draft: str) -> None:
    config = SpeculationConfig(draft_model="tiny", num_draft_tokens=3)
    rig = rig_of(tiny_loaded(), config, EngineConfig(batch=3), draft=tiny_loaded(draft))
    asked = [(form, sampling) for form in range(len(FORMS)) for sampling in range(len(SAMPLINGS))]
    for i, (form, sampling) in enumerate(asked):
        rig.submit(request(str(i), form, sampling, 23))
    rig.finish()
    for i, (form, sampling) in enumerate(asked):
        got, own = answer_of(rig, str(i)), plain("llama", form, sampling, 23)
        assert (got.ids, got.text, got.end) == (own.ids, own.text, own.end)
    assert rig.counters.proposed_tokens
    # A model that drafts for itself is right wherever the grammar leaves its own choice.
    assert draft != "llama" or rig.counters.accepted_tokens
