"""Where checkpoints of generations lie, who owns them, and the thread that writes them.

DIR/.lock             held for moments: while a process takes its place, or takes over what a dead one left
DIR/RUN/.lock         held by a process as long as it lives
DIR/RUN/KEY-NAME.gen  the newest checkpoint of one generation, replaced as a whole
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gnomon.engine.resume.record import Record, Unreadable

log = logging.getLogger(__name__)

SUFFIX = ".gen"
MAX_KEPT = 256
"""Interrupted generations kept; the oldest go first."""
MAX_KEPT_BYTES = 64 << 20
MAX_FILE_BYTES = 8 << 20
"""A generation that takes more is not saved any further: with 11 log-probabilities a token that is about 30,000 tokens."""
MAX_AGE = 24 * 3600.0
"""Seconds after which nobody is expected to ask again."""
LOCK_SECONDS = 30.0
"""How long another process may take to start up or to clean up."""


class Slot:
    """The checkpoint of one generation. Everything but `key` belongs to the store."""

    __slots__ = ("key", "num_bytes", "path", "record", "since")

    def __init__(self, key: str, path: Path) -> None:
        self.key = key
        self.path = path
        self.num_bytes = 0
        """On disk."""
        self.record: Record | None = None
        """What is to be written."""
        self.since = 0.0
        """When it was interrupted, in seconds of the system's clock."""


@dataclass(slots=True)
class Counts:
    """What happened since the store was opened."""

    written: int = 0
    written_bytes: int = 0
    failed: int = 0
    too_large: int = 0
    skipped: int = 0
    """Requests that aren't saved, because they have several choices."""
    adopted: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    rejected: int = 0
    """Checkpoints whose tokens the request does not allow."""
    corrupt: int = 0
    foreign: int = 0
    expired: int = 0
    evicted: int = 0
    removed: int = 0


class Store:
    """Checkpoints in a directory that several processes may share; each owns what it writes, and the next to start what it leaves.

    All methods may be called from any thread. None waits for the disk but `claim`, `flush` and `close`; a single background thread
    writes, at most one file per generation being due: of several checkpoints only the newest is.
    """

    def __init__(self, directory: Path, every: int) -> None:
        """Take a place in `directory`, and over what processes left there that have ended. `every` is how many tokens lie between
        checkpoints. Raises OSError when the directory can't be used."""
        self.directory = directory
        self.every = every
        self.counts = Counts()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._due: OrderedDict[Slot, Record | None] = OrderedDict()
        """What to write, or None to remove."""
        self._busy = False
        self._closed = False
        self._warned = False
        self._live: set[Slot] = set()
        self._kept: OrderedDict[Slot, None] = OrderedDict()
        """Slots of interrupted generations, the oldest first."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._run = directory / uuid.uuid4().hex
        try:
            with FileLock(directory / ".lock", timeout=LOCK_SECONDS, mode=0o600):
                self._run.mkdir(mode=0o700)
                # Whoever closes the store need not be the thread that opened it.
                self._own = FileLock(self._run / ".lock", timeout=0, mode=0o600, thread_local=False)
                self._own.acquire()
                self._adopt()
        except Timeout as error:
            raise OSError(f"{directory / '.lock'} is held by another process") from error
        self._thread = threading.Thread(target=self._write_all, name="gnomon-checkpoints", daemon=True)
        self._thread.start()

    # Of running generations

    def open(self, key: str) -> Slot:
        """A place for a generation that begins."""
        slot = Slot(key, self._run / f"{key}-{uuid.uuid4().hex[:8]}{SUFFIX}")
        with self._lock:
            self._live.add(slot)
        return slot

    def claim(self, key: str) -> tuple[Slot, Record] | None:
        """The most recently interrupted generation of this key, and its place, which is the caller's now. Reads one file."""
        while True:
            with self._lock:
                slot = next((one for one in reversed(self._kept) if one.key == key), None)
                if slot is None:
                    return None
                del self._kept[slot]
                self._live.add(slot)
                record, expired = slot.record, time.time() - slot.since > MAX_AGE
            if not expired:
                record = record or self._read(slot.path)
                if record is not None and record.key == key:
                    return slot, record
            else:
                self.counts.expired += 1
            self.remove(slot)

    def save(self, slot: Slot, record: Record) -> None:
        """Have a generation's newest state written."""
        with self._changed:
            if self._closed or slot not in self._live:
                return
            slot.record = record
            self._due[slot] = record
            self._changed.notify_all()

    def keep(self, slot: Slot) -> None:
        """The generation was interrupted: what was saved of it waits for the identical request."""
        with self._changed:
            self._live.discard(slot)
            if not slot.num_bytes and slot not in self._due:
                return
            slot.since = time.time()
            self._kept[slot] = None
            if slot not in self._due:
                slot.record = None
            self._bound()

    def remove(self, slot: Slot) -> None:
        """The generation has ended: nothing of it is kept."""
        with self._changed:
            self._live.discard(slot)
            self._drop(slot)

    def tell_skipped(self) -> None:
        """A request came whose generation can't be saved."""
        self.counts.skipped += 1
        if self.counts.skipped == 1:
            log.warning(
                "requests with several choices are not saved: their choices share one prefill, resuming needs one each"
            )

    def tell_resumed(self, record: Record) -> None:
        self.counts.resumed += 1
        self.counts.resumed_tokens += len(record.tokens)

    def reject(self, slot: Slot) -> None:
        """A checkpoint doesn't fit the request that claimed it."""
        self.counts.rejected += 1
        self.remove(slot)

    def flush(self, timeout: float) -> bool:
        """Wait until all that is due is on disk; False if it isn't after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._due and not self._busy, timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Write what is due and leave the directory to the next process. May be called again."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for slot in list(self._live):
                # Whoever owned it has gone without a word.
                if slot.num_bytes or slot in self._due:
                    self._kept[slot] = None
            self._live.clear()
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._due and not self._busy, timeout)
            if not done:
                log.warning("%d checkpoints of generations were not written in time", len(self._due))
        log.info("%d interrupted generations are kept in %s", len(self._kept), self.directory)
        self._own.release()
        if not self._kept:
            with contextlib.suppress(OSError):
                (self._run / ".lock").unlink(missing_ok=True)
                self._run.rmdir()

    def stats(self) -> dict[str, Any]:
        """As plain JSON values."""
        with self._lock:
            kept = len(self._kept), sum(slot.num_bytes for slot in self._kept)
            live = sum(bool(slot.num_bytes) for slot in self._live), sum(slot.num_bytes for slot in self._live)
            due = len(self._due)
        c = self.counts
        return {
            "enabled": True,
            "directory": str(self.directory),
            "every": self.every,
            "kept": kept[0],
            "kept_bytes": kept[1],
            "max_kept": MAX_KEPT,
            "max_kept_bytes": MAX_KEPT_BYTES,
            "open": live[0],
            "open_bytes": live[1],
            "due": due,
            **{name: getattr(c, name) for name in Counts.__slots__},
        }

    # Under the lock

    def _drop(self, slot: Slot) -> None:
        slot.record = None
        self._kept.pop(slot, None)
        self._due.pop(slot, None)
        # It may be about to be written, or be there.
        self._due[slot] = None
        self._changed.notify_all()

    def _bound(self) -> None:
        """Forget the oldest beyond the limits."""
        total = sum(slot.num_bytes for slot in self._kept)
        while self._kept and (len(self._kept) > MAX_KEPT or total > MAX_KEPT_BYTES):
            oldest = next(iter(self._kept))
            total -= oldest.num_bytes
            self.counts.evicted += 1
            self._drop(oldest)

    # The writer

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if not self._due:
                    return
                slot, record = self._due.popitem(last=False)
                self._busy = True
            try:
                self._write(slot, record) if record is not None else self._unlink(slot)
            except OSError as error:
                self.counts.failed += 1
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "a generation's checkpoint could not be written, and its answer would begin anew: %s", error
                    )
            finally:
                with self._changed:
                    self._busy = False
                    if slot in self._kept:
                        if slot not in self._due:
                            slot.record = None
                        self._bound()
                    self._changed.notify_all()

    def _write(self, slot: Slot, record: Record) -> None:
        data = record.encode()
        if len(data) > MAX_FILE_BYTES:
            # What is there still is a beginning of the answer.
            self.counts.too_large += 1
            return
        temporary = slot.path.with_suffix(".tmp")
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(slot.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync(self._run)
        slot.num_bytes = len(data)
        self.counts.written += 1
        self.counts.written_bytes += len(data)
        self._warned = False

    def _unlink(self, slot: Slot) -> None:
        if slot.num_bytes:
            slot.num_bytes = 0
            slot.path.unlink(missing_ok=True)
            self.counts.removed += 1

    def _read(self, path: Path) -> Record | None:
        try:
            return Record.decode(path.read_bytes())
        except Unreadable as error:
            self.counts.corrupt += 1
            log.warning("the checkpoint %s is removed: %s", path, error)
        except OSError as error:
            self.counts.failed += 1
            log.warning("the checkpoint %s could not be read: %s", path, error)
        return None

    # At the start

    def _adopt(self) -> None:
        """Move here what dead processes left, and forget what is too old, too much or broken."""
        found: list[Slot] = []
        for run in sorted(self.directory.iterdir()):
            if run == self._run or not run.is_dir() or run.is_symlink():
                continue
            lock = FileLock(run / ".lock", timeout=0, mode=0o600)
            try:
                lock.acquire()
            except Timeout:
                continue  # its process lives
            except OSError as error:
                log.warning("checkpoints of generations in %s can't be taken over: %s", run, error)
                continue
            try:
                found += self._adopt_run(run)
            except OSError as error:
                self.counts.failed += 1
                log.warning("checkpoints of generations in %s can't be taken over: %s", run, error)
            finally:
                lock.release()
        found.sort(key=lambda slot: slot.since)
        with self._changed:
            self._kept.update(dict.fromkeys(found))
            self._bound()

    def _adopt_run(self, run: Path) -> list[Slot]:
        found: list[Slot] = []
        for path in sorted(run.iterdir()):
            if path.suffix == ".tmp":
                path.unlink()
            if path.suffix != SUFFIX or not path.is_file():
                continue
            about = path.stat()
            if time.time() - about.st_mtime > MAX_AGE:
                self.counts.expired += 1
                path.unlink()
                continue
            slot = self._checked(path, about.st_size)
            if slot is not None:
                slot.since = about.st_mtime
                found.append(slot)
                self.counts.adopted += 1
        rest = [path for path in run.iterdir() if path.name != ".lock"]
        if not rest:
            (run / ".lock").unlink(missing_ok=True)
            run.rmdir()
        return found

    def _checked(self, path: Path, num_bytes: int) -> Slot | None:
        """The file moved to this process's place, if it is whole."""
        try:
            if num_bytes > MAX_FILE_BYTES:
                raise Unreadable(f"{num_bytes} bytes are more than {MAX_FILE_BYTES}")
            record = Record.decode(path.read_bytes())
            if not path.name.startswith(f"{record.key}-"):
                raise Unreadable("its name is another request's")
        except Unreadable as error:
            if error.foreign:
                # A newer version's, which may come back.
                self.counts.foreign += 1
                return None
            self.counts.corrupt += 1
            log.warning("the checkpoint %s is removed: %s", path, error)
            path.unlink()
            return None
        slot = Slot(record.key, self._run / path.name)
        path.replace(slot.path)
        slot.num_bytes = num_bytes
        return slot


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync(directory: Path) -> None:
    """Have a rename in a directory survive a power failure, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
