"""What the prefix cache gives, takes, tells a slower tier, and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gnomon.state.prefix.block import Block, Checkpoint
from gnomon.state.prefix.explain import Miss
from gnomon.state.snapshot import LayerSnapshot, RowSnapshot


@dataclass(slots=True)
class Counts:
    """What happened since the cache was made."""

    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    published_tokens: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    refused: int = 0
    """Publications that stopped because nothing more could be evicted for them."""
    buffer_returns: int = 0


@dataclass(frozen=True, slots=True)
class Lent:
    """What a prompt gets: the state of its first `length` tokens (None for 0), and why it isn't longer."""

    length: int
    snapshot: RowSnapshot | None
    miss: Miss | None


class Below(Protocol):
    """A slower tier that states go to."""

    def keep(self, entry: Block | Checkpoint) -> None:
        """An entry is new or has got more parts; its arrays are evaluated."""
        ...

    def spill(self, entry: Block | Checkpoint) -> None:
        """An entry is about to be evicted."""
        ...

    def holds(self, entry: Block | Checkpoint) -> bool:
        """Whether nothing would be lost with the entry."""
        ...


@dataclass(frozen=True, slots=True)
class Adopted:
    """A block that comes from a slower tier; `layers` None if it is to be here already."""

    tokens: tuple[int, ...]
    layers: Mapping[int, LayerSnapshot] | None
    count: int
