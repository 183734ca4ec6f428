"""What `previous_response_id` refers to: finished responses, in memory, for an hour, and those under way; each is its key's own."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)

TTL = 3600.0
"""Seconds that a response is kept."""
MAX_BYTES = 32 << 20
"""Bytes of JSON text that all kept responses have together."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a response that follows needs: its instructions, the texts of system messages, and all other messages in order."""

    instructions: str | None = None
    system: tuple[str, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`input` are the items of its own request. `owner` is the name of the key it was made with; others don't find it."""

    body: dict[str, Any]
    input: Sequence[dict[str, Any]]
    conversation: Conversation
    owner: str | None = None

    @property
    def size(self) -> int:
        said = self.conversation
        held = (self.body, self.input, said.instructions, said.system, said.messages)
        return len(json.dumps(held, ensure_ascii=False).encode())


class Running(Protocol):
    """A response under way."""

    @property
    def owner(self) -> str | None: ...

    def body(self) -> dict[str, Any]: ...

    def cancel(self) -> dict[str, Any]:
        """Stop it, and return it as it ended."""
        ...


class ResponseStore:
    """Responses by id, found by their owners only; the least recently used go first when the bytes are spent.

    Safe to use from several threads.
    """

    def __init__(
        self, ttl: float = TTL, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ttl = ttl
        self.max_bytes = max_bytes
        self.running: dict[str, Running] = {}
        """Touched on the event loop only."""
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[StoredResponse, int, float]] = OrderedDict()
        """Response, size and when it ends to be kept."""
        self._bytes = 0
        self._too_large = 0

    def put(self, name: str, response: StoredResponse) -> bool:
        """Keep a response. False, and a line in the log, if it alone has more bytes than may be kept."""
        size = response.size
        with self._lock:
            self._expire()
            self._drop(name)
            if size > self.max_bytes:
                self._too_large += 1
                logger.warning("%s has %d bytes and is not stored: the limit is %d", name, size, self.max_bytes)
                return False
            self._kept[name] = response, size, self._clock() + self.ttl
            self._bytes += size
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._kept)))
            return True

    def get(self, name: str, owner: str | None = None) -> StoredResponse | None:
        with self._lock:
            self._expire()
            if name not in self._kept or self._kept[name][0].owner != owner:
                return None
            self._kept.move_to_end(name)
            return self._kept[name][0]

    def under_way(self, name: str, owner: str | None = None) -> Running | None:
        """On the event loop only."""
        run = self.running.get(name)
        return None if run is None or run.owner != owner else run

    def delete(self, name: str, owner: str | None = None) -> bool:
        """Whether there was such a response."""
        with self._lock:
            self._expire()
            if name not in self._kept or self._kept[name][0].owner != owner:
                return False
            return self._drop(name)

    def stats(self) -> dict[str, int]:
        with self._lock:
            self._expire()
            return {
                "entries": len(self._kept),
                "bytes": self._bytes,
                "max_bytes": self.max_bytes,
                "ttl_ms": round(self.ttl * 1000),
                "too_large": self._too_large,
            }

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, (_, _, end) in self._kept.items() if end <= now]:
            self._drop(name)

    def _drop(self, name: str) -> bool:
        found = self._kept.pop(name, None)
        if found is not None:
            self._bytes -= found[1]
        return found is not None
