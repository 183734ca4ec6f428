"""Which part of a request's time went where, for whoever traces."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from gnomon.engine.row import Job
from gnomon.trace import Phase, Tracer, Value


class Spans:
    """Reports to a tracer, if one is on. Used on the engine's thread only."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.num_spans = 0

    @property
    def enabled(self) -> bool:
        return self.tracer.enabled

    def queued(self, job: Job) -> None:
        """A request was admitted."""
        self.tracer.span(job.request.id, "queue", job.submitted, job.admitted)

    def work(self, jobs: Sequence[Job], phase: Phase, start: float, **attributes: Value) -> None:
        """Report a span of work that these requests share."""
        if not self.tracer.enabled:
            return
        if self.tracer.sync:
            mx.synchronize()
        end = time.monotonic()
        self.num_spans += 1
        shared = self.num_spans if len(jobs) > 1 else None
        for job in dict.fromkeys(jobs):
            self.tracer.span(job.request.id, phase, start, end, work_id=shared, **attributes)

    def end(self, job: Job) -> None:
        """Report the wait for the first token, which overlaps the first step, and close the request's trace."""
        if not self.tracer.enabled:
            return
        if job.first_token:
            self.tracer.span(job.request.id, "first_token", job.prefilled or job.admitted, job.first_token)
        outcome = "cancelled" if job.cancelled else "failed" if job.error is not None else "finished"
        counts = {"promptTokens": len(job.prompt), "completionTokens": job.num_generated}
        self.tracer.end(job.request.id, outcome, lane="batched" if job.batched else "serial", **counts)
