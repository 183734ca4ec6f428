"""What other threads ask of the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx

from gnomon.engine.aside import SideJob
from gnomon.engine.row import Job


@dataclass(frozen=True, slots=True)
class Submit:
    job: Job


@dataclass(frozen=True, slots=True)
class Beside:
    job: SideJob[Any]


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    answered: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Wake:
    """Something that requests wait for has come."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Hold on to a session's states no longer; `answer` hears whether there was such a session."""

    session: str
    answer: Future[bool] | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Do `work` on the engine's thread and give its result to `answer`."""

    work: Callable[[], Any]
    answer: Future[Any]


Command = Submit | Beside | Cancel | Stop | Wake | CloseSession | Ask


class Mailbox:
    """First in, first out, from any thread to one."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()

    def post(self, command: Command) -> None:
        self._queue.put(command)

    def take(self, wait: float = 0.0, digest: Callable[[], int] | None = None) -> list[Command]:  # noqa: ARG002  (for several processes)
        """All commands there are, waiting up to `wait` seconds for a first one. `digest` tells what the engine has come to."""
        commands: list[Command] = []
        try:
            if wait:
                commands.append(self._queue.get(timeout=wait))
            while True:
                commands.append(self._queue.get_nowait())
        except Empty:
            return commands

    def active_memory(self) -> int:
        """Bytes that MLX holds, as the engine that takes this mail is to reckon them."""
        return mx.get_active_memory()
