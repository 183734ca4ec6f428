"""One life of the engine's process, the requests it holds, and how long anything may take."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

from gnomon import bell
from gnomon.engine.api import Event, Request, Sink
from gnomon.isolate.messages import Writer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Waits, in seconds."""

    load: float = 900.0
    """For a child to become ready."""
    submit: float = 5.0
    """For a request to be taken: longer than any turn of a live process, as the caller's event loop stands meanwhile."""
    compile: float = 60.0
    silence: float = 30.0
    """Without a report, or in the middle of a message, the child counts as frozen and is killed."""
    stop: float = 60.0
    """For the child to end by itself: it may have states to write."""
    early_death: float = 10.0
    """A child that dies so soon after it was ready is started again only after `pause`."""
    pause: float = 5.0
    window: float = 60.0
    restarts: int = 3
    """Most restarts within `window`; the next one waits until it is over."""


@dataclass(slots=True)
class Ticket:
    """A request whose last event has not come."""

    request: Request
    sink: Sink
    begun: bool = False
    """Something of the answer was delivered: it can't be begun again unseen."""
    retried: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class Child:
    """One life of the engine's process."""

    process: subprocess.Popen[bytes]
    connection: Connection
    writer: Writer
    born: float = field(default_factory=time.monotonic)
    ready: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    """When the last message of it was read."""

    @property
    def silence(self) -> float:
        """Seconds since it said something; none while what it said waits to be read."""
        with contextlib.suppress(OSError):
            if self.connection.poll():
                return 0.0
        return time.monotonic() - self.heard


AWAY: Final = 2.0
"""Seconds that something took longer than it can, after which this process stood still itself: a debugger, a paused machine."""


def in_time(reply: Future[None], seconds: float) -> None:
    """Wait for a reply, anew if this process stood still meanwhile. Raises TimeoutError, and what the reply raises."""
    begun = time.monotonic()
    try:
        reply.result(seconds)
    except FutureTimeout:
        if reply.done() or time.monotonic() - begun > seconds + AWAY:
            reply.result(seconds)
        else:
            raise


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def tell(heard: Sequence[tuple[Ticket, Event]]) -> None:
    """Give events to those who wait for them. What a listener raises is its own and is logged."""
    with bell.gathering():
        for ticket, event in heard:
            try:
                ticket.sink(event)
            except Exception as error:
                log.warning("request %s: its listener failed: %s", ticket.request.id, error, exc_info=error)
