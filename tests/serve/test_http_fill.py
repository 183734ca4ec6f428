"""What the routes tell of foretold text, and what they give the engine to assert."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from engine_fixtures import tiny_loaded, tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.config import ConfigError, HTTPConfig, SamplingDefaults, SpeculationConfig, resolve
from gnomon.engine.engine import Engine
from gnomon.engine.settings import Settings
from gnomon.serve.app import create_app

TOKENIZER = tiny_tokenizer()
QWEN = (Path(__file__).parents[1] / "chat" / "templates" / "qwen3.jinja").read_text("utf-8")
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 5}, "married": {"type": "boolean"}},
    "required": ["first_name", "married"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA | {"required": []}}}
FIRST, SECOND = TOKENIZER.encode("<to")


class Templated:
    """The tiny tokenizer with a template that writes calls."""

    chat_templates = {"default": QWEN}  # noqa: RUF012
    special_tokens = {"eos_token": "<|im_end|>"}  # noqa: RUF012

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return TOKENIZER.encode(text)

    def token_id(self, piece: str) -> int | None:
        return TOKENIZER.token_id(piece)


def client_of(fill: SpeculationConfig) -> Iterator[TestClient]:
    engine = Engine(tiny_loaded, TOKENIZER, Settings(model_id="tiny", speculation=fill))
    try:
        engine.wait(300)
        template = ChatTemplate(Templated())
        app = create_app(
            engine, TOKENIZER, template, HTTPConfig(allowed_hosts=("testserver",)), SamplingDefaults(temperature=0.0)
        )
        with TestClient(app) as client:
            yield client
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def strict() -> Iterator[TestClient]:
    yield from client_of(SpeculationConfig(fill="strict", num_draft_tokens=16))


def answer(client: TestClient, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 60, **more}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


CALLING = {
    "tools": [TOOL],
    "chat_template_kwargs": {"enable_thinking": False},
    "logit_bias": {str(FIRST): 60, str(SECOND): 50},
    # The opener's second piece comes once the first was the last token.
    "repetition_penalty": 1.5,
    "repetition_context_size": 1,
}


def test_usage_tells_what_a_grammar_foretold(strict: TestClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    made = answer(strict, response_format=form, max_tokens=200, chat_template_kwargs={"enable_thinking": False})
    fill, speculation = made["usage"]["fill"], made["usage"]["speculation"]
    assert set(json.loads(made["choices"][0]["message"]["content"])) == {"first_name", "married"}
    assert fill["grammar"] == fill["injected"] == fill["verifyAccepted"] == speculation["accepted"] > 0
    assert fill["verifyRejected"] == speculation["rejected"]
    assert (fill["strict"], fill["echo"], fill["spanLens"], fill["wastedSamples"]) == (0, 0, [], 0)
    told = strict.get("/stats").json()["speculation"]
    assert told["sources"] == ["strict", "grammar"]
    assert any(name.startswith("grammar") for name in told["acceptance"])


def test_settled_text_is_asserted_for_offered_tools_only(strict: TestClient) -> None:
    fill = answer(strict, **CALLING)["usage"]["fill"]
    assert fill["strict"] == sum(fill["spanLens"]) == fill["wastedSamples"] > 5
    # Without tools, or with log-probabilities, there is nothing to assert.
    bare = {name: value for name, value in CALLING.items() if name != "tools"}
    assert "fill" not in answer(strict, **bare)["usage"]
    assert "fill" not in answer(strict, **CALLING, logprobs=True)["usage"]


def test_nothing_is_asserted_unless_asked_for() -> None:
    for client in client_of(SpeculationConfig()):
        assert "fill" not in answer(client, **CALLING)["usage"]
        assert client.get("/stats").json()["speculation"]["sources"] == ["grammar"]


def test_asserting_excludes_drafting() -> None:
    with pytest.raises(ConfigError, match=r"GNOMON_FILL.*excludes --draft-model"):
        resolve(None, {"GNOMON_FILL": "strict", "GNOMON_DRAFT_MODEL": "other"})
    assert resolve(None, {"GNOMON_FILL": "echo", "GNOMON_DRAFT_MODEL": "other"}).speculation.echo
