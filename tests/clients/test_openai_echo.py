"""Prompt log-probabilities by the official client, over the real engine: the numbers are those of mlx-lm's own model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fake_engine import Live, eventually, serving
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from openai import OpenAI

from engine_fixtures import tiny_engine, tiny_model, tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.config import EngineConfig, HTTPConfig, SamplingDefaults
from gnomon.engine import scoring
from gnomon.engine.api import EngineUnavailable, InvalidRequest
from gnomon.engine.engine import Engine
from gnomon.serve.app import create_app

TEXT = "there is nothing in here that is not there already, said the captain to his sailors"
CHUNK = 16


@pytest.fixture(scope="module")
def live() -> Iterator[Live[Engine]]:
    tokenizer, http = tiny_tokenizer(), HTTPConfig()
    with tiny_engine("llama", EngineConfig(prefill_chunk=CHUNK)) as engine:
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults())
        with serving(app, engine, http) as made:
            yield made


@pytest.fixture
def client(live: Live[Engine]) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def expected(model_type: str, ids: list[int], chunk: int = CHUNK) -> np.ndarray:
    """Log-softmax (len(ids) - 1, vocabulary) as mlx_lm.evaluate computes it, in windows of `chunk`."""
    model: Any = tiny_model(model_type)
    cache = make_prompt_cache(model)
    inputs = mx.array([ids[:-1]])
    parts = [
        nn.log_softmax(model(inputs[:, start : start + chunk], cache=cache).astype(mx.float32))[0]
        for start in range(0, len(ids) - 1, chunk)
    ]
    return np.array(mx.concatenate(parts))


def test_scores_are_mlx_lm_s(client: OpenAI) -> None:
    ids = tiny_tokenizer().encode(TEXT)
    rows = expected("llama", ids)
    made = client.completions.create(model="", prompt=ids, echo=True, logprobs=3, max_tokens=1, temperature=0)
    choice = made.choices[0]
    assert choice.logprobs is not None
    scores, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert scores is not None
    assert tops is not None
    assert scores[0] is None
    assert len(scores) == len(ids) + 1
    assert scores[1:-1] == [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]
    assert [max(top.values()) for top in tops[1:-1]] == rows.max(axis=1).tolist()
    assert choice.text.startswith(TEXT)
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(ids), 1)
    # The token generated is scored as what follows the prompt.
    assert scores[-1] == pytest.approx(float(expected("llama", [*ids, 0])[-1].max()), abs=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3", "mamba2"])
def test_every_kind_of_state_is_carried_from_window_to_window(model_type: str) -> None:
    prompts = [tuple(tiny_tokenizer().encode(TEXT)), (5,), (5, 6)]
    with tiny_engine(model_type, EngineConfig(prefill_chunk=CHUNK)) as engine:
        made = engine.score(prompts, 0).result(300)
    assert [len(scores) for scores in made] == [len(prompt) - 1 for prompt in prompts]
    for prompt, scores in zip(prompts, made, strict=True):
        if scores:
            rows = expected(model_type, list(prompt))
            assert [one.id for one in scores] == list(prompt[1:])
            assert [one.logprob for one in scores] == [float(r[t]) for r, t in zip(rows, prompt[1:], strict=True)]


def test_windows_are_as_narrow_as_a_vocabulary_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tuple(tiny_tokenizer().encode(TEXT))
    with tiny_engine("llama") as engine:
        monkeypatch.setattr(scoring, "LOGIT_BYTES", 4 * engine.model.vocab_size * 7)
        (scores,) = engine.score([ids], 0).result(300)
    rows = expected("llama", list(ids), 7)
    assert [one.logprob for one in scores] == [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]


def test_answers_go_on_meanwhile(client: OpenAI) -> None:
    def answer() -> str:
        made = client.completions.create(model="", prompt="the cat", max_tokens=24, temperature=0, seed=1)
        return made.choices[0].text

    alone, found = answer(), []
    thread = threading.Thread(target=lambda: found.append(answer()))
    thread.start()
    for _ in range(3):
        client.completions.create(model="", prompt=[TEXT] * 3, echo=True, logprobs=1, max_tokens=0)
    thread.join()
    assert found == [alone]


def test_what_cannot_be_scored_is_refused_and_who_leaves_is_not_waited_for() -> None:
    with tiny_engine("llama", EngineConfig(prefill_chunk=CHUNK)) as engine:
        with pytest.raises(InvalidRequest, match=r"prompt\[1\]"):
            engine.score([(5,), (5,) * 3000], 0)
        first = engine.score([(5,) * 1000] * 1000, 0)  # minutes of work
        second = engine.score([(5, 6)], 0)
        assert first.cancel()
        assert len(second.result(300)[0]) == 1
        assert engine.drain(60)
        with pytest.raises(EngineUnavailable):
            engine.score([(1, 2)], 0)
    with tiny_engine("llama", EngineConfig(prefill_chunk=1)) as engine:
        left = engine.score([(5,) * 2000] * 50, 0)
        engine.stop()
        with pytest.raises(EngineUnavailable, match="stopped"):
            left.result(300)
        eventually(lambda: engine.health().state == "stopped")


def test_a_failure_is_its_job_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_engine("llama") as engine:
        monkeypatch.setattr(scoring, "token_logprob", lambda *_: 1 / 0)
        with pytest.raises(Exception, match="scoring failed: division by zero"):
            engine.score([(5, 6)], 0).result(300)
        monkeypatch.undo()
        assert len(engine.score([(5, 6)], 0).result(300)[0]) == 1
