"""/v1/messages over a scripted engine: what goes in, what comes out, and in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import CALLING, KEY, MODEL, FakeEngine, Job, full, live_server, make_app, named_events, prompts
from starlette.testclient import TestClient

from gnomon.config import HTTPConfig, SamplingDefaults
from gnomon.engine.api import SamplingParams
from gnomon.serve.services import Timing

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


def ask(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 100, "messages": [{"role": "user", "content": content}], **fields}


def app_client(engine: FakeEngine, **made: Any) -> TestClient:
    return TestClient(make_app(engine, **{"template": CALLING, **made}), base_url="http://localhost")


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with app_client(engine) as made:
        yield made


def message(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(MESSAGES, json=ask(**fields))
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(MESSAGES, json=ask(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.text)
    check_order(events)
    return events


def check_order(events: list[dict[str, Any]]) -> None:
    """The rules of a stream: one start, blocks one after the other with indices from 0, a delta of the message, the end."""
    events = [event for event in events if event["type"] != "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[0]["type"] == "message_start"
    deltas = {
        "text": {"text_delta"},
        "thinking": {"thinking_delta", "signature_delta"},
        "tool_use": {"input_json_delta"},
    }
    block: dict[str, Any] | None = None
    count = 0
    for event in events[1:-2]:
        assert event["index"] == count
        if event["type"] == "content_block_start":
            assert block is None
            block = event["content_block"]
        elif event["type"] == "content_block_delta":
            assert block is not None
            assert event["delta"]["type"] in deltas[block["type"]]
        else:
            assert event["type"] == "content_block_stop"
            assert block is not None
            block, count = None, count + 1
    assert block is None
    assert count >= 1


def test_a_whole_message(client: TestClient, engine: FakeEngine) -> None:
    response = client.post(MESSAGES, json=ask(), headers={"anthropic-version": "2023-06-01"})
    body = response.json()
    assert body["id"].startswith("msg_")
    assert len(body.pop("id")) == 28
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(engine.submitted[0].prompt),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert response.headers["x-gnomon-tier"] == "L1"
    assert engine.submitted[0].max_tokens == 100


def test_every_event_in_order(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(f"hm</think>Yes\n{CALL}")
    with app_client(engine) as client:
        events = stream(client, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    tokens = len(engine.submitted[0].prompt)
    start = events[0]["message"]
    assert start["content"] == []
    assert (start["stop_reason"], start["usage"]["input_tokens"]) == (None, tokens)
    told = [
        {key: value for key, value in event.items() if key != "type"} for event in events if event["type"] != "ping"
    ]
    begun = [event["content_block"] for event in told if "content_block" in event]
    assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert begun[1] == {"type": "text", "text": ""}
    assert {**begun[2], "id": ""} == {"type": "tool_use", "id": "", "name": "add", "input": {}}
    deltas = [event["delta"] for event in told if "index" in event and "delta" in event]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert [delta["type"] for delta in deltas if "thinking" in delta or "signature" in delta] == [
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
    ]
    assert "".join(delta.get("text", "") for delta in deltas) == "Yes"
    fragments = [delta["partial_json"] for delta in deltas if "partial_json" in delta]
    assert json.loads("".join(fragments)) == {"x": 1}
    assert len(fragments) > 1
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len(f"hm</think>Yes\n{CALL}")


def test_calls_of_a_whole_message(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(f"{CALL}\n{CALL}")
    with app_client(engine) as client:
        body = message(client, tools=[TOOL])
        one = message(client, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    first, second = body["content"]
    assert first["id"] != second["id"]
    assert {**first, "id": ""} == {"type": "tool_use", "id": "", "name": "add", "input": {"x": 1}}
    assert body["stop_reason"] == "tool_use"
    assert [block["type"] for block in one["content"]] == ["tool_use"]


def test_a_call_that_can_not_be_read_is_text(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say('<tool_call>{"name": "add", "arguments": {"x": </tool_call>')
    with app_client(engine) as client:
        response = client.post(MESSAGES, json=ask(tools=[TOOL]))
    body = response.json()
    assert [block["type"] for block in body["content"]] == ["text"]
    assert body["content"][0]["text"].startswith("<tool_call>")
    assert body["stop_reason"] == "end_turn"
    assert "could not be read" in response.headers["warning"]


@pytest.mark.parametrize(
    ("reason", "stop", "told", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("length", None, "max_tokens", None),
        ("stop", "END", "stop_sequence", "END"),
    ],
)
def test_stop_reasons(engine: FakeEngine, reason: Any, stop: str | None, told: str, sequence: str | None) -> None:
    def script(job: Job) -> None:
        job.delta("A")
        job.finish(reason, stop=stop)
        job.end()

    engine.script = script
    with app_client(engine) as client:
        body = message(client, stop_sequences=["END", "FIN"])
        events = stream(client, stop_sequences=["END", "FIN"])
    assert engine.submitted[0].stop == ("END", "FIN")
    assert (body["stop_reason"], body["stop_sequence"]) == (told, sequence)
    assert events[-2]["delta"] == {"stop_reason": told, "stop_sequence": sequence}


def test_no_text_is_one_empty_block(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say("")
    with app_client(engine) as client:
        assert message(client)["content"] == [{"type": "text", "text": ""}]
        types = [event["type"] for event in stream(client)]
    assert types == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_cached_tokens_are_no_input_tokens(engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta("A")
        job.finish()
        job.end(cached_tokens=4)

    engine.script = script
    with app_client(engine) as client:
        usage = message(client)["usage"]
        last = stream(client)[-2]["usage"]
    assert usage == last
    assert usage["cache_read_input_tokens"] == 4
    assert usage["input_tokens"] == len(engine.submitted[0].prompt) - 4


def test_a_long_prefill_is_bridged_by_pings(engine: FakeEngine) -> None:
    engine.script, lines = None, []
    with (
        live_server(engine, template=CALLING, timing=Timing(keep_alive=0.01)) as live,
        httpx.stream("POST", live.url + MESSAGES, json=ask(stream=True)) as response,
    ):
        job = engine.take()
        for line in response.iter_lines():
            lines.append(line)
            if line == "event: ping" and lines.count(line) == 3:
                job.say("A")
    events = named_events("\n".join([*lines, ""]))
    check_order(events)
    types = [event["type"] for event in events]
    start = types.index("content_block_start")
    assert types[1:start].count("ping") >= 3


def test_history(client: TestClient, engine: FakeEngine) -> None:
    message(
        client,
        system=[
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "secret", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"x": 1}},
                    {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "text", "text": "So?"},
                ],
            },
            {"role": "user", "content": "Well?"},
        ],
        tools=[TOOL],
    )
    assert prompts(engine)[0].startswith(
        "<system>Be brief.\n<user>ab\n"
        '<assistant>(secret)Let me see.[add {"x": 1}][add {}]\n'
        "<tool>1\n<tool>Error: no\n<user>So?\n\nWell?\n"
        '<tools>[{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": '
    )


@pytest.mark.parametrize(
    ("thinking", "open_"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        (None, True),
    ],
)
def test_thinking(engine: FakeEngine, thinking: Any, open_: bool) -> None:
    with app_client(engine, sampling=SamplingDefaults(thinking=True)) as client:
        response = client.post(MESSAGES, json=ask(thinking=thinking))
    assert prompts(engine)[0].endswith("<think>\n" if open_ else "<think></think>")
    assert ("budget_tokens" in response.headers.get("warning", "")) == bool(thinking and "budget_tokens" in thinking)


def test_any_other_display_of_thinking_shows_it(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say("hm</think>Yes")
    with app_client(engine) as client:
        content = message(client, thinking={"type": "enabled", "display": "updates"})["content"]
    assert content == [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Yes"}]


def test_omitted_thinking_is_told_without_its_text(engine: FakeEngine) -> None:
    engine.script = lambda job: job.say("hm</think>Yes")
    with app_client(engine) as client:
        thinking = {"type": "enabled", "display": "omitted"}
        content = message(client, thinking=thinking)["content"]
        events = stream(client, thinking=thinking)
        thought = content[0]
        assert (thought["type"], thought["thinking"]) == ("thinking", "")
        assert not any("thinking" in event.get("delta", {}) for event in events)
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert [one["signature"] for one in deltas if one["type"] == "signature_delta"] == [thought["signature"]]
        # What comes back is what a client that was shown the thinking sends; of a broken or another's signature it is nothing.
        for signature, said in (
            (thought["signature"], "(hm)Yes"),
            (thought["signature"] + "=!", "Yes"),
            ("EqoB", "Yes"),
        ):
            turn = {"role": "assistant", "content": [{**thought, "signature": signature}, content[1]]}
            message(client, messages=[{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}])
            assert f"<user>a\n<assistant>{said}\n<user>b" in prompts(engine)[-1]


def test_sampling_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7}
    message(client, **fields, metadata={"user_id": "u"}, service_tier="auto", context_management={"edits": []})
    assert engine.submitted[0].sampling == SamplingParams(**fields)


def test_tools_of_anthropic_s_servers_are_left_out(client: TestClient, engine: FakeEngine) -> None:
    response = client.post(MESSAGES, json=ask(tools=[{"type": "web_search_20250305", "name": "web_search"}, TOOL]))
    assert "left out: 1" in response.headers["warning"]
    assert "web_search" not in prompts(engine)[0]
    message(client, tools=[TOOL], tool_choice={"type": "none"})
    assert "<tools>" not in prompts(engine)[1]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_tool_choice_is_enforced(client: TestClient, engine: FakeEngine, choice: dict[str, Any]) -> None:
    message(client, tools=[TOOL], tool_choice=choice)
    demanded = engine.submitted[0].constraint
    assert demanded is not None
    assert "add" in demanded.source
    unknown = client.post(MESSAGES, json=ask(tools=[TOOL], tool_choice={"type": "tool", "name": "mul"}))
    assert unknown.status_code == 400
    assert "tool_choice" in unknown.json()["error"]["message"]


def test_counting_tokens_generates_nothing(client: TestClient, engine: FakeEngine) -> None:
    fields = ask(system="Be brief.", tools=[TOOL])
    del fields["max_tokens"]
    counted = client.post(COUNT, json=fields).json()
    assert not engine.submitted
    client.post(MESSAGES, json=fields)
    assert counted == {"input_tokens": len(engine.submitted[0].prompt)}


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_form_is_demanded(client: TestClient, engine: FakeEngine, field: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    form: dict[str, Any] = {"type": "json_schema", "schema": schema}
    message(client, **{field: {"format": form} if field == "output_config" else form})
    demanded = engine.submitted[0].constraint
    assert demanded is not None
    assert (json.loads(demanded.source), demanded.strict) == (schema, True)
    refused = client.post(MESSAGES, json=ask(output_config={"format": {**form, "schema": {"type": "objekt"}}}))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("output_config.format.schema.type is not valid")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages must not be empty"),
    ({"messages": None}, "messages must be of type list, got null"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role must be one of"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be a str or a list of blocks"),
    ({"content": [IMAGE]}, f"messages[0].content[0] is of type image, but the model {MODEL} takes no image input"),
    ({"content": [{"type": "document"}]}, "takes no document input"),
    ({"content": [{"type": "input_audio"}]}, "takes no audio input"),
    ({"content": [{"type": "search_result"}]}, "messages[0].content[0].type must be one of text, thinking"),
    ({"content": ["x"]}, 'messages[0].content[0] must be an object with a type, got "x"'),
    ({"content": [{"type": "text"}]}, "messages[0].content[0].text must be of type str, got null"),
    ({"content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}, "a turn of the user can't hold"),
    ({"content": [{"type": "tool_result", "content": "x"}]}, "messages[0].content[0].tool_use_id must be a str"),
    ({"content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}, "content[0] is of type image"),
    ({"system": 3}, "system must be a str or a list of parts, got 3"),
    ({"system": [IMAGE]}, "system[0] is of type image"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"temperature": "hot"}, 'temperature must be of type float, got "hot"'),
    ({"top_p": 2}, "top_p must be at most 1, got 2"),
    ({"stop_sequences": "END"}, 'stop_sequences must be of type list, got "END"'),
    ({"stop_sequences": [""]}, "stop_sequences must not hold an empty string"),
    ({"stop": "END"}, "stop is not a field of this route: use stop_sequences"),
    ({"logit_bias": {"1": 2}}, "logit_bias is not supported on this route"),
    ({"n": 2}, "n must be 1 on this route, got 2"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type must be one of"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must be at least 1, got 0"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name is required"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type must be one of"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
    ({"container": "c"}, "container is not supported"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "messages must not end with an assistant turn",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]},
                {"role": "user", "content": "a"},
            ]
        },
        'messages[0].content[0].input must be of type object, got "{}"',
    ),
]


@pytest.mark.parametrize(("fields", "expected"), BAD, ids=[expected[:40] for _, expected in BAD])
def test_bad_inputs(client: TestClient, engine: FakeEngine, fields: dict[str, Any], expected: str) -> None:
    for route in (MESSAGES, COUNT):
        response = client.post(route, json=ask(**fields))
        assert response.status_code == 400
        body = response.json()
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert expected in body["error"]["message"]
    assert not engine.submitted


def test_refusals_have_anthropic_s_body(engine: FakeEngine) -> None:
    with app_client(engine, http=HTTPConfig(api_keys=(KEY,), body_limit=1000)) as client:
        refused = client.post(MESSAGES, json=ask())
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        client.headers["x-api-key"] = KEY
        assert client.post(MESSAGES, json=ask()).status_code == 200
        for response, status, kind in (
            (client.post(MESSAGES, content=b"{"), 400, "invalid_request_error"),
            (client.post(MESSAGES, json=ask("x" * 2000)), 413, "request_too_large"),
            (client.get("/v1/messages/batches"), 404, "not_found_error"),
            (client.get(MESSAGES), 405, "invalid_request_error"),
            (client.post(MESSAGES, json=ask(), headers={"host": "evil.example"}), 403, "permission_error"),
        ):
            body = response.json()
            assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        engine.refusal = full()
        busy = client.post(MESSAGES, json=ask())
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")
        assert busy.json()["error"]["type"] == "rate_limit_error"


def test_failures(engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta("A")
        job.fail("row 0 met a NaN")

    engine.script = script
    with app_client(engine) as client:
        whole = client.post(MESSAGES, json=ask())
        events = named_events(client.post(MESSAGES, json=ask(stream=True)).text)
    expected = {"type": "error", "error": {"type": "api_error", "message": "row 0 met a NaN"}}
    assert (whole.status_code, whole.json()) == (500, expected)
    assert events[-1] == expected
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]


def test_the_root_names_the_routes(client: TestClient) -> None:
    endpoints = client.get("/v1").json()["endpoints"]
    assert {f"POST {MESSAGES}", f"POST {COUNT}"} <= set(endpoints)
    assert "MessagesRequest" in client.get("/openapi.json").json()["components"]["schemas"]
