"""Embeddings by the official client, over the real engine: the numbers are those of mlx-lm's own model."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest
from fake_engine import FakeEngine, Live, eventually, make_app, serving
from openai import OpenAI
from starlette.testclient import TestClient

from engine_fixtures import tiny_engine, tiny_model, tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.cli.main import main
from gnomon.config import EngineConfig, HTTPConfig, SamplingDefaults
from gnomon.engine.api import EngineUnavailable, InvalidRequest
from gnomon.engine.engine import Engine
from gnomon.serve.app import create_app
from tiny_models import save

TEXTS = [
    "the cat sat on the mat",
    "there is nothing in here that is not there already, said the captain to his sailors",
    "é",
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live[Engine]]:
    tokenizer, http = tiny_tokenizer(), HTTPConfig()
    with tiny_engine("qwen3", EngineConfig(prefill_chunk=16)) as engine:
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults())
        with serving(app, engine, http) as made:
            yield made


@pytest.fixture
def client(live: Live[Engine]) -> Iterator[OpenAI]:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def expected(text: str) -> np.ndarray:
    """The last hidden state of mlx-lm's model, without a cache, with length 1."""
    ids = [*tiny_tokenizer().encode(text), tiny_tokenizer().token_id("<|endoftext|>")]
    model: Any = tiny_model("qwen3")
    last = np.array(model.model(mx.array([ids]))[0, -1])
    return last / np.linalg.norm(last)


def test_vectors_are_mlx_lm_s(client: OpenAI) -> None:
    made = client.embeddings.create(model="", input=TEXTS)
    assert [one.index for one in made.data] == [0, 1, 2]
    for text, one in zip(TEXTS, made.data, strict=True):
        np.testing.assert_allclose(one.embedding, expected(text), atol=2e-6)
    assert made.usage.prompt_tokens == sum(len(tiny_tokenizer().encode(text)) + 1 for text in TEXTS)
    # The client asks for base64 of its own accord; numbers are the same, and so is a text alone, or as ids.
    alone = client.embeddings.create(model="", input=TEXTS[1], encoding_format="float")
    assert alone.data[0].embedding == made.data[1].embedding
    ids = client.embeddings.create(model="", input=tiny_tokenizer().encode(TEXTS[1]))
    assert ids.data[0].embedding == made.data[1].embedding
    cut = client.embeddings.create(model="", input=TEXTS[0], dimensions=8)
    head = expected(TEXTS[0])[:8]
    np.testing.assert_allclose(cut.data[0].embedding, head / np.linalg.norm(head), atol=2e-6)
    told = client.embeddings.create(model="", input="a cat", extra_body={"instruction": "find it"})
    np.testing.assert_allclose(told.data[0].embedding, expected("Instruct: find it\nQuery:a cat"), atol=2e-6)


def test_answers_go_on_meanwhile(client: OpenAI) -> None:
    alone = client.completions.create(model="", prompt="the cat", max_tokens=24, temperature=0, seed=1).choices[0].text
    found: list[str] = []

    def answer() -> None:
        found.append(
            client.completions.create(model="", prompt="the cat", max_tokens=24, temperature=0, seed=1).choices[0].text
        )

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(3):
        client.embeddings.create(model="", input=TEXTS * 3)
    thread.join()
    assert found == [alone]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [["a"]]}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [1, 100_000]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a " * 3000}, "input[0]"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({}, "input"),
    ],
)
def test_what_makes_no_sense_is_refused(live: Live[Engine], fields: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{live.url}/v1/embeddings", json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_other_models_give_none() -> None:
    with tiny_engine("llama") as engine, pytest.raises(InvalidRequest, match=r"tiny-llama .*gives no embeddings"):
        engine.embed([(1,)])


def test_whoever_leaves_is_not_waited_for_and_the_end_is_told() -> None:
    with tiny_engine("qwen3", EngineConfig(prefill_chunk=16)) as engine:
        first = engine.embed([(5,) * 1000] * 1000)  # minutes of work
        second = engine.embed([(5, 6)])
        assert first.cancel()
        assert len(second.result(300)) == 1
        assert engine.drain(60)
        with pytest.raises(EngineUnavailable):
            engine.embed([(1,)])
    with tiny_engine("qwen3", EngineConfig(prefill_chunk=1)) as engine:
        left = engine.embed([(5,) * 2000] * 50)
        engine.stop()
        with pytest.raises(EngineUnavailable, match="stopped"):
            left.result(300)
        eventually(lambda: engine.health().state == "stopped")


def test_the_wire_form() -> None:
    with TestClient(make_app(FakeEngine()), base_url="http://localhost") as client:
        made = client.post("/v1/embeddings", json={"input": "abc", "encoding_format": "base64"}).json()
    assert made["object"] == "list"
    assert made["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    (one,) = made["data"]
    assert {**one, "embedding": None} == {"object": "embedding", "index": 0, "embedding": None}
    assert np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() == pytest.approx([0.6, 0.8, 3.0])


def test_the_verb(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    save("qwen3", tmp_path / "m")
    assert main(["embed", "--model", str(tmp_path / "m"), "--text", "the cat", "--text", "a", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["text"], second["text"]) == ("the cat", "a")
    assert np.linalg.norm(first["embedding"]) == pytest.approx(1, abs=1e-5)
    save("llama", tmp_path / "l")
    assert main(["embed", "--model", str(tmp_path / "l"), "--text", "the cat"]) == 1
    assert "gives no embeddings" in capsys.readouterr().err


def test_refusals_have_the_client_s_type(live: Live[Engine], client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input"):
        client.embeddings.create(model="", input="")
