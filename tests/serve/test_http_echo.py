"""`echo` of /v1/completions: prompts given back with their scores, in OpenAI's legacy shape, whole and streamed."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from fake_engine import FakeEngine, Job, full, logprob, parse_stream
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from gnomon.serve.prompt_echo import offsets

COMPLETIONS = "/v1/completions"


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    data = parse_stream(client.post(COMPLETIONS, json={**body, "stream": True}).text)
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def exclaim(job: Job) -> None:
    job.delta("!", 0, logprob("!", -0.25, ("!", -0.25)))
    job.finish("length")
    job.end()


# What the fake engine gives: the n-th token is worth -n, and the next byte is its rival, half a nat better.
PROMPT = {
    "tokens": ["<s>", "H", "i"],
    "token_logprobs": [None, -1.0, -2.0],
    "top_logprobs": [None, {"H": -1.0, "I": -0.5}, {"i": -2.0, "j": -1.5}],
    "text_offset": [0, 0, 1],
}
WHOLE = {
    "tokens": [*PROMPT["tokens"], "!"],
    "token_logprobs": [*PROMPT["token_logprobs"], -0.25],
    "top_logprobs": [*PROMPT["top_logprobs"], {"!": -0.25}],
    "text_offset": [0, 0, 1, 2],
}


def test_prompt_and_answer_stand_in_one_choice(client: TestClient, engine: FakeEngine) -> None:
    engine.script = exclaim
    (choice,) = complete(client, prompt="Hi", echo=True, logprobs=1, max_tokens=1)["choices"]
    assert choice == {"index": 0, "text": "Hi!", "logprobs": WHOLE, "finish_reason": "length"}


def test_a_stream_begins_with_the_prompt(client: TestClient, engine: FakeEngine) -> None:
    engine.script = exclaim
    chunks = stream(client, prompt="Hi", echo=True, logprobs=1, max_tokens=1)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0] == {"index": 0, "text": "Hi", "logprobs": PROMPT, "finish_reason": None}
    assert "".join(choice["text"] for choice in choices) == "Hi!"
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in WHOLE} == WHOLE


def test_nothing_is_generated_when_no_token_may_be(client: TestClient, engine: FakeEngine) -> None:
    body = complete(client, prompt=["Hi", "H"], echo=True, logprobs=0, max_tokens=0, n=2)
    assert engine.submitted == []
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "Hi", "length"), (1, "Hi", "length"), (2, "H", "length"), (3, "H", "length"),
    ]  # fmt: skip
    assert body["choices"][1]["logprobs"] == {**PROMPT, "top_logprobs": None}
    assert body["choices"][2]["logprobs"]["token_logprobs"] == [None, -1.0]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 0, 5)
    chunks = stream(client, prompt="Hi", echo=True, max_tokens=0, stream_options={"include_usage": True})
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == ["length"]
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


def test_a_lone_token_has_no_score(client: TestClient) -> None:
    (choice,) = complete(client, prompt=[72], echo=True, logprobs=1, max_tokens=0)["choices"]
    assert choice["text"] == "H"
    assert choice["logprobs"] == {
        "tokens": ["H"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0],
    }  # fmt: skip


def test_without_logprobs_nothing_is_scored(client: TestClient, engine: FakeEngine) -> None:
    engine.script = exclaim
    engine.score = None  # type: ignore[method-assign, assignment]
    (choice,) = complete(client, prompt="Hi", echo=True)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Hi!", None)


def test_an_engine_that_refuses_is_heard(client: TestClient, engine: FakeEngine) -> None:
    engine.refusal = full()
    response = client.post(COMPLETIONS, json={"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert response.status_code == 429


@pytest.mark.parametrize(
    ("text", "spellings", "found"),
    [
        ("Hi", [b"<s>", b"H", b"i"], [0, 0, 1]),
        ("Hi you", [b" Hi", b" you"], [0, 2]),  # SentencePiece puts a blank before the text
        ("aé!", [b"a", b"\xc3", b"\xa9", b"!"], [0, 1, 1, 2]),
        ("a€b", [b"a\xe2", b"\x82", b"\xacb"], [0, 1, 1]),
        ("", [b"<s>"], [0]),
    ],
)
def test_offsets_by_hand(text: str, spellings: list[bytes], found: list[int]) -> None:
    assert offsets(text, spellings) == found


@given(st.text(max_size=20), st.lists(st.integers(0, 60)))
def test_offsets_count_the_characters_begun_before(text: str, cuts: list[int]) -> None:
    data = text.encode()
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in pairwise(ends)]
    # Decoding drops a character that is cut: a piece within a character begins where that does.
    assert offsets(text, pieces) == [len(data[:a].decode(errors="ignore")) for a in ends[:-1]]
