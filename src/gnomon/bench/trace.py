"""Where phase traces go: JSON lines on standard error, and OpenTelemetry spans when an exporter is configured."""

from __future__ import annotations

import importlib
import json
import secrets
import sys
import time
from typing import Any, TextIO

from gnomon.trace import ORIGIN, RequestTrace, Tracer, TraceSink

_HEX = frozenset("0123456789abcdef")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class JsonLines:
    """Writes a line per span and a closing line per request. Times are milliseconds; `startedAtMs` counts from the process's start.

    Spans with a `workId` are shared by several requests: adding them over requests counts work twice.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def emit(self, trace: RequestTrace) -> None:
        lines: list[dict[str, Any]] = [
            {
                "p2r": "span",
                "traceId": trace.trace_id,
                "requestId": trace.request_id,
                "phase": span.phase,
                "startedAtMs": _ms(span.start - ORIGIN),
                "durationMs": _ms(span.end - span.start),
                **({} if span.work_id is None else {"workId": span.work_id}),
                **span.attributes,
            }
            for span in trace.spans
        ]
        lines.append(
            {
                "p2r": "request",
                "traceId": trace.trace_id,
                "requestId": trace.request_id,
                "outcome": trace.outcome,
                "startedAtMs": _ms(trace.start - ORIGIN),
                "durationMs": _ms(trace.end - trace.start),
                "phases": {
                    name: {"count": total.count, "ms": _ms(total.seconds)} for name, total in trace.phases.items()
                },
                "unexplainedMs": _ms(trace.unexplained),
                **trace.attributes,
            }
        )
        stream = self._stream or sys.stderr
        stream.write("".join(json.dumps(line) + "\n" for line in lines))
        stream.flush()


class OpenTelemetry:
    """Turns each finished request into one parent span and a child per recorded span, with their original times.

    A trace id of 32 hexadecimal digits becomes the OpenTelemetry trace id; any other is kept as the attribute `gnomon.trace_id`.
    """

    def __init__(self, provider: Any | None = None) -> None:
        self._api: Any = importlib.import_module("opentelemetry.trace")
        self._tracer: Any = self._api.get_tracer("gnomon", tracer_provider=provider)
        self._epoch_ns = time.time_ns() - int(time.monotonic() * 1e9)

    def _at(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)

    def _parent(self, trace_id: str) -> Any | None:
        if len(trace_id) != 32 or not set(trace_id) <= _HEX or int(trace_id, 16) == 0:
            return None
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        remote = self._api.SpanContext(int(trace_id, 16), secrets.randbits(63) | 1, is_remote=True, trace_flags=flags)
        return self._api.set_span_in_context(self._api.NonRecordingSpan(remote))

    def emit(self, trace: RequestTrace) -> None:
        attributes: dict[str, Any] = {
            "gnomon.request_id": trace.request_id,
            "gnomon.trace_id": trace.trace_id,
            "gnomon.outcome": trace.outcome,
            "gnomon.unexplained_ms": _ms(trace.unexplained),
            **{f"gnomon.{name}_ms": _ms(total.seconds) for name, total in trace.phases.items()},
            **{f"gnomon.{name}": value for name, value in trace.attributes.items()},
        }
        root = self._tracer.start_span(
            "request", context=self._parent(trace.trace_id), start_time=self._at(trace.start), attributes=attributes
        )
        context = self._api.set_span_in_context(root)
        for span in trace.spans:
            extra = {f"gnomon.{name}": value for name, value in span.attributes.items()}
            if span.work_id is not None:
                extra["gnomon.work_id"] = span.work_id
            child = self._tracer.start_span(
                span.phase, context=context, start_time=self._at(span.start), attributes=extra
            )
            child.end(end_time=self._at(span.end))
        root.end(end_time=self._at(trace.end))


def exporter_configured() -> bool:
    """Whether the process has an OpenTelemetry provider that exports: one set by `opentelemetry-instrument` or by the embedding program."""
    try:
        api: Any = importlib.import_module("opentelemetry.trace")
    except ModuleNotFoundError:
        return False
    provider = api.get_tracer_provider()
    return not isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider)


def export_to(endpoint: str) -> Any:
    """A provider that sends spans in batches to an OTLP collector over HTTP; `endpoint` is its base URL, as in OpenTelemetry's variables.

    Raises `ModuleNotFoundError` without the extra `otel`.
    """
    try:
        sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
        batch: Any = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources: Any = importlib.import_module("opentelemetry.sdk.resources")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"exporting traces to {endpoint} needs the extra `gnomon[otel]`: {error}") from error
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": "gnomon"}))
    provider.add_span_processor(
        batch.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces"))
    )
    return provider


def make_tracer(*, p2r: bool = False, sync: bool = False, otlp_endpoint: str | None = None) -> Tracer:
    """The process's tracer: JSON lines if `p2r`, OpenTelemetry if an endpoint is given or a provider is already set; else an inert one."""
    sinks: list[TraceSink] = []
    if p2r:
        sinks.append(JsonLines())
    if otlp_endpoint is not None:
        sinks.append(OpenTelemetry(export_to(otlp_endpoint)))
    elif exporter_configured():
        sinks.append(OpenTelemetry())
    return Tracer(sinks, sync=sync)
