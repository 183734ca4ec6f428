"""The official Python client runs an agent against a live server: calls, results fed back, an answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Job, Live, live_server
from openai import OpenAI
from test_openai_node import package as package

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
JSON_CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 3, "zip": "89073"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
XML_CALLS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=zip>\n89073\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>"
)
KIMI_CALLS = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Ulm", "days": 3, "zip": "89073"}<|tool_call_end|><|tool_call_begin|>functions.time:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)


def agent(calls: str):
    """A model that calls first, and answers with the results it finds in the prompt."""

    def script(job: Job) -> None:
        if "21 degrees" in job.text and "noon" in job.text:
            job.say("It is noon and 21 degrees.")
        else:
            job.say(f"Let me see.\n\n{calls}")

    return script


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3.jinja", JSON_CALLS),
        ("tools/qwen3_coder.jinja", XML_CALLS),
        ("tools/kimi_k2.jinja", KIMI_CALLS),
    ],
    ids=["json", "xml", "kimi"],
)
def live(request: pytest.FixtureRequest) -> Iterator[Live[FakeEngine]]:
    file, calls = request.param
    engine = FakeEngine(agent(calls), context_length=8192)
    with live_server(engine, template=(TEMPLATES / file).read_text("utf-8")) as made:
        yield made


@pytest.fixture
def client(live: Live[FakeEngine]) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def use(name: str, arguments: str) -> str:
    given = json.loads(arguments)
    if name == "weather":
        assert given == {"city": "Ulm", "days": 3, "zip": "89073"}
        return "21 degrees"
    assert (name, given) == ("time", {})
    return "noon"


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_s_turn(client: OpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "What time is it, and how warm?"}]
    for _ in range(2):
        if stream:
            with client.chat.completions.stream(model="any", messages=messages, tools=TOOLS) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0]
        message = choice.message
        if choice.finish_reason != "tool_calls":
            break
        assert message.content == "Let me see."
        assert message.tool_calls is not None
        assert len({call.id for call in message.tool_calls}) == 2
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls:
            assert call.type == "function"
            result = use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert len(messages) == 4
    assert choice.finish_reason == "stop"
    assert message.content == "It is noon and 21 degrees."
    assert not message.tool_calls


def test_arguments_arrive_while_they_grow(client: OpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "Go"}]
    with client.chat.completions.stream(model="any", messages=ask, tools=TOOLS) as events:
        arguments = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    deltas = [event.arguments_delta for event in arguments if event.name == "weather"]
    assert json.loads("".join(deltas)) == {"city": "Ulm", "days": 3, "zip": "89073"}
    assert len(deltas) > 5


def test_one_call_at_a_time(client: OpenAI, live: Live[FakeEngine]) -> None:
    answer = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Go"}], tools=TOOLS, parallel_tool_calls=False
    )
    assert answer.choices[0].message.tool_calls is not None
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


def test_no_tools_no_calls(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Go"}], tools=TOOLS, tool_choice="none"
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_the_node_client_runs_tools(live: Live[FakeEngine], package: Path) -> None:
    """Its own loop: it calls the functions and feeds the results back, whole and streamed."""
    script = package / "openai_tools.mjs"
    shutil.copyfile(Path(__file__).with_name(script.name), script)
    environment = {**os.environ, "BASE_URL": live.url + "/v1"}
    ran = subprocess.run(["node", str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["whole"] == report["streamed"] == "It is noon and 21 degrees."
    assert report["seen"] == [["weather", {"city": "Ulm", "days": 3, "zip": "89073"}], ["time", {}]] * 2
