"""Structured output through the official client, the server and the real engine, parsed into the client's own types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import jsonschema
import openai
import pytest
from fake_engine import Live, serving
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

import tiny_models
from engine_fixtures import tiny_engine, tiny_tokenizer
from gnomon.chat.template import ChatTemplate
from gnomon.config import EngineConfig, HTTPConfig, SamplingDefaults
from gnomon.engine.engine import Engine
from gnomon.serve.app import create_app

ASK: list[Any] = [{"role": "user", "content": "the cat"}]


class Leg(BaseModel):
    side: Literal["left", "right"]
    length: int = Field(ge=0, le=99)


class Cat(BaseModel):
    name: str = Field(max_length=8)
    grey: bool | None
    legs: list[Leg] = Field(max_length=2)


def live_engine(config: EngineConfig) -> Iterator[Live[Engine]]:
    tokenizer, http = tiny_tokenizer(), HTTPConfig()
    with tiny_engine("llama", config) as engine:
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults(temperature=1.0))
        with serving(app, engine, http) as made:
            yield made


TEMPLATE = tiny_models.CHAT_TEMPLATE + "{% if tools %}{# <tool_call> #}{% endif %}"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"speed": {"$ref": "#/$defs/speed"}, "why": {"type": "string", "maxLength": 9}},
                "required": ["speed"],
                "additionalProperties": False,
                "$defs": {"speed": {"enum": speeds}},
            },
        },
    }
    for name, speeds in (("run", [1, 2]), ("hide", ["now", None]))
]


@pytest.fixture(scope="module")
def calling() -> Iterator[Live[Engine]]:
    """A model whose template knows tool calls in JSON."""
    inner, http = tiny_tokenizer(), HTTPConfig()
    speaking: Any = SimpleNamespace(
        chat_templates={"default": TEMPLATE},
        special_tokens=inner.special_tokens,
        encode=inner.encode,
        token_id=inner.token_id,
    )
    with tiny_engine("llama") as engine:
        app = create_app(engine, inner, ChatTemplate(speaking), http, SamplingDefaults(temperature=1.0))
        with serving(app, engine, http) as made:
            yield made


@pytest.fixture(scope="module")
def live() -> Iterator[Live[Engine]]:
    yield from live_engine(EngineConfig())


@pytest.fixture(scope="module")
def ungrammatical() -> Iterator[Live[Engine]]:
    yield from live_engine(EngineConfig(grammar=False))


def test_answers_parse_into_types_in_a_crowd(live: Live[Engine]) -> None:
    async def crowd() -> list[Cat]:
        async with AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int) -> Cat:
                made = await client.chat.completions.parse(
                    model="", messages=ASK, response_format=Cat, seed=seed, max_tokens=300
                )
                assert made.choices[0].finish_reason == "stop"
                assert made.choices[0].message.parsed is not None
                return made.choices[0].message.parsed

            return await asyncio.gather(*(one(seed) for seed in range(8)))

    assert len({cat.model_dump_json() for cat in asyncio.run(crowd())}) > 1


def test_a_stream_is_the_same_answer(live: Live[Engine]) -> None:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "", "messages": ASK, "seed": 3, "max_tokens": 300}
        whole = client.chat.completions.parse(**ask, response_format=Cat)
        with client.chat.completions.stream(**ask, response_format=Cat) as stream:
            streamed = stream.get_final_completion()
        assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed is not None
        text = client.completions.create(
            model="", prompt="the", max_tokens=50, extra_body={"guided_choice": ["yes", "no"]}
        )
        assert text.choices[0].text in ("yes", "no")


def test_refusals_say_where(live: Live[Engine]) -> None:
    with OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        for schema, strict, param, part in (
            ({"type": "object", "properties": {"a": {"type": "it"}}}, False, ".schema.properties.a.type", "'it'"),
            ({"type": "array", "uniqueItems": True}, True, ".schema", "uniqueItems"),
        ):
            form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="", messages=ASK, response_format=form)
            assert caught.value.param == "response_format.json_schema" + param
            assert part in caught.value.message
        with pytest.raises(openai.BadRequestError, match="unclosed group"):
            client.chat.completions.create(model="", messages=ASK, extra_body={"guided_regex": "(a"})


def test_switched_off_it_is_only_asked_for(ungrammatical: Live[Engine]) -> None:
    with OpenAI(base_url=ungrammatical.url + "/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="", messages=ASK, max_tokens=8, response_format={"type": "json_object"}
        )
        assert "grammar not enforced" in raw.headers["warning"]
        made = raw.parse()
        told = made.usage
        plain = client.chat.completions.create(model="", messages=ASK, max_tokens=8).usage
        assert told is not None
        assert plain is not None
        assert told.prompt_tokens > plain.prompt_tokens
        strict: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}}
        with pytest.raises(openai.BadRequestError, match="strict"):
            client.chat.completions.create(model="", messages=ASK, response_format=strict)
        assert made.choices[0].finish_reason in ("length", "stop")


def test_tool_choice_is_enforced(calling: Live[Engine]) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    with OpenAI(base_url=calling.url + "/v1", api_key="none", max_retries=0) as client:
        for choice, names in (
            ("required", {"run", "hide"}),
            ({"type": "function", "function": {"name": "hide"}}, {"hide"}),
        ):
            seen: set[str] = set()
            for seed in range(6):
                ask: dict[str, Any] = {"model": "", "messages": ASK, "seed": seed, "max_tokens": 400, "tools": TOOLS}
                ask |= {"tool_choice": choice, "parallel_tool_calls": False}
                made = client.chat.completions.create(**ask).choices[0]
                assert made.finish_reason == "tool_calls"
                assert made.message.tool_calls is not None
                assert not made.message.content
                (call,) = made.message.tool_calls
                assert call.type == "function"
                jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
                seen.add(call.function.name)
            assert seen == names
        with client.chat.completions.stream(**ask) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed is not None
        assert streamed[0].function.arguments == call.function.arguments
        with pytest.raises(openai.BadRequestError, match="'jump'"):
            client.chat.completions.create(**{**ask, "tool_choice": {"type": "function", "function": {"name": "jump"}}})
        with pytest.raises(openai.BadRequestError, match="the tools are: none"):
            client.chat.completions.create(**{**ask, "tool_choice": "required", "tools": []})
        unsound = [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**ask, "tool_choice": "required", "tools": unsound})
        assert caught.value.param == "tools[0].function.parameters.type"


def test_strict_tools_when_the_model_chooses(calling: Live[Engine]) -> None:
    """Prose and calls as the model likes; a call it makes is valid, and with a form of the answer there is nothing else."""
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}, "strict": True}}
    kinds: set[str] = set()
    with OpenAI(base_url=calling.url + "/v1", api_key="none", max_retries=0) as client:
        for seed in range(8):
            ask: dict[str, Any] = {"model": "", "messages": ASK, "seed": seed, "max_tokens": 400, "tools": strict}
            made = client.chat.completions.create(**ask, response_format=form).choices[0]
            kinds.add(made.finish_reason)
            for call in made.message.tool_calls or ():
                assert call.type == "function"
                jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
            if made.finish_reason == "stop":
                assert made.message.content in ("1", "2")
        assert kinds >= {"stop", "tool_calls"}
        made = client.chat.completions.create(**{**ask, "max_tokens": 50}).choices[0]
        assert made.message.content
