"""What the two processes say to each other, over a socket pair that only they hold."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Literal, get_args

from gnomon.chat.constraint import Constraint
from gnomon.engine.api import Delta, Event, Health, ModelInfo, Request

# To the child


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what the child's program makes its engine from."""

    what: Any


@dataclass(frozen=True, slots=True)
class Submit:
    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class Compile:
    number: int
    constraint: Constraint


@dataclass(frozen=True, slots=True)
class Call:
    """One of the engine's methods that a person waits for."""

    number: int
    name: Literal["flush", "close_session", "embed", "score"]
    argument: Any


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    answered: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits any more for the reply to this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine and the process."""


# To the parent


@dataclass(frozen=True, slots=True)
class Ready:
    model: ModelInfo


@dataclass(frozen=True, slots=True)
class Unloadable:
    """The engine could not be made: no other attempt would fare better."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """To a numbered message: its value, or what it raised."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Happened:
    events: Sequence[Event]

    def __reduce__(self) -> tuple[Callable[[list[Any]], Happened], tuple[list[Any]]]:
        # New text is nearly all there is to tell: as plain tuples it is written and read in a quarter of the time.
        plain = [
            (event.request_id, event.index, event.text, event.ids, event.logprobs) if type(event) is Delta else event
            for event in self.events
        ]
        return _happened, (plain,)


def _happened(plain: list[Any]) -> Happened:
    return Happened([Delta(*event) if type(event) is tuple else event for event in plain])


@dataclass(frozen=True, slots=True)
class Report:
    """Sent every `REPORT_SECONDS` by a thread of its own: its absence means that the whole process stands still."""

    health: Health
    stats: Mapping[str, Any]


REPORT_SECONDS = 0.5


_EVENTS = frozenset[type](get_args(Event))


class Writer:
    """Sends messages and events from a thread of its own, so that no sender waits for the other process to read. Events that wait go as
    one message."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        self._queue.put(message)

    def close(self, timeout: float = 5.0) -> None:
        """Send what waits, for at most `timeout` seconds, and end."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        queue = self._queue
        # The other process may be gone: what it can't hear any more is of no use to it.
        with contextlib.suppress(OSError):
            while (message := queue.get()) is not None:
                events: list[Event] = []
                while type(message) in _EVENTS:
                    events.append(message)
                    if queue.empty():
                        break
                    message = queue.get()
                if events:
                    self._connection.send(Happened(events))
                if message is None:
                    return
                if type(message) not in _EVENTS:
                    self._connection.send(message)
