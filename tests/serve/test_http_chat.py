"""/v1/chat/completions: shapes as OpenAI's clients know them, thinking, usage, log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import MODEL, THINKING, FakeEngine, Job, logprob, make_app, parse_stream, prompts, user
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.testclient import TestClient

from gnomon.config import SamplingDefaults
from gnomon.engine.api import HLG, CacheMiss, SamplingParams, Speculated

CHAT = "/v1/chat/completions"


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    response = client.post(CHAT, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    data = parse_stream(response.text)
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def test_a_whole_answer(client: TestClient, engine: FakeEngine) -> None:
    body = chat(client, **user("Hi"))
    ChatCompletion.model_validate(body, strict=True)
    assert body["id"] == engine.submitted[0].id
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    # "<user>Hi\n<assistant>" is 20 bytes; "Hello" 5.
    assert body["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cache": {"tier": "none", "tokens": 0, "miss": None},
        "lane": "serial",
        "tier": "L1",
    }
    assert prompts(engine) == ["<user>Hi\n<assistant>"]


def test_a_stream_says_role_then_text_then_finish(client: TestClient) -> None:
    chunks = stream(client, **user("Hi"))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["model"] == MODEL
        assert "usage" not in chunk
        assert chunk["id"] == chunks[0]["id"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[1:] == [*({"content": c} for c in "Hello"), {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["stop"]


def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(client: TestClient, engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta("A")
        job.finish("length")
        miss = CacheMiss("edited text", 7)
        job.end(cached_tokens=7, lane="batched", tier="L2", cache_tier="ram", cache_miss=miss)

    engine.script = script
    chunks = stream(client, **user("Hi", stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 1,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cache": {"tier": "ram", "tokens": 7, "miss": {"kind": "edited text", "position": 7}},
        "lane": "batched",
        "tier": "L2",
    }
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_usage_tells_of_guessed_tokens(client: TestClient, engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta("ABCDEFGHIJ")
        job.finish("length")
        # Ten tokens of five forwards: windows of 3 (all right), 3 (one right) and 2 (none right), and two plain steps.
        job.end(lane="serial+spec", speculation=Speculated(8, 4, 5, (3, 1, 0), (3, 3, 2), (2, 1, 1)))

    engine.script = script
    usage = chat(client, **user("Hi"))["usage"]
    assert usage["lane"] == "serial+spec"
    assert usage["speculation"] == {
        "drafted": 8,
        "accepted": 4,
        "rejected": 4,
        "targetCalls": 5,
        "rounds": 3,
        "acceptanceLengths": [3, 1, 0],
        "tokensPerForward": usage["completion_tokens"] / 5,
        "forwardsSaved": usage["completion_tokens"] - 5,
        "draftedByPos": [3, 3, 2],
        "acceptedByPos": [2, 1, 1],
    }


def test_choices_are_told_apart(client: TestClient, engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        for index, text in ((1, "b"), (0, "a"), (1, "B"), (0, "A")):
            job.delta(text, index)
        job.finish("length", 1)
        job.finish("stop", 0)
        job.end()

    engine.script = script
    body = chat(client, **user("Hi", n=2))
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "aA", "stop"),
        (1, "bB", "length"),
    ]
    assert body["usage"]["completion_tokens"] == 4
    assert engine.submitted[0].n == 2
    chunks = stream(client, **user("Hi", n=2))
    assert [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]] == [0, 1]
    for index, text in ((0, "aA"), (1, "bB")):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(delta.get("content", "") for delta in deltas) == text


def thinker(job: Job) -> None:
    # What a model writes after "<think>\n", cut at awkward places.
    for text in ("why", " not\n</th", "ink>\n\nBe", "cause"):
        job.delta(text, tokens=1)
    job.finish()
    job.end()


def test_reasoning_goes_apart(engine: FakeEngine) -> None:
    engine.script = thinker
    with TestClient(make_app(engine, template=THINKING), base_url="http://localhost") as client:
        body = chat(client, **user("Hi", reasoning_effort="low"))
        assert body["choices"][0]["message"] == {
            "role": "assistant",
            "content": "Because",
            "refusal": None,
            "reasoning_content": "why not",
            "reasoning": "why not",
        }
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
        chunks = stream(client, **user("Hi", reasoning_effort="low"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why not"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "why not"
    assert "".join(delta.get("content", "") for delta in deltas) == "Because"
    assert not any("content" in delta and "reasoning_content" in delta for delta in deltas)


def test_a_thought_that_never_ends_stays_reasoning(engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta("hm</thi")
        job.finish("length")
        job.end()

    engine.script = script
    with TestClient(make_app(engine, template=THINKING), base_url="http://localhost") as client:
        message = chat(client, **user("Hi", reasoning_effort="high"))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "hm</thi")


@pytest.mark.parametrize(
    ("flag", "fields", "thinks"),
    [
        (None, {}, False),
        (True, {}, True),
        (True, {"reasoning_effort": "none"}, False),
        (False, {"reasoning_effort": "xhigh"}, True),
        (True, {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
        (False, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_who_decides_on_thinking(engine: FakeEngine, flag: bool | None, fields: dict[str, Any], thinks: bool) -> None:
    app = make_app(engine, template=THINKING, sampling=SamplingDefaults(thinking=flag))
    with TestClient(app, base_url="http://localhost") as client:
        chat(client, **user("Hi", **fields))
    assert prompts(engine)[0].endswith("<think>\n" if thinks else "<think></think>")


@pytest.mark.parametrize(
    ("defaults", "fields", "expected"),
    [
        ({}, {}, 0.7),
        ({}, {"reasoning_effort": "high"}, 0.7),
        ({"temperature": 1.0, "from_model": frozenset({"temperature"})}, {}, 0.7),
        ({"temperature": 1.0, "from_model": frozenset({"temperature"})}, {"reasoning_effort": "high"}, 1.0),
        ({"temperature": 0.6, "from_model": frozenset({"temperature"})}, {}, 0.6),
        ({"temperature": 1.5}, {}, 1.5),
        ({"temperature": 1.5}, {"temperature": 0}, 0.0),
    ],
)
def test_temperature_precedence(
    engine: FakeEngine, defaults: dict[str, Any], fields: dict[str, Any], expected: float
) -> None:
    app = make_app(engine, template=THINKING, sampling=SamplingDefaults(**defaults))
    with TestClient(app, base_url="http://localhost") as client:
        chat(client, **user("Hi", **fields))
    assert engine.submitted[0].sampling.temperature == expected


def test_sampling_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    chat(
        client,
        **user(
            "Hi",
            temperature=1,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            xtc_probability=0.5,
            xtc_threshold=0.1,
            seed=-7,
            logit_bias={"5": -1, "256": 2.5},
            repetition_penalty=1.1,
            repetition_context_size=0,
            presence_penalty=0.2,
            presence_context_size=30,
            frequency_penalty=-0.3,
            frequency_context_size=40,
            logprobs=True,
            top_logprobs=3,
            stop=["\n\n", "END"],
            max_tokens=9,
            max_completion_tokens=10,
            hlg={"width": 2, "pivot": "median"},
            unknown_field={"is": "ignored"},
        ),
    )
    request = engine.submitted[0]
    assert request.sampling == SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        xtc_probability=0.5,
        xtc_threshold=0.1,
        seed=-7,
        logit_bias=((5, -1.0), (256, 2.5)),
        repetition_penalty=1.1,
        repetition_context_size=0,
        presence_penalty=0.2,
        presence_context_size=30,
        frequency_penalty=-0.3,
        frequency_context_size=40,
        logprobs=3,
        hlg=HLG(width=2.0, pivot="median"),
    )
    assert request.stop == ("\n\n", "END")
    assert request.max_tokens == 10


def test_nulls_mean_absent(client: TestClient, engine: FakeEngine) -> None:
    names = (
        "temperature top_p top_k min_p seed stop n max_tokens max_completion_tokens logprobs top_logprobs tools tool_choice "
        "response_format stream stream_options logit_bias user reasoning_effort chat_template_kwargs functions"
    )
    chat(client, **user("Hi", **dict.fromkeys(names.split())))
    assert engine.submitted[0].sampling == SamplingParams(temperature=0.7)


def test_server_defaults_fill_what_a_request_leaves_out(engine: FakeEngine) -> None:
    defaults = SamplingDefaults(top_p=0.8, top_k=20, min_p=0.1, max_tokens=33, hlg_sampling=True, hlg_toe=1.0)
    with TestClient(make_app(engine, sampling=defaults), base_url="http://localhost") as client:
        first = client.post(CHAT, json=user("Hi"))
        second = client.post(CHAT, json=user("Hi", top_k=0, max_tokens=3, hlg={"enabled": False}, stream=True))
    one, two = engine.submitted
    assert (one.sampling.top_p, one.sampling.top_k, one.sampling.min_p, one.max_tokens) == (0.8, 20, 0.1, 33)
    assert one.sampling.hlg == HLG(toe=1.0)
    assert (two.sampling.top_p, two.sampling.top_k, two.max_tokens, two.sampling.hlg) == (0.8, 0, 3, None)
    assert first.headers["x-gnomon-tier"] == first.json()["usage"]["tier"] == "Lab"
    assert second.headers["x-gnomon-tier"] == "L1"


def test_a_stream_with_tone_curve_says_it_is_lab(client: TestClient) -> None:
    response = client.post(CHAT, json=user("Hi", hlg={}, stream=True, stream_options={"include_usage": True}))
    assert response.headers["x-gnomon-tier"] == "Lab"
    assert json.loads(parse_stream(response.text)[-2])["usage"]["tier"] == "Lab"


def test_history_is_rendered_as_templates_expect_it(client: TestClient, engine: FakeEngine) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "two"]}'}}
    chat(
        client,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning": "because", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "x", "reasoning": "one", "reasoning_content": "two"},
        ],
    )
    assert prompts(engine) == [
        '<system>Be brief.\n<user>ab\n<assistant>(because)[f {"x": [1, "two"]}]\n<tool>3\n<assistant>(two)x\n<assistant>'
    ]


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def test_tools_are_rendered_and_the_limit_is_told(client: TestClient, engine: FakeEngine) -> None:
    response = client.post(CHAT, json=user("Hi", tools=[TOOL], tool_choice="auto"))
    assert response.status_code == 200
    assert "way of writing tool calls is not known" in response.headers["warning"]
    response = client.post(CHAT, json=user("Hi", tools=[TOOL], tool_choice="none"))
    assert "warning" not in response.headers
    with_tools, without = prompts(engine)
    assert json.loads(with_tools.partition("<tools>")[2].partition("\n")[0]) == [TOOL]
    assert "<tools>" not in without


def test_logprobs_have_openai_s_shape_and_ids(client: TestClient, engine: FakeEngine) -> None:
    first = logprob("A", -0.5, ("A", -0.5), ("b", -1.5))
    second = logprob("\n", float("-inf"), ("c", -0.1), ("d", -3.0))

    def script(job: Job) -> None:
        job.delta("A", 0, first)
        job.delta("", 0, second)  # held back; its text comes with the next
        job.delta("\nB", 0)
        job.finish()
        job.end()

    engine.script = script
    expected = [
        {
            "id": 65,
            "token": "A",
            "logprob": -0.5,
            "bytes": [65],
            "top_logprobs": [
                {"id": 65, "token": "A", "logprob": -0.5, "bytes": [65]},
                {"id": 98, "token": "b", "logprob": -1.5, "bytes": [98]},
            ],
        },
        {
            "id": 10,
            "token": "\n",
            "logprob": -9999.0,
            "bytes": [10],
            "top_logprobs": [
                {"id": 99, "token": "c", "logprob": -0.1, "bytes": [99]},
                {"id": 100, "token": "d", "logprob": -3.0, "bytes": [100]},
            ],
        },
    ]
    body = chat(client, **user("Hi", logprobs=True, top_logprobs=2))
    ChatCompletion.model_validate(body, strict=True)
    assert body["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    chunks = stream(client, **user("Hi", logprobs=True, top_logprobs=2))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    told = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [one for part in told for one in part] == expected


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"top_logprobs": -1}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 20}, 20),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_which_logprobs_are_asked_for(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], wanted: int | None
) -> None:
    chat(client, **user("Hi", **fields))
    assert engine.submitted[0].sampling.logprobs == wanted


def test_trace_ids_are_adopted(client: TestClient, engine: FakeEngine) -> None:
    given = client.post(CHAT, json=user("Hi"), headers={"x-gnomon-trace-id": "abc-123"})
    made = client.post(CHAT, json=user("Hi"))
    assert given.headers["x-gnomon-trace-id"] == "abc-123"
    assert engine.submitted[0].trace_id == "abc-123"
    assert made.headers["x-gnomon-trace-id"] == made.headers["x-request-id"] == engine.submitted[1].trace_id


def test_a_failure_in_a_stream_is_its_last_event(client: TestClient, engine: FakeEngine) -> None:
    def script(job: Job) -> None:
        job.delta("A")
        job.fail("row 3 met a NaN")

    engine.script = script
    response = client.post(CHAT, json=user("Hi", stream=True))
    assert response.status_code == 200
    data = [json.loads(one) for one in parse_stream(response.text)]
    assert data[1]["choices"][0]["delta"] == {"content": "A"}
    assert data[-1] == {
        "error": {"message": "row 3 met a NaN", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert len(data) == 3


def test_a_failure_of_a_whole_answer_has_a_status(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.fail("row 3 met a NaN")
    response = client.post(CHAT, json=user("Hi"))
    assert (response.status_code, response.json()["error"]["message"]) == (500, "row 3 met a NaN")
    engine.script = lambda job: job.fail("the device is gone", "engine_failed", fatal=True)
    response = client.post(CHAT, json=user("Hi"))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")


def test_a_whole_answer_that_the_engine_s_end_cuts_off(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: engine.stop()
    response = client.post(CHAT, json=user("Hi"))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stopped")


def test_what_the_engine_cancels_is_an_error(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda job: job.cancel()
    response = client.post(CHAT, json=user("Hi"))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "cancelled")
