"""Who asks, and the session that a request names in its head, over which the body's own field wins."""

from __future__ import annotations

from contextvars import ContextVar

HEADER = "x-session-id"
MAX_CHARACTERS = 256

named: ContextVar[str | None] = ContextVar("session", default=None)
"""Of the HTTP request under way."""
key_name: ContextVar[str | None] = ContextVar("key_name", default=None)
"""Of the key with which the HTTP request under way was let in; None where none is asked for."""


def own(session: str) -> str:
    """The session of this name that belongs to the key of the request under way: no other key's has the same name."""
    key = key_name.get()
    return session if key is None else f"{key}/{session}"


def namespace(namespace: str) -> str:
    """The namespace of states of this name that belongs to the key of the request under way."""
    key = key_name.get()
    return namespace if key is None else f"{namespace} of key {key}"
