"""Counts and gauges. Written by the engine thread as plain numbers, read by any other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from gnomon.engine.row import Job

STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the step time histogram, in seconds."""


@dataclass(slots=True)
class Rate:
    """Tokens per second of busy time, whole life and lately (the last 256 or more tokens weigh most)."""

    tokens: int = 0
    seconds: float = 0.0
    recent_tokens: float = 0.0
    recent_seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.recent_tokens += tokens
        self.recent_seconds += seconds
        if self.recent_tokens > 512:
            self.recent_tokens /= 2
            self.recent_seconds /= 2

    @property
    def mean(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    @property
    def recent(self) -> float | None:
        return self.recent_tokens / self.recent_seconds if self.recent_seconds else None


@dataclass(slots=True)
class Counters:
    """Everything counted since the engine started, and the gauges of the last turn that took them."""

    submitted_requests: int = 0
    submitted_rows: int = 0
    finished_requests: int = 0
    cancelled_requests: int = 0
    failed_requests: int = 0
    refused_requests: int = 0
    recoveries: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    steps: int = 0
    batched_steps: int = 0
    window_steps: int = 0
    step_rows: int = 0
    prefill_chunks: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    proposed_at: list[int] = field(default_factory=list[int])
    accepted_at: list[int] = field(default_factory=list[int])
    """Proposed and accepted tokens by their place in the window."""
    masks: int = 0
    mask_seconds: float = 0.0
    """Host time spent on finding what constrained rows may draw."""
    prefill: Rate = field(default_factory=Rate)
    decode: Rate = field(default_factory=Rate)
    step_buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    step_seconds: float = 0.0
    request_seconds: float = 0.0
    """Mean time from admission to end, weighted towards recent requests."""
    active_rows: int = 0
    kv_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict[str, int])

    def step(self, rows: int, seconds: float) -> None:
        """One decode step of `rows` rows took `seconds` of the engine's time."""
        self.steps += 1
        self.step_rows += rows
        self.batched_steps += rows > 1
        self.step_seconds += seconds
        for i, bound in enumerate(STEP_BUCKETS):
            if seconds <= bound:
                self.step_buckets[i] += 1
                return
        self.step_buckets[-1] += 1

    def guessed(self, proposed: int, accepted: int) -> None:
        """A row's guesses were verified."""
        self.proposed_tokens += proposed
        self.accepted_tokens += accepted
        for counts, n in ((self.proposed_at, proposed), (self.accepted_at, accepted)):
            counts.extend([0] * (proposed - len(counts)))
            for position in range(n):
                counts[position] += 1

    def ended(self, job: Job) -> None:
        """A request left."""
        if job.error is not None:
            self.failed_requests += 1
        elif job.cancelled:
            self.cancelled_requests += 1
        else:
            self.finished_requests += 1
            seconds = time.monotonic() - job.admitted
            self.request_seconds = seconds if not self.request_seconds else 0.8 * self.request_seconds + 0.2 * seconds

    def histogram(self) -> dict[str, Any]:
        """Cumulative counts by upper bound, as Prometheus has them."""
        total, out = 0, dict[str, int]()
        for bound, count in zip([*map(str, STEP_BUCKETS), "+Inf"], self.step_buckets, strict=True):
            total += count
            out[bound] = total
        return {"buckets": out, "sum": self.step_seconds, "count": self.steps}
