"""Forced, copied and settled text in the engine: what was verified changes nothing, what was asserted is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proposers import Oracle
from speculating import DEAR, Fixed

from engine_fixtures import EOS_ID, VOCAB_SIZE, Rig, tiny_loaded, tiny_tokenizer
from gnomon.chat.constraint import json_schema, regex
from gnomon.chat.spans import ToolSpans, tool_spans
from gnomon.chat.template import ChatTemplate
from gnomon.config import EngineConfig, SpeculationConfig
from gnomon.engine.api import ChoiceFinished, Delta, Filled, Finished, Request, SamplingParams
from gnomon.engine.speculation import ProposerFactory, Speculation

TYPES = ("llama", "gemma3", "qwen3_5", "mamba")
TOKENIZER = tiny_tokenizer()
PROMPT = tuple(TOKENIZER.encode("the cat sat on the mat, the cat sat on the mat\n"))
CLOSED = {"additionalProperties": False}


def dense(names: Sequence[str], kinds: Sequence[Any]) -> dict[str, Any]:
    properties = dict(zip(names, kinds, strict=False))
    return {"type": "object", "properties": properties, "required": list(properties), **CLOSED}


KINDS = (
    {"type": "integer", "maximum": 999},
    {"type": "boolean"},
    {"enum": ["north", "south"]},
    {"type": "string", "maxLength": 4},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    dense(["latitude", "longitude"], [{"type": "integer", "maximum": 9}] * 2),
)
SCHEMA = dense(["first_name", "married", "place", "direction"], [KINDS[3], KINDS[1], KINDS[5], KINDS[2]])
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=1.0, seed=5))


def rig_of(
    fill: SpeculationConfig | None, model_type: str = "llama", rows: int = 8, extra: ProposerFactory | None = None
) -> Rig:
    loaded = tiny_loaded(model_type)
    speculation = None if fill is None else Speculation(fill, vocab_size=loaded.vocab_size, extra=extra)
    return Rig(loaded, EngineConfig(batch=rows), speculation=speculation)


def text_of(rig: Rig, name: str) -> str:
    return "".join(e.text for e in rig.events[name] if isinstance(e, Delta))


def end_of(rig: Rig, name: str) -> tuple[str, str | None]:
    return next((e.reason, e.stop) for e in rig.events[name] if isinstance(e, ChoiceFinished))


def filled(rig: Rig, name: str) -> Filled:
    end = rig.end(name)
    assert isinstance(end, Finished)
    assert end.usage.fill is not None
    return end.usage.fill


def schema_request(name: str, schema: dict[str, Any], sampling: SamplingParams, tokens: int = 200) -> Request:
    return Request(name, PROMPT, sampling, tokens, constraint=json_schema(schema))


GRAMMAR = SpeculationConfig()
ALL = SpeculationConfig(draft_kind="ngram", fill="both")


@pytest.mark.parametrize("rows", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", TYPES)
def test_forced_and_copied_text_changes_no_token(model_type: str, rows: int) -> None:
    @settings(max_examples=2, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        requests: list[Request] = []
        for i in range(rows + 1):
            names = data.draw(
                st.lists(
                    st.sampled_from(["id", "name", "the cat", "sat_on", "x y"]), min_size=1, max_size=4, unique=True
                )
            )
            kinds = [data.draw(st.sampled_from(KINDS)) for _ in names]
            sampling = replace(data.draw(st.sampled_from(SAMPLINGS)), logprobs=1)
            made = schema_request(str(i), dense(names, kinds), sampling, data.draw(st.sampled_from([9, 150])))
            requests.append(made if data.draw(st.integers(0, 3)) else replace(made, constraint=None, max_tokens=24))
        wait = data.draw(st.integers(0, 3))
        cancelled = data.draw(st.none() | st.integers(0, rows))
        rigs = [rig_of(fill, model_type, rows) for fill in (None, ALL)]
        for rig in rigs:
            for each in requests:
                rig.submit(each)
                rig.turn(wait)
            if cancelled is not None:
                rig.cancel(str(cancelled))
            rig.finish()
        plain, quick = rigs
        for each in requests:
            ids, scores = quick.ids(each.id), _scores(quick, each.id)
            if end_of(quick, each.id)[0] == "cancelled" or end_of(plain, each.id)[0] == "cancelled":
                common = min(len(ids), len(plain.ids(each.id)))
                assert ids[:common] == plain.ids(each.id)[:common]
                continue
            assert (ids, end_of(quick, each.id)) == (plain.ids(each.id), end_of(plain, each.id))
            assert scores == pytest.approx(_scores(plain, each.id), abs=2e-4)
            if each.constraint is not None and end_of(quick, each.id)[0] == "stop":
                jsonschema.validate(json.loads(text_of(quick, each.id)), json.loads(each.constraint.source))

    check()


def _scores(rig: Rig, name: str) -> list[float]:
    return [s.logprob for e in rig.events[name] if isinstance(e, Delta) for s in e.logprobs]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_dense_schema_takes_fewer_steps(sampling: SamplingParams) -> None:
    rigs = [rig_of(fill) for fill in (None, GRAMMAR, replace(GRAMMAR, grammar_draft_tokens=1))]
    for rig in rigs:
        rig.submit(schema_request("r", SCHEMA, sampling))
        rig.finish()
    plain, quick, narrow = rigs
    assert quick.ids("r") == plain.ids("r") == narrow.ids("r")
    assert quick.counters.steps < 0.8 * plain.counters.steps
    assert quick.counters.steps < narrow.counters.steps < plain.counters.steps
    told = filled(quick, "r")
    assert told.grammar == quick.counters.accepted_tokens > 0
    assert told.verify_drafted == quick.counters.proposed_tokens
    assert told.decode_steps == quick.counters.steps
    assert (told.strict, told.echo, told.spans, told.wasted_samples) == (0, 0, (), 0)


def test_a_longer_guess_goes_on_where_forced_text_ends() -> None:
    plain = rig_of(None)
    plain.submit(schema_request("r", SCHEMA, SAMPLINGS[1]))
    plain.finish()
    answer = plain.ids("r")
    rigs = [
        rig_of(GRAMMAR, extra=lambda request, index, error=error: Oracle(answer, VOCAB_SIZE, error, seed=3))
        for error in (0.0, 1.0)
    ]
    for rig in rigs:
        rig.submit(schema_request("r", SCHEMA, SAMPLINGS[1]))
        rig.finish()
        assert rig.ids("r") == answer
    right, wrong = rigs
    alone = rig_of(GRAMMAR)
    alone.submit(schema_request("r", SCHEMA, SAMPLINGS[1]))
    alone.finish()
    assert right.counters.steps < alone.counters.steps
    assert wrong.counters.accepted_tokens > 0


def test_grammar_proposals_can_be_switched_off() -> None:
    rig = rig_of(replace(GRAMMAR, grammar_jump=False))
    rig.submit(schema_request("r", SCHEMA, SAMPLINGS[0]))
    rig.finish()
    assert rig.counters.window_steps == 0
    end = rig.end("r")
    assert isinstance(end, Finished)
    assert end.usage.fill is None


def test_stops_and_ends_inside_forced_text() -> None:
    rig = rig_of(GRAMMAR)
    rig.submit(Request("stop", PROMPT, constraint=regex("the cat sat on the mat"), stop=(" on",)))
    rig.submit(Request("end", PROMPT, constraint=regex("the cat sat on the mat")))
    rig.submit(Request("short", PROMPT, max_tokens=3, constraint=regex("the cat sat on the mat")))
    rig.finish()
    assert (text_of(rig, "stop"), end_of(rig, "stop")) == ("the cat sat", ("stop", " on"))
    assert (text_of(rig, "end"), end_of(rig, "end")) == ("the cat sat on the mat", ("stop", None))
    assert (end_of(rig, "short"), len(rig.ids("short"))) == (("length", None), 3)


def test_the_session_is_copied() -> None:
    bias = ((EOS_ID, -100.0),)
    passage = tuple(TOKENIZER.encode("a long line about the cat and the mat that comes twice"))
    rows: dict[str, Rig] = {}
    for name, fill in (("plain", None), ("echo", SpeculationConfig(fill="echo", fill_k=4))):
        rig = rows[name] = rig_of(fill)
        # A greedy random model soon repeats itself.
        rig.submit(Request("r", passage * 2, SamplingParams(logit_bias=bias), 150))
        rig.finish()
    assert rows["echo"].ids("r") == rows["plain"].ids("r")
    told = filled(rows["echo"], "r")
    assert told.echo == rows["echo"].counters.accepted_tokens > 20
    assert rows["echo"].counters.steps < rows["plain"].counters.steps


# Settled text of tool calls


class Templated:
    special_tokens = {"eos_token": "<|im_end|>"}  # noqa: RUF012
    chat_templates = {  # noqa: RUF012
        "default": (Path(__file__).parents[1] / "chat" / "templates" / "qwen3.jinja").read_text("utf-8")
    }

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return TOKENIZER.encode(text)

    def token_id(self, piece: str) -> int | None:
        return TOKENIZER.token_id(piece)


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], **CLOSED},
    },
}
SCAFFOLD = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'


@cache
def spans() -> ToolSpans:
    made = tool_spans(ChatTemplate(Templated()), [TOOL], lambda ids: TOKENIZER.decode(ids, hide=False))
    assert made is not None
    return made


STRICT = SpeculationConfig(fill="strict", fill_max_span=64)


def test_settled_text_is_written_without_asking() -> None:
    rig = rig_of(STRICT)
    # Of these two tokens the greedy model writes one first: the opener's first, by preference.
    first, second = TOKENIZER.encode("<to")
    prefer = SamplingParams(logit_bias=((first, 60.0), (second, 50.0)), presence_penalty=40.0, presence_context_size=20)
    rig.submit(Request("r", PROMPT, prefer, 60, spans=spans()))
    rig.finish()
    assert text_of(rig, "r").startswith(SCAFFOLD)
    told = filled(rig, "r")
    assert told.strict == told.wasted_samples == sum(told.spans) == len(TOKENIZER.encode(SCAFFOLD)) - 2
    assert max(told.spans) == 17
    assert told.decode_steps == rig.counters.steps < 60 - told.strict + len(told.spans) + 1
    off = rig_of(SpeculationConfig(fill="echo"))
    off.submit(Request("r", PROMPT, prefer, 60, spans=spans()))
    off.finish()
    assert not text_of(off, "r").startswith(SCAFFOLD[:12])


def test_settled_text_comes_singly_where_windows_do_not_pay() -> None:
    texts: list[str] = []
    for dear in (False, True):
        rig = rig_of(STRICT)
        if dear:
            assert rig.core.speculation is not None
            rig.core.speculation.pace = Fixed(DEAR)
        rig.submit(Request("r", PROMPT, prefer_opener(), 60, spans=spans()))
        rig.finish()
        texts.append(text_of(rig, "r"))
        assert (rig.counters.window_steps == 0) == dear
        told = filled(rig, "r")
        assert told.strict == sum(told.spans) == len(TOKENIZER.encode(SCAFFOLD)) - 2
    assert texts[0] == texts[1]
    assert texts[0].startswith(SCAFFOLD)


def prefer_opener(**more: Any) -> SamplingParams:
    first, second = TOKENIZER.encode("<to")
    return SamplingParams(
        logit_bias=((first, 60.0), (second, 50.0)), presence_penalty=40.0, presence_context_size=20, **more
    )


@pytest.mark.parametrize("guard", ["logprobs", "constraint", "no spans"])
def test_guards_keep_settled_text_out(guard: str) -> None:
    sampling = prefer_opener(logprobs=0) if guard == "logprobs" else prefer_opener()
    request = Request("r", PROMPT, sampling, 40, spans=None if guard == "no spans" else spans())
    if guard == "constraint":
        request = replace(request, constraint=regex("<to(a|z){30}"))
    rig = rig_of(STRICT)
    rig.submit(request)
    rig.finish()
    assert SCAFFOLD[:12] not in text_of(rig, "r")
    end = rig.end("r")
    assert isinstance(end, Finished)
    assert end.usage.fill is None or end.usage.fill.strict == 0


def test_settled_text_changes_no_other_row() -> None:
    free = Request("free", PROMPT, SamplingParams(temperature=1.0, seed=4), 60)
    bound = schema_request("bound", SCHEMA, SAMPLINGS[1])
    alone = rig_of(None)
    for each in (free, bound):
        alone.submit(each)
    alone.finish()
    rig = rig_of(STRICT)
    for each in (free, Request("call", PROMPT, prefer_opener(), 60, spans=spans()), bound):
        rig.submit(each)
    rig.finish()
    assert text_of(rig, "call").startswith(SCAFFOLD)
    for name in ("free", "bound"):
        assert rig.ids(name) == alone.ids(name)


def test_what_follows_settled_text_is_what_the_model_says_behind_it() -> None:
    """The state behind asserted tokens is that of a prompt that ends with them."""
    for model_type in ("llama", "qwen3_5"):
        rig = rig_of(STRICT, model_type)
        rig.submit(Request("r", PROMPT, prefer_opener(), 90, spans=spans()))
        rig.finish()
        head = TOKENIZER.encode(SCAFFOLD)
        ids = rig.ids("r")
        assert ids[: len(head)] == head
        # Penalties remember what was asserted as well as what was drawn.
        other = rig_of(None, model_type)
        other.submit(Request("r", (*PROMPT, *head), prefer_opener(), 90 - len(head)))
        other.finish()
        assert ids[len(head) :] == other.ids("r")


def test_a_stop_string_inside_settled_text_ends_there() -> None:
    rig = rig_of(STRICT)
    rig.submit(Request("r", PROMPT, prefer_opener(), 60, spans=spans(), stop=('"name"',)))
    rig.finish()
    assert (text_of(rig, "r"), end_of(rig, "r")) == ("<tool_call>\n{", ("stop", '"name"'))


def test_a_limit_inside_settled_text_ends_there() -> None:
    rig = rig_of(STRICT)
    rig.submit(Request("r", PROMPT, prefer_opener(), 7, spans=spans()))
    rig.finish()
    # The last token has no window, and is the model's own.
    assert rig.ids("r")[:6] == TOKENIZER.encode(SCAFFOLD)[:6]
    assert len(rig.ids("r")) == 7
    assert end_of(rig, "r") == ("length", None)


def test_cancelling_inside_settled_text_leaves_nothing_behind() -> None:
    rig = rig_of(STRICT)
    rig.submit(Request("r", PROMPT, prefer_opener(), 60, spans=spans()))
    while not any(isinstance(e, Delta) for e in rig.events["r"]):
        rig.turn()
    rig.turn(3)
    rig.cancel("r")
    rig.finish()
    assert end_of(rig, "r")[0] == "cancelled"
    assert SCAFFOLD.startswith(text_of(rig, "r"))
    assert rig.core.batch.num_open == 0
