"""What breaks in the real engine, as clients of the server see it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
from mlx import nn

import tiny_models
from engine_fixtures import tiny_engine, tiny_loaded, tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.config import HTTPConfig, SamplingDefaults
from gnomon.engine.engine import Engine
from gnomon.serve.app import create_app

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from fake_engine import Live, eventually, parse_stream, serving

POISON = 300


@contextmanager
def served(breaks: Callable[[mx.array], bool]) -> Iterator[Live[Engine]]:
    """A server over a tiny model that raises on the inputs that `breaks` picks."""
    model = tiny_models.make("llama", num_hidden_layers=2)
    stock = type(model)

    def call(self: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if breaks(tokens):
            raise RuntimeError("injected")
        return stock.__call__(self, tokens, *args, **kwargs)

    model.__class__ = type(stock.__name__, (stock,), {"__call__": call})
    tokenizer, http = tiny_tokenizer(), HTTPConfig()
    with tiny_engine(load=lambda: tiny_loaded(model=model)) as engine:
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults())
        with serving(app, engine, http) as live:
            yield live


async def crowd(url: str, prompts: list[list[int]]) -> list[httpx.Response]:
    """Streams and whole answers by turns, all at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        bodies = [
            {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0, "stream": index % 2 == 0}
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))


def test_a_prompt_that_breaks_the_step_is_answered_with_an_error_and_harms_nobody() -> None:
    prompts = [[5, 6, 7 + index] for index in range(6)]
    prompts[2][-1] = prompts[3][-1] = POISON
    with served(lambda tokens: bool((tokens == POISON).any().item())) as live:
        answers = asyncio.run(crowd(live.url, prompts))
        for index, answer in enumerate(answers):
            if index == 2:
                assert answer.status_code == 200
                assert "injected" in parse_stream(answer.text)[-1]
            elif index == 3:
                assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
                assert "injected" in answer.json()["error"]["message"]
            elif index % 2 == 0:
                assert parse_stream(answer.text)[-1] == "[DONE]"
            else:
                assert answer.json()["usage"]["completion_tokens"] == 20
        assert httpx.get(live.url + "/health").content == b'{"status": "ok"}'
        assert live.app.state.services.metrics.counts == {"completed": 4, "failed": 2, "cancelled": 0}


def test_when_the_device_is_gone_everyone_is_told_and_the_server_ends() -> None:
    gone = False
    with served(lambda _: gone) as live:
        assert asyncio.run(crowd(live.url, [[5, 6]]))[0].status_code == 200
        gone = True
        stream, whole = asyncio.run(crowd(live.url, [[5, 6], [7, 8]]))
        assert '"error"' in parse_stream(stream.text)[-1] if stream.status_code == 200 else stream.status_code == 503
        assert whole.status_code == 503
        eventually(lambda: live.engine.health().state == "failed")
        eventually(lambda: live.server.exit_code == 1)
