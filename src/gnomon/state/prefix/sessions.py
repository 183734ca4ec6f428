"""Sessions that requests name: what their last turns left is the last to be evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.state.prefix.block import Entry, common

MAX_SESSIONS = 256
"""Sessions kept open; the one used longest ago is closed for another."""


@dataclass(frozen=True, slots=True)
class _Session:
    tokens: tuple[int, ...]
    entries: Sequence[Entry]


class Sessions:
    """The last turn of each open session. Guards what the next turn may go on from, which is evicted only when nothing else is left."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Session] = OrderedDict()
        self.hits = 0
        """Requests that were lent something of their session's last turn."""
        self.misses = 0

    def __len__(self) -> int:
        return len(self._open)

    def lent(self, name: str, prompt: Sequence[int], length: int) -> None:
        """A request of a session was lent the state of its first `length` tokens."""
        session = self._open.get(name)
        if session is not None and length and common(session.tokens, tuple(prompt)):
            self.hits += 1
        else:
            self.misses += 1

    def turn(self, name: str, tokens: Sequence[int], entries: Sequence[Entry]) -> None:
        """A turn of a session ended after these tokens, whose state is in these entries."""
        for entry in entries:
            entry.guards += 1
        self.close(name)
        self._open[name] = _Session(tuple(tokens), entries)
        while len(self._open) > MAX_SESSIONS:
            self.close(next(iter(self._open)))

    def close(self, name: str) -> bool:
        """Guard nothing of a session any more; False if there is none of that name. Nothing is evicted by this."""
        session = self._open.pop(name, None)
        for entry in session.entries if session is not None else ():
            entry.guards -= 1
        return session is not None

    def clear(self) -> None:
        for name in list(self._open):
            self.close(name)
