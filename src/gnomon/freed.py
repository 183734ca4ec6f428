"""Memory that was freed but stays resident, since the C library keeps it for what comes next (glibc): given back once it is much.

Buffers of prompts of all lengths, freed between states that stay, leave gaps that nothing fits again. Eight conversations held a gigabyte
that way within minutes. Fixing the size from which buffers are mapped one by one (mallopt) avoids it too, for a tenth of prefill's time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from ctypes import CDLL, Structure, c_size_t
from functools import cache
from pathlib import Path
from typing import Any, Final

LEAST_IDLE: Final = 32 << 20
"""Bytes kept beyond what is in use that are given back while nothing runs."""
LEAST_BUSY: Final = 256 << 20
"""The same between two steps of running requests, whose pages would be asked for again."""
PAUSE_IDLE: Final = 1.0
PAUSE_BUSY: Final = 5.0
"""Seconds between two looks."""


class _Info(Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@cache
def _library() -> Any | None:
    """The C library, if it is a glibc that can tell and give back (2.33 and later)."""
    if not Path("/proc/self/statm").exists():
        return None
    library = CDLL(None)
    if not (hasattr(library, "malloc_trim") and hasattr(library, "mallinfo2")):
        return None
    library.mallinfo2.restype = _Info
    return library


def kept() -> int:
    """Bytes of private memory that are resident and not in use by anyone who allocated them; also counts what was mapped otherwise."""
    library = _library()
    if library is None:
        return 0
    _, resident, shared = (int(word) for word in Path("/proc/self/statm").read_text().split()[:3])
    info = library.mallinfo2()
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") - info.uordblks - info.hblkhd


def give_back() -> None:
    """Give all of it back; some milliseconds, more for gigabytes. Nothing where the C library has no such call."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


class Freed:
    """Looks now and then, on the engine's thread, and gives back what is much more than could be given back the last time."""

    def __init__(
        self,
        kept: Callable[[], int] = kept,
        give_back: Callable[[], None] = give_back,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept, self._give_back, self._now = kept, give_back, now
        self._rest = kept()
        self._due = 0.0
        self.times = 0
        self.bytes = 0

    def look(self, *, idle: bool) -> None:
        """Whether nothing runs decides how much is much, and how soon it is looked at again."""
        now = self._now()
        if now < self._due:
            return
        before = self._kept()
        # What others mapped comes and goes too.
        self._rest = min(self._rest, before)
        if before - self._rest >= (LEAST_IDLE if idle else LEAST_BUSY):
            self._give_back()
            self._rest = self._kept()
            self.times += 1
            self.bytes += max(0, before - self._rest)
        self._due = now + (PAUSE_IDLE if idle else PAUSE_BUSY)

    def stats(self) -> dict[str, int]:
        """How often memory was given back, and how much in all."""
        return {"times": self.times, "bytes": self.bytes}
