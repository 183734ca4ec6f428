"""The Responses API of the official Python client against a live server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from agent import CITIES
from fake_engine import KEY, MODEL, FakeEngine, Live, eventually, named_events, prompts
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import FunctionToolParam, Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

TOOL: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture
def client(agent: Live[FakeEngine]) -> Iterator[OpenAI]:
    with OpenAI(base_url=agent.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_a_response(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hi", instructions="Be brief.", metadata={"a": "b"})
    assert (answer.output_text, answer.status, answer.model) == ("Héllo", "completed", MODEL)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    # Strictly by the client's own types: nothing it requires is left out.
    Response.model_validate(json.loads(answer.to_json()))
    thought = client.responses.create(model=MODEL, input="Hi", reasoning={"effort": "high"})
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert thought.output_text == "So"
    assert thought.incomplete_details is not None
    assert thought.incomplete_details.reason == "max_output_tokens"


def test_a_stream_s_events_are_of_the_client_s_types(agent: Live[FakeEngine]) -> None:
    adapter: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    body = {"input": "Weather?", "tools": [TOOL], "reasoning": {"effort": "high"}, "stream": True}
    response = httpx.post(
        f"{agent.url}/v1/responses", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=300
    )
    types: list[str] = []
    for event in named_events(response.text):
        parsed = adapter.validate_python(event)
        assert parsed.type == event["type"]
        types.append(parsed.type.removeprefix("response."))
    item = "output_item.added"
    summary = ["part.added", "text.delta", "text.done", "part.done"]
    call = [item, "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    text = [
        item,
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert [kind for index, kind in enumerate(types) if index == 0 or kind != types[index - 1]] == [
        "created",
        "in_progress",
        item,
        *(f"reasoning_summary_{kind}" for kind in summary),
        "output_item.done",
        *text,
        *call,
        *call,
        "completed",
    ]


def test_tools_streamed_and_gone_on_from(client: OpenAI, agent: Live[FakeEngine]) -> None:
    with client.responses.stream(model=MODEL, input="Weather?", tools=[TOOL], reasoning={"effort": "low"}) as stream:
        seen = {event.type for event in stream}
        answer = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.output_text.delta", "response.completed"} <= seen
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": city} for city in CITIES]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    final = client.responses.create(model=MODEL, input=results, previous_response_id=answer.id, tools=[TOOL])
    assert final.output_text == "Sunny in both."
    by_hand: Any = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in answer.output), *results]
    client.responses.create(model=MODEL, input=by_hand, tools=[TOOL], store=False)
    # What the server kept and what a client keeps by itself come to the same prompt.
    assert prompts(agent.engine)[-1] == prompts(agent.engine)[-2]
    assert '<assistant>(two cities)Let me see.[weather {"city": "Paris"}]' in prompts(agent.engine)[-1]


class City(BaseModel):
    name: str
    population: int


def test_an_answer_parsed_into_a_type(client: OpenAI) -> None:
    made = client.responses.parse(model=MODEL, input="Hi", text_format=City)
    assert made.output_parsed == City(name="Paris", population=2)


def test_what_is_kept(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hi")
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    items = list(client.responses.input_items.list(made.id))
    assert [item.type for item in items] == ["message"]
    with pytest.raises(openai.BadRequestError, match="can't be cancelled"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
    assert unknown.value.param == "previous_response_id"


def test_errors(client: OpenAI, agent: Live[FakeEngine]) -> None:
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://localhost/x.png"}]}]
    with pytest.raises(openai.BadRequestError, match=f"the model {MODEL} takes no image input"):
        client.responses.create(model=MODEL, input=image)
    with pytest.raises(openai.InternalServerError, match="NaN"):
        client.responses.create(model=MODEL, input="fail")
    last = list(client.responses.create(model=MODEL, input="fail", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "NaN" in last.response.error.message
    assert not agent.engine.open


async def cancelled(url: str) -> Any:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.responses.create(model=MODEL, input="wait", stream=True)
        name, last = "", None
        async for event in stream:
            if event.type == "response.created":
                name = event.response.id
            elif event.type == "response.output_text.delta":
                assert (await client.responses.cancel(name)).status == "cancelled"
            last = event
        return last


def test_cancelling_a_stream(agent: Live[FakeEngine]) -> None:
    last = asyncio.run(cancelled(agent.url))
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    eventually(lambda: not agent.engine.open)
