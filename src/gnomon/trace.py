"""Phase traces of requests: who reports spans, and what a sink gets. Standard library only, so that every room may import it.

The engine and the server report intervals of `time.monotonic` against a request id; the tracer adds them up per phase and works out
what no phase explains. Spans that several requests share (a batched step) carry the same `work_id`: their times must never be added
across requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

log = logging.getLogger(__name__)

Phase = Literal["queue", "prefix", "prefill", "first_token", "step", "delivery"]
Value = str | int | float | bool
TOKEN_PHASES: frozenset[str] = frozenset({"step", "delivery"})
"""Phases that recur for every token: only their first spans go out one by one."""
TOKEN_SPANS = 8
ORIGIN = time.monotonic()
"""The instant that process-relative times count from."""


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of a request's life, in seconds of `time.monotonic`. `work_id` names work shared with other requests."""

    request_id: str
    trace_id: str
    phase: Phase
    start: float
    end: float
    work_id: int | None = None
    attributes: Mapping[str, Value] = field(default_factory=dict[str, Value])


@dataclass(frozen=True, slots=True)
class PhaseTotal:
    """Number of spans of one phase of one request and the sum of their lengths in seconds."""

    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A finished request. `unexplained` is the part of `end - start`, in seconds, that no span covers (overlaps count once)."""

    request_id: str
    trace_id: str
    start: float
    end: float
    outcome: str
    phases: Mapping[str, PhaseTotal]
    unexplained: float
    spans: tuple[Span, ...]
    attributes: Mapping[str, Value] = field(default_factory=dict[str, Value])


class TraceSink(Protocol):
    """Receives finished requests, on whichever thread ended them. It must not block for long."""

    def emit(self, trace: RequestTrace) -> None: ...


@dataclass(slots=True)
class _Open:
    trace_id: str
    start: float
    holders: int = 0
    outcome: str = "finished"
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    spans: list[Span] = field(default_factory=list[Span])
    intervals: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    totals: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])


class Tracer:
    """Collects the spans of open requests and hands finished ones to the sinks. Thread-safe. Without sinks every call returns at once.

    `sync` asks the engine to wait for the device at the end of each traced phase, so that spans hold device time: it slows the engine and
    must be off for any timing that is reported.
    """

    def __init__(self, sinks: Sequence[TraceSink] = (), *, sync: bool = False) -> None:
        self._sinks = list(sinks)
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self.enabled = bool(self._sinks)
        self.sync = sync and self.enabled

    def begin(self, request_id: str, trace_id: str | None = None, *, at: float | None = None) -> None:
        """Open a request, or hold one that is open: it is emitted when everyone who began it has ended it.

        `trace_id` defaults to the request id; the first one to begin decides it, and the start.
        """
        if not self.enabled:
            return
        start = time.monotonic() if at is None else at
        with self._lock:
            self._open.setdefault(request_id, _Open(trace_id or request_id, start)).holders += 1

    def span(
        self,
        request_id: str,
        phase: Phase,
        start: float,
        end: float | None = None,
        *,
        work_id: int | None = None,
        **attributes: Value,
    ) -> None:
        """Report one interval. Unknown or finished requests are ignored, so that late deliveries do no harm."""
        if not self.enabled:
            return
        stop = time.monotonic() if end is None else end
        with self._lock:
            request = self._open.get(request_id)
            if request is None:
                return
            count, seconds = request.totals.get(phase, (0, 0.0))
            request.totals[phase] = (count + 1, seconds + stop - start)
            request.intervals.append((start, stop))
            if phase not in TOKEN_PHASES or count < TOKEN_SPANS:
                request.spans.append(Span(request_id, request.trace_id, phase, start, stop, work_id, attributes))

    def end(self, request_id: str, outcome: str | None = None, *, at: float | None = None, **attributes: Value) -> None:
        """Let go of a request; the last one to do so emits it. The last outcome given counts. Unknown requests are ignored."""
        if not self.enabled:
            return
        stop = time.monotonic() if at is None else at
        with self._lock:
            request = self._open.get(request_id)
            if request is None:
                return
            request.outcome = outcome or request.outcome
            request.attributes.update(attributes)
            request.holders -= 1
            if request.holders > 0:
                return
            del self._open[request_id]
        phases = {name: PhaseTotal(count, seconds) for name, (count, seconds) in request.totals.items()}
        unexplained = (stop - request.start) - covered(request.intervals, request.start, stop)
        trace = RequestTrace(
            request_id,
            request.trace_id,
            request.start,
            stop,
            request.outcome,
            phases,
            unexplained,
            tuple(request.spans),
            request.attributes,
        )
        for sink in tuple(self._sinks):
            try:
                sink.emit(trace)
            except Exception:  # a broken exporter must not end the engine's thread: it is dropped, and said so once
                log.exception("trace sink %s failed and is switched off", type(sink).__name__)
                self._sinks.remove(sink)
                self.enabled = bool(self._sinks)


def covered(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Length of the union of `intervals`, clipped to [start, end], in the same unit."""
    total = 0.0
    reached = start
    for low, high in sorted(intervals):
        begin = max(low, reached)
        stop = min(high, end)
        if stop > begin:
            total += stop - begin
            reached = stop
    return total


OFF = Tracer()
"""The tracer of whoever got none."""
