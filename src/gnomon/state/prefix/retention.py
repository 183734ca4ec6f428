"""Which entry goes first when room is needed."""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Literal

from gnomon.state.prefix.block import Block, Checkpoint, Entry

Policy = Literal["lru", "cost-size"]


class Retention:
    """An order of eviction.

    `lru`: the entry that was used longest ago. `cost-size`: GreedyDual-Size (Cao and Irani, 1997): the least of clock + cost / size,
    cost being the tokens that would have to be computed again, and the clock the rank of the last entry evicted, so that what isn't
    used ages.
    """

    def __init__(self, policy: Policy = "lru") -> None:
        self.policy: Policy = policy
        self._clock = 0.0
        self._count = itertools.count()
        self._heap: list[tuple[float, int, Entry]] = []

    def touch(self, entry: Entry) -> None:
        """The entry was stored, or used."""
        entry.used_at = time.monotonic()
        if self.policy == "lru":
            self._clock += 1
            entry.rank = self._clock
        else:
            # A checkpoint saves all tokens up to it, a block its own.
            tokens = (
                entry.position
                if isinstance(entry, Checkpoint)
                else len(entry.tokens)
                if isinstance(entry, Block)
                else 0
            )
            entry.rank = self._clock + tokens * 1e6 / max(1, entry.num_bytes)
        self.offer(entry)

    def offer(self, entry: Entry) -> None:
        """The entry may be evicted from now on, if `may_go` says so when its turn comes."""
        heapq.heappush(self._heap, (entry.rank, next(self._count), entry))

    def next(self) -> Entry | None:
        """The entry to evict, one that no session guards if there is such; None if there is none. It has to be evicted, or offered
        again."""
        guarded: list[tuple[float, int, Entry]] = []
        found: tuple[float, int, Entry] | None = None
        while self._heap and found is None:
            item = heapq.heappop(self._heap)
            if item[0] == item[2].rank and may_go(item[2]):
                if item[2].guards:
                    guarded.append(item)
                else:
                    found = item
        if found is None and guarded:
            found = guarded.pop(0)
        for item in guarded:
            heapq.heappush(self._heap, item)
        if found is None:
            return None
        if self.policy == "cost-size":
            self._clock = max(self._clock, found[0])
        return found[2]

    def tidy(self, num_entries: int) -> None:
        """Forget outdated offers once they are many."""
        if len(self._heap) > 4 * num_entries + 256:
            seen: set[int] = set()
            kept: list[tuple[float, int, Entry]] = []
            for item in self._heap:
                if item[0] == item[2].rank and may_go(item[2]) and id(item[2]) not in seen:
                    seen.add(id(item[2]))
                    kept.append(item)
            heapq.heapify(kept)
            self._heap = kept


def may_go(entry: Entry) -> bool:
    """Nothing else needs the entry, and it is still held."""
    if isinstance(entry, Checkpoint):
        return entry.block.checkpoints.get(entry.position) is entry
    return isinstance(entry, Block) and not entry.is_ghost and not entry.refs and entry.parent is not None
