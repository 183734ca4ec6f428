"""The official client, the server and the real engine together, over a tiny random model; and the starter, once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from fake_engine import Live, eventually, serving
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob

from engine_fixtures import tiny_engine, tiny_model, tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.config import EngineConfig, HTTPConfig, SamplingDefaults
from gnomon.engine.engine import Engine, load
from gnomon.engine.settings import Settings
from gnomon.serve.app import create_app
from solo import GAP_BOUNDS, solo, ties_until_equal

ASK: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
TEXT = "<|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def live() -> Iterator[Live[Engine]]:
    tokenizer, http = tiny_tokenizer(), HTTPConfig(preparation_queue=1000)
    with tiny_engine("llama", EngineConfig(batch=8, queue=1000, prefill_chunk=16)) as engine:
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults())
        with serving(app, engine, http) as made:
            yield made


@pytest.fixture
def client(live: Live[Engine]) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_greedy_tokens_are_mlx_lm_s(client: OpenAI) -> None:
    ids = tiny_tokenizer().encode(TEXT)
    expected = solo(tiny_model("llama"), ids, 24)
    answer = client.chat.completions.create(
        model="", messages=ASK, temperature=0, max_tokens=24, logprobs=True, extra_body={"ignore_eos": True}
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    got = [one.model_extra["id"] for one in told.content if one.model_extra]
    assert len(got) == 24
    assert ties_until_equal(got, expected, GAP_BOUNDS["float32"]) == 0
    for one, scores in zip(told.content, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(scores.max()), abs=1e-4)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 24)
    assert answer.choices[0].finish_reason == "length"


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(live: Live[Engine], client: OpenAI) -> None:
    def ask(seed: int, **more: Any) -> dict[str, Any]:
        return {"model": "", "messages": ASK, "temperature": 0.9, "seed": seed, "max_tokens": 16, **more}

    alone = [client.chat.completions.create(**ask(seed)).choices[0].message.content for seed in range(4)]
    assert len(set(alone)) == 4

    async def crowd() -> list[str]:
        async with AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as many:

            async def one(seed: int) -> str:
                stream = await many.chat.completions.create(**ask(seed, stream=True))
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(seed % 4) for seed in range(16)))

    assert asyncio.run(crowd()) == alone * 4


def test_logprobs_are_told_in_a_crowd_as_alone(live: Live[Engine], client: OpenAI) -> None:
    def ask(seed: int) -> dict[str, Any]:
        return {
            **{"model": "", "messages": ASK, "temperature": 0.8, "seed": seed, "max_tokens": 12},
            **{"logprobs": True, "top_logprobs": 1 + seed},
        }

    def told(answer: ChatCompletion) -> list[ChatCompletionTokenLogprob]:
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        return logprobs.content or []

    alone = [told(client.chat.completions.create(**ask(seed))) for seed in range(6)]

    async def crowd() -> list[ChatCompletion]:
        async with AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(many.chat.completions.create(**ask(seed)) for seed in range(6)))

    for seed, (own, answer) in enumerate(zip(alone, asyncio.run(crowd()), strict=True)):
        shared = told(answer)
        assert [one.token for one in shared] == [one.token for one in own]
        for mine, theirs in zip(own, shared, strict=True):
            assert len(theirs.top_logprobs) == 1 + seed
            assert theirs.logprob == pytest.approx(mine.logprob, abs=1e-3)
            assert theirs.top_logprobs[0].logprob >= theirs.logprob - 1e-6


def test_choices_differ_and_are_counted_together(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="", messages=ASK, n=3, seed=5, temperature=1, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tiny_tokenizer().encode(TEXT))
    assert answer.usage.completion_tokens == 36


def test_no_part_of_a_stop_string_is_streamed(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "", "messages": ASK, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    assert whole is not None
    assert len(whole) > 8
    for start in range(2, len(whole) - 4, 3):
        stop = whole[start : start + 3]
        expected = whole[: whole.index(stop)]
        received, finish = "", None
        for chunk in client.chat.completions.create(**fields, stop=[stop, "not there"], stream=True):
            received += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
            assert expected.startswith(received)
        assert (received, finish) == (expected, "stop")


def test_a_prompt_beyond_the_context(client: OpenAI, live: Live[Engine]) -> None:
    answer = httpx.post(live.url + "/v1/completions", json={"prompt": [5] * 2048, "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "2048" in error["message"]


def test_the_crowd_leaves_nothing_behind(live: Live[Engine]) -> None:
    """Two hundred requests through eight rows; many are left in the queue, in prefill or in decode."""
    engine = live.engine

    def held() -> tuple[Any, ...]:
        stats = engine.stats()
        batch, services = stats["batch"], live.app.state.services
        return (
            stats["engine"]["open_requests"],
            batch["active_rows"],
            batch["pending_rows"],
            batch["kv_bytes"],
            services.metrics.open,
            services.preparation.running + services.preparation.waiting,
        )

    eventually(lambda: held() == (0,) * 6)
    before, cached = mx.get_active_memory(), engine.stats()["prompt_cache"]["bytes"]
    chance = random.Random(7)

    async def one(client: httpx.AsyncClient, stream: bool, lines: float, seconds: float | None) -> str:
        """The last line read, of a client that leaves after so many lines or so many seconds."""
        body = {"prompt": [7] * chance.randrange(1, 120), "max_tokens": 24, "stream": stream, "ignore_eos": True}
        last = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    last, lines = line or last, lines - bool(line)
                    if lines <= 0:
                        break
        return last

    async def crowd() -> list[str]:
        async with httpx.AsyncClient(
            base_url=live.url, timeout=500, limits=httpx.Limits(max_connections=200)
        ) as client:
            return await asyncio.gather(*(one(client, *plan) for plan in plans))

    stay, after_lines, after_seconds = (
        [(index % 2 == 0, math.inf, None) for index in range(80)],
        [(True, chance.randrange(1, 6), None) for _ in range(60)],
        [(index % 2 == 0, math.inf, chance.uniform(0.2, 4)) for index in range(60)],
    )
    plans = [*stay, *after_lines, *after_seconds]
    ended = asyncio.run(crowd())
    assert all(last == "data: [DONE]" or last.endswith("}") for last in ended[: len(stay)])
    eventually(lambda: held() == (0,) * 6)
    counts = live.app.state.services.metrics.counts
    assert counts["cancelled"] > 0
    assert counts["failed"] == 0
    # What is kept for later prompts is held on purpose.
    kept = engine.stats()["prompt_cache"]["bytes"] - cached
    eventually(lambda: mx.get_active_memory() <= before + 4096 + 1.01 * kept)
    assert httpx.get(live.url + "/health").content == b'{"status": "ok"}'


@pytest.mark.network
def test_the_starter_knows_the_capital_of_france(starter_path: Path) -> None:
    from gnomon.chat.tokenizer import Tokenizer

    tokenizer, http = Tokenizer.load(starter_path), HTTPConfig()
    engine = load(starter_path, Settings(model_id="starter"))
    app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults())
    with serving(app, engine, http) as live, OpenAI(base_url=live.url + "/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="starter",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The capital of France is Paris."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 37
