"""Anthropic's official Python client against a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from agent import CITIES
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam, RawMessageStreamEvent, ToolParam
from fake_engine import KEY, MODEL, FakeEngine, Live, eventually, named_events, prompts
from pydantic import BaseModel, TypeAdapter

TOOL: ToolParam = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(agent: Live[FakeEngine]) -> Iterator[Anthropic]:
    with Anthropic(base_url=agent.url, api_key=KEY, max_retries=0) as made:
        yield made


def ask(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


def test_a_message(client: Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=50, system="Be brief.", messages=ask("Hi"))
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")
    assert (answer.model, answer.stop_reason, answer.stop_sequence) == (MODEL, "end_turn", None)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Héllo"}]
    counted = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=ask("Hi"))
    assert counted.input_tokens == answer.usage.input_tokens


def test_thinking(client: Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    answer = client.messages.create(model=MODEL, max_tokens=2048, messages=ask("Hi"), thinking=thinking)
    assert [block.to_dict() for block in answer.content] == [
        {"type": "thinking", "thinking": "because", "signature": ""},
        {"type": "text", "text": "So"},
    ]
    assert answer.stop_reason == "max_tokens"
    again = client.messages.create(
        model=MODEL,
        max_tokens=2048,
        messages=[*ask("Hi"), answer.to_param(), *ask("And?")],
        thinking={"type": "disabled"},
    )
    assert again.content[0].to_dict() == {"type": "text", "text": "Héllo"}


def test_a_stream_s_events_are_of_the_client_s_types(agent: Live[FakeEngine]) -> None:
    adapter: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    body = {
        "max_tokens": 50,
        "messages": ask("Hi"),
        "tools": [TOOL],
        "thinking": {"type": "enabled"},
        "stream": True,
    }
    response = httpx.post(f"{agent.url}/v1/messages", json=body, headers={"x-api-key": KEY}, timeout=120)
    events = named_events(response.text)
    types: list[str] = []
    for event in events:
        if event["type"] != "ping":
            parsed = adapter.validate_python(event)
            assert parsed.to_dict(exclude_unset=True) == event
            types.append(parsed.type)
    runs = [kind for index, kind in enumerate(types) if kind != types[index - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == ["message_start", *block * 4, "message_delta", "message_stop"]


def test_tools_streamed_and_their_results_sent_back(client: Anthropic, agent: Live[FakeEngine]) -> None:
    seen: list[str] = []
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(
        model=MODEL, max_tokens=2048, messages=ask("Weather?"), tools=[TOOL], thinking=thinking
    ) as stream:
        seen += [event.type for event in stream]
        answer = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= set(seen)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": city} for city in CITIES]
    assert answer.stop_reason == "tool_use"
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    final = client.messages.create(
        model=MODEL,
        max_tokens=2048,
        messages=[*ask("Weather?"), answer.to_param(), {"role": "user", "content": results}],
        tools=[TOOL],
    )
    assert final.content[0].to_dict() == {"type": "text", "text": "Sunny in both."}
    prompt = prompts(agent.engine)[-1]
    assert '<assistant>(two cities)Let me see.[weather {"city": "Paris"}][weather {"city": "Z' in prompt
    assert prompt.count("<tool>sunny\n") == 2


def test_the_whole_and_the_streamed_answer_are_the_same(client: Anthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 9, "messages": ask("Weather?"), "tools": [TOOL]}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()

    def told(message: anthropic.types.Message) -> Any:
        content = [{**block.to_dict(), "id": None} for block in message.content]
        return content, message.stop_reason, message.usage.to_dict()

    assert told(whole) == told(streamed)


class City(BaseModel):
    name: str
    population: int


def test_an_answer_parsed_into_a_type(client: Anthropic) -> None:
    made = client.messages.parse(model=MODEL, max_tokens=50, messages=ask("Hi"), output_format=City)
    assert made.parsed_output == City(name="Paris", population=2)


def test_errors(client: Anthropic, agent: Live[FakeEngine]) -> None:
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match=f"the model {MODEL} takes no image input"):
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=5, messages=ask("Hi"))
    body: Any = refused.value.body
    assert body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.RequestTooLargeError):
        client.messages.create(model=MODEL, max_tokens=5, messages=ask("x" * 20_000))
    with pytest.raises(anthropic.InternalServerError, match="NaN"):
        client.messages.create(model=MODEL, max_tokens=5, messages=ask("fail"))
    with (
        pytest.raises(anthropic.APIStatusError, match="NaN") as failed,
        client.messages.stream(model=MODEL, max_tokens=5, messages=ask("fail")) as stream,
    ):
        stream.until_done()
    assert json.loads(json.dumps(failed.value.body))["error"]["type"] == "api_error"
    assert not agent.engine.open


def test_a_bearer_token_will_do(agent: Live[FakeEngine]) -> None:
    with Anthropic(base_url=agent.url, auth_token=KEY, max_retries=0) as client:
        assert client.messages.create(model=MODEL, max_tokens=5, messages=ask("Hi")).stop_reason == "end_turn"


async def leave(url: str) -> None:
    async with AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        stream = await client.messages.create(model=MODEL, max_tokens=5, messages=ask("wait"), stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()


def test_leaving_a_stream_cancels_the_request(agent: Live[FakeEngine]) -> None:
    import asyncio

    asyncio.run(leave(agent.url))
    eventually(lambda: not agent.engine.open)
