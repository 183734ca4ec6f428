"""Work that may take long and needs no device (parsing, rendering, tokenising), off the event loop and bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from gnomon.serve.errors import too_many

T = TypeVar("T")


class PreparationPool:
    """Threads that prepare requests. At most `limit` requests wait for one; a further request is refused with 429.

    A request that is cancelled while it waits leaves the queue at once; one that is being worked on holds its thread until
    that work returns. All methods run on the event loop.
    """

    def __init__(self, limit: int, workers: int = 2) -> None:
        self.limit = limit
        self.workers = workers
        self._held = 0
        self._executor = ThreadPoolExecutor(workers, "prepare")

    @property
    def running(self) -> int:
        return min(self._held, self.workers)

    @property
    def waiting(self) -> int:
        return self._held - self.running

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work()` on a thread. Raises APIError 429 when the queue is full, and what `work` raises."""
        if self.waiting >= self.limit and self.running >= self.workers:
            raise too_many(
                f"the preparation queue is full: {self.waiting} requests wait, and no more than {self.limit} may", 1
            )
        loop = asyncio.get_running_loop()
        future = self._executor.submit(work)
        self._held += 1

        def release(_: Future[T]) -> None:
            try:
                loop.call_soon_threadsafe(self._release)
            except RuntimeError:  # the loop closed while a thread was at work: nobody counts any more
                return

        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def later(self, work: Callable[[], object]) -> None:
        """Do `work` on a thread when one is free; nobody waits for it, and what it raises is its own to handle."""
        # None takes it after `close`.
        with contextlib.suppress(RuntimeError):
            self._executor.submit(work)

    def _release(self) -> None:
        self._held -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
