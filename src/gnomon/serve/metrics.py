"""Counts and times, for `/metrics` in Prometheus' text and for `/stats` as JSON. One registry per application."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gnomon.engine.api import Supervised, Usage
from gnomon.isolate import ModelPool
from gnomon.serve.keys import KeyRing

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
RECENT = 512
"""Requests that the percentiles of `/stats` look back on."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of one answered request, in seconds."""

    queue: float
    first_token: float
    total: float


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings, under names joined with `_`; the buckets of histograms are left out."""
    for key, value in values.items():
        name = f"{prefix}_{key}" if prefix else key
        if isinstance(value, Mapping):
            if key != "buckets":
                yield from numbers(value, name)
        elif isinstance(value, int | float):  # bool counts as 0 or 1
            yield name, float(value)


def _engine_numbers(engine: Supervised) -> Iterator[tuple[str, str, float]]:
    """Name, description and value of each gauge of an engine."""
    health = engine.health()
    yield "gnomon_engine_up", "1 while the engine's loop turns", health.state == "ok"
    yield "gnomon_engine_beat_age_seconds", "time since the engine's loop last turned", health.beat_age
    # Its section on itself says what health has said above.
    sections = {name: section for name, section in engine.stats().items() if name != "engine"}
    for name, value in numbers(sections):
        yield "gnomon_engine_" + re.sub(r"[^a-zA-Z0-9_]", "_", name), f"{name} of the engine", value


class EngineCollector(Collector):
    """The engine's own stats, read when someone asks."""

    def __init__(self, engine: Supervised) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        for name, about, value in _engine_numbers(self.engine):
            yield GaugeMetricFamily(name, about, value=value)


class PoolCollector(Collector):
    """The stats of each loaded model's engine under the model's id, and what the pool itself counts."""

    def __init__(self, pool: ModelPool[Any]) -> None:
        self.pool = pool

    def collect(self) -> Iterable[Metric]:
        gauges: dict[str, GaugeMetricFamily] = {}
        for model, engine in self.pool.engines().items():
            for name, about, value in _engine_numbers(engine):
                gauges.setdefault(name, GaugeMetricFamily(name, about, labels=("model",))).add_metric((model,), value)
        yield from gauges.values()
        resident = GaugeMetricFamily("gnomon_pool_resident", "1 while the model is loaded", labels=("model",))
        leases = GaugeMetricFamily("gnomon_pool_open", "requests that use the model", labels=("model",))
        waiting = GaugeMetricFamily("gnomon_pool_waiting", "requests that wait for the model", labels=("model",))
        requests = CounterMetricFamily("gnomon_pool_requests", "requests that got the model", labels=("model",))
        loads = CounterMetricFamily("gnomon_pool_loads", "times the model was loaded", labels=("model",))
        for entry, row in self.pool.entries():
            resident.add_metric((entry.id,), row["state"] == "resident")
            leases.add_metric((entry.id,), row["leases"])
            waiting.add_metric((entry.id,), row["waiting"])
            requests.add_metric((entry.id,), row["requests"])
            loads.add_metric((entry.id,), row["loads"])
        yield from (resident, leases, waiting, requests, loads)


class KeyCollector(Collector):
    """What each key has done, under its name."""

    def __init__(self, keys: KeyRing) -> None:
        self.keys = keys

    def collect(self) -> Iterable[Metric]:
        about = self.keys.stats()
        yield CounterMetricFamily(
            "gnomon_key_unknown", "requests without a key, or with one that is not known", value=about["unknown"]
        )
        yield GaugeMetricFamily(
            "gnomon_key_file_error", "1 while the file of keys can't be used", value=about["error"] is not None
        )
        requests = CounterMetricFamily("gnomon_key_requests", "requests by key", labels=("key",))
        refused = CounterMetricFamily("gnomon_key_refused", "of them over the key's limit", labels=("key",))
        under_way = GaugeMetricFamily("gnomon_key_open", "requests under way by key", labels=("key",))
        for name, use in about["uses"].items():
            requests.add_metric((name,), use["requests"])
            refused.add_metric((name,), use["refused"])
            under_way.add_metric((name,), use["open"])
        yield from (requests, refused, under_way)


class Metrics:
    """What the HTTP side counts. Written on the event loop only."""

    def __init__(self, running: Supervised, keys: KeyRing) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "gnomon_http_requests", "HTTP requests answered", ("method", "route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "gnomon_http_request_seconds", "time to the response's end", ("route",), registry=registry, buckets=_SECONDS
        )
        self.outcomes = Counter(
            "gnomon_generations",
            "generations by how they ended: completed, failed or cancelled",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self.streams = Gauge("gnomon_generations_open", "generations under way", registry=registry)
        self.prompt_tokens = Counter("gnomon_prompt_tokens", "prompt tokens of completed requests", registry=registry)
        self.cached_tokens = Counter("gnomon_cached_tokens", "of them reused from a cache", registry=registry)
        self.completion_tokens = Counter("gnomon_completion_tokens", "tokens generated", registry=registry)
        self.calls = Counter(
            "gnomon_tool_calls", "tool calls by outcome: complete or malformed", ("outcome",), registry=registry
        )
        self.first_token = Histogram(
            "gnomon_first_token_seconds", "from submission to the first token", registry=registry, buckets=_SECONDS
        )
        self.queued = Histogram("gnomon_queue_seconds", "wait for a row", registry=registry, buckets=_SECONDS)
        self.prefill = Histogram("gnomon_prefill_seconds", "time in prefill", registry=registry, buckets=_SECONDS)
        self.decode = Histogram("gnomon_decode_seconds", "time in decode", registry=registry, buckets=_SECONDS)
        self.recent: deque[Latency] = deque(maxlen=RECENT)
        self.watchers = 0
        """Streams of statistics that are open."""
        self.counts = {"completed": 0, "failed": 0, "cancelled": 0}
        self.open = 0
        registry.register(PoolCollector(running) if isinstance(running, ModelPool) else EngineCollector(running))
        registry.register(KeyCollector(keys))

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        # Methods are the client's words: unknown ones must not become label values without end.
        known = method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
        self.requests.labels(known, route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def opened(self) -> None:
        self.open += 1
        self.streams.inc()

    def ended(self, endpoint: str, outcome: str) -> None:
        self.open -= 1
        self.streams.dec()
        self.counts[outcome] += 1
        self.outcomes.labels(endpoint, outcome).inc()

    def usage(self, usage: Usage) -> None:
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.completion_tokens.inc(usage.completion_tokens)
        self.queued.observe(usage.queue_seconds)
        self.prefill.observe(usage.prefill_seconds)
        self.decode.observe(usage.decode_seconds)

    def tool_calls(self, complete: int, malformed: int) -> None:
        for outcome, count in (("complete", complete), ("malformed", malformed)):
            self.calls.labels(outcome).inc(count)

    def latency(self, latency: Latency) -> None:
        self.first_token.observe(latency.first_token)
        self.recent.append(latency)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def summary(self) -> dict[str, Any]:
        """Percentiles over the recent requests, in milliseconds; null without any."""
        recent = list(self.recent)
        return {
            "requests": len(recent),
            "queue_ms": _percentiles([one.queue for one in recent]),
            "first_token_ms": _percentiles([one.first_token for one in recent]),
            "total_ms": _percentiles([one.total for one in recent]),
        }


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    """Nearest-rank percentiles."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": None, "p95": None, "max": None}

    def at(percent: int) -> float:
        return round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)] * 1e3, 3)

    return {"p50": at(50), "p95": at(95), "max": at(100)}
