"""/v1/completions: prompts of every form, both shapes of log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_engine import MODEL, FakeEngine, Job, logprob, make_app, parse_stream, prompts
from openai.types import Completion
from starlette.testclient import TestClient

from gnomon.config import SamplingDefaults

COMPLETIONS = "/v1/completions"


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    response = client.post(COMPLETIONS, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    data = parse_stream(response.text)
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def echo(job: Job) -> None:
    """Says the prompt backwards."""
    job.say(job.text[::-1], "length")


def test_a_whole_answer(client: TestClient, engine: FakeEngine) -> None:
    body = complete(client, prompt="Hi")
    Completion.model_validate(body, strict=True)
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 5)
    assert engine.submitted[0].prompt == (256, 72, 105)


def test_a_stream(client: TestClient) -> None:
    chunks = stream(client, prompt="Hi", stream_options={"include_usage": True})
    # OpenAI sends null until the end, which its own type of whole answers doesn't allow for.
    Completion.model_validate(chunks[-2], strict=True)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 5 + ["stop"]
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert texts == [*"Hello", ""]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 8


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(256, 97, 98)]),
        (["ab", "c"], [(256, 97, 98), (256, 99)]),
        ([97, 98], [(97, 98)]),
        ([[97, 98], [99]], [(97, 98), (99,)]),
        ("é", [(256, 195, 169)]),
    ],
)
def test_forms_of_prompts(client: TestClient, engine: FakeEngine, prompt: Any, ids: list[tuple[int, ...]]) -> None:
    complete(client, prompt=prompt)
    assert [request.prompt for request in engine.submitted] == ids


def test_prompts_and_choices_are_numbered_together(client: TestClient, engine: FakeEngine) -> None:
    engine.script = echo
    body = complete(client, prompt=["ab", "cd"], n=2)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "ba"), (1, "ba"), (2, "dc"), (3, "dc")]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 8
    chunks = stream(client, prompt=["ab", "cd"], n=2)
    for index, text in ((0, "ba"), (1, "ba"), (2, "dc"), (3, "dc")):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert own[-1]["finish_reason"] == "length"


def test_one_failing_prompt_fails_the_request_and_frees_the_others(client: TestClient, engine: FakeEngine) -> None:
    engine.script = None
    import threading

    answers: list[Any] = []
    asked = threading.Thread(
        target=lambda: answers.append(client.post(COMPLETIONS, json={"prompt": ["a", "b"]})), daemon=True
    )
    asked.start()
    first, second = engine.take(), engine.take()
    second.fail("row 1 met a NaN")
    asked.join(120)
    assert answers[0].status_code == 500
    assert first.cancelled.is_set()
    assert not engine.open


def test_when_the_queue_fills_midway_none_is_left_behind(client: TestClient, engine: FakeEngine) -> None:
    from fake_engine import full

    engine.script = None
    submit = engine.submit

    def second_is_refused(request: Any, sink: Any) -> None:
        if engine.submitted:
            raise full()
        submit(request, sink)

    engine.submit = second_is_refused  # type: ignore[method-assign]
    response = client.post(COMPLETIONS, json={"prompt": ["a", "b"]})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert engine.take().cancelled.is_set()
    assert not engine.open


TOKENS = (
    logprob("a", -0.25, ("a", -0.25), ("b", -2.0)),
    logprob("b", -3.0, ("c", -0.1), ("d", -2.5)),
)


def two_tokens(job: Job) -> None:
    for token in TOKENS:
        job.delta(token.token, 0, token)
    job.finish()
    job.end()


LEGACY = {
    "tokens": ["a", "b"],
    "token_logprobs": [-0.25, -3.0],
    "top_logprobs": [{"a": -0.25, "b": -2.0}, {"c": -0.1, "d": -2.5, "b": -3.0}],
    "text_offset": [0, 1],
}


def test_an_integer_asks_for_openai_s_legacy_shape(client: TestClient, engine: FakeEngine) -> None:
    engine.script = two_tokens
    body = complete(client, prompt="Hi", logprobs=2)
    Completion.model_validate(body, strict=True)
    assert engine.submitted[0].sampling.logprobs == 2
    assert body["choices"][0]["logprobs"] == LEGACY
    parts = [
        c["choices"][0]["logprobs"] for c in stream(client, prompt="Hi", logprobs=2) if c["choices"][0]["logprobs"]
    ]
    assert {name: [one for part in parts for one in part[name]] for name in LEGACY} == LEGACY


def test_zero_asks_for_the_sampled_tokens_only(client: TestClient, engine: FakeEngine) -> None:
    engine.script = two_tokens
    body = complete(client, prompt="Hi", logprobs=0)
    assert engine.submitted[0].sampling.logprobs == 0
    assert body["choices"][0]["logprobs"] == {**LEGACY, "top_logprobs": None}


def test_a_boolean_asks_for_mlx_lm_s_shape(client: TestClient, engine: FakeEngine) -> None:
    engine.script = two_tokens
    body = complete(client, prompt="Hi", logprobs=True)
    assert engine.submitted[0].sampling.logprobs == 0
    assert body["choices"][0]["logprobs"] == {"content": [{"id": 97, "logprob": -0.25}, {"id": 98, "logprob": -3.0}]}
    body = complete(client, prompt="Hi", top_logprobs=2)
    assert body["choices"][0]["logprobs"]["content"][1] == {
        "id": 98,
        "token": "<0x62>",
        "logprob": -3.0,
        "top_logprobs": [
            {"id": 99, "token": "<0x63>", "logprob": -0.1},
            {"id": 100, "token": "<0x64>", "logprob": -2.5},
        ],
    }
    parts = [c["choices"][0]["logprobs"] for c in stream(client, prompt="Hi", logprobs=True)]
    assert [one for part in parts if part for one in part["content"]] == [
        {"id": 97, "logprob": -0.25},
        {"id": 98, "logprob": -3.0},
    ]


def test_a_raw_prompt_takes_the_model_s_own_temperature(engine: FakeEngine) -> None:
    defaults = SamplingDefaults(temperature=1.0, from_model=frozenset({"temperature"}))
    with TestClient(make_app(engine, sampling=defaults), base_url="http://localhost") as client:
        complete(client, prompt="Hi")
    assert engine.submitted[0].sampling.temperature == 1.0


def test_literal_tags_in_a_raw_completion_are_text(engine: FakeEngine) -> None:
    from fake_engine import THINKING

    engine.script = lambda job: job.say("<think>x</think>y")
    with TestClient(make_app(engine, template=THINKING), base_url="http://localhost") as client:
        assert complete(client, prompt="Hi")["choices"][0]["text"] == "<think>x</think>y"
    assert prompts(engine) == ["Hi"]
