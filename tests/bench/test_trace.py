"""Phase traces: arithmetic of phases, JSON lines, OpenTelemetry spans, and sinks that break."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gnomon.bench.trace import JsonLines, OpenTelemetry, make_tracer
from gnomon.trace import OFF, ORIGIN, TOKEN_SPANS, RequestTrace, Tracer, covered


class Keep:
    def __init__(self) -> None:
        self.traces: list[RequestTrace] = []

    def emit(self, trace: RequestTrace) -> None:
        self.traces.append(trace)


def traced(sink: Any, at: float = 0.0) -> None:
    """A request of ten seconds: queued 1 s, prefilled 2 + 2 s, nine steps of 0.25 s of which one overlaps a delivery."""
    tracer = Tracer([sink])
    tracer.begin("r1", "0af7651916cd43dd8448eb211c80319c", at=at)
    tracer.span("r1", "queue", at, at + 1)
    tracer.span("r1", "prefill", at + 1, at + 3, tokens=512)
    tracer.span("r1", "prefill", at + 3, at + 5, tokens=100)
    for n in range(9):
        tracer.span("r1", "step", at + 5 + n * 0.5, at + 5.25 + n * 0.5, work_id=n, rows=3)
    tracer.span("r1", "delivery", at + 5.125, at + 5.375)
    tracer.end("r1", "stop", at=at + 10, tokens=9)


def test_phases_and_remainder() -> None:
    sink = Keep()
    traced(sink)
    (trace,) = sink.traces
    assert {name: (total.count, total.seconds) for name, total in trace.phases.items()} == {
        "queue": (1, 1.0), "prefill": (2, 4.0), "step": (9, 2.25), "delivery": (1, 0.25),
    }  # fmt: skip
    # 10 s less 5 s of queue and prefill, 9 steps of 0.25 s, and the half of the delivery that no step covers.
    assert trace.unexplained == pytest.approx(10 - 5 - 2.25 - 0.125)


def test_only_the_first_token_spans_go_out_singly() -> None:
    sink = Keep()
    traced(sink)
    steps = [span for span in sink.traces[0].spans if span.phase == "step"]
    assert [span.work_id for span in steps] == list(range(TOKEN_SPANS))


def test_json_lines() -> None:
    stream = io.StringIO()
    traced(JsonLines(stream), at=ORIGIN + 100)
    *spans, request = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert request == {
        "p2r": "request", "traceId": "0af7651916cd43dd8448eb211c80319c", "requestId": "r1", "outcome": "stop",
        "startedAtMs": 100_000.0, "durationMs": 10_000.0, "unexplainedMs": 2625.0, "tokens": 9,
        "phases": {
            "queue": {"count": 1, "ms": 1000.0}, "prefill": {"count": 2, "ms": 4000.0},
            "step": {"count": 9, "ms": 2250.0}, "delivery": {"count": 1, "ms": 250.0},
        },
    }  # fmt: skip
    assert spans[1] == {
        "p2r": "span", "traceId": "0af7651916cd43dd8448eb211c80319c", "requestId": "r1", "phase": "prefill",
        "startedAtMs": 101_000.0, "durationMs": 2000.0, "tokens": 512,
    }  # fmt: skip
    assert spans[3]["workId"] == 0


def test_opentelemetry_spans() -> None:
    """Read back through the SDK's own exporter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traced(OpenTelemetry(provider))
    spans = exporter.get_finished_spans()
    root = next(span for span in spans if span.name == "request")
    children = [span for span in spans if span is not root]
    assert [span.name for span in children] == ["queue", "prefill", "prefill", *["step"] * 8, "delivery"]
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in children)
    assert {format(span.context.trace_id, "032x") for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert root.end_time is not None
    assert root.start_time is not None
    assert root.end_time - root.start_time == pytest.approx(10e9, abs=1000)
    assert root.attributes is not None
    assert root.attributes["gnomon.unexplained_ms"] == 2625.0
    assert children[1].attributes is not None
    assert children[1].attributes["gnomon.tokens"] == 512


@pytest.mark.parametrize("trace_id", ["my-trace", "0" * 32, "Z" * 32])
def test_foreign_trace_ids_become_an_attribute(trace_id: str) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer([OpenTelemetry(provider)])
    tracer.begin("r", trace_id)
    tracer.end("r", "stop")
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gnomon.trace_id"] == trace_id
    assert format(span.context.trace_id, "032x") != trace_id


def test_a_broken_sink_is_dropped_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def emit(self, trace: RequestTrace) -> None:
            raise OSError("disk full")

    kept = Keep()
    tracer = Tracer([Broken(), kept])
    for name in ("a", "b"):
        tracer.begin(name)
        tracer.end(name, "stop")
    assert [trace.request_id for trace in kept.traces] == ["a", "b"]
    assert [record.message for record in caplog.records].count("trace sink Broken failed and is switched off") == 1


def test_late_and_unknown_spans_are_ignored() -> None:
    sink = Keep()
    tracer = Tracer([sink])
    tracer.span("nobody", "step", 0, 1)
    tracer.begin("r", at=0)
    tracer.end("r", "stop", at=10)
    tracer.span("r", "delivery", 0, 1)
    tracer.end("r", "stop", at=11)
    assert [(trace.start, trace.end, trace.phases) for trace in sink.traces] == [(0, 10, {})]


@pytest.mark.parametrize("server_first", [False, True])
def test_a_request_held_by_server_and_engine_goes_out_when_both_let_go(server_first: bool) -> None:
    sink = Keep()
    tracer = Tracer([sink])
    tracer.begin("r", "t", at=0)
    tracer.begin("r", at=5)
    ends: list[dict[str, Any]] = [{"outcome": "cancelled", "at": 10.0, "tokens": 3}, {"at": 12.0}]
    for n in (1, 0) if server_first else (0, 1):
        assert sink.traces == []
        tracer.end("r", **ends[n])
    (trace,) = sink.traces
    assert (trace.start, trace.end, trace.trace_id) == (0, 10.0 if server_first else 12.0, "t")
    assert (trace.outcome, trace.attributes) == ("cancelled", {"tokens": 3})


def test_off_by_default_and_without_sinks() -> None:
    assert not OFF.enabled
    assert not make_tracer().enabled
    assert make_tracer(p2r=True, sync=True).sync
    assert not make_tracer(sync=True).sync
    OFF.begin("r")
    OFF.span("r", "step", 0, 1)
    OFF.end("r", "stop")


def test_spans_of_many_threads_are_all_counted() -> None:
    sink = Keep()
    tracer = Tracer([sink])
    tracer.begin("r", at=0)

    def report() -> None:
        for n in range(500):
            tracer.span("r", "step", n, n + 1)

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.end("r", "stop", at=500)
    assert sink.traces[0].phases["step"].count == 2000
    assert sink.traces[0].unexplained == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 12)), max_size=12))
def test_union_of_intervals_by_counting_cells(pieces: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in pieces]
    cells = {n for low, high in intervals for n in range(low, high) if 0 <= n < 20}
    assert covered(intervals, 0, 20) == len(cells)
