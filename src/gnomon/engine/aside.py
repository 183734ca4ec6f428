"""Work on whole prompts that makes no tokens, on the engine thread, one window at a time between the steps of the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx

from gnomon.engine.api import EngineError, EngineUnavailable
from gnomon.engine.runner import Runner
from gnomon.kernels import dispatch
from gnomon.state.batch_state import BatchState

T = TypeVar("T")


class SideJob(ABC, Generic[T]):
    """Prompts under way, a result for each; whoever loses interest cancels the future.

    Every prompt is computed alone, so that its result depends on nothing else.
    """

    what: ClassVar[str]
    """What is done, in messages."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self.prompts = prompts
        self.future: Future[list[T]] = Future()
        self.results: list[T] = []
        self.state: BatchState | None = None
        self.done = 0
        """Tokens of the current prompt that are in its state."""

    def needed(self, prompt: Sequence[int]) -> int:
        """How many of a prompt's tokens have to be computed."""
        return len(prompt)

    def width(self, runner: Runner, prompt: Sequence[int]) -> int:
        """The most tokens of a window."""
        return runner.workspace.chunk(runner.config.prefill_chunk, len(prompt))

    @abstractmethod
    def forward(self, runner: Runner, window: mx.array, state: BatchState) -> mx.array:
        """What the model makes of a window (1, tokens) of ids."""

    @abstractmethod
    def take(self, prompt: Sequence[int], start: int, made: mx.array | None) -> T | None:
        """Take what was made of the window that began at `start`, None if none was needed; the prompt's result after its last."""

    def advance(self, runner: Runner) -> None:
        """Run one window of the first prompt without a result."""
        prompt, start = self.prompts[len(self.results)], self.done
        end = min(start + self.width(runner, prompt), self.needed(prompt))
        made: mx.array | None = None
        if end > start:
            state = self.state = self.state or runner.new_state()
            runner.heart.beat(f"{self.what} {end - start} tokens", end - start)
            with dispatch.step():
                state.begin(end - start)
                made = self.forward(runner, mx.array([prompt[start:end]], dtype=mx.int32), state)
                state.commit()
        self.done = end
        result = self.take(prompt, start, made)
        if result is not None:
            self.results.append(result)
            self.state, self.done = None, 0
            mx.clear_cache()
        elif self.state is not None:
            mx.eval(self.state.arrays())


class Aside:
    """The side jobs that wait for the engine thread."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.waiting: deque[SideJob[Any]] = deque()

    def turn(self) -> None:
        """Run one window of the first prompt that waits. Raises `DeviceFailed` when that fails and nothing else works either."""
        while self.waiting and self.waiting[0].future.cancelled():
            self.waiting.popleft()
        if not self.waiting:
            return
        job = self.waiting[0]
        try:
            job.advance(self.runner)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this job's, or the device is gone)
            self.waiting.popleft()
            _settle(job, EngineError(f"{job.what} failed: {error}"))
            job.state = None
            self.runner.mend()
            self.runner.probe()
            return
        if len(job.results) == len(job.prompts):
            self.waiting.popleft()
            _settle(job, None)

    def fail_all(self, error: Exception) -> None:
        for job in self.waiting:
            _settle(job, EngineUnavailable(str(error)))
        self.waiting.clear()


def _settle(job: SideJob[Any], error: Exception | None) -> None:
    # Cancelled in the meantime: nobody waits.
    with suppress(InvalidStateError):
        if error is None:
            job.future.set_result(job.results)
        else:
            job.future.set_exception(error)
