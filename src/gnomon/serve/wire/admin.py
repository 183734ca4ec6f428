"""Bodies of the administrative routes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict

from gnomon.serve.wire.sampling import SessionId


class FlushBody(TypedDict):
    """What became durable. Counts of dropped and failed writes are of this flush."""

    durable: bool
    flushedSnapshots: int
    pendingSnapshots: int
    pendingSpills: int
    pendingSpillBytes: int
    droppedSpills: int
    failedSpills: int
    missingSnapshots: int
    elapsedMs: float
    entries: int
    longest_durable_prefix_tokens: int


class CloseSession(BaseModel):
    """Which session to close."""

    model_config = ConfigDict(strict=True, extra="ignore")

    session_id: SessionId


class Drain(BaseModel):
    """What to drain: one model of several, or without an id the whole server."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None


class DrainBody(TypedDict):
    """Whether every open request ended by itself, and what is on disk; null where there is no cache on disk."""

    drained: bool
    cache: FlushBody | None


class ClosedBody(TypedDict):
    """Whether there was such a session."""

    closed: bool
