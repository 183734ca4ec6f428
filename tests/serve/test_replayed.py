"""What an interrupted answer had delivered comes at once, and is told as if it had come piece by piece."""

from __future__ import annotations

import itertools

from fake_engine import FakeEngine, Job
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from engine_fixtures import tiny_tokenizer
from gnomon.chat.reasoning import TagFormat
from gnomon.chat.template import ChatTemplate
from gnomon.config import HTTPConfig, SamplingDefaults
from gnomon.engine.api import ChoiceFinished, Delta, Replayed, Request
from gnomon.serve.app import create_app
from gnomon.serve.bridge import CAPACITY
from gnomon.serve.generation import Assembly, Piece

THOUGHT = "<think>so it is</think>\n\nyes, <b>it</b> is"


@given(st.lists(st.integers(1, len(THOUGHT) - 1), unique=True).map(sorted), st.data())
def test_reasoning_and_content_are_split_and_counted_alike(borders: list[int], data: st.DataObject) -> None:
    edges = [0, *borders, len(THOUGHT)]
    deltas = [Delta("r", 0, THOUGHT[a:b], (a,)) for a, b in itertools.pairwise(edges)]
    seam = data.draw(st.integers(0, len(deltas)))
    one, other = (Assembly([Request("r", (1,))], TagFormat("<think>", "</think>").splitter) for _ in range(2))
    whole = [piece for delta in deltas for piece in one.feed(delta)]
    again = other.feed(Replayed("r", 0, tuple(deltas[:seam])))
    again += [piece for delta in deltas[seam:] for piece in other.feed(delta)]
    for pieces, assembly in ((whole, one), (again, other)):
        pieces += assembly.feed(ChoiceFinished("r", 0, "stop"))
    assert joined(again) == joined(whole) == ("so it is", "yes, <b>it</b> is", "stop")
    assert one.reasoning_tokens == other.reasoning_tokens


def joined(pieces: list[Piece]) -> tuple[str, str, str | None]:
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), pieces[-1].finish


def test_a_long_replay_does_not_count_as_a_client_that_does_not_read() -> None:
    def script(job: Job) -> None:
        job.sink(Replayed(job.request.id, 0, tuple(Delta(job.request.id, 0, "a", (5,)) for _ in range(CAPACITY + 10))))
        job.delta("b")
        job.finish()
        job.end()

    tokenizer = tiny_tokenizer()
    app = create_app(FakeEngine(script), tokenizer, ChatTemplate(tokenizer), HTTPConfig(), SamplingDefaults())
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.post("/v1/completions", json={"prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "a" * (CAPACITY + 10) + "b"
