"""A child program over a scripted engine without a model: what the prompt says happens."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.engine.api import (
    ChoiceFinished,
    Delta,
    EngineUnavailable,
    Finished,
    FlushReport,
    Health,
    InvalidRequest,
    ModelInfo,
    QueueFull,
    Request,
    Sink,
    Usage,
)
from gnomon.isolate import run

SAY, DIE, HANG, FULL, INVALID, SLOW = range(6)


class Stub:
    model = ModelInfo("stub", "/nowhere", "llama", 512, 257, (256,), 1000, 1_700_000_000)

    def __init__(self, what: Any) -> None:
        if what == "unloadable":
            raise ValueError("there is no such model")
        if what == "never ready":
            time.sleep(600)
        if isinstance(what, str) and what.startswith("waits for "):
            while not Path(what.removeprefix("waits for ")).exists():
                time.sleep(0.01)
        if what == "dies early":
            os._exit(3)
        if isinstance(what, str) and what.startswith("model "):
            self.model = replace(self.model, id=what.removeprefix("model "))
        if isinstance(what, tuple):
            # What `gnomon serve` sends: shown where a test can see it.
            config, found = what
            shares = (config.engine.memory_budget, config.engine.prompt_cache)
            self.model = replace(self.model, id=found.id, path=f"{found.path} {shares}")
        self.marker = what
        self.cancelled: set[str] = set()

    def submit(self, request: Request, sink: Sink) -> None:
        order = request.prompt[0]
        if order == FULL:
            raise QueueFull("64 requests wait", 7)
        if order == INVALID:
            raise InvalidRequest("the prompt is too long", "prompt", "context_length_exceeded")
        threading.Thread(target=self.answer, args=(order, request, sink), daemon=True).start()

    def answer(self, order: int, request: Request, sink: Sink) -> None:
        if order == DIE or (order == SLOW and self.first_time()):
            os.kill(os.getpid(), signal.SIGKILL)
        sink(Delta(request.id, 0, "one" if self.model.id == "stub" else f"{self.model.id} one", (1,)))
        while order == HANG and request.id not in self.cancelled:
            time.sleep(0.01)
        sink(Delta(request.id, 0, " two", (2,)))
        sink(ChoiceFinished(request.id, 0, "cancelled" if order == HANG else "stop"))
        sink(Finished(request.id, Usage(len(request.prompt), 2)))

    def first_time(self) -> bool:
        """Whether no child before has been here."""
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def embed(self, prompts: Sequence[tuple[int, ...]]) -> Future[list[list[float]]]:
        made: Future[list[list[float]]] = Future()
        made.set_result([[float(len(self.model.id)), 0.0] for _ in prompts])
        return made

    def compile(self, constraint: Any) -> Sequence[str]:
        raise EngineUnavailable("no grammars here")

    def cancel(self, request_id: str, *, answered: bool = False) -> None:
        self.cancelled.add(request_id)

    def health(self) -> Health:
        return Health("ok", 0.1)

    def stats(self) -> Mapping[str, Any]:
        return {"batch": {"configured": 8}, "pid": os.getpid()}

    def flush(self, timeout: float) -> FlushReport:
        return FlushReport(True, entries=int(timeout))

    def close_session(self, session: str) -> bool:
        return session == "open"

    def drain(self, timeout: float) -> bool:
        return True

    def stop(self) -> None:
        """Write for 3 s where that was asked for."""
        if isinstance(self.marker, str) and self.marker.startswith("writes "):
            time.sleep(3)
            Path(self.marker.removeprefix("writes ")).touch()


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[-1]), Stub))
