"""Loads of many requests: a closed loop of clients, and an open one on a schedule that no slow server slows and what met its aims."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from statistics import median, quantiles

from gnomon.bench.http import Rejected, Streamed
from gnomon.bench.workload import ArmFailed, Schedule

TAIL_SAMPLES = 20
"""Requests below which no 95th percentile is given: it would be their maximum."""


def closed_loop(
    prompts: Sequence[Sequence[str]], send: Callable[[str], Streamed]
) -> tuple[float, list[list[Streamed]]]:
    """Clients, one for each sequence of prompts, that send their next request when the last one has ended; returns the instant of the
    start (`perf_counter`) and each client's answers."""

    def client(mine: Sequence[str]) -> list[Streamed]:
        return [send(prompt) for prompt in mine]

    with ThreadPoolExecutor(len(prompts)) as pool:
        begun = time.perf_counter()
        return begun, list(pool.map(client, prompts))


def loop_summary(begun: float, answers: Sequence[Streamed]) -> dict[str, float]:
    """Tokens per second from the start to the last end, and latencies."""
    total = max(a.ended for a in answers) - begun
    firsts = [a.outputs[0] - a.begun for a in answers]
    return {
        "aggregate_tokens_per_second": sum(a.completion_tokens for a in answers) / total,
        "first_output_median_seconds": median(firsts),
        "first_output_max_seconds": max(firsts),
        "total_seconds": total,
    }


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: instants of `perf_counter` at which it was to be sent and was, and its answer, or the refusal."""

    scheduled: float
    sent: float
    answer: Streamed | Rejected

    @property
    def first(self) -> float | None:
        """Seconds from the scheduled arrival to the first output; None if it was refused."""
        return self.answer.outputs[0] - self.scheduled if isinstance(self.answer, Streamed) else None

    @property
    def pace(self) -> float | None:
        """Mean seconds of each token after the first; None if there are none, or it was refused."""
        if not isinstance(self.answer, Streamed) or self.answer.completion_tokens < 2:
            return None
        return (self.answer.ended - self.answer.outputs[0]) / (self.answer.completion_tokens - 1)


def arrival_times(schedule: Schedule, count: int, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests arrive. Poisson: gaps are exponential of mean 1 / rate, from `seed`, the first
    one included; constant: every 1 / rate seconds, the first at once."""
    if schedule.law == "constant":
        return [n / schedule.rate for n in range(count)]
    source = random.Random(seed)
    return list(accumulate(source.expovariate(schedule.rate) for _ in range(count)))


def offer(times: Sequence[float], send: Callable[[int], Streamed]) -> tuple[float, list[Arrival]]:
    """Send request n at `times[n]`, each on a thread of its own; returns the instant of the start and what came of each.

    A refusal (`Rejected`) is an outcome. Any other `ArmFailed` is raised once all requests have ended.
    """
    with ThreadPoolExecutor(len(times)) as pool:
        begun = time.perf_counter()

        def one(number: int) -> Arrival:
            scheduled = begun + times[number]
            time.sleep(max(0.0, scheduled - time.perf_counter()))
            sent = time.perf_counter()
            try:
                return Arrival(scheduled, sent, send(number))
            except Rejected as refusal:
                return Arrival(scheduled, sent, refusal)

        return begun, list(pool.map(one, range(len(times))))


def met(schedule: Schedule, arrival: Arrival) -> bool:
    """Whether a request met both objectives."""
    first, pace = arrival.first, arrival.pace
    return first is not None and first <= schedule.first and (pace is None or pace <= schedule.pace)


def summary(schedule: Schedule, begun: float, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Goodput (requests that met both objectives, per second from the start to the last end), latencies from the scheduled arrivals,
    and counts. Raises `ArmFailed` if every request was refused."""
    answers = [a.answer for a in arrivals if isinstance(a.answer, Streamed)]
    if not answers:
        raise ArmFailed(f"all {len(arrivals)} requests were refused: {arrivals[0].answer}")
    total = max(a.ended for a in answers) - begun
    good = sum(met(schedule, a) for a in arrivals)
    firsts = [a.first for a in arrivals if a.first is not None]
    paces = [a.pace for a in arrivals if a.pace is not None]
    found = {
        "goodput_requests_per_second": good / total,
        "objectives_met": good / len(arrivals),
        "rejected_requests": float(len(arrivals) - len(answers)),
        "aggregate_tokens_per_second": sum(a.completion_tokens for a in answers) / total,
        "first_output_median_seconds": median(firsts),
        "first_output_max_seconds": max(firsts),
        "total_seconds": total,
    }
    if paces:
        found["token_time_median_seconds"] = median(paces)
    if len(firsts) >= TAIL_SAMPLES:
        found["first_output_p95_seconds"] = quantiles(firsts, n=20, method="inclusive")[-1]
    return found
