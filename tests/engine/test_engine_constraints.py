"""Answers of a random model under grammars: always valid, the same alone and in any company, and ended by the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from proposers import Oracle

from engine_fixtures import EOS_ID, Rig, tiny_compiler, tiny_engine, tiny_loaded, tiny_tokenizer
from gnomon.chat import constraint
from gnomon.chat.constraint import Constraint, json_schema
from gnomon.chat.reasoning import CHANNEL, HarmonyFormat, TagFormat, Thinking, split
from gnomon.config import EngineConfig
from gnomon.engine.api import ChoiceFinished, Delta, Failed, InvalidRequest, Request, SamplingParams, Unenforceable
from gnomon.engine.constrained import RowConstraint
from gnomon.grammar import GrammarFailed

HOT = SamplingParams(temperature=1.0, seed=1)
PROMPT = tuple(tiny_tokenizer().encode("the cat sat on the"))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
        "pet": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
    "$defs": {"pet": {"type": "object", "properties": {"legs": {"type": "number"}}, "additionalProperties": False}},
}
NUMBERS = {"type": "array", "items": {"type": "integer", "multipleOf": 3, "maximum": 999}, "minItems": 2, "maxItems": 4}
CLOSED = {"additionalProperties": False}
WHEN = {
    "type": "object",
    "properties": {"on": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}},
    "required": ["on", "id"],
    **CLOSED,
}
CALL = {
    "oneOf": [
        {"type": "object", "properties": {"f": {"const": f}, "x": {"type": kind}}, "required": ["f", "x"], **CLOSED}
        for f, kind in (("up", "boolean"), ("down", "null"))
    ]
}
SCHEMAS = [PERSON, NUMBERS, WHEN, CALL]
FORMS: list[Constraint] = [
    *map(json_schema, SCHEMAS),
    json_schema(PERSON, any_whitespace=True),
    constraint.regex("[a-f]{3,9}-[0-9]{2}"),
    constraint.choice(["yes", "no", "the cat sat on the mat"]),
    constraint.grammar('root ::= "<" ("x" | root) ">"'),
]


def request(name: str, wanted: Constraint | None, **more: Any) -> Request:
    return Request(name, PROMPT, **{"sampling": HOT, "max_tokens": 500, **more, "constraint": wanted})


def text_of(rig: Rig, name: str, index: int = 0) -> str:
    return "".join(e.text for e in rig.events[name] if isinstance(e, Delta) and e.index == index)


def reason(rig: Rig, name: str, index: int = 0) -> tuple[str, str | None]:
    return next((e.reason, e.stop) for e in rig.events[name] if isinstance(e, ChoiceFinished) and e.index == index)


def check(wanted: Constraint, text: str) -> None:
    """By other libraries than the one that made the grammar."""
    match wanted.kind:
        case "json":
            validator = jsonschema.Draft202012Validator(
                json.loads(wanted.source), format_checker=jsonschema.FormatChecker()
            )
            validator.validate(json.loads(text))
        case "regex":
            assert re.fullmatch(wanted.source, text)
        case "choice":
            assert text in json.loads(wanted.source)
        case "grammar":
            depth = text.count("<")
            assert text == "<" * depth + "x" + ">" * depth


def run(requests: Sequence[Request], config: EngineConfig | None = None, propose: Any = None) -> Rig:
    rig = Rig(tiny_loaded(), config, propose)
    for each in requests:
        rig.submit(each)
    rig.finish()
    return rig


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """The ids of each form's answer, run by itself."""
    made: dict[str, list[int]] = {}
    for i, wanted in enumerate(FORMS):
        rig = run([request(f"r{i}", wanted)])
        made[f"r{i}"] = rig.ids(f"r{i}")
        assert reason(rig, f"r{i}") == ("stop", None)
        check(wanted, text_of(rig, f"r{i}"))
    return made


def test_a_batch_of_eight_grammars_equals_each_alone(alone: dict[str, list[int]]) -> None:
    rig = run([request(f"r{i}", wanted) for i, wanted in enumerate(FORMS)])
    assert {name: rig.ids(name) for name in alone} == alone
    assert rig.counters.batched_steps > 0
    assert rig.counters.masks > 0


@pytest.mark.parametrize("config", [EngineConfig(pipeline=False), EngineConfig(batch=3, early_first_token=False)])
def test_other_company_changes_nothing(alone: dict[str, list[int]], config: EngineConfig) -> None:
    free = [request(f"free{i}", None, max_tokens=40) for i in range(3)]
    mixed = [free[0], *(request(f"r{i}", FORMS[i]) for i in (0, 5, 3)), *free[1:]]
    rig = run(mixed, config)
    unbound = run(free)
    for name in ("r0", "r5", "r3"):
        assert rig.ids(name) == alone[name]
    for each in free:
        assert rig.ids(each.id) == unbound.ids(each.id)


def test_rows_with_proposals_share_steps_with_constrained_ones(alone: dict[str, list[int]]) -> None:
    free = request("free", None, max_tokens=60, sampling=SamplingParams())
    answer = run([free]).ids("free")
    rig = run(
        [request("r0", FORMS[0]), free, request("r5", FORMS[5])],
        propose=lambda each, index: Oracle(answer, 320, 0.2),
    )
    assert rig.counters.accepted_tokens > 0
    assert rig.ids("free") == answer
    assert (rig.ids("r0"), rig.ids("r5")) == (alone["r0"], alone["r5"])


@pytest.mark.parametrize("schema", range(len(SCHEMAS)))
def test_generated_text_always_validates(schema: int) -> None:
    wanted = json_schema(SCHEMAS[schema])
    samplings = [
        SamplingParams(temperature=1.0, seed=schema),
        SamplingParams(temperature=2.0, seed=2, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, seed=3, xtc_probability=1.0, xtc_threshold=0.02, presence_penalty=0.5),
    ]
    rig = run([request(f"r{i}", wanted, sampling=params, n=4) for i, params in enumerate(samplings)])
    texts: set[str] = set()
    for i in range(len(samplings)):
        for index in range(4):
            assert reason(rig, f"r{i}", index) == ("stop", None)
            check(wanted, text_of(rig, f"r{i}", index))
            texts.add(text_of(rig, f"r{i}", index))
    # Choices draw on their own.
    assert len(texts) > 1


def test_the_end_comes_with_the_grammar_and_no_end_token() -> None:
    rig = run([request("r", constraint.regex("ab"))])
    assert rig.ids("r") == tiny_tokenizer().encode("ab")
    # A grammar that could go on ends by the model's own end token, which is no text.
    rig = run([request("r", constraint.regex("a+"), sampling=SamplingParams(logit_bias=((EOS_ID, 100.0),)))])
    assert (text_of(rig, "r"), reason(rig, "r")) == ("a", ("stop", None))
    # ... which a row that ignores ends still needs.
    rig = run(
        [request("r", constraint.regex("a+"), sampling=SamplingParams(logit_bias=((EOS_ID, 100.0),)), ignore_eos=True)]
    )
    assert (text_of(rig, "r"), reason(rig, "r")) == ("a", ("stop", None))


def test_a_limit_cuts_an_answer_short() -> None:
    rig = run([request("r", json_schema(PERSON), max_tokens=4)])
    assert reason(rig, "r") == ("length", None)
    assert len(rig.ids("r")) == 4
    rig = run([request("r", constraint.regex("ab"), max_tokens=2)])
    assert reason(rig, "r") == ("stop", None)


def test_stop_strings_end_an_answer_before_its_grammar_does() -> None:
    rig = run([request("r", json_schema(PERSON), stop=('"age"', "never"))])
    text = text_of(rig, "r")
    assert reason(rig, "r") == ("stop", '"age"')
    assert text.startswith('{"name":')
    assert '"age' not in text
    # A beginning of a stop string that the grammar's end leaves hanging is delivered.
    rig = run([request("r", constraint.regex("abc"), stop=("cd",))])
    assert (text_of(rig, "r"), reason(rig, "r")) == ("abc", ("stop", None))


def test_log_probabilities_are_of_what_was_allowed() -> None:
    wanted = constraint.choice(["x", "y", "z"])
    rig = run([request("r", wanted, sampling=replace(HOT, logprobs=5))])
    (entry,) = [entry for e in rig.events["r"] if isinstance(e, Delta) for entry in e.logprobs]
    assert {top.token for top in entry.top} == {"x", "y", "z"}
    assert sum(2.718281828459045**top.logprob for top in entry.top) == pytest.approx(1.0, abs=1e-5)


def test_cancelling_leaves_nothing_behind(alone: dict[str, list[int]]) -> None:
    rig = Rig(tiny_loaded())
    for i in (0, 1):
        rig.submit(request(f"r{i}", FORMS[i]))
    rig.turn(4)
    rig.cancel("r1")
    rig.finish()
    assert rig.ids("r0") == alone["r0"]
    assert reason(rig, "r1") == ("cancelled", None)


def test_a_row_survives_a_failed_step(alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tiny_loaded())
    for i in (0, 4):
        rig.submit(request(f"r{i}", FORMS[i]))
    rig.turn(6)
    step = rig.core.stepper.step
    failures = iter([RuntimeError("once")])

    def failing() -> bool:
        for error in failures:
            raise error
        return step()

    monkeypatch.setattr(rig.core.stepper, "step", failing)
    rig.finish()
    assert rig.counters.recoveries == 1
    assert (rig.ids("r0"), rig.ids("r4")) == (alone["r0"], alone["r4"])


def test_a_grammar_that_gives_up_fails_its_own_request(
    alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tiny_loaded())
    rig.submit(request("r0", FORMS[0]))
    rig.submit(request("bad", FORMS[1]))
    rig.turn(5)
    bad = next(row.constraint for row in rig.core.batch.rows if row.job.request.id == "bad")

    def give_up() -> None:
        raise GrammarFailed("too many ways")

    monkeypatch.setattr(bad, "allowed", give_up)
    rig.finish()
    end = rig.end("bad")
    assert isinstance(end, Failed)
    assert (end.code, end.message) == ("grammar_failed", "too many ways")
    assert rig.ids("r0") == alone["r0"]


# Thinking

ANGLES = TagFormat("<", ">")
TO_CLOSE = SamplingParams(temperature=1.0, seed=4, logit_bias=((tiny_tokenizer().encode(">")[0], 5.0),))


@pytest.mark.parametrize(("generation_prompt", "opens"), [("<", False), ("", True), ("<>", False)])
def test_a_model_thinks_first_and_is_constrained_after(generation_prompt: str, opens: bool) -> None:
    wanted = json_schema(PERSON)
    bias = {**dict(TO_CLOSE.logit_bias), **({tiny_tokenizer().encode("<")[0]: 9.0} if opens else {})}
    params = replace(TO_CLOSE, logit_bias=tuple(bias.items()))
    thinking = Thinking(ANGLES, generation_prompt)
    requests = [
        request(f"r{i}", wanted, sampling=replace(params, seed=i), thinking=thinking, max_tokens=900) for i in range(4)
    ]
    rig = run(requests)
    lengths: list[int] = []
    for each in requests:
        reasoning, content = split(ANGLES, text_of(rig, each.id), generation_prompt)
        assert reason(rig, each.id) == ("stop", None)
        check(wanted, content)
        lengths.append(len(reasoning))
    assert any(lengths) == (generation_prompt != "<>")
    # In other words, the same alone.
    assert [rig.ids(each.id) for each in requests] == [run([each]).ids(each.id) for each in requests]


def test_a_model_need_not_think() -> None:
    wanted = json_schema(NUMBERS)
    bias = ((tiny_tokenizer().encode("<")[0], -50.0),)
    for may_open in (True, False):
        thinking = Thinking(ANGLES, may_open=may_open)
        rig = run([request("r", wanted, sampling=replace(HOT, logit_bias=bias), thinking=thinking)])
        check(wanted, text_of(rig, "r"))
    # Where it may not, not even an urge makes it.
    urge = replace(HOT, logit_bias=((tiny_tokenizer().encode("<")[0], 50.0),))
    rig = run([request("r", wanted, sampling=urge, thinking=Thinking(ANGLES, may_open=False))])
    check(wanted, text_of(rig, "r"))


def walker(wanted: Constraint, thinking: Thinking) -> RowConstraint:
    return RowConstraint(tiny_compiler().compile(wanted).start(), tiny_tokenizer(), thinking)


def allowed(row: RowConstraint) -> set[int]:
    words = row.allowed()
    return {32 * at + bit for at, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1}


def test_a_tag_of_several_tokens_is_opened_whole() -> None:
    encode = tiny_tokenizer().encode
    row = walker(constraint.choice(["yes"]), Thinking(TagFormat("<think>", "</think>")))
    tag = encode("<think>")
    assert len(tag) > 1
    assert tag[0] in allowed(row)
    row.advance(tag[0])
    for token in tag[1:]:
        assert allowed(row) == {token}
        row.advance(token)
    free = allowed(row)
    assert EOS_ID not in free
    assert len(free) > 300
    for token in encode("so yes</think"):
        assert not row.finished
        row.advance(token)
    row.advance(encode(">")[0])
    assert allowed(row) == {
        token for token in range(320) if tiny_compiler().compile(constraint.choice(["yes"])).start().allows(token)
    }


def test_a_piece_that_also_begins_an_answer_begins_the_answer() -> None:
    row = walker(constraint.regex("<b>"), Thinking(TagFormat("<think>", "</think>")))
    for token in tiny_tokenizer().encode("<b>"):
        assert not row.finished
        row.advance(token)
    assert row.finished


def test_no_token_writes_on_behind_the_closing_tag() -> None:
    tokenizer = tiny_tokenizer()
    # "the" is one token: as a tag that ends in "t", tokens would carry what belongs to the grammar.
    row = walker(constraint.choice(["yes"]), Thinking(TagFormat("<", "at"), "<"))
    barred = {tokenizer.token_bytes(token) for token in set(range(320)) - allowed(row) - {EOS_ID}}
    assert barred == {s for s in map(tokenizer.token_bytes, range(320)) if b"at" in s and s.partition(b"at")[2]}
    row.advance(tokenizer.encode("a")[0])
    assert all(
        not tokenizer.token_bytes(token).startswith(b"t") or tokenizer.token_bytes(token) == b"t"
        for token in allowed(row)
    )


def test_harmony_is_constrained_in_its_final_message_only() -> None:
    tokenizer = tiny_tokenizer()
    names = {CHANNEL: 0, "<|start|>": 1, "<|message|>": 3}

    class Harmonic:
        """The tiny tokenizer with ids whose text is harmony's."""

        def encode(self, text: str) -> list[int]:
            return [names[text]] if text in names else tokenizer.encode(text)

        def stream(self) -> Any:
            inner = tokenizer.stream(hide=False)
            by_id = {i: text for text, i in names.items()}

            class Stream:
                def push(self, token: int) -> str:
                    return by_id.get(token) or inner.push(token)

            return Stream()

    wanted = tiny_compiler().compile(constraint.choice(["yes", "no"])).start()
    row = RowConstraint(wanted, Harmonic(), Thinking(HarmonyFormat(), "<|start|>assistant"))  # pyright: ignore
    assert allowed(row) == {0, 1}
    for token in (0, *tokenizer.encode("analysis"), 3, *tokenizer.encode("no"), *tokenizer.encode("<|end|>")):
        assert EOS_ID not in allowed(row)
        row.advance(token)
    assert allowed(row) == {0, 1}
    for token in (1, *tokenizer.encode("assistant"), 0, *tokenizer.encode("final"), 3):
        row.advance(token)
    assert {tokenizer.token_bytes(token) for token in allowed(row)} <= {b"y", b"ye", b"yes", b"n", b"no"}
    for token in tokenizer.encode("no"):
        row.advance(token)
    assert row.finished


# The engine's door


def test_the_door_compiles_or_refuses() -> None:
    with tiny_engine() as engine:
        assert list(engine.compile(json_schema({"type": "array", "uniqueItems": True}))) == ["uniqueItems"]
        made = engine.generate("the", constraint=json_schema(PERSON), sampling=HOT, n=2, max_tokens=500)
        for choice in made.choices:
            check(json_schema(PERSON), choice.text)
            assert choice.finish_reason == "stop"
        with pytest.raises(InvalidRequest, match="unclosed group"):
            engine.generate("the", constraint=constraint.regex("("))
        assert engine.stats()["grammar"]["masks"] > 0
    with tiny_engine(config=EngineConfig(grammar=False)) as engine:
        with pytest.raises(Unenforceable) as caught:
            engine.compile(json_schema(PERSON))
        assert caught.value.code == "grammar_off"
        assert engine.stats()["grammar"] == {"enabled": False, "masks": 0, "mask_seconds": 0.0}
