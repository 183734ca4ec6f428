"""Waking those who wait for a thread's events once for many. Standard library only, so that every room may import it.

Waking costs a system call, in which the thread gives up the interpreter; whoever wakes up then takes it. A thread that tells several
readers something, and has more to do, gathers the calls that wake them and rings when it has told all.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator


class _Gathered(threading.local):
    calls: dict[Callable[[], None], None] | None = None
    """What is to be called when this thread rings, each once; None where it doesn't gather."""


_gathered = _Gathered()


def wake(call: Callable[[], None]) -> None:
    """Call it: when this thread rings if it gathers, else at once. It must not raise."""
    calls = _gathered.calls
    if calls is None:
        call()
    else:
        calls[call] = None


def ring() -> None:
    """Call what was gathered. To be done before the thread waits for anything."""
    if calls := _gathered.calls:
        _gathered.calls = {}
        for call in calls:
            call()


@contextlib.contextmanager
def gathering() -> Generator[None]:
    """Gather within the block, and ring at its end."""
    _gathered.calls = {}
    try:
        yield
    finally:
        ring()
        _gathered.calls = None
