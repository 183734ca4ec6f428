"""Runs paired blocks: every arm gets the same workload back to back, in alternating order, and every attempt is kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from pydantic import ValidationError

from gnomon.bench.preflight import CPUWatch, SwapGuard
from gnomon.bench.schema import Sample, Status
from gnomon.bench.workload import ArmFailed, ArmTimedOut, Cell, Contender, Measurement, Unsupported, Workload

log = logging.getLogger(__name__)

WARMUP_TIMEOUT = 600.0
MIN_TIMEOUT = 120.0


class Interrupted(Exception):
    """The run was stopped from outside; what was measured so far is kept."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run. `seed` is the first block's workload seed; each further block adds one. `exclusive` keeps one arm alive at a time."""

    blocks: int
    seed: int = 0
    warmups: int = 1
    exclusive: bool = False


def order(block: int, arms: int) -> list[int]:
    """Order of the arms in a block: AB and BA in turn; with more arms, even blocks start one further on and odd ones mirror them."""
    if arms == 2:
        return [0, 1] if block % 2 == 0 else [1, 0]
    shift = (block // 2) % arms
    forward = [(shift + i) % arms for i in range(arms)]
    return forward if block % 2 == 0 else forward[::-1]


def wrong_work(workload: Workload, measured: Measurement) -> str | None:
    """How the work done differs from the work ordered, or None."""
    cell, work = workload.cell, measured.work
    if cell.task == "command":
        return None
    ordered = {"concurrency": cell.rows, "depth": cell.depth}
    if cell.total_output is not None:
        ordered["output_tokens"] = cell.total_output
    if cell.prompt_tokens:
        ordered["prompt_tokens"] = cell.prompt_tokens * cell.rows
    for name, wanted in ordered.items():
        if getattr(work, name) != wanted:
            return f"{name} is {getattr(work, name)}, ordered were {wanted}"
    return None


class Runner:
    """Measures contenders in blocks. `record` is called with every sample as soon as it is known.

    A sample fails alone: the block goes on with the other arms and the arm is restarted for the next one. Nothing is tried again.
    """

    def __init__(self, contenders: Sequence[Contender], record: Callable[[Sample], None], plan: Plan) -> None:
        names = [contender.arm.name for contender in contenders]
        if len(set(names)) != len(names):
            raise ValueError(f"arms need distinct names, not {', '.join(names)}")
        self._contenders = list(contenders)
        self._record = record
        self._plan = plan
        self._began = time.perf_counter()
        self._index = 0

    def run(self, cells: Sequence[Cell]) -> None:
        """Warm up, then measure every cell in every block. Raises `Interrupted` if the user stops it; contenders are stopped either way."""
        try:
            for cell in cells:
                budget = self._warm(cell)
                for block in range(self._plan.blocks):
                    workload = Workload(cell, self._plan.seed + block, block, timeout=budget)
                    for slot, place in enumerate(order(block, len(self._contenders))):
                        self._sample(self._contenders[place], workload, slot)
        finally:
            for contender in self._contenders:
                contender.stop()

    def _warm(self, cell: Cell) -> float:
        """Run the warm-ups (block -1) and return the time a sample may take: four times the slowest warm-up, at least two minutes."""
        slowest = 0.0
        for attempt in range(1, self._plan.warmups + 1):
            workload = Workload(cell, self._plan.seed - 1, -1, attempt, WARMUP_TIMEOUT)
            for slot, contender in enumerate(self._contenders):
                slowest = max(slowest, self._sample(contender, workload, slot))
        return max(MIN_TIMEOUT, 4 * slowest)

    def _sample(self, contender: Contender, workload: Workload, slot: int) -> float:
        swap, watch = SwapGuard(), CPUWatch([os.getpid()])
        started = time.perf_counter()
        measured: Measurement | None = None
        status: Status = "ok"
        reason: str | None = None
        stopped: BaseException | None = None
        try:
            if self._plan.exclusive:
                for other in self._contenders:
                    if other is not contender:
                        other.stop()
            if workload.cell.task not in ("start", "memory"):  # they start it anew themselves
                contender.start()
            measured = contender.measure(workload)
        except Unsupported as error:
            status, reason = "unsupported", str(error)
        except ArmTimedOut as error:
            status, reason = "timeout", str(error)
        except ArmFailed as error:
            status, reason = "failed", str(error)
        except KeyboardInterrupt as error:
            status, reason, stopped = "interrupted", "stopped by the user", error
        except Exception as error:  # whatever breaks a contender is that contender's failure, and part of the record
            log.exception("arm %s broke", contender.arm.name)
            status, reason = "failed", f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - started
        if measured is not None:
            disturbed = swap.disturbance()
            wrong = wrong_work(workload, measured)
            if disturbed is not None:
                status, reason = "interrupted", disturbed
            elif wrong is not None:
                status, reason = "invalid", wrong
        if status in ("failed", "timeout", "interrupted"):
            contender.stop()
        self._record(self._row(contender, workload, slot, status, reason, measured, started, seconds, watch.read()))
        if stopped is not None:
            raise Interrupted("stopped by the user") from stopped
        return seconds

    def _row(
        self,
        contender: Contender,
        workload: Workload,
        slot: int,
        status: Status,
        reason: str | None,
        measured: Measurement | None,
        started: float,
        seconds: float,
        others: float,
    ) -> Sample:
        common = {
            "index": self._index,
            "cell": str(workload.cell),
            "block": workload.block,
            "slot": slot,
            "arm": contender.arm.name,
            "seed": workload.seed,
            "attempt": workload.attempt,
            "started": started - self._began,
            "seconds": seconds,
            "others_cpu": round(others, 4),
            "swap_bytes": psutil.swap_memory().used,
        }
        self._index += 1
        if measured is None:
            return Sample.model_validate({**common, "status": status, "reason": reason})
        full = {**common, "metrics": measured.metrics, "work": measured.work, "details": measured.details}
        try:
            return Sample.model_validate({**full, "status": status, "reason": reason})
        except ValidationError as error:
            first = error.errors()[0]
            nonsense = f"nonsense: {'.'.join(map(str, first['loc']))}: {first['msg']}"
            return Sample.model_validate({**common, "status": "invalid", "reason": nonsense})
