"""The thread that writes: bytes in, files out, nothing of a model in between."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gnomon.state.ssd.format import Entry, Packed
from gnomon.state.ssd.index import Index
from gnomon.state.ssd.manifest import Listed, Manifest
from gnomon.state.ssd.store import Found, Store

log = logging.getLogger(__name__)

PAUSE_SECONDS = 60.0
"""How long nothing is written after the disk took no more."""
LOOK_SECONDS = 2.0
"""How often the index is read for what other processes wrote."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(slots=True)
class Written:
    """What happened since the tier was opened. Bytes are the files'."""

    spills: int = 0
    bytes: int = 0
    seconds: float = 0.0
    dropped: int = 0
    """States that were not written: no room in the queue, or none on the disk."""
    failed: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    superseded: int = 0
    pauses: int = 0
    index_errors: int = 0


class Writer:
    """Takes content that is to be written, and writes it in the order it came, on a thread of its own.

    At most `queue_bytes` wait; what waits can be read from `pending`. The files of all identities together stay within `max_bytes`: those
    used longest ago go first, and never one that others stand on. Nothing is written while the file system has less than `min_free`
    bytes, or for a minute after it took no more; there is one warning until it does again.
    """

    def __init__(self, store: Store, index: Index, *, queue_bytes: int, max_bytes: int | None, min_free: int) -> None:
        self.store = store
        self.index = index
        self.queue_bytes = queue_bytes
        self.max_bytes = max_bytes
        self.min_free = min_free
        self.counts = Written()
        self.found = Found()
        self.pending: OrderedDict[str, Packed] = OrderedDict()
        """By name, what waits and what is being written. Replaced by no other thread than the writer's, guarded by `_changed`."""
        self.pending_bytes = 0
        self.files = 0
        self.bytes = 0
        """Files in the directory and their size, of all identities, as of the last write or look."""
        self.paused: str | None = None
        """Why nothing is written now."""
        self._pause_ends = 0.0
        self._told_too_large = False
        self._changed = threading.Condition()
        self._errands: deque[tuple[Literal["touch", "forget"], Entry]] = deque()
        self._stopping = False
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="gnomon-ssd-writer", daemon=True)

    def start(self) -> None:
        """Open the directory and bring index and files in line. Raises OSError and sqlite3.Error when that can't be done."""
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    # From any thread

    @property
    def is_paused(self) -> bool:
        return self.paused is not None and time.monotonic() < self._pause_ends

    def offer(self, packed: Packed) -> bool:
        """Have it written; False, and it is counted as dropped, if there is no room in the queue or nothing is written now."""
        name = packed.entry.name
        with self._changed:
            if name in self.pending:
                return True
            fits = self.pending_bytes + packed.num_bytes <= self.queue_bytes or not self.pending
            if self._stopping or self.is_paused or not fits:
                self.counts.dropped += 1
                return False
            self.pending[name] = packed
            self.pending_bytes += packed.num_bytes
            self.index.add(packed.entry, packed.num_bytes)
            self._changed.notify_all()
        return True

    def has_room(self, num_bytes: int) -> bool:
        """Whether an offer of this size would be taken."""
        with self._changed:
            fits = self.pending_bytes + num_bytes <= self.queue_bytes or not self.pending
            return fits and not self._stopping and not self.is_paused

    def touch(self, entries: Iterable[Entry]) -> None:
        """The entries were used."""
        self._errand("touch", entries)

    def forget(self, entries: Iterable[Entry]) -> None:
        """The entries' files are gone, or no good: see that they are."""
        self._errand("forget", entries)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits to be written; False if that took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.pending or not self._thread.is_alive(), timeout)

    def wait(self, timeout: float) -> None:
        """Wait until something of what waits is written, or for `timeout` seconds."""
        with self._changed:
            self._changed.wait(timeout)

    def close(self, timeout: float) -> None:
        """Write what waits, for at most `timeout` seconds, and end the thread. What is left then is counted as dropped."""
        self.flush(timeout)
        with self._changed:
            self._stopping = True
            left = list(self.pending)[1:]
            for name in left:
                self._done(name, kept=False)
            self.counts.dropped += len(left)
            self._changed.notify_all()
        self._thread.join(timeout=10.0)

    def _errand(self, what: Literal["touch", "forget"], entries: Iterable[Entry]) -> None:
        with self._changed:
            self._errands.extend((what, one) for one in entries)
            self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        try:
            self.store.create()
            manifest = self._open()
            self.found = self.store.reconcile(manifest)
            for reason in self.found.removed:
                log.warning("%s: removed", reason)
            for one in self.found.listed:
                self.index.add(one.entry, one.size)
            self.files, self.bytes = manifest.total()
            self._make_room(manifest, 0)
        except Exception as error:  # noqa: BLE001  (handed to `start`)
            self._error = error
            return
        finally:
            self._ready.set()
        try:
            self._serve(manifest)
        finally:
            manifest.close()

    def _open(self) -> Manifest:
        try:
            return Manifest(self.store.home)
        except sqlite3.Error as error:
            # The files say all that the index does; without it the directory is only looked through at every start.
            self.counts.index_errors += 1
            log.warning("the index of the SSD cache can't be opened, the files are listed in memory: %s", error)
            return Manifest(None)

    def _serve(self, manifest: Manifest) -> None:
        look = time.monotonic() + LOOK_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or self._errands or self.pending, max(0.0, look - time.monotonic())
                )
                if self._stopping and not self.pending:
                    return
                errands = list(self._errands)
                self._errands.clear()
                packed = next(iter(self.pending.values()), None)
            try:
                self._run_errands(manifest, errands)
                if packed is not None:
                    self._write(manifest, packed)
                if time.monotonic() >= look:
                    look = time.monotonic() + LOOK_SECONDS
                    self._look(manifest)
            except sqlite3.Error as error:
                # The files are what counts, and the next start lists them anew.
                self.counts.index_errors += 1
                if self.counts.index_errors == 1:
                    log.warning("the index of the SSD cache can't be written: %s", error)
            finally:
                if packed is not None:
                    with self._changed:
                        self._done(packed.entry.name, kept=True)

    def _write(self, manifest: Manifest, packed: Packed) -> None:
        entry, begun = packed.entry, time.perf_counter()
        try:
            if self.is_paused:
                self.counts.dropped += 1
                self.index.remove(entry.name)
                return
            size = packed.num_bytes
            if self.max_bytes is not None and size > self.max_bytes:
                if not self._told_too_large:
                    self._told_too_large = True
                    log.warning(
                        "a state of %d bytes is not kept on disk: --ssd-cache-max is %d bytes", size, self.max_bytes
                    )
                self.counts.dropped += 1
                self.index.remove(entry.name)
                return
            free = self.store.free_bytes()
            if free - size < self.min_free:
                raise OSError(errno.ENOSPC, f"{free} bytes are free, and {self.min_free} are to stay so")
            self._make_room(manifest, size)
            size = self.store.write(packed)
        except OSError as error:
            self.counts.failed += 1
            self.index.remove(entry.name)
            self._pause(error)
            return
        if self.paused is not None:
            log.info("the SSD cache writes again")
            self.paused = None
        self.counts.spills += 1
        self.counts.bytes += size
        self.counts.seconds += time.perf_counter() - begun
        manifest.put([Listed(entry, size, time.time())])
        old = self.index.superseded(entry)
        self.counts.superseded += len(old)
        self._remove(manifest, old)
        self._make_room(manifest, 0)
        self.files, self.bytes = manifest.total()

    def _pause(self, error: OSError) -> None:
        self._pause_ends = time.monotonic() + PAUSE_SECONDS
        self.counts.pauses += 1
        reason = "no space" if error.errno in _FULL else "failed"
        if self.paused is None:
            log.warning("the SSD cache writes nothing for now, states stay in memory only: %s", error)
        self.paused = f"{reason}: {error}"

    def _make_room(self, manifest: Manifest, size: int) -> None:
        """Remove what was used longest ago until `size` more bytes fit."""
        if self.max_bytes is None:
            return
        total = manifest.total()[1]
        while total + size > self.max_bytes:
            oldest = manifest.oldest()
            if oldest is None:
                break
            total -= oldest.size
            self.counts.evictions += 1
            self.counts.evicted_bytes += oldest.size
            self._remove(manifest, [oldest.entry])
        self.files, self.bytes = manifest.total()

    def _remove(self, manifest: Manifest, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        for entry in entries:
            self.index.remove(entry.name)
            try:
                self.store.remove(entry)
            except OSError as error:
                log.warning("%s can't be removed: %s", self.store.path(entry), error)
        manifest.drop(entry.name for entry in entries)

    def _run_errands(self, manifest: Manifest, errands: Iterable[tuple[Literal["touch", "forget"], Entry]]) -> None:
        errands = list(errands)
        used, now = [entry for what, entry in errands if what == "touch"], time.time()
        for entry in used:
            try:
                self.store.touch(entry, now)
            except OSError:
                continue  # it has just gone, or isn't ours to touch: then it only counts as older
        manifest.touch((entry.name for entry in used), now)
        self._remove(manifest, (entry for what, entry in errands if what == "forget"))

    def _look(self, manifest: Manifest) -> None:
        """See what other processes wrote."""
        for one in manifest.added():
            self.index.add(one.entry, one.size)
        self.files, self.bytes = manifest.total()

    def _done(self, name: str, *, kept: bool) -> None:
        packed = self.pending.pop(name, None)
        if packed is not None:
            self.pending_bytes -= packed.num_bytes
            if not kept:
                self.index.remove(name)
            self._changed.notify_all()
