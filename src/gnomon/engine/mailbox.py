"""What other threads ask of the engine thread."""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from gnomon.engine.embedding import EmbeddingJob
from gnomon.engine.row import Job


@dataclass(frozen=True, slots=True)
class Submit:
    job: Job


@dataclass(frozen=True, slots=True)
class Embed:
    job: EmbeddingJob


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Submit | Embed | Cancel | Stop


class Mailbox:
    """First in, first out, from any thread to one."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()

    def post(self, command: Command) -> None:
        self._queue.put(command)

    def take(self, wait: float = 0.0) -> list[Command]:
        """All commands there are, waiting up to `wait` seconds for a first one."""
        commands: list[Command] = []
        try:
            if wait:
                commands.append(self._queue.get(timeout=wait))
            while True:
                commands.append(self._queue.get_nowait())
        except Empty:
            return commands
