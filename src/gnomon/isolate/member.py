"""One model of a pool: whether it has a process, who uses it and who waits for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from gnomon.engine.api import FlushReport
from gnomon.isolate.engine import IsolatedEngine
from gnomon.isolate.plan import Entry

P = TypeVar("P")
State = Literal["cold", "loading", "resident", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class Lease(Generic[P]):
    """A resident model, which stays so until `release`. `parts` is what was opened for it."""

    id: str
    parts: P
    release: Callable[[], None]
    """May be called again."""


@dataclass(slots=True)
class Waiter(Generic[P]):
    """A request for a model that isn't there yet."""

    lease: Future[Lease[P]]
    since: float
    deadline: float


@dataclass(slots=True)
class Member(Generic[P]):
    """Guarded by the pool's lock. Times are those of the monotonic clock."""

    entry: Entry
    share: int
    pinned: bool = False
    state: State = "cold"
    engine: IsolatedEngine | None = None
    parts: P | None = None
    leases: int = 0
    used: float = 0.0
    """When it was last asked for or let go."""
    waiters: deque[Waiter[P]] = field(default_factory=deque[Waiter[P]])
    making_room: bool = False
    """It drains only because others want its place."""
    leaving: bool = False
    """Its process is being ended."""
    failure: str | None = None
    failed_at: float = 0.0
    loads: int = 0
    load_seconds: float = 0.0
    """Of the last load."""
    requests: int = 0
    flushed: FlushReport | None = None
    """What its last process left on disk."""

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def live(self) -> bool:
        """It has a process."""
        return self.state in ("loading", "resident", "draining")

    @property
    def restarts(self) -> int:
        return 0 if self.engine is None else int(self.engine.process()["restarts"])

    def drain(self, *, making_room: bool = False) -> None:
        """Lend it to no one more; its process ends when those who use it have let go."""
        self.state, self.making_room = "draining", making_room

    def row(self) -> dict[str, Any]:
        """As plain JSON values."""
        process = {} if self.engine is None else self.engine.process()
        return {
            "id": self.id,
            "state": self.state,
            "reason": self.failure,
            "pinned": self.pinned,
            "pid": process.get("pid"),
            "restarts": process.get("restarts", 0),
            "leases": self.leases,
            "waiting": len(self.waiters),
            "requests": self.requests,
            "loads": self.loads,
            "load_seconds": round(self.load_seconds, 3),
            "idle_seconds": round(time.monotonic() - self.used, 1)
            if self.state == "resident" and not self.leases
            else None,
            "need_bytes": self.entry.need,
            "share_bytes": self.share,
        }
