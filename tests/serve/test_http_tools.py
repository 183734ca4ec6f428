"""/v1/chat/completions with tools: calls whole and streamed, and what ends a turn."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Job, Live, eventually, live_server, logprob, make_app, parse_stream, prompts, user
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from gnomon.engine.api import Unenforceable

CHAT = "/v1/chat/completions"
TEMPLATE = (Path(__file__).parents[1] / "chat" / "templates" / "qwen3.jinja").read_text("utf-8")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {}}}}}
    for name in ("weather", "time")
]


def call(name: str = "weather", arguments: str = '{"city": "Ulm"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(engine, template=TEMPLATE), base_url="http://localhost") as made:
        yield made


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post(CHAT, json=user("Hi", tools=TOOLS, **body))
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    return response.json()


def chunks(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    response = client.post(CHAT, json=user("Hi", tools=TOOLS, stream=True, **body))
    assert response.status_code == 200, response.text
    data = parse_stream(response.text)
    assert data.pop() == "[DONE]"
    for one in data:
        ChatCompletionChunk.model_validate_json(one, strict=True)
    return [json.loads(one) for one in data]


def test_calls_of_a_whole_answer(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(f"Let me see.\n{call()}\n{call('time', '{}')}")
    choice = ask(client)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    ids = [one.pop("id") for one in message["tool_calls"]]
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
        {"type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert len(set(ids)) == 2
    assert all(id.startswith("call_") and len(id) >= 13 for id in ids)


def test_only_calls_leave_the_content_null(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(f"<think>\nHm.\n</think>\n\n{call()}")
    message = ask(client)["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "Hm."
    assert len(message["tool_calls"]) == 1


def test_a_call_within_thinking_is_a_thought(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(f"<think>\n{call()}\n</think>\n\nNo.")
    choice = ask(client)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "No."
    assert choice["message"]["reasoning_content"] == call()
    assert "tool_calls" not in choice["message"]


def test_deltas_of_a_stream(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(f"So. {call()}{call('time', '{}')}")
    made = chunks(client, stream_options={"include_usage": True})
    assert made[-1]["choices"] == []
    choices = [one["choices"][0] for one in made[:-1]]
    deltas = [one["delta"] for one in choices]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "So."
    parts = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(one) == 1 for one in parts)
    first = [one[0] for one in parts if one[0]["index"] == 0]
    assert {**first[0], "id": ""} == {
        "index": 0,
        "id": "",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    # As they were generated: a character at a time, but for white space between values.
    fragments = [one["function"]["arguments"] for one in first[1:]]
    assert "".join(fragments) == '{"city": "Ulm"}'
    assert len(fragments) == 14
    assert all(one.keys() == {"index", "function"} and one["function"].keys() == {"arguments"} for one in first[1:])
    second = [one[0] for one in parts if one[0]["index"] == 1]
    assert second[0]["function"]["name"] == "time"
    assert "".join(one["function"]["arguments"] for one in second) == "{}"
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["tool_calls"]
    assert choices[-1]["delta"] == {}


def test_a_call_that_breaks_off_is_content(client: TestClient, engine: FakeEngine) -> None:
    text = call()[:-20]
    engine.script = lambda job: job.say(text, "length")
    response = client.post(CHAT, json=user("Hi", tools=TOOLS))
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert response.headers["warning"] == '299 gnomon "a tool call could not be read and is text in content"'
    made = [one["choices"][0] for one in chunks(client)]
    assert made[-1]["finish_reason"] == "length"
    assert "".join(one["delta"].get("content") or "" for one in made) == text
    counted = client.get("/metrics").text
    assert 'gnomon_tool_calls_total{outcome="malformed"} 2.0' in counted
    assert 'gnomon_tool_calls_total{outcome="complete"} 0.0' in counted


@pytest.mark.parametrize("text", ["Use <tool_call> tags.", f"```\n{call()}\n```", call("other", "{}"), f"`{call()}`"])
def test_markers_that_are_no_calls_stay_text(client: TestClient, engine: FakeEngine, text: str) -> None:
    engine.script = lambda job: job.say(text)
    choice = ask(client)["choices"][0]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


def test_without_tools_nothing_is_a_call(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(call())
    for body in (user("Hi"), user("Hi", tools=[]), user("Hi", tools=TOOLS, tool_choice="none")):
        choice = client.post(CHAT, json=body).json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": call(), "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert ("<tools>" in bytes(i for i in engine.submitted[-1].prompt if i < 256).decode()) is False


STRICT = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]


def test_a_choice_is_enforced_or_asked_for_or_refused(client: TestClient, engine: FakeEngine) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        engine.unenforceable = None
        response = client.post(CHAT, json=user("Hi", tools=TOOLS, tool_choice=choice))
        assert response.status_code == 200
        assert "warning" not in response.headers
        constraint = engine.submitted[-1].constraint
        assert constraint is not None
        assert (constraint.kind, constraint.param) == ("grammar", "tool_choice")
        engine.unenforceable = Unenforceable("grammars are switched off", "tool_choice", "grammar_off")
        engine.script = lambda job: job.say(call())
        response = client.post(CHAT, json=user("Hi", tools=TOOLS, tool_choice=choice))
        assert response.headers["warning"] == '299 gnomon "tool_choice not enforced: grammars are switched off"'
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert engine.submitted[-1].constraint is None
        assert "Answer with a call of weather" in prompts(engine)[-1]
        response = client.post(CHAT, json=user("Hi", tools=STRICT, tool_choice=choice))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tool_choice"
        assert "strict" in response.json()["error"]["message"]


def test_strict_tools_are_held_to_their_schemas_when_the_model_chooses(client: TestClient, engine: FakeEngine) -> None:
    assert client.post(CHAT, json=user("Hi", tools=TOOLS)).status_code == 200
    assert engine.submitted[-1].constraint is None
    assert client.post(CHAT, json=user("Hi", tools=STRICT, tool_choice="none")).status_code == 200
    assert engine.submitted[-1].constraint is None
    engine.script = lambda job: job.say(f"Let me see.{call()}")
    response = client.post(CHAT, json=user("Hi", tools=STRICT))
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    constraint = engine.submitted[-1].constraint
    assert constraint is not None
    assert (constraint.kind, constraint.param, constraint.strict) == ("grammar", "tools", True)
    engine.unenforceable = Unenforceable("no such thing", "tools")
    assert client.post(CHAT, json=user("Hi", tools=STRICT)).json()["error"]["message"].startswith("a tool is strict")


def test_a_form_of_the_answer_leaves_room_for_calls(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(call())
    response = client.post(CHAT, json=user("Hi", tools=TOOLS, response_format={"type": "json_object"}))
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    constraint = engine.submitted[-1].constraint
    assert constraint is not None
    assert (constraint.kind, constraint.param) == ("grammar", "tools")
    # Other forms are no JSON: with them there are no calls.
    response = client.post(CHAT, json=user("Hi", tools=TOOLS, guided_choice=["yes", "no"]))
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    constraint = engine.submitted[-1].constraint
    assert constraint is not None
    assert constraint.kind == "choice"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_ends_the_turn_when_parallel_calls_are_off(stream: bool) -> None:
    engine = FakeEngine(None)
    with live_server(engine, template=TEMPLATE) as live:
        answered = ask_live(live, stream=stream, parallel_tool_calls=False)
        job = next(answered)
        for character in f"Hm. {call()}":
            job.delta(character)
        assert job.cancelled.wait(120)
        choices = next(answered)
    text = "".join(one.get("content") or "" for one, _ in choices)
    calls = [one for delta, _ in choices for one in delta.get("tool_calls", [])]
    assert text == "Hm."
    assert "".join(one["function"]["arguments"] for one in calls) == '{"city": "Ulm"}'
    assert {one.get("index", 0) for one in calls} == {0}
    assert [finish for _, finish in choices if finish] == ["tool_calls"]
    assert live.app.state.services.metrics.counts == {"completed": 1, "failed": 0, "cancelled": 0}


def test_the_turn_goes_on_until_every_choice_has_its_call(client: TestClient, engine: FakeEngine) -> None:
    cancelled: list[bool] = []

    def script(job: Job) -> None:
        job.delta(call() + call("time") + "x", 1)
        job.delta("Hm", 0)
        cancelled.append(job.cancelled.wait(0.05))
        job.delta(f". {call('time')}", 0)
        cancelled.append(job.cancelled.wait(120))

    engine.script = script
    choices = ask(client, n=2, parallel_tool_calls=False)["choices"]
    # The answer may be here before the script's thread has gone on.
    eventually(lambda: len(cancelled) == 2)
    assert cancelled == [False, True]
    assert [one["finish_reason"] for one in choices] == ["tool_calls", "tool_calls"]
    assert [one["message"]["content"] for one in choices] == ["Hm.", None]
    assert [[c["function"]["name"] for c in one["message"]["tool_calls"]] for one in choices] == [["time"], ["weather"]]


def test_parallel_calls_are_on_unless_said(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.say(call() + call("time"))
    for said in ({}, {"parallel_tool_calls": True}, {"parallel_tool_calls": None}):
        assert len(ask(client, **said)["choices"][0]["message"]["tool_calls"]) == 2


def test_log_probabilities_of_calls_are_all_told(client: TestClient, engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        for character in call():
            job.delta(character, 0, logprob(character, -0.25))
        job.finish()
        job.end()

    engine.script = script
    told = ask(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in told) == call()
    streamed = [one["choices"][0]["logprobs"] for one in chunks(client, logprobs=True)]
    assert "".join(one["token"] for part in streamed if part for one in part["content"]) == call()


def test_history_with_calls_and_results_is_rendered(client: TestClient, engine: FakeEngine) -> None:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
        for i in "12"
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": made},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "22"}]},
    ]
    assert client.post(CHAT, json={"messages": messages, "tools": TOOLS}).status_code == 200
    prompt = bytes(i for i in engine.submitted[-1].prompt if i < 256).decode()
    assert f"{call()}\n{call()}<|im_end|>" in prompt
    assert "<tool_response>\n21\n</tool_response>\n<tool_response>\n22\n</tool_response>" in prompt


def ask_live(live: Live[FakeEngine], **body: Any) -> Iterator[Any]:
    """The engine's job, then what the client got: each delta with its finish reason."""
    answers: list[httpx.Response] = []
    request = threading.Thread(
        target=lambda: answers.append(httpx.post(live.url + CHAT, json=user("Hi", tools=TOOLS, **body), timeout=120))
    )
    request.start()
    yield live.engine.take()
    request.join(120)
    if not body["stream"]:
        choice = answers[0].json()["choices"][0]
        yield [(choice["message"], choice["finish_reason"])]
    else:
        data = parse_stream(answers[0].text)[:-1]
        choices = [json.loads(one)["choices"][0] for one in data]
        yield [(one["delta"], one["finish_reason"]) for one in choices]


def test_what_one_delta_holds_comes_in_order(client: TestClient, engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta(f"<think>\nHm.\n</think>\n\nFirst.\n{call()}\nThen.\n{call('time', '{}')}")
        job.finish()
        job.end()

    engine.script = script
    order: list[str] = []
    for chunk in chunks(client):
        delta = chunk["choices"][0]["delta"]
        if delta.get("reasoning_content"):
            order.append(delta["reasoning_content"])
        if delta.get("content"):
            order.append(delta["content"])
        functions = [one["function"] for one in delta.get("tool_calls", [])]
        order += [function.get("name") or function["arguments"] for function in functions]
    assert order == ["Hm.", "First.", "weather", '{"city": "Ulm"}', "\nThen.", "time", "{}"]


def test_an_answer_of_a_demanded_form_is_no_call(engine: FakeEngine) -> None:
    """Llama writes calls as bare JSON, which an answer in JSON may happen to look like."""
    source = (Path(__file__).parents[1] / "chat" / "templates" / "llama3.jinja").read_text("utf-8")
    text = '{"name": "weather", "parameters": {"city": "Ulm"}}'
    engine.script = lambda job: job.say(text)
    engine.model = replace(engine.model, context_length=4096)
    with TestClient(make_app(engine, template=source), base_url="http://localhost") as client:
        assert ask(client)["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        choice = ask(client, response_format={"type": "json_object"})["choices"][0]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"


@pytest.fixture
def untaught(engine: FakeEngine) -> Iterator[TestClient]:
    """A model whose template knows nothing of tools."""
    source = (Path(__file__).parents[1] / "chat" / "templates" / "starter.jinja").read_text("utf-8")
    engine.model = replace(engine.model, context_length=4096)
    with TestClient(make_app(engine, template=source), base_url="http://localhost") as made:
        yield made


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_choice_is_enforced_where_the_model_was_taught_no_notation(
    untaught: TestClient, engine: FakeEngine, choice: Any
) -> None:
    engine.script = lambda job: job.say(call())
    response = untaught.post(CHAT, json=user("Hi", tools=STRICT, tool_choice=choice))
    assert response.status_code == 200
    assert "warning" not in response.headers
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    constraint = engine.submitted[-1].constraint
    assert constraint is not None
    assert (constraint.kind, constraint.param) == ("grammar", "tool_choice")


def test_tools_are_told_and_calls_read_where_the_model_was_taught_no_notation(
    untaught: TestClient, engine: FakeEngine
) -> None:
    engine.script = lambda job: job.say(f"So.\n{call()}")
    assert untaught.get("/v1/models").json()["data"][0]["tool_format"] == "generic"
    response = untaught.post(CHAT, json=user("Hi", tools=TOOLS))
    assert "warning" not in response.headers
    message = response.json()["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == ("So.", '{"city": "Ulm"}')
    assert all(json.dumps(tool) in prompts(engine)[-1] for tool in TOOLS)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21"}
    said = [{"role": "user", "content": "Hi"}, message, result]
    assert untaught.post(CHAT, json={"messages": said, "tools": TOOLS}).status_code == 200
    assert f"So.\n{call()}<|im_end|>" in prompts(engine)[-1]
    assert "<tool_response>\n21\n</tool_response>" in prompts(engine)[-1]
    assert untaught.post(CHAT, json=user("Hi", tools=TOOLS, tool_choice="none")).status_code == 200
    assert "Tools" not in prompts(engine)[-1]
