"""What gives way, in which order, when memory runs short: what is kept for reuse, then the size of prefill windows, then who is admitted.

    used > ceiling     cache has something     it is given up                         step "cache"
                       else                    windows are halved, to FEWEST tokens   step "chunk"
                       else                    nobody joins those who run             step "queue"
    used < release     for CALM turns          back by one: admit, then double the windows

Between release and ceiling nothing changes, so that no step is taken back only to be taken again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import mlx.core as mx

log = logging.getLogger(__name__)

RELEASE: Final = 0.9
"""Share of the ceiling under which memory is no longer short."""
CALM: Final = 16
"""Turns in a row under it before a step is taken back."""
WARY: Final = 1024
"""The same after an allocation failed, of which the numbers had not told."""
FEWEST: Final = 32
"""Tokens of the smallest window."""

REMEMBERED: Final = 16
"""Changes of step or window that are told of."""

Step = Literal["none", "cache", "chunk", "queue"]
STEPS: Final[tuple[Step, ...]] = ("none", "cache", "chunk", "queue")


@dataclass(frozen=True, slots=True)
class Change:
    """What was entered `at` (monotonic), with so many bytes in use and windows of so many tokens."""

    at: float
    step: Step
    used: int
    chunk: int


class Pressure:
    """Watches what MLX holds, once a turn. `shed` gives up so many bytes of what is kept for reuse and says how many went.

    `active` tells the bytes in use, to which `windows` adds what prefill needs for a moment. With `enabled` off only what is kept for
    reuse gives way. Everything runs on the engine's thread except `stats`.
    """

    def __init__(
        self,
        ceiling: int,
        chunk: int,
        shed: Callable[[int], int],
        *,
        enabled: bool = True,
        active: Callable[[], int] = mx.get_active_memory,
        windows: bool = True,
    ) -> None:
        self.ceiling = ceiling
        self.full = chunk
        self.chunk = chunk
        """The most tokens of a prefill window now."""
        self.shed = shed
        self.enabled = enabled
        self.active = active
        self.windows = windows
        self.step: Step = "none"
        self.used = 0
        self.peak = 0
        """The most bytes in use at once, of all windows."""
        self.reclaims = 0
        self.reclaimed_bytes = 0
        self.halvings = 0
        self.holds = 0
        self.failures = 0
        self._window = 0
        """What the last window needed while it ran, in bytes; 0 if none ran since the last look."""
        self._calm = 0
        self._patience = CALM
        self._since = time.monotonic()
        self._history: tuple[Change, ...] = ()
        """The last changes, oldest first; replaced whole, as other threads read it."""

    @property
    def release(self) -> int:
        return int(RELEASE * self.ceiling)

    @property
    def is_holding(self) -> bool:
        """Nobody is to join those who run."""
        return self.step == "queue"

    def window_begins(self) -> None:
        """A prefill window is about to run."""
        self.peak = max(self.peak, mx.get_peak_memory())
        mx.reset_peak_memory()

    def window_ended(self) -> None:
        peak = mx.get_peak_memory()
        self.peak = max(self.peak, peak)
        if self.windows:
            self._window = peak

    def look(self) -> None:
        """Take a step if memory is short, or one back if it has not been for a while."""
        held = self.active()
        self.used, self._window = max(held, self._window), 0
        if self.used > self.ceiling:
            self._calm = 0
            self._reclaim(self.used - self.ceiling)
        elif self.used < self.release and self.step != "none":
            self._calm += 1
            if self._calm >= self._patience:
                self._calm = 0
                self._ease()
        else:
            self._calm = 0

    def failed(self) -> None:
        """An allocation failed: whatever the numbers say, memory is short."""
        self.failures += 1
        self._calm, self._patience = 0, WARY
        went = self.shed(1 << 62)
        self.reclaimed_bytes += went
        self.reclaims += went > 0
        mx.clear_cache()
        if self.enabled:
            self._halve()

    def idle(self) -> None:
        """Nothing runs: whoever comes next meets no one to wait for."""
        if self.step == "queue":
            self._enter("chunk" if self.chunk < self.full else "cache")

    def _reclaim(self, excess: int) -> None:
        went = self.shed(excess)
        if went > 0:
            self.reclaims += 1
            self.reclaimed_bytes += went
            if self.step == "none":
                self._enter("cache")
        elif self.enabled and self.chunk > FEWEST:
            self._halve()
        elif self.enabled and self.step != "queue":
            self.holds += 1
            self._enter("queue")

    def _halve(self) -> None:
        if self.chunk > FEWEST:
            self.halvings += 1
            self.chunk = max(FEWEST, self.chunk // 2)
        if self.step != "queue":
            self._enter("chunk")
        self._note()

    def _ease(self) -> None:
        if self.step == "queue":
            self._enter("chunk" if self.chunk < self.full else "cache")
        elif self.chunk < self.full:
            self.chunk = min(self.full, self.chunk * 2)
            if self.chunk == self.full:
                self._enter("cache")
            self._note()
        else:
            self._patience = CALM
            self._enter("none")

    def _enter(self, step: Step) -> None:
        if step == self.step:
            return
        level = logging.INFO if STEPS.index(step) < STEPS.index(self.step) or step == "cache" else logging.WARNING
        about = (self.step, step, self.used, self.ceiling, self.chunk)
        log.log(level, "memory: step %s to %s at %d bytes in use, ceiling %d, windows of %d tokens", *about)
        self.step, self._since = step, time.monotonic()
        self._note()

    def _note(self) -> None:
        """Remember the step and window, if they are not those of the last change."""
        last = self._history[-1] if self._history else None
        if last is None or (last.step, last.chunk) != (self.step, self.chunk):
            change = Change(time.monotonic(), self.step, self.used, self.chunk)
            self._history = (*self._history, change)[-REMEMBERED:]

    def stats(self) -> dict[str, Any]:
        """As plain JSON values; read on any thread. `level` is the step's number, for graphs."""
        now = time.monotonic()
        return {
            "enabled": self.enabled,
            "step": self.step,
            "level": STEPS.index(self.step),
            "step_seconds": now - self._since,
            "used_bytes": self.used,
            "ceiling_bytes": self.ceiling,
            "release_bytes": self.release,
            "chunk_tokens": self.chunk,
            "full_chunk_tokens": self.full,
            "reclaims": self.reclaims,
            "reclaimed_bytes": self.reclaimed_bytes,
            "chunk_halvings": self.halvings,
            "holds": self.holds,
            "allocation_failures": self.failures,
            "history": [
                {
                    "step": one.step,
                    "seconds_ago": round(now - one.at, 1),
                    "used_bytes": one.used,
                    "chunk_tokens": one.chunk,
                }
                for one in self._history
            ],
        }


_NO_MEMORY: Final = (
    "[malloc]",
    "unable to allocate",
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or what it came from, says that an allocation failed: MLX has no type of its own for it."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and any(one in text for one in _NO_MEMORY)
        ):
            return True
        error = error.__cause__
    return False


def code_of(error: Exception) -> str:
    """The code of a request that failed for `error`."""
    return "out_of_memory" if is_out_of_memory(error) else "engine_error"
