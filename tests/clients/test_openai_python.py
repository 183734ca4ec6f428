"""The official Python client against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from fake_engine import KEY, MODEL, FakeEngine, Live, eventually
from openai import AsyncOpenAI, OpenAI


@pytest.fixture
def client(live: Live[FakeEngine]) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


def ask(text: str) -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=ask("Hi"), n=2, logprobs=True, top_logprobs=2, temperature=0, seed=1
    )
    assert answer.model == MODEL
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")
    assert [choice.message.content for choice in answer.choices] == ["Héllo", "Héllo"]
    assert answer.choices[0].finish_reason == "stop"
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert (told.content[0].token, told.content[0].top_logprobs[1].token) == ("H", "J")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=ask("Hi"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Héllo"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_the_client_s_own_accumulation_of_a_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ask("Hi"), n=2) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.message.content for choice in answer.choices] == ["Héllo", "Héllo"]


def test_reasoning(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ask("think"), reasoning_effort="high")
    message = answer.choices[0].message
    assert message.content == "So"
    assert getattr(message, "reasoning_content", None) == "because"
    assert answer.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(model=MODEL, messages=ask("think"), reasoning_effort="high", stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "because"
    assert "".join(delta.content or "" for delta in deltas) == "So"


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["Héllo", "Héllo"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert answer.choices[0].logprobs.tokens[0] == "H"
    parts = list(client.completions.create(model=MODEL, prompt=[1, 2], stream=True))
    assert "".join(part.choices[0].text for part in parts) == "Héllo"
    assert parts[-1].choices[0].finish_reason == "stop"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors(client: OpenAI, live: Live[FakeEngine]) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=ask("Hi"), temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.AuthenticationError) as wrong:
        client.with_options(api_key="sk-wrong").models.list()
    assert wrong.value.code == "invalid_api_key"
    with pytest.raises(openai.APIStatusError) as large:
        client.chat.completions.create(model=MODEL, messages=ask("x" * 20_000))
    assert large.value.status_code == 413
    with pytest.raises(openai.InternalServerError, match="row 0 met a NaN"):
        client.chat.completions.create(model=MODEL, messages=ask("fail"))
    received = ""
    with pytest.raises(openai.APIError, match="row 0 met a NaN"):  # noqa: PT012  (what came before the error counts too)
        for chunk in client.chat.completions.create(model=MODEL, messages=ask("fail"), stream=True):
            received += chunk.choices[0].delta.content or ""
    assert received == "A"


def test_a_stream_that_is_closed_early_is_cancelled(client: OpenAI, live: Live[FakeEngine]) -> None:
    with client.chat.completions.create(model=MODEL, messages=ask("wait"), stream=True) as stream:
        assert next(stream).choices[0].delta.role == "assistant"
        assert len(live.engine.open) == 1
    eventually(lambda: not live.engine.open)


def test_async(live: Live[FakeEngine]) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=live.url + "/v1", api_key=KEY, max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=ask("Hi")) for _ in range(8))
            )
            assert [answer.choices[0].message.content for answer in answers] == ["Héllo"] * 8
            stream = await client.chat.completions.create(model=MODEL, messages=ask("Hi"), stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Héllo"

    asyncio.run(main())
