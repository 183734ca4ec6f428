"""Which models fit into one memory together, by what `gnomon fit` says of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that may be loaded. `need` is what it takes with one ordinary request, in bytes; `context` is in tokens."""

    id: str
    path: str
    model_type: str
    size_bytes: int
    need: int
    created: int
    context: int | None = None
    vision: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """`places` models may be loaded, in `room` bytes: the operator's budget if `enforced`, else advice."""

    places: int
    room: int
    enforced: bool

    def share(self, need: int) -> int:
        """Bytes that a model of this need has for itself, and counts for.

        Without a budget that is its need. A budget is divided: into as many equal shares as there are places and one more, so that the
        next model can start while the last one serves; a model that doesn't fit into one gets a half, a third and so on, up to all.
        """
        if not self.enforced:
            return need
        return next(
            (self.room // parts for parts in range(self.places + 1, 1, -1) if need * parts <= self.room), self.room
        )

    def fits(self, shares: Sequence[int]) -> bool:
        """Whether models of these shares can be in memory at once."""
        return sum(shares) <= self.room

    def possible(self, need: int) -> bool:
        """Whether a model of this need may be loaded at all. Advice stops none that is alone."""
        return not self.enforced or need <= self.room
