"""From the engine's thread to the event loop: the events of one HTTP request, bounded, and cancelled when nobody wants them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Self

from gnomon import bell
from gnomon.engine.api import Delta, Engine, EngineError, Event, Failed, Finished, Progress, Replayed, Request
from gnomon.serve.errors import APIError, from_engine
from gnomon.trace import OFF, Tracer

logger = logging.getLogger(__name__)

CAPACITY = 4096
"""Events that may wait for a client that doesn't read; with one more its request is cancelled."""


class Relay:
    """Carries events to the streams of one event loop, which is woken once for all that came since it last looked.

    Waking costs a system call, in which the engine's thread gives up the interpreter: for every row and token that is too much.
    """

    _of_loops: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Relay]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not the loop itself: the relay is its value in the table above.
        self._loop = weakref.ref(loop)
        self._waiting: deque[tuple[EventStream, Event]] = deque()
        self._woken = False
        """The loop was woken and has not begun to look."""

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Relay:
        """The loop's own."""
        return cls._of_loops.setdefault(loop, cls(loop))

    def send(self, stream: EventStream, event: Event) -> None:
        """Have the loop hand an event to a stream. From any thread."""
        self._waiting.append((stream, event))
        # Appended before looked: whoever lowers the flag after this sees the event.
        if not self._woken:
            bell.wake(self._wake)

    def _wake(self) -> None:
        if self._woken:
            return
        self._woken = True
        loop = self._loop()
        try:
            if loop is None:
                raise RuntimeError("the loop is gone")
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            logger.debug("%d events after the loop closed", len(self._waiting))
            self._waiting.clear()
            self._woken = False

    def _deliver(self) -> None:
        self._woken = False
        waiting = self._waiting
        for _ in range(len(waiting)):
            stream, event = waiting.popleft()
            try:
                stream.receive(event)
            except Exception:  # what one stream's engine raises when it is told to cancel is not the others' loss
                logger.exception("event of %s was not received", event.request_id)


class EventStream:
    """The events of the engine requests behind one HTTP request, in the order the engine sent them.

    Leaving the `async with` block, or calling `close`, cancels what is still running: wherever it is, in the queue, in prefill or
    in decode, the engine gives its row or slot back at the next chunk or step.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[Request], capacity: int = CAPACITY, tracer: Tracer = OFF
    ) -> None:
        """Submit the requests, all or none. Must run on the event loop. Raises APIError with the engine's reason."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._capacity = capacity
        self._pending: deque[Event] = deque()
        self._relay = Relay.of(self._loop)
        self._waiter: asyncio.Future[None] | None = None
        """Of the reader, while it waits."""
        self._timer: asyncio.TimerHandle | None = None
        self._silent_at = 0.0
        self._open: set[str] = set()
        self._closed = False
        self._overflowed = False
        self.submitted_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.progress: dict[str, Progress] = {}
        self._tracer = tracer
        self._traced: list[str] = []
        self._sent: deque[tuple[str, float]] = deque()
        """Texts under way: request and when the engine gave them out. The first `_handed` of them were read here."""
        self._handed = 0
        try:
            for request in requests:
                tracer.begin(request.id, request.trace_id)
                self._traced.append(request.id)
                engine.submit(request, self._sink)
                self._open.add(request.id)
        except EngineError as error:
            self.close()
            raise from_engine(error) from error

    @property
    def ended(self) -> bool:
        """Every request has had its last event, and all events were read."""
        return not self._open and not self._pending

    def _sink(self, event: Event) -> None:
        # On the engine thread.
        if self._tracer.enabled and isinstance(event, Delta):
            self._sent.append((event.request_id, time.monotonic()))
        self._relay.send(self, event)

    def receive(self, event: Event) -> None:
        """Take an event for the reader. On the event loop."""
        kind = type(event)
        if kind is Finished or kind is Failed:
            self._open.discard(event.request_id)
        if self._closed or self._overflowed:
            return
        if kind is Delta or kind is Replayed:
            if self.first_token_at is None:
                self.first_token_at = time.perf_counter()
        elif isinstance(event, Progress):
            self.progress[event.request_id] = event
            return
        if len(self._pending) >= self._capacity:
            self._overflowed = True
            self._pending.clear()
            self.cancel()
        else:
            self._pending.append(event)
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self, timeout: float | None = None) -> list[Event]:
        """All events that wait, at least one; none after `timeout` seconds of silence, or when every request has ended.

        Raises APIError when the reader fell so far behind that its request was cancelled.
        """
        if self._handed:
            self._delivered()
        if not (self._pending or self._overflowed or self.ended):
            self._silent_at = math.inf if timeout is None else self._loop.time() + timeout
            if timeout is not None and self._timer is None:
                self._timer = self._loop.call_at(self._silent_at, self._silence)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._overflowed:
            raise APIError(
                503,
                f"the client reads too slowly: more than {self._capacity} events waited for it, and its request was cancelled",
                type="server_error",
                code="client_too_slow",
            )
        events = list(self._pending)
        self._pending.clear()
        if self._tracer.enabled:
            self._handed = sum(isinstance(event, Delta) for event in events)
        return events

    def _silence(self) -> None:
        """One timer runs for many waits: setting and cancelling one for each token costs more than its text."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() >= self._silent_at:
            self._wake()
        elif self._silent_at < math.inf:
            self._timer = self._loop.call_at(self._silent_at, self._silence)

    def _delivered(self) -> None:
        """Whoever asks for more, or closes, has written what it was given before: that ends these deliveries."""
        for _ in range(self._handed):
            request_id, sent = self._sent.popleft()
            self._tracer.span(request_id, "delivery", sent)
        self._handed = 0

    def cancel(self, *, answered: bool = False) -> None:
        """Stop what still runs; its events come until the last. `answered` tells that the client has all it wants."""
        for request_id in tuple(self._open):
            self._engine.cancel(request_id, answered=answered)

    def close(self) -> None:
        """Cancel what still runs and drop what waits. May be called again."""
        if not self._closed:
            self._closed = True
            self._pending.clear()
            if self._timer is not None:
                self._timer.cancel()
            self.cancel()
            self._delivered()
            for request_id in self._traced:
                self._tracer.end(request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
