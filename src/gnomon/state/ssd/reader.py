"""The thread that reads, so that nobody waits for the disk but the prompts whose beginning is on it."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gnomon.state.ssd.format import BadFile, Entry, Packed
from gnomon.state.ssd.store import Store
from gnomon.state.ssd.writer import Writer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Reads:
    """What happened since the tier was opened. Bytes are those of arrays."""

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    coalesced: int = 0
    cancelled: int = 0
    """Reads that nobody wanted any more when their turn came."""
    corrupt: int = 0
    missing: int = 0
    unreadable: int = 0


@dataclass(slots=True)
class _Fetch:
    wanted: Sequence[Entry]
    got: dict[str, Packed | None] = field(default_factory=dict[str, Packed | None])

    @property
    def is_done(self) -> bool:
        return len(self.got) == len(self.wanted)


class Reader:
    """Reads entries for requests, in the order they ask. One that several ask for is read once.

    `notify` is called on the reader's thread when a request has all it asked for. Entries that can't be read count as gone, and those
    whose bytes are wrong are removed.
    """

    def __init__(self, store: Store, writer: Writer, notify: Callable[[], None], *, verify: bool) -> None:
        self.store = store
        self.writer = writer
        self.verify = verify
        self.counts = Reads()
        self._notify = notify
        self._changed = threading.Condition()
        self._fetches: dict[str, _Fetch] = {}
        self._queue: OrderedDict[str, tuple[Entry, set[str]]] = OrderedDict()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gnomon-ssd-reader", daemon=True)
        self._thread.start()

    def fetch(self, request_id: str, entries: Sequence[Entry]) -> None:
        """Read these, at least one, for a request."""
        with self._changed:
            self._fetches[request_id] = _Fetch(entries)
            for entry in entries:
                if entry.name in self._queue:
                    self.counts.coalesced += 1
                self._queue.setdefault(entry.name, (entry, set()))[1].add(request_id)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """The request wants nothing any more. Unknown ids are ignored."""
        with self._changed:
            fetch = self._fetches.pop(request_id, None)
            for entry in fetch.wanted if fetch is not None else ():
                if entry.name in self._queue:
                    self._queue[entry.name][1].discard(request_id)

    def take(self) -> dict[str, dict[str, Packed | None]]:
        """Requests whose reads have ended, with what was read by name; None for what is gone."""
        with self._changed:
            done = {request_id: fetch.got for request_id, fetch in self._fetches.items() if fetch.is_done}
            for request_id in done:
                del self._fetches[request_id]
            return done

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._queue)
                if self._stopping:
                    return
                name, (entry, waiting) = next(iter(self._queue.items()))
                if not waiting:
                    del self._queue[name]
                    self.counts.cancelled += 1
                    continue
            packed = self._read(entry)
            with self._changed:
                _, waiting = self._queue.pop(name)
                fetches = [self._fetches[one] for one in waiting if one in self._fetches]
                for fetch in fetches:
                    fetch.got[name] = packed
                is_done = any(fetch.is_done for fetch in fetches)
            if is_done:
                self._notify()

    def _read(self, entry: Entry) -> Packed | None:
        waiting = self.writer.pending.get(entry.name)
        if waiting is not None:
            return waiting
        counts, begun = self.counts, time.perf_counter()
        try:
            packed = self.store.read(entry, verify=self.verify)
        except BadFile as error:
            counts.corrupt += 1
            log.warning("%s: removed", error)
        except FileNotFoundError:
            # Another process may have removed it.
            counts.missing += 1
        except OSError as error:
            counts.unreadable += 1
            log.warning("%s can't be read and is left out: %s", self.store.path(entry), error)
            self.writer.index.remove(entry.name)
            return None
        else:
            counts.files += 1
            counts.bytes += packed.num_bytes
            counts.seconds += time.perf_counter() - begun
            return packed
        self.writer.index.remove(entry.name)
        self.writer.forget([entry])
        return None
