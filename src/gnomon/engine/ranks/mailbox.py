"""Mailboxes that keep several processes in step: what one takes, all take, before the same turn."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import mlx.core as mx

from gnomon.engine.api import Event, Request, Sink
from gnomon.engine.mailbox import Cancel, CloseSession, Command, Mailbox, Stop, Submit, Wake
from gnomon.engine.ranks.link import Ranks, Watched
from gnomon.engine.row import Job
from gnomon.engine.runner import DeviceFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begin:
    """A request that rank 0 took on, with what it decided of it."""

    request: Request
    limit: int
    seed: int


Shared = Begin | Cancel | CloseSession | Stop


@dataclass(frozen=True, slots=True)
class Turn:
    """What every process takes before its next turn. `digest` is of all turns before, `active` what MLX holds at rank 0, in bytes."""

    digest: int
    active: int
    mail: tuple[Shared, ...]


class Leading(Mailbox):
    """Rank 0's: whatever is taken is told to the others first."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.active = 0

    def active_memory(self) -> int:
        """What it was when the turn was told: every process has to come to the same of it."""
        return self.active

    def take(self, wait: float = 0.0, digest: Callable[[], int] | None = None) -> list[Command]:
        """Raises `DeviceFailed`, once, when another process is gone."""
        commands = super().take(wait)
        ranks = self.ranks
        if ranks.over:
            return commands
        if ranks.lost is None:
            self.active = mx.get_active_memory()
            turn = Turn(digest() if digest is not None else 0, self.active, tuple(map(_shared, _known(commands))))
            data = pickle.dumps(turn)
            for rank, link in enumerate(ranks.links, 1):
                try:
                    link.send_bytes(data)
                except OSError:
                    ranks.lost = ranks.lost or f"rank {rank} has ended"
            if any(isinstance(command, Stop) for command in commands):
                ranks.over = True
        if ranks.lost is not None:
            ranks.over = True
            for command in commands:
                self.post(command)
            raise DeviceFailed(ranks.lost)
        return commands


def _known(commands: list[Command]) -> list[Submit | Cancel | CloseSession | Stop]:
    known: list[Submit | Cancel | CloseSession | Stop] = []
    for command in commands:
        if isinstance(command, Submit | Cancel | CloseSession | Stop):
            known.append(command)
        elif not isinstance(command, Wake):
            raise TypeError(f"{type(command).__name__} can't be done by several processes")
    return known


def _shared(command: Submit | Cancel | CloseSession | Stop) -> Shared:
    match command:
        case Submit(job):
            return Begin(job.request, job.limit, job.seed)
        case CloseSession(session):
            return CloseSession(session)
        case other:
            return other


class Following(Mailbox):
    """Another rank's: what rank 0 took. `begin` makes a request's job here."""

    def __init__(self, ranks: Ranks, begin: Callable[[Begin], Job]) -> None:
        super().__init__()
        self.ranks = ranks
        self.begin = begin
        self.active = 0
        self._turns: SimpleQueue[Turn | None] = SimpleQueue()
        self._stopped = False

    def active_memory(self) -> int:
        """Rank 0's."""
        return self.active

    def listen(self, engine: Watched) -> None:
        """Begin to hear rank 0, on a thread of its own: only it notices that rank 0 is gone while this engine waits on the device."""
        threading.Thread(target=self._listen, args=(engine,), name="rank-0", daemon=True).start()

    def _listen(self, engine: Watched) -> None:
        link = self.ranks.links[0]
        while True:
            try:
                turn: Turn = pickle.loads(link.recv_bytes())
            except (EOFError, OSError):
                self._turns.put(None)
                if not self.ranks.over:
                    self.ranks.end("rank 0 has ended", engine)
                return
            self._turns.put(turn)
            if any(isinstance(one, Stop) for one in turn.mail):
                self.ranks.over = True

    def take(self, wait: float = 0.0, digest: Callable[[], int] | None = None) -> list[Command]:  # noqa: ARG002  (rank 0 decides)
        """Waits for rank 0. Raises `DeviceFailed` when it is gone, or went another way."""
        if self._stopped or self.ranks.lost is not None:
            return []
        turn = self._turns.get()
        if turn is None:
            raise DeviceFailed(self.ranks.lost or "rank 0 has ended")
        mine = digest() if digest is not None else turn.digest
        if mine != turn.digest:
            self.ranks.lost = f"rank {self.ranks.rank} came to other tokens than rank 0"
            raise DeviceFailed(self.ranks.lost)
        self.active = turn.active
        self._stopped = any(isinstance(one, Stop) for one in turn.mail)
        return [Submit(self.begin(one)) if isinstance(one, Begin) else one for one in turn.mail]


def mailbox_of(ranks: Ranks | None, begin: Callable[[Begin], Job]) -> Mailbox:
    """The mailbox of an engine that is one of `ranks`, or alone."""
    if ranks is None:
        return Mailbox()
    return Leading(ranks) if ranks.leads else Following(ranks, begin)


def listen(mailbox: Mailbox, engine: Watched) -> None:
    """Begin to hear the other processes, if there are any."""
    if isinstance(mailbox, Following):
        mailbox.listen(engine)
    elif isinstance(mailbox, Leading):
        mailbox.ranks.watch(engine)


def kept(sink: Sink, cancel: Callable[[], None]) -> Sink:
    """A sink whose failure reaches all processes, as its request's cancellation: the others don't have it."""

    def told(event: Event) -> None:
        try:
            sink(event)
        except Exception:
            # A sink is the caller's code; what it may raise is not known.
            log.exception("the receiver of a request failed, and the request is cancelled")
            cancel()

    return told
