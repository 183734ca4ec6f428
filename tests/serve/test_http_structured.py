"""What a client may demand of an answer's form: what reaches the engine, what is refused, what degrades, and how that is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import THINKING, FakeEngine, make_app, prompts, user
from starlette.testclient import TestClient

from gnomon.chat.constraint import Constraint
from gnomon.engine.api import Unenforceable

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def form(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def demanded(engine: FakeEngine) -> Constraint:
    found = engine.submitted[-1].constraint
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ("json", '{"type":"object"}', False)),
        (form(), ("json", json.dumps(SCHEMA), False)),
        (form(any_whitespace=True, strict=True), ("json", json.dumps(SCHEMA), True)),
        ({"guided_json": SCHEMA}, ("json", json.dumps(SCHEMA), False)),
        ({"guided_json": json.dumps(SCHEMA)}, ("json", json.dumps(SCHEMA), False)),
        ({"guided_regex": "a+"}, ("regex", "a+", False)),
        ({"guided_choice": ["yes", "no"]}, ("choice", '["yes", "no"]', False)),
        ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"', False)),
        ({"structured_outputs": SCHEMA}, ("json", json.dumps(SCHEMA), False)),
        # vLLM's form of the field.
        ({"structured_outputs": {"json": SCHEMA}}, ("json", json.dumps(SCHEMA), False)),
        ({"structured_outputs": {"json_object": True}}, ("json", '{"type":"object"}', False)),
        ({"structured_outputs": {"regex": "a"}}, ("regex", "a", False)),
        ({"structured_outputs": {"choice": ["a"]}}, ("choice", '["a"]', False)),
        ({"structured_outputs": {"grammar": "g"}}, ("grammar", "g", False)),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_demand_reaches_the_engine(
    client: TestClient, engine: FakeEngine, route: str, fields: dict[str, Any], expected: tuple[str, str, bool]
) -> None:
    body = user("Hi", **fields) if route == CHAT else {"prompt": "Hi", **fields}
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    assert "warning" not in response.headers
    got = demanded(engine)
    assert (got.kind, got.source, got.any_whitespace) == expected
    assert got.strict == (fields == form(any_whitespace=True, strict=True))
    assert engine.compiled == [got]
    # An enforced demand changes nothing of the prompt.
    assert prompts(engine) == ["<user>Hi\n<assistant>" if route == CHAT else "Hi"]


def test_the_first_demand_in_the_order_of_rank_counts(client: TestClient, engine: FakeEngine) -> None:
    # From the highest rank to the lowest; json_object and json_schema share a field.
    ranks: list[tuple[dict[str, Any], str]] = [
        ({"guided_grammar": "g"}, "guided_grammar"),
        (form(), "response_format.json_schema.schema"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": SCHEMA}, "structured_outputs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ]
    for first in range(len(ranks)):
        fields: dict[str, Any] = {}
        for given, _ in ranks[first:]:
            fields = {**given, **fields}
        client.post(CHAT, json=user("Hi", **fields))
        assert demanded(engine).param == ranks[first][1]


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_regex": None}]
)
def test_no_demand(client: TestClient, engine: FakeEngine, fields: dict[str, Any]) -> None:
    client.post(CHAT, json=user("Hi", **fields))
    assert engine.submitted[0].constraint is None
    assert engine.compiled == []


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"response_format": "json"}, "response_format", "must be an object with type"),
        ({"response_format": {"type": ["text"]}}, "response_format", "must be an object with type"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "an object with a schema, got null",
        ),
        (form(7), "response_format.json_schema.schema", "must be a JSON schema, got 7"),
        (form(False), "response_format.json_schema.schema", "must be a JSON schema, got false"),
        (form(strict="yes"), "response_format.json_schema.strict", "must be of type bool"),
        (form({"type": "integre"}), "response_format.json_schema.schema.type", "'integre' is not valid under any"),
        (
            form({"properties": {"a": {"items": {"minLength": -1}}}}),
            "response_format.json_schema.schema.properties.a.items.minLength",
            "-1 is less than the minimum of 0",
        ),
        (
            form({"anyOf": [{}, {"pattern": "("}]}),
            "response_format.json_schema.schema.anyOf[1].pattern",
            "'(' is not a 'regex'",
        ),
        (
            form({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"a": {}}}),
            "response_format.json_schema.schema.properties.a.$ref",
            'nothing is at "#/$defs/b"',
        ),
        ({"guided_json": "{"}, "guided_json", "is not valid JSON"),
        ({"guided_regex": 3}, "guided_regex", "must be of type str, got 3"),
        ({"guided_choice": "a"}, "guided_choice", 'must be a list of str, got "a"'),
        ({"guided_choice": []}, "guided_choice", "must have 1 to 4096 strings, got 0"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "must be of type str, got 1"),
        ({"guided_grammar": ["a"]}, "guided_grammar", "must be of type str"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "must have exactly one of"),
        ({"structured_outputs": {"choice": [2]}}, "structured_outputs.choice[0]", "must be of type str, got 2"),
    ],
)
def test_a_demand_that_makes_no_sense_is_refused_with_its_place(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], param: str, part: str
) -> None:
    for stream in (False, True):
        response = client.post(CHAT, json=user("Hi", stream=stream, **fields))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert part in error["message"]
    assert engine.submitted == []


def test_deep_schemas_are_refused(client: TestClient) -> None:
    schema: dict[str, Any] = {}
    for _ in range(150):
        schema = {"items": schema}
    error = client.post(CHAT, json=user("Hi", **form(schema))).json()["error"]
    assert error["message"] == "response_format.json_schema.schema must have at most 100 levels"


def test_what_the_engine_cannot_enforce_is_asked_of_the_model_with_a_warning(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.unenforceable = Unenforceable('no "such"\nthing \u20ac', "response_format", "unsupported")
    response = client.post(CHAT, json=user("Hi", **form()))
    assert response.status_code == 200
    assert response.headers["warning"] == "299 gnomon \"grammar not enforced: no 'such' thing ?\""
    assert engine.submitted[0].constraint is None
    asked = f"Answer with a JSON value and nothing else that is valid under this JSON schema:\n{json.dumps(SCHEMA)}"
    assert prompts(engine) == [f"<system>{asked}\n<user>Hi\n<assistant>"]
    with_system = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    streamed = client.post(CHAT, json={**with_system, **form(), "stream": True})
    assert "grammar not enforced" in streamed.headers["warning"]
    assert prompts(engine)[1] == f"<system>Be brief.\n\n{asked}\n<user>Hi\n<assistant>"
    raw = client.post(COMPLETIONS, json={"prompt": "Hi", **form()})
    assert "grammar not enforced" in raw.headers["warning"]
    assert prompts(engine)[2] == "Hi"


def test_json_object_is_asked_for_without_a_schema(client: TestClient, engine: FakeEngine) -> None:
    engine.unenforceable = Unenforceable("grammars are switched off", "response_format", "grammar_off")
    client.post(CHAT, json=user("Hi", response_format={"type": "json_object"}))
    assert prompts(engine) == ["<system>Answer with a JSON object and nothing else.\n<user>Hi\n<assistant>"]


def test_strict_is_refused_where_it_would_degrade(client: TestClient, engine: FakeEngine) -> None:
    engine.unenforceable = Unenforceable("grammars are switched off", "response_format", "grammar_off")
    response = client.post(CHAT, json=user("Hi", **form(strict=True)))
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "response_format.json_schema.schema is strict, but grammars are switched off",
        "type": "invalid_request_error",
        "param": "response_format.json_schema.schema",
        "code": "unsupported",
    }
    engine.unenforceable, engine.gaps = None, ("uniqueItems",)
    response = client.post(CHAT, json=user("Hi", **form(strict=True)))
    assert response.status_code == 400
    assert "uniqueItems" in response.json()["error"]["message"]
    assert engine.submitted == []


def test_a_schema_enforced_in_part_warns_of_the_rest(client: TestClient, engine: FakeEngine) -> None:
    engine.gaps = ("uniqueItems", "not")
    response = client.post(CHAT, json=user("Hi", **form()))
    assert response.headers["warning"] == (
        '299 gnomon "grammar not enforced in full: not supported in a JSON schema: uniqueItems, not"'
    )
    assert demanded(engine).kind == "json"
    assert prompts(engine)[0].startswith("<system>Answer with a JSON value")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        # Python's own engine knows look-ahead: well formed, only not enforceable. The others nobody can read.
        ({"guided_regex": "(?=a)b"}, 200),
        ({"guided_regex": "(a"}, 400),
        ({"guided_grammar": "start: foo"}, 400),
    ],
)
def test_what_does_not_compile_is_refused_unless_it_is_known_to_be_sound(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], status: int
) -> None:
    engine.unenforceable = Unenforceable("at 1(8): no", next(iter(fields)), "unsupported")
    response = client.post(CHAT, json=user("Hi", **fields))
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == next(iter(fields))
        assert "at 1(8)" in response.json()["error"]["message"]
    engine.unenforceable = Unenforceable("off", next(iter(fields)), "grammar_off")
    assert client.post(CHAT, json=user("Hi", **fields)).status_code == 200


def test_the_engine_learns_where_the_answer_starts(engine: FakeEngine) -> None:
    with TestClient(make_app(engine, template=THINKING), base_url="http://localhost") as client:
        for thinking in (True, False):
            client.post(CHAT, json=user("Hi", chat_template_kwargs={"enable_thinking": thinking}, **form()))
        client.post(CHAT, json=user("Hi"))
    first, second, third = (request.thinking for request in engine.submitted)
    assert first is not None
    assert first.splitter().stage == "thinking"
    assert second is not None
    assert second.splitter().stage == "content"
    assert third is None
