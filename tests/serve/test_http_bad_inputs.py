"""What is refused, with which status and message: every message names the field, the value and the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import ByteTokenizer, FakeEngine, full, make_app, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from gnomon.engine.api import EngineUnavailable, InvalidRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
STRICT_TOOL = {**TOOL, "function": {**TOOL["function"], "strict": True}}


def image(kind: str = "image_url") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:,"}}]}]


SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "temperature must be at least 0, got -0.1"),
    ({"temperature": 5.1}, "temperature", "temperature must be at most 5, got 5.1"),
    ({"temperature": "hot"}, "temperature", 'temperature must be of type float, got "hot"'),
    ({"temperature": True}, "temperature", "temperature must be of type float, got true"),
    ({"top_p": 1.5}, "top_p", "top_p must be at most 1, got 1.5"),
    ({"top_p": -1}, "top_p", "top_p must be at least 0, got -1"),
    ({"top_k": -1}, "top_k", "top_k must be at least 0, got -1"),
    ({"top_k": 2.0}, "top_k", "top_k must be of type int, got 2.0"),
    ({"top_k": 1_000_001}, "top_k", "top_k must be at most 1000000, got 1000001"),
    ({"min_p": 2}, "min_p", "min_p must be at most 1, got 2"),
    ({"xtc_probability": 1.1}, "xtc_probability", "xtc_probability must be at most 1, got 1.1"),
    ({"xtc_threshold": 0.6}, "xtc_threshold", "xtc_threshold must be at most 0.5, got 0.6"),
    ({"seed": 1.5}, "seed", "seed must be of type int, got 1.5"),
    ({"seed": 2**64}, "seed", "seed must be at most 18446744073709551615, got 18446744073709551616"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 10**30}, "max_tokens", f"max_tokens must be at most 10000000, got {10**30}"),
    ({"max_tokens": "5"}, "max_tokens", 'max_tokens must be of type int, got "5"'),
    ({"n": 0}, "n", "n must be at least 1, got 0"),
    ({"n": 9}, "n", "n must be at most 8, got 9"),
    ({"stream": "yes"}, "stream", 'stream must be of type bool, got "yes"'),
    ({"stream_options": []}, "stream_options", "stream_options must be of type object, got []"),
    (
        {"stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "stream_options.include_usage must be of type bool, got 1",
    ),
    ({"stop": 5}, "stop", "stop must be a str or a list of str, got 5"),
    ({"stop": ["a", 5]}, "stop", 'stop must be a str or a list of str, got ["a", 5]'),
    ({"stop": ""}, "stop", "stop must not hold an empty string"),
    ({"stop": ["x"] * 33}, "stop", "stop must have at most 32 strings, got 33"),
    ({"stop": "x" * 1025}, "stop", "stop strings must have at most 1024 characters, got one of 1025"),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias must be a dict of int to float, got [1]"),
    ({"logit_bias": {"a": 1}}, "logit_bias", 'logit_bias must be a dict of int to float, got {"a": 1}'),
    ({"logit_bias": {"1": "x"}}, "logit_bias", 'logit_bias must be a dict of int to float, got {"1": "x"}'),
    ({"logit_bias": {"1": True}}, "logit_bias", 'logit_bias must be a dict of int to float, got {"1": true}'),
    ({"logit_bias": {"-1": 1}}, "logit_bias", 'logit_bias must be a dict of int to float, got {"-1": 1}'),
    ({"logit_bias": {"257": 1}}, "logit_bias", "logit_bias: token id 257 must be at most 256"),
    ({"repetition_penalty": -1}, "repetition_penalty", "repetition_penalty must be at least 0, got -1"),
    ({"repetition_context_size": -1}, "repetition_context_size", "repetition_context_size must be at least 0, got -1"),
    ({"presence_penalty": "x"}, "presence_penalty", 'presence_penalty must be of type float, got "x"'),
    ({"frequency_context_size": 0.5}, "frequency_context_size", "frequency_context_size must be of type int, got 0.5"),
    ({"top_logprobs": "x"}, "top_logprobs", 'top_logprobs must be of type int, got "x"'),
    ({"top_logprobs": -2}, "top_logprobs", "top_logprobs must be at least 0, got -2"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20, got 21"),
    ({"hlg": {"width": 101}}, "hlg.width", "hlg.width must be at most 100, got 101"),
    ({"hlg": {"pivot": "side"}}, "hlg.pivot", "hlg.pivot must be one of 'top', 'entropy' or 'median', got \"side\""),
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        'response_format must be an object with type "text", "json_object", "json_schema", got {"type": "xml"}',
    ),
    ({"adapter": "lora"}, "adapter", 'adapter "lora" is not mounted'),
]

MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "messages is required"),
    ({"messages": "Hi"}, "messages", 'messages must be of type list, got "Hi"'),
    ({"messages": []}, "messages", "messages must not be empty"),
    ({"messages": ["Hi"]}, "messages[0]", 'messages[0] must be of type object, got "Hi"'),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "messages[0].role is required"),
    (
        {"messages": [{"role": "robot", "content": "Hi"}]},
        "messages[0].role",
        "messages[0].role must be one of 'system', 'developer', 'user', 'assistant' or 'tool', got \"robot\"",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is required of a user message"),
    (
        {"messages": [*HI, {"role": "user", "content": 5}]},
        "messages[1].content",
        "messages[1].content must be a str or a list of parts, got 5",
    ),
    (
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        "messages[0].content[0]",
        'messages[0].content[0] must be an object with a type, got {"text": "x"}',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
        "messages[0].content[0].text must be of type str, got 5",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        "messages[0].content[0].type",
        'messages[0].content[0].type must be one of text, input_text, output_text, refusal, got "smell"',
    ),
    (
        {"messages": image()},
        "messages[0].content[1]",
        "messages[0].content[1] is of type image_url, but the model tests/fake-model takes no image input",
    ),
    (
        {"messages": image("input_audio")},
        "messages[0].content[1]",
        "messages[0].content[1] is of type input_audio, but the model tests/fake-model takes no audio input",
    ),
    (
        {"messages": image("video_url")},
        "messages[0].content[1]",
        "messages[0].content[1] is of type video_url, but the model tests/fake-model takes no video input",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[0].tool_calls",
        "messages[0].tool_calls belong to assistant messages, not user",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
        "messages[0].tool_calls[0].function.name is required",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
        "messages[0].function_call is not supported: use tool_calls",
    ),
    ({"messages": HI, "logprobs": 1}, "logprobs", "logprobs must be of type bool, got 1"),
    (
        {"messages": HI, "tools": [STRICT_TOOL], "tool_choice": "required"},
        "tool_choice",
        "a tool is strict, but this model's notation of calls is not known",
    ),
    (
        {"messages": HI, "tools": [STRICT_TOOL]},
        "tools",
        "a tool is strict, but this model's notation of calls is not known",
    ),
    (
        {"messages": HI, "tool_choice": "maybe"},
        "tool_choice",
        'tool_choice must be "none", "auto", "required" or a function, got "maybe"',
    ),
    (
        {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
        "tool_choice",
        'tool_choice {"type": "allowed_tools"} can\'t be enforced; use "auto", "required", "none" or a function',
    ),
    (
        {"messages": HI, "tools": [{"type": "custom"}]},
        "tools[0].type",
        "tools[0].type must be one of 'function', got \"custom\"",
    ),
    ({"messages": HI, "functions": []}, "functions", "functions is not supported: use tools"),
    ({"messages": HI, "modalities": ["audio"]}, "modalities", 'modalities must be ["text"], got ["audio"]'),
    ({"messages": HI, "web_search_options": {}}, "web_search_options", "web_search_options is not supported"),
    (
        {"messages": HI, "reasoning_effort": "huge"},
        "reasoning_effort",
        "reasoning_effort must be one of 'none', 'minimal', 'low', 'medium', 'high' or 'xhigh', got \"huge\"",
    ),
    (
        {"messages": HI, "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
        "chat_template_kwargs must not set messages",
    ),
    (
        {"messages": HI, "max_completion_tokens": 0},
        "max_completion_tokens",
        "max_completion_tokens must be at least 1, got 0",
    ),
]

PROMPTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is required"),
    ({"prompt": ""}, "prompt", "prompt must not be empty"),
    ({"prompt": []}, "prompt", "prompt must not be empty"),
    ({"prompt": [[]]}, "prompt", "prompt must not be empty"),
    ({"prompt": {"a": 1}}, "prompt", 'prompt must be a str, a list of str, or lists of token ids, got {"a": 1}'),
    ({"prompt": ["a", 1]}, "prompt", "prompt must be a str, a list of str, or lists of token ids, got 1 in it"),
    ({"prompt": [1, "a"]}, "prompt", 'prompt must hold token ids of type int, got "a"'),
    ({"prompt": [1, True]}, "prompt", "prompt must hold token ids of type int, got true"),
    ({"prompt": [257]}, "prompt", "prompt: token id 257 must be at least 0 and at most 256"),
    ({"prompt": [[1], [-1]]}, "prompt[1]", "prompt[1]: token id -1 must be at least 0 and at most 256"),
    ({"prompt": ["x"] * 65}, "prompt", "prompt must hold at most 64 prompts, got 65"),
    ({"prompt": "x", "logprobs": "x"}, "logprobs", 'logprobs must be of type int or bool, got "x"'),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "logprobs must be at most 20, got 21"),
    ({"prompt": "x", "logprobs": -1}, "logprobs", "logprobs must be at least 0, got -1"),
    *(
        (
            {"prompt": "x", "echo": True, **asked},
            "logprobs",
            "echo: a prompt's log-probabilities come in OpenAI's legacy shape only, for which logprobs is an integer",
        )
        for asked in ({"logprobs": True}, {"top_logprobs": 2})
    ),
    ({"prompt": "x", "echo": False, "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
    ({"prompt": "x", "suffix": "y"}, "suffix", 'suffix: infilling is not supported, got "y"'),
    ({"prompt": "x", "best_of": 3}, "best_of", "best_of must equal n (1): choices are not ranked, got 3"),
]

TABLE = [
    *((CHAT, {"messages": HI, **fields}, param, message) for fields, param, message in SAMPLING),
    *((COMPLETIONS, {"prompt": "x", **fields}, param, message) for fields, param, message in SAMPLING),
    *((CHAT, *row) for row in MESSAGES),
    *((COMPLETIONS, *row) for row in PROMPTS),
]


@pytest.fixture(scope="module")
def untouched() -> Iterator[tuple[TestClient, FakeEngine]]:
    """A client of an engine to which nothing gets through: many tests can share it."""
    engine = FakeEngine()
    with TestClient(make_app(engine), base_url="http://localhost") as made:
        yield made, engine


@pytest.mark.parametrize(("route", "body", "param", "message"), TABLE)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(
    untouched: tuple[TestClient, FakeEngine], route: str, body: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    client, engine = untouched
    # A stream must be refused with a status too, before it opens.
    response = client.post(route, json={"stream": stream, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["message"], error["param"]) == (message, param)
    assert error["type"] == "invalid_request_error"
    assert not engine.submitted


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"a": 1} trailing',
        b"[" * 100_000,
        b'{"a": ' * 100_000,
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_what_is_no_json_object(client: TestClient, route: str, body: bytes) -> None:
    response = client.post(route, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_numbers_that_overflow(client: TestClient) -> None:
    for number in ("1e999", "-1e999"):
        for field in ("temperature", "presence_penalty"):
            response = client.post(COMPLETIONS, content=f'{{"prompt": "x", "{field}": {number}}}')
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field
        response = client.post(COMPLETIONS, content=f'{{"prompt": "x", "logit_bias": {{"1": {number}}}}}')
        assert response.json()["error"]["param"] == "logit_bias"
    huge = "9" * 4000
    for field in ("temperature", "max_tokens", "seed", "n", "prompt"):
        response = client.post(COMPLETIONS, content=f'{{"prompt": "x", "{field}": {huge}}}')
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
    response = client.post(COMPLETIONS, content=f'{{"prompt": [{huge}]}}')
    assert response.json()["error"]["param"] == "prompt"
    response = client.post(COMPLETIONS, content=f'{{"prompt": "x", "logit_bias": {{"1": {huge}}}}}')
    assert response.json()["error"]["param"] == "logit_bias"


def test_messages_show_only_the_beginning_of_a_long_value(client: TestClient) -> None:
    message = client.post(COMPLETIONS, json={"prompt": "x", "top_k": "x" * 10_000}).json()["error"]["message"]
    assert message.startswith('top_k must be of type int, got "xxx')
    assert len(message) < 200


def test_switches_of_thinking_must_be_booleans(client: TestClient) -> None:
    for value in ("false", 0, []):
        response = client.post(CHAT, json=user("Hi", chat_template_kwargs={"enable_thinking": value}))
        assert response.status_code == 400
        assert "enable_thinking" in response.json()["error"]["message"]


def test_the_template_s_own_refusal(engine: FakeEngine) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with TestClient(make_app(engine, template=source), base_url="http://localhost") as client:
        response = client.post(CHAT, json=user("Hi", stream=True))
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "template_error"


def test_a_template_that_breaks_hurts_its_request_alone(engine: FakeEngine) -> None:
    source = "{% if messages[0].content == 'bad' %}{{ messages[0].content + 1 }}{% endif %}ok"
    with TestClient(make_app(engine, template=source), base_url="http://localhost") as client:
        assert client.post(CHAT, json=user("bad")).status_code == 400
        assert client.post(CHAT, json=user("good")).status_code == 200


def test_a_model_without_template(engine: FakeEngine) -> None:
    with TestClient(make_app(engine, template=None), base_url="http://localhost") as client:
        response = client.post(CHAT, json=user("Hi"))
        assert (response.status_code, response.json()["error"]["code"]) == (400, "no_chat_template")
        assert client.post(COMPLETIONS, json={"prompt": "Hi"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code", "headers"),
    [
        (full(), 429, "queue_full", {"retry-after": "3"}),
        (EngineUnavailable("the engine is draining"), 503, "engine_unavailable", {"retry-after": "5"}),
        (InvalidRequest("hlg.width must be above 0", "hlg.width", "bad_curve"), 400, "bad_curve", {}),
    ],
)
def test_the_engine_s_refusals_come_before_the_stream(
    client: TestClient,
    engine: FakeEngine,
    stream: bool,
    refusal: Exception,
    status: int,
    code: str,
    headers: dict[str, str],
) -> None:
    engine.refusal = refusal  # type: ignore[assignment]
    response = client.post(CHAT, json=user("Hi", stream=stream))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["message"]) == (status, code, str(refusal))
    assert error["param"] == getattr(refusal, "param", None)
    assert headers.items() <= dict(response.headers).items()


def test_the_engine_s_word_for_the_prompt_is_the_client_s(client: TestClient, engine: FakeEngine) -> None:
    engine.refusal = InvalidRequest("the prompt has 600 tokens", "prompt", "context_length_exceeded")
    for route, body, param in ((CHAT, user("Hi"), "messages"), (COMPLETIONS, {"prompt": "Hi"}, "prompt")):
        error = client.post(route, json=body).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_unknown_routes_and_methods(client: TestClient) -> None:
    response = client.get("/v2/nothing")
    assert (response.status_code, response.json()["error"]["message"]) == (404, "no such route: GET /v2/nothing")
    response = client.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert response.json()["error"]["message"].endswith("; allowed: POST")
    response = client.get("/v1/models/other/model")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("interval", "says"), [("61", "must be at most 60"), ("0", "must be at least 0.1"), ("x", "must be of type float")]
)
def test_parameters_of_the_query_have_the_error_body_too(client: TestClient, interval: str, says: str) -> None:
    response = client.get("/stats/stream", params={"interval": interval})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "interval")
    assert error["message"] == f'interval {says}, got "{interval}"'


def test_a_model_that_still_loads(client: TestClient, engine: FakeEngine) -> None:
    class Loading(FakeEngine):
        @property
        def model(self) -> Any:
            raise EngineUnavailable("the model is still loading")

        @model.setter
        def model(self, value: Any) -> None:
            return

    with TestClient(make_app(Loading()), base_url="http://localhost") as loading:
        for answer in (loading.get("/v1/models"), loading.get("/v1"), loading.post(CHAT, json=user("Hi"))):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert loading.get("/metrics").status_code == 200


def test_what_nobody_foresaw_is_an_internal_error(client: TestClient, engine: FakeEngine) -> None:
    def broken(request: object, sink: object) -> None:
        raise RuntimeError("secret detail")

    engine.submit = broken  # type: ignore[method-assign,assignment]
    response = client.post(CHAT, json=user("Hi"))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"].startswith("req_")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *(
            "messages",
            "prompt",
            "model",
            "stream",
            "stream_options",
            "n",
            "max_tokens",
            "stop",
            "temperature",
            "top_p",
            "top_k",
        ),
        *(
            "seed",
            "logit_bias",
            "logprobs",
            "top_logprobs",
            "tools",
            "tool_choice",
            "hlg",
            "response_format",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "adapter",
        ),
        *("chat_template_kwargs", "reasoning_effort", "echo", "suffix", "best_of"),
    ]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.sampled_from([CHAT, COMPLETIONS]), st.dictionaries(NAMES, JSON, max_size=4))
def test_no_body_is_an_internal_error(client: TestClient, route: str, fields: dict[str, Any]) -> None:
    body = {"messages": HI, **fields} if route == CHAT else {"prompt": "Hi", **fields}
    response = client.post(route, content=json.dumps(body))
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["message"]
        assert error["param"] or error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ("/v1/responses", {"input": "a" * 5000}, "input"),
        ("/v1/completions", {"prompt": ["a", "a" * 5000]}, "prompt[1]"),
        ("/v1/embeddings", {"input": "a" * 5000}, "input"),
    ],
)
def test_what_no_context_can_hold_is_refused_before_it_is_tokenised(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any], param: str
) -> None:
    def encode(self: ByteTokenizer, text: str, *, special: bool = False) -> list[int]:
        assert len(text) < 5000
        return list(text.encode())

    with TestClient(make_app(engine), base_url="http://localhost") as client:
        monkeypatch.setattr(ByteTokenizer, "encode", encode)
        response = client.post(route, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "5000 bytes" in error["message"]
    if route != "/v1/messages":  # Anthropic's errors name no field
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("route", "tool"),
    [
        ("/v1/chat/completions", {"type": "function", "function": {"name": ""}}),
        ("/v1/messages", {"name": "", "input_schema": {"type": "object"}}),
        ("/v1/responses", {"type": "function", "name": ""}),
    ],
)
def test_tools_have_names(client: TestClient, route: str, tool: dict[str, Any]) -> None:
    said = [{"role": "user", "content": "Hi"}]
    response = client.post(route, json={"messages": said, "input": "Hi", "tools": [tool]})
    assert response.status_code == 400
    assert "name" in response.json()["error"]["message"]
