"""The session that a request names in its head; the body's own field wins."""

from __future__ import annotations

from contextvars import ContextVar

HEADER = "x-session-id"
MAX_CHARACTERS = 256

named: ContextVar[str | None] = ContextVar("session", default=None)
"""Of the HTTP request under way."""
