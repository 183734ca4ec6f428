"""Traces of real requests: through the engine alone, and through the HTTP application over it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from gnomon.bench.trace import JsonLines
from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, HTTPConfig, SamplingDefaults
from gnomon.engine.api import Request
from gnomon.engine.engine import Engine, load
from gnomon.engine.settings import Host
from gnomon.serve.app import create_app
from gnomon.trace import RequestTrace, Tracer

from . import tiny_directory


class Keep:
    """Keeps traces and lets tests wait for one."""

    def __init__(self) -> None:
        self.traces: dict[str, RequestTrace] = {}
        self._changed = threading.Condition()

    def emit(self, trace: RequestTrace) -> None:
        with self._changed:
            self.traces[trace.trace_id] = trace
            self._changed.notify_all()

    def wait(self, trace_id: str) -> RequestTrace:
        with self._changed:
            assert self._changed.wait_for(lambda: trace_id in self.traces, 300)
            return self.traces[trace_id]


@pytest.fixture(scope="module")
def sink() -> Keep:
    return Keep()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory.write(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def engine(path: Path, sink: Keep) -> Iterator[Engine]:
    with load(path, EngineConfig(prefill_chunk=16), Host(tracer=Tracer([sink]))) as running:
        yield running


def check(trace: RequestTrace) -> None:
    """What holds of every trace: spans lie within the request, nothing is explained twice, totals agree with the spans."""
    assert 0 <= trace.unexplained <= trace.end - trace.start
    for span in trace.spans:
        assert trace.start <= span.start <= span.end <= trace.end
    for name, total in trace.phases.items():
        singles = [span for span in trace.spans if span.phase == name]
        assert len(singles) == min(total.count, 8) if name in ("step", "delivery") else total.count
        if len(singles) == total.count:
            assert total.seconds == pytest.approx(sum(span.end - span.start for span in singles))


def test_phases_of_one_request(engine: Engine, sink: Keep) -> None:
    """Forty prompt tokens in chunks of 16: 39 are drained as 16, 16 and 7; twelve tokens take twelve steps."""
    list(engine.stream(Request("a", tuple(range(2, 42)), max_tokens=12, ignore_eos=True, trace_id="t-a")))
    trace = sink.wait("t-a")
    check(trace)
    assert [span.attributes["tokens"] for span in trace.spans if span.phase == "prefill"] == [16, 16, 7]
    assert all(int(span.attributes["peakBytes"]) > 0 for span in trace.spans if span.phase == "prefill")
    assert trace.phases["queue"].count == trace.phases["first_token"].count == 1
    assert trace.phases["step"].count in (12, 13)
    assert (trace.outcome, trace.attributes["completionTokens"], trace.attributes["lane"]) == ("finished", 12, "serial")


def test_shared_steps_carry_the_same_work_id(engine: Engine, sink: Keep) -> None:
    threads = [
        threading.Thread(
            target=lambda name=name: list(
                engine.stream(Request(name, (5, 6, 7), max_tokens=40, ignore_eos=True, trace_id=f"t-{name}"))
            )
        )
        for name in ("b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared = [
        {span.work_id for span in sink.wait(f"t-{name}").spans if span.phase == "step" and span.work_id is not None}
        for name in ("b", "c")
    ]
    assert shared[0] & shared[1]


def test_a_cancelled_request_says_so(engine: Engine, sink: Keep) -> None:
    events = engine.stream(Request("d", (5, 6, 7), max_tokens=4000, ignore_eos=True, trace_id="t-d"))
    next(events)
    events.close()  # type: ignore[attr-defined]
    trace = sink.wait("t-d")
    check(trace)
    assert trace.outcome == "cancelled"


def test_through_http_with_delivery(engine: Engine, sink: Keep, path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    tracer = engine.host.tracer
    app = create_app(
        engine,
        tokenizer,
        ChatTemplate(tokenizer),
        HTTPConfig(allowed_hosts=("testserver",)),
        SamplingDefaults(temperature=0.0),
        tracer=tracer,
    )
    body = {"prompt": "hello", "max_tokens": 6, "stream": True, "ignore_eos": True}
    with TestClient(app) as client:
        response = client.post("/v1/completions", json=body, headers={"x-gnomon-trace-id": "my/trace"})
    assert response.status_code == 200
    texts = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    chunks = [chunk for chunk in texts if chunk["choices"] and chunk["choices"][0]["text"]]
    trace = sink.wait("my/trace")
    check(trace)
    assert trace.phases["delivery"].count >= len(chunks) > 0
    assert trace.attributes["completionTokens"] == 6


def test_json_lines_of_a_real_request(path: Path) -> None:
    stream = io.StringIO()
    with load(path, host=Host(tracer=Tracer([JsonLines(stream)], sync=True))) as running:
        running.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[-1]["p2r"] == "request"
    assert {line["phase"] for line in lines[:-1]} == {"queue", "prefill", "first_token", "step"}
    starts = [line["startedAtMs"] for line in lines]
    assert all(0 <= start < 3_600_000 for start in starts)
