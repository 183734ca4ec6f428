"""The tier as the engine's thread sees it: states go down as bytes, and come back as prompts ask for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gnomon.state.fingerprint import digest
from gnomon.state.prefix.block import Block, Checkpoint
from gnomon.state.ssd.index import Index
from gnomon.state.ssd.pack import entry_of, pack
from gnomon.state.ssd.reader import Reader
from gnomon.state.ssd.store import Store
from gnomon.state.ssd.writer import Writer

Held = Block | Checkpoint


class SSDTier:
    """Keeps states of one identity in a directory. Its methods belong to the engine's thread, except `stats`.

    `identity` is all that the bits of a state depend on beside the tokens and a request's namespace; `about` says it for people.
    `wake` is called, on another thread, when reads have ended.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        about: Mapping[str, Any],
        wake: Callable[[], None],
        *,
        max_bytes: int | None = None,
        min_free: int = 0,
        queue_bytes: int = 1 << 29,
        verify: bool = False,
        write_behind: bool = True,
    ) -> None:
        """Open the directory, which may take a while when its index is lost. Raises OSError and sqlite3.Error."""
        self.directory = directory
        self.identity = digest([identity])
        self.write_behind = write_behind
        self.store = Store(directory)
        self.index = Index()
        self.writer = Writer(self.store, self.index, queue_bytes=queue_bytes, max_bytes=max_bytes, min_free=min_free)
        self.writer.start()
        self.store.describe(self.identity, about)
        self.reader = Reader(self.store, self.writer, wake, verify=verify)
        self.restores = 0
        """Requests that got state from here."""
        self.restored_tokens = 0
        self.restore_seconds_last = 0.0
        self.demotions = 0
        self._dirty: dict[Held, None] = {}
        """States that wait for room in the writer's queue."""

    @property
    def num_dirty(self) -> int:
        return len(self._dirty)

    # What the cache in memory tells

    def keep(self, entry: Held) -> None:
        """Write an entry when there is room in the queue, if states are written when they are made."""
        if self.write_behind and not (self.writer.has_room(entry.num_bytes) and self._offer(entry)):
            self._dirty[entry] = None

    def spill(self, entry: Held) -> None:
        """Write an entry that memory gives up now, or count it as dropped."""
        self._dirty.pop(entry, None)
        if self.holds(entry):
            return
        if not self.writer.has_room(entry.num_bytes):
            self.writer.counts.dropped += 1
        else:
            self._offer(entry)

    def holds(self, entry: Held) -> bool:
        """Whether an entry is written, or about to be."""
        return entry_of(entry, self.identity).name in self.index

    def tend(self) -> None:
        """Write on, as far as there is room."""
        for entry in list(self._dirty):
            if _is_held(entry) and not self.holds(entry):
                if not self.writer.has_room(entry.num_bytes):
                    return
                self._offer(entry)
            del self._dirty[entry]

    def mark(self, entries: Iterable[Held]) -> int:
        """Have those written that are not; how many."""
        missing = [entry for entry in entries if not self.holds(entry)]
        self._dirty.update(dict.fromkeys(missing))
        return len(missing)

    def count_missing(self, entries: Iterable[Held]) -> int:
        """How many entries are neither written nor about to be."""
        return sum(not self.holds(entry) for entry in entries)

    def restored(self, num_tokens: int) -> None:
        """A request was lent so many tokens that memory alone didn't have."""
        self.restores += 1
        self.restored_tokens += num_tokens

    def close(self, timeout: float) -> None:
        """Write what waits, for at most `timeout` seconds, and end both threads."""
        self.reader.close()
        deadline = time.monotonic() + timeout
        while self._dirty and not self.writer.is_paused and time.monotonic() < deadline:
            self.tend()
            self.writer.wait(0.05)
        self.writer.close(max(0.0, deadline - time.monotonic()))

    def longest(self) -> int:
        """Tokens of the longest state of this identity that is on disk."""
        return self.index.longest(self.identity, self.writer.pending)

    def stats(self) -> dict[str, Any]:
        """As plain JSON values; read on any thread."""
        writer, reader = self.writer, self.reader
        written, reads, found = writer.counts, reader.counts, writer.found
        return {
            "dir": str(self.directory),
            "entries": writer.files,
            "bytes": writer.bytes,
            "max_bytes": writer.max_bytes,
            "restores": self.restores,
            "restored_tokens": self.restored_tokens,
            "restore_ms_last": round(self.restore_seconds_last * 1e3, 3),
            "demotions": self.demotions,
            "pending_snapshots": self.num_dirty,
            "pending_spills": len(writer.pending),
            "pending_spill_bytes": writer.pending_bytes,
            "dropped_spills": written.dropped,
            "failed_spills": written.failed,
            "longest_durable_prefix_tokens": self.longest(),
            "spills": written.spills,
            "written_bytes": written.bytes,
            "write_seconds": written.seconds,
            "evictions": written.evictions,
            "evicted_bytes": written.evicted_bytes,
            "superseded": written.superseded,
            "pauses": written.pauses,
            "paused": writer.paused if writer.is_paused else None,
            "index_errors": written.index_errors,
            "reads": asdict(reads),
            "found": {
                "entries": len(found.listed),
                "added": found.added,
                "lost": found.lost,
                "removed": len(found.removed),
                "unreadable": found.unreadable,
                "unfinished": found.unfinished,
            },
            "verify": reader.verify,
            "write_behind": self.write_behind,
        }

    def _offer(self, held: Held) -> bool:
        entry = entry_of(held, self.identity)
        return entry.name in self.index or self.writer.offer(pack(held, entry))


def _is_held(entry: Held) -> bool:
    """Memory hasn't given it up."""
    if isinstance(entry, Checkpoint):
        return entry.block.checkpoints.get(entry.position) is entry
    return not entry.is_ghost
