"""The real starter at temperature 1 under grammars, with its real vocabulary."""

from __future__ import annotations

import json
import queue
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gnomon.chat import constraint
from gnomon.chat.constraint import Constraint
from gnomon.chat.tool_choice import tool_call
from gnomon.chat.tools import GENERIC, parse
from gnomon.config import KernelConfig
from gnomon.engine.api import ChoiceFinished, Delta, Failed, Request, SamplingParams
from gnomon.engine.engine import Engine, load
from gnomon.engine.settings import Settings

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "big": {"type": "boolean"},
        "rank": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "big", "rank"],
    "additionalProperties": False,
}


@pytest.mark.network
def test_the_starter_keeps_to_its_grammar(starter_path: Path) -> None:
    hot = SamplingParams(temperature=1.0, seed=3)
    with load(starter_path) as engine:
        prompt = "A city in France as JSON:\n"
        made = engine.generate(prompt, sampling=hot, max_tokens=60, constraint=constraint.json_schema(SCHEMA))
        assert made.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(made.text), SCHEMA)
        pattern = r"[A-Z][a-zé]{2,8}, 1[0-9]{3}"
        made = engine.generate("Paris,", sampling=hot, max_tokens=20, constraint=constraint.regex(pattern))
        assert made.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, made.text)


def closed(**properties: Any) -> dict[str, Any]:
    """An object with all of these properties and no other."""
    kept = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **kept}


WORD = {"type": "string", "pattern": "^[a-z]{1,10}$"}
SCHEMAS: dict[str, Any] = {
    "flat": SCHEMA,
    "nested": closed(who=closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 150}), ok={"type": "boolean"}),
    "list": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 4},
    "list of objects": closed(rows={"type": "array", "items": closed(id={"type": "integer"}, tag=WORD), "minItems": 1, "maxItems": 3}),
    "enum": closed(unit={"enum": ["celsius", "kelvin", 3, None]}, word={"const": "é\n\"x\""}),
    "any of": closed(value={"anyOf": [{"type": "number", "minimum": -5, "maximum": 5}, WORD, {"type": "null"}]}),
    "references": {
        **closed(tree={"$ref": "#/$defs/node"}),
        "$defs": {"node": {"anyOf": [WORD, {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}]}},
    },
    "formats": closed(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "optional": {
        "type": "object",
        "properties": {"a": WORD, "b": {"type": "integer", "maximum": 99, "minimum": -99}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "lengths": closed(short={"type": "string", "minLength": 3, "maxLength": 8}),
    "keys": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3, "minProperties": 1},
}  # fmt: skip
LARK = 'start: sum "."\nsum: NUMBER (" + " NUMBER){1,3} " = " NUMBER\nNUMBER: /[1-9][0-9]{0,2}/'
GBNF = 'root ::= greeting ", " ("world" | "moon") "!"\ngreeting ::= "Hello" | "Good " ("day" | "night")'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": closed(city=WORD, days={"type": "integer", "minimum": 1, "maximum": 9})}}
    for name in ("weather", "trains")
]  # fmt: skip


@dataclass(frozen=True)
class Form:
    """A demand, and whether a text meets it, told by something else than the grammar."""

    constraint: Constraint
    meets: Callable[[str], object]


def matching(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern).fullmatch


def validating(schema: Any) -> Callable[[str], object]:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    return lambda text: validator.is_valid(json.loads(text))


def calling(text: str) -> bool:
    content, calls = parse(GENERIC, text, TOOLS)
    schema = TOOLS[0]["function"]["parameters"]
    return not content and len(calls) == 1 and validating(schema)(calls[0].arguments) is True


REGEXES = (r"[A-Z][a-zé]{2,8}, 1[0-9]{3}", r"(yes|no)( because [a-z ]{5,30})?\.", r"\d{3}-\d{4}", r"[^\x00-\x7f]{2,6}")
FORMS: dict[str, Form] = {
    **{name: Form(constraint.json_schema(schema), validating(schema)) for name, schema in SCHEMAS.items()},
    **{pattern: Form(constraint.regex(pattern), matching(pattern)) for pattern in REGEXES},
    "choice": Form(constraint.choice(["Paris", "Pa", "Zürich"]), {"Paris", "Pa", "Zürich"}.__contains__),
    "lark": Form(constraint.grammar(LARK), matching(r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,3} = [1-9]\d{0,2}\.")),
    "gbnf": Form(constraint.grammar(GBNF), matching(r"(Hello|Good (day|night)), (world|moon)!")),
    "call": Form(tool_call(GENERIC, TOOLS, single=True), calling),
}
ROUNDS = 6


@dataclass
class Answer:
    text: str = ""
    finish: str = ""
    stop: str | None = None


def together(engine: Engine, requests: list[Request]) -> dict[str, Answer]:
    """The answers of requests that are submitted at once."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for request in requests:
        engine.submit(request, events.put)
    answers = {request.id: Answer() for request in requests}
    left = len(requests)
    while left:
        event = events.get(timeout=900)
        if isinstance(event, Delta):
            answers[event.request_id].text += event.text
        elif isinstance(event, ChoiceFinished):
            answers[event.request_id].finish, answers[event.request_id].stop = event.reason, event.stop
            left -= 1
        assert not isinstance(event, Failed), event
    return answers


@pytest.fixture(scope="module")
def starter(starter_path: Path) -> Iterator[Engine]:
    with load(starter_path, Settings(kernels=KernelConfig(kernels="native"))) as engine:
        yield engine


def request(engine: Engine, name: str, seed: int, **more: Any) -> Request:
    text = f"<|im_start|>user\nAnswer in the form: {name}<|im_end|>\n<|im_start|>assistant\n"
    hot = SamplingParams(temperature=1.0, seed=seed)
    ids = tuple(engine.tokenizer.encode(text))
    wanted = FORMS[name].constraint
    return Request(f"{name} {seed}", ids, sampling=hot, max_tokens=200, constraint=wanted, **more)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rows", [1, 8])
def test_every_form_is_kept_at_temperature_one(starter: Engine, rows: int) -> None:
    """Alone, and in batches of eight with a different grammar each. What `max_tokens` cuts off may be anything's beginning."""
    wanted = [request(starter, name, seed) for seed in range(ROUNDS) for name in FORMS]
    count: Counter[str] = Counter()
    wrong: list[tuple[str, str]] = []
    for start in range(0, len(wanted), rows):
        for name, answer in together(starter, wanted[start : start + rows]).items():
            form = FORMS[name.rpartition(" ")[0]]
            met = answer.finish == "length" or bool(form.meets(answer.text))
            count["cut" if answer.finish == "length" else "met" if met else "missed"] += 1
            if not met:
                wrong.append((name, answer.text))
    print(f"{rows} rows: {dict(count)}")
    assert wrong == []
    assert count["met"] >= 0.95 * len(wanted)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(3600)
def test_a_stop_string_ends_a_form_early(starter: Engine) -> None:
    """What was written until then is a beginning of the form; forms in which it can't stand are met as ever."""
    met = stopped = 0
    for seed in range(ROUNDS):
        names = ["nested", "list of objects", "list", "call", "lark", "gbnf", "choice", "keys"]
        answers = together(starter, [request(starter, name, seed, stop=('":', " = ")) for name in names])
        for name, answer in zip(names, answers.values(), strict=True):
            if answer.stop is None:
                assert name in ("list", "gbnf", "choice")
                assert FORMS[name].meets(answer.text)
                met += 1
                continue
            assert (answer.finish, '":' in answer.text, " = " in answer.text) == ("stop", False, False)
            if name == "nested":
                assert answer.text == '{"who'
            if name == "lark":
                assert re.fullmatch(r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,3}", answer.text)
            stopped += 1
    print(f"{stopped} stopped, {met} met")
    assert (stopped, met) == (5 * ROUNDS, 3 * ROUNDS)
