"""Recorded answers and event sequences of chat completions, Messages and Responses against the vendors' types and rules of order."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from agent import CALLS, CITIES
from fake_engine import CALLING, FakeEngine, Job, Script, eventually, make_app, named_events, parse_stream
from openai.types.responses import Response
from starlette.testclient import TestClient
from vendor import ChatCompletion, ChatCompletionChunk, Completion, Message, message_event, response_event, strict

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORM = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
ONE = CALLS.partition("\n<tool_call>")[0]


@dataclass(frozen=True)
class Case:
    """What the model writes, and what of it is asked for: `options` are read by `bodies`."""

    text: str
    kinds: tuple[str, ...]
    """What the answer is made of, in order."""
    finish: str = "stop"
    stop: str | None = None
    options: frozenset[str] = field(default_factory=frozenset)
    failure: bool = False

    def script(self, job: Job) -> None:
        for character in self.text:
            job.delta(character)
        if self.failure:
            job.fail("row 0 met a NaN")
        else:
            job.finish("length" if self.finish == "length" else "stop", stop=self.stop)
            job.end()


def of(*options: str) -> frozenset[str]:
    return frozenset(options)


CASES = {
    "text": Case("Héllo", ("text",)),
    "nothing": Case("", ()),
    "cut": Case("Hé", ("text",), "length"),
    "stop": Case("Hé", ("text",), stop="STOP", options=of("stop")),
    "call": Case(ONE, ("call",), "tool_calls", options=of("tools")),
    "parallel calls": Case(CALLS, ("call", "call"), "tool_calls", options=of("tools")),
    "text and calls": Case(f"Let me see.\n{CALLS}", ("text", "call", "call"), "tool_calls", options=of("tools")),
    "required": Case(ONE, ("call",), "tool_calls", options=of("tools", "required")),
    "named": Case(ONE, ("call",), "tool_calls", options=of("tools", "named")),
    "thinking": Case("because</think>\n\nSo", ("reasoning", "text"), options=of("thinking")),
    "thinking, then calls": Case(
        f"two</think>Let me see.\n{CALLS}", ("reasoning", "text", "call", "call"), "tool_calls", options=of("tools", "thinking")
    ),
    "thinking, cut": Case("becau", ("reasoning",), "length", options=of("thinking")),
    "a call, cut": Case(ONE[: ONE.index("Par") + 2], ("cut call",), "length", options=of("tools")),
    "a form": Case('{"name": "Paris"}', ("text",), options=of("form")),
    "failure": Case("A", ("text",), failure=True),
    "failure at once": Case("", (), failure=True),
    "failure in a call": Case(ONE[: ONE.index("Par") + 2], ("cut call",), failure=True, options=of("tools")),
}  # fmt: skip


def chat_body(case: Case) -> dict[str, Any]:
    made: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
    if "tools" in case.options:
        made["tools"] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    if "required" in case.options:
        made["tool_choice"] = "required"
    if "named" in case.options:
        made["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    if "thinking" in case.options:
        made["reasoning_effort"] = "high"
    if "form" in case.options:
        made["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": FORM, "strict": True},
        }
    if "stop" in case.options:
        made["stop"] = ["STOP"]
    return made


def message_body(case: Case) -> dict[str, Any]:
    made: dict[str, Any] = {"model": "any", "max_tokens": 1000, "messages": [{"role": "user", "content": "Hi"}]}
    if "tools" in case.options:
        made["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    if "required" in case.options:
        made["tool_choice"] = {"type": "any"}
    if "named" in case.options:
        made["tool_choice"] = {"type": "tool", "name": "weather"}
    if "thinking" in case.options:
        made["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if "form" in case.options:
        made["output_config"] = {"format": {"type": "json_schema", "schema": FORM}}
    if "stop" in case.options:
        made["stop_sequences"] = ["STOP"]
    return made


def response_body(case: Case) -> dict[str, Any]:
    made: dict[str, Any] = {"model": "any", "input": "Hi"}
    if "tools" in case.options:
        made["tools"] = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    if "required" in case.options:
        made["tool_choice"] = "required"
    if "named" in case.options:
        made["tool_choice"] = {"type": "function", "name": "weather"}
    if "thinking" in case.options:
        made["reasoning"] = {"effort": "high"}
    if "form" in case.options:
        made["text"] = {"format": {"type": "json_schema", "name": "city", "schema": FORM, "strict": True}}
    if "stop" in case.options:
        made["stop"] = ["STOP"]
    return made


ENGINE = FakeEngine()
CLIENT = TestClient(make_app(ENGINE, template=CALLING), base_url="http://localhost")


def ask(script: Script, path: str, body: Mapping[str, Any]) -> Any:
    ENGINE.script = script
    return CLIENT.post(path, json=body)


def events_of(case: Case, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    answer = ask(case.script, path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return named_events(answer.text)


named = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
sound = pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if not case.failure],
    ids=[n for n, case in CASES.items() if not case.failure],
)


def arguments(calls: Sequence[Any]) -> list[Any]:
    return [json.loads(call) for call in calls]


CALLED = [{"city": city} for city in CITIES]


# Chat completions.


@sound
def test_a_chat_completion(case: Case) -> None:
    answer = ask(case.script, "/v1/chat/completions", chat_body(case))
    assert answer.status_code == 200, answer.text
    made = strict(ChatCompletion, answer.json())
    (choice,) = made.choices
    assert choice.finish_reason == case.finish
    calls = choice.message.tool_calls or []
    assert arguments([call.function.arguments for call in calls]) == CALLED[: case.kinds.count("call")]
    assert len({call.id for call in calls}) == len(calls)
    assert (choice.message.content is None) == (case.kinds in (("call",), ("call", "call")))
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


@named
@pytest.mark.parametrize("usage", [False, True])
def test_chat_chunks(case: Case, usage: bool) -> None:
    body = {**chat_body(case), "stream": True, "stream_options": {"include_usage": usage}}
    data = parse_stream(ask(case.script, "/v1/chat/completions", body).text)
    if case.failure:
        error = json.loads(data.pop())["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"] == "row 0 met a NaN"
    else:
        assert data.pop() == "[DONE]"
    values = [json.loads(one) for one in data]
    chunks = [strict(ChatCompletionChunk, value) for value in values]
    assert len({(one.id, one.created, one.model, one.system_fingerprint) for one in chunks}) == 1
    # Usage: null in every chunk but one more, which has no choice; or not there at all.
    assert all(("usage" in value) == usage for value in values)
    if usage and not case.failure:
        *chunks, last = chunks
        assert last.choices == []
        assert last.usage is not None
    assert all(one.usage is None and len(one.choices) == 1 for one in chunks)
    deltas = [one.choices[0].delta for one in chunks]
    finishes = [one.choices[0].finish_reason for one in chunks]
    # The role is told first and once, the reason to end last and once, with nothing else.
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    assert finishes[-1] == (None if case.failure else case.finish)
    if not case.failure:
        assert deltas[-1].model_dump(exclude_none=True) == {}
    calls: list[dict[str, str]] = []
    for delta in deltas:
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                assert (bool(call.id), call.type, bool(call.function.name)) == (True, "function", True)
                calls.append({"id": call.id, "arguments": ""})
            assert call.index == len(calls) - 1
            assert call.id in (None, calls[-1]["id"])
            calls[-1]["arguments"] += call.function.arguments or ""
        told = [bool(delta.content), bool(delta.tool_calls), bool((delta.model_extra or {}).get("reasoning_content"))]
        assert sum(told) <= 1
    if case.failure or "cut call" in case.kinds:
        return
    whole = ask(case.script, "/v1/chat/completions", chat_body(case)).json()["choices"][0]["message"]
    assert "".join(delta.content or "" for delta in deltas) == (whole["content"] or "")
    reasoning = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    assert reasoning == whole.get("reasoning_content", "")
    assert [call["arguments"] for call in calls] == [
        call["function"]["arguments"] for call in whole.get("tool_calls", ())
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(stream: bool) -> None:
    body = {"prompt": "Hi", "logprobs": 1, "stream": stream}
    answer = ask(CASES["text"].script, "/v1/completions", body)
    if not stream:
        strict(Completion, answer.json())
        return
    *chunks, last = parse_stream(answer.text)
    assert last == "[DONE]"
    values = [json.loads(one) for one in chunks]
    # The type wants a reason to end in every chunk; OpenAI's own chunks have null until the last, as the documentation says.
    assert [value["choices"][0]["finish_reason"] for value in values] == [None] * (len(values) - 1) + ["stop"]
    for value in values:
        value["choices"][0]["finish_reason"] = "stop"
        strict(Completion, value)
    assert "".join(value["choices"][0]["text"] for value in values) == "Héllo"


# Messages.

BLOCKS = {"text": "text", "reasoning": "thinking", "call": "tool_use", "cut call": "tool_use"}
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def stop_reason(case: Case) -> str:
    if case.stop is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[case.finish]


@sound
def test_a_message(case: Case) -> None:
    made = strict(Message, ask(case.script, "/v1/messages", message_body(case)).json())
    assert (made.stop_reason, made.stop_sequence) == (stop_reason(case), case.stop)
    assert [block.input for block in made.content if block.type == "tool_use"] == CALLED[: case.kinds.count("call")]


@named
def test_message_events(case: Case) -> None:
    values = events_of(case, "/v1/messages", message_body(case))
    events = [event for event in map(message_event, values) if event is not None]
    first, *events = events
    assert first.type == "message_start"
    assert (first.message.content, first.message.stop_reason, first.message.stop_sequence) == ([], None, None)
    blocks: list[tuple[str, str]] = []
    signed = False
    open_ = False
    while events and events[0].type.startswith("content_block"):
        event = events.pop(0)
        if event.type == "content_block_start":
            assert not open_
            assert event.index == len(blocks)
            block = event.content_block
            blocks.append((block.type, ""))
            assert not getattr(block, {"tool_use": "input"}.get(block.type, block.type))
            open_, signed = True, False
            continue
        assert open_
        assert event.index == len(blocks) - 1
        kind, text = blocks[-1]
        if event.type == "content_block_stop":
            open_ = False
            assert signed == (kind == "thinking")
        elif event.delta.type == "signature_delta":
            assert not signed
            signed = True
        else:
            name, attribute = DELTAS[kind]
            assert (event.delta.type, signed) == (name, False)
            blocks[-1] = kind, text + getattr(event.delta, attribute)
    kinds = [BLOCKS[kind] for kind in case.kinds]
    assert [kind for kind, _ in blocks if kind != "text" or "cut call" not in case.kinds] == (
        kinds if kinds or case.failure else ["text"]
    )
    if case.failure:
        (error,) = events
        assert (error.type, error.error.type, error.error.message) == ("error", "api_error", "row 0 met a NaN")
        return
    assert not open_
    delta, last = events
    assert (delta.type, last.type) == ("message_delta", "message_stop")
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == (stop_reason(case), case.stop)
    if "cut call" in case.kinds:
        return
    whole = ask(case.script, "/v1/messages", message_body(case)).json()
    assert delta.usage.output_tokens == whole["usage"]["output_tokens"]
    read = [json.loads(text) if kind == "tool_use" else text for kind, text in blocks]
    assert read == [block[{"tool_use": "input"}.get(block["type"], block["type"])] for block in whole["content"]]


# Responses.

ITEMS = {"text": "message", "reasoning": "reasoning", "call": "function_call", "cut call": "function_call"}
CHAINS = {
    "reasoning": ("reasoning_summary_part.added", "reasoning_summary_text", "reasoning_summary_part.done"),
    "message": ("content_part.added", "output_text", "content_part.done"),
    "function_call": (None, "function_call_arguments", None),
}
ATTRIBUTES = {"reasoning": "text", "message": "text", "function_call": "arguments"}


def status(case: Case) -> str:
    return "failed" if case.failure else "incomplete" if case.finish == "length" else "completed"


def item_text(item: Any) -> str:
    if item.type == "function_call":
        return item.arguments
    (part,) = item.content if item.type == "message" else item.summary
    return part.text


@sound
def test_a_response(case: Case) -> None:
    made = strict(Response, ask(case.script, "/v1/responses", response_body(case)).json())
    assert made.status == status(case)
    calls = [item.arguments for item in made.output if item.type == "function_call"]
    assert arguments(calls) == CALLED[: case.kinds.count("call")]
    assert (made.incomplete_details is not None) == (made.status == "incomplete")


def check_response(events: list[Any]) -> Any:
    """The rules of a stream, apart from what it holds; the response it ends with."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert (event.response.status, event.response.output, event.response.usage) == ("in_progress", [], None)
    end = events[-1].response
    rest, done = events[2:-1], []
    while rest:
        added = rest.pop(0)
        assert added.type == "response.output_item.added"
        assert added.output_index == len(done)
        item = added.item
        assert item.status == "in_progress"
        assert not (item.arguments if item.type == "function_call" else getattr(item, "summary", None) or item.content)
        begin, kind, finish = CHAINS[item.type]
        text, stage = "", "begin" if begin else "delta"
        while rest and rest[0].type != "response.output_item.done":
            event = rest.pop(0)
            name = event.type.removeprefix("response.")
            assert (event.item_id, event.output_index) == (item.id, added.output_index)
            assert getattr(event, "content_index", 0) == getattr(event, "summary_index", 0) == 0
            if stage == "begin":
                assert (name, event.part.text) == (begin, "")
                stage = "delta"
            elif stage == "delta" and name == f"{kind}.delta":
                text += event.delta
            elif stage == "delta":
                assert (name, getattr(event, ATTRIBUTES[item.type])) == (f"{kind}.done", text)
                stage = "finish" if finish else "end"
            else:
                assert (stage, name, event.part.text) == ("finish", finish, text)
                stage = "end"
        if not rest:
            # It broke off inside an item.
            assert events[-1].type in ("response.failed", "response.incomplete")
            break
        assert stage == "end"
        finished = rest.pop(0)
        assert finished.output_index == added.output_index
        assert (finished.item.id, finished.item.type, item_text(finished.item)) == (item.id, item.type, text)
        assert finished.item.status in ("completed", "incomplete")
        done.append(finished.item)
    if end.status == "completed":
        assert end.output == [item for item in done if item.status == "completed"]
    return end


@named
def test_response_events(case: Case) -> None:
    events = [response_event(value) for value in events_of(case, "/v1/responses", response_body(case))]
    end = check_response(events)
    assert (events[-1].type, end.status) == (f"response.{status(case)}", status(case))
    assert len({event.response.id for event in (events[0], events[1], events[-1])}) == 1
    items = [event.item for event in events if event.type == "response.output_item.added"]
    kinds = [ITEMS[kind] for kind in case.kinds]
    if "cut call" in case.kinds:
        assert items[0].type == "function_call"
    else:
        assert [item.type for item in items] == (kinds if kinds or case.failure else ["message"])
    if case.failure:
        assert (end.error.code, end.error.message) == ("server_error", "row 0 met a NaN")
        return
    whole = strict(Response, ask(case.script, "/v1/responses", response_body(case)).json())
    assert [item_text(item) for item in end.output] == [item_text(item) for item in whole.output]
    assert end.usage == whole.usage


def test_a_cancelled_response() -> None:
    engine = FakeEngine(None)
    with TestClient(make_app(engine, template=CALLING), base_url="http://localhost") as client:
        answers: list[Any] = []
        body = {**response_body(CASES["text"]), "stream": True}
        thread = threading.Thread(target=lambda: answers.append(client.post("/v1/responses", json=body)))
        thread.start()
        engine.take().delta("A")
        running = client.app.state.services.responses.running  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        eventually(lambda: bool(running) and bool(next(iter(running.values())).outline.told))
        (name,) = running
        strict(Response, client.get(f"/v1/responses/{name}").json())
        strict(Response, client.post(f"/v1/responses/{name}/cancel").json())
        thread.join(120)
    end = check_response([response_event(value) for value in named_events(answers[0].text)])
    assert (end.id, end.status) == (name, "cancelled")


ERRORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": []},
    "/v1/completions": {},
    "/v1/responses": {"input": []},
    "/v1/messages": {"messages": []},
    "/v1/messages/count_tokens": {"messages": []},
}


@pytest.mark.parametrize("path", ERRORS)
def test_refusals(path: str) -> None:
    answer = ask(CASES["text"].script, path, {**ERRORS[path], "stream": True})
    assert answer.status_code == 400
    value = answer.json()
    if path.startswith("/v1/messages"):
        message_event(value)
        return
    assert value.keys() == {"error"}
    assert value["error"].keys() == {"message", "type", "param", "code"}
