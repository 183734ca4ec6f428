"""The cache's second tier as the engine works with it: what may go wrong there costs reuse, and nothing else."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from gnomon.config import CacheConfig
from gnomon.engine.api import FlushReport
from gnomon.engine.fetch import Fetcher
from gnomon.engine.row import Job
from gnomon.state.keys import root_key
from gnomon.state.prefix import Lent, Miss, PrefixCache
from gnomon.state.prefix.block import Block, Checkpoint
from gnomon.state.ssd.tier import SSDTier

T = TypeVar("T")
log = logging.getLogger(__name__)

DEMOTE_SECONDS = 5.0
"""How often memory is looked through for what nobody uses."""
FLUSH_STEP = 0.05
CLOSE_SECONDS = 10.0
"""How long the end of the engine waits for writes that nobody flushed."""


class Ask(Protocol):
    """Has work done on the engine's thread; None if it wasn't done within the seconds."""

    def __call__(self, work: Callable[[], T], timeout: float, /) -> T | None: ...


class DiskUnusable(RuntimeError):
    """The directory can't be used at all."""


class Disk:
    """Sits below the prefix cache. After a defect in it, it is off: logged, told in the stats, and waited for no more.

    `identity` is what the bits of a state depend on beside the tokens and a job's own namespace, `about` says it for people.
    """

    def __init__(
        self,
        config: CacheConfig,
        cache: PrefixCache,
        identity: str,
        about: Mapping[str, Any],
        namespace: Callable[[Job], str],
        wake: Callable[[], None],
    ) -> None:
        """Raises `DiskUnusable`, naming the directory."""
        directory = config.ssd_cache
        if directory is None:
            raise ValueError("no directory is set")
        try:
            self.tier = SSDTier(
                directory,
                identity,
                about,
                wake,
                max_bytes=config.ssd_cache_max,
                min_free=config.ssd_cache_min_free,
                queue_bytes=config.ssd_cache_queue,
                verify=config.ssd_cache_verify,
                write_behind=config.ssd_writebehind,
            )
        except (OSError, sqlite3.Error) as error:
            raise DiskUnusable(f"--ssd-cache {directory} can't be used: {error}") from error
        self.config = config
        self.cache = cache
        self.namespace = namespace
        self.failure: str | None = None
        self._fetcher = Fetcher(cache, self.tier, namespace)
        self._demote_at = 0.0
        cache.below = self

    # What the cache tells

    def keep(self, entry: Block | Checkpoint) -> None:
        with self._guarded("write a state"):
            self.tier.keep(entry)

    def spill(self, entry: Block | Checkpoint) -> None:
        with self._guarded("write a state"):
            self.tier.spill(entry)

    def holds(self, entry: Block | Checkpoint) -> bool:
        with self._guarded("look a state up"):
            return self.tier.holds(entry)
        return False

    # What jobs need

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for reads."""
        return len(self._fetcher)

    def fetch(self, job: Job) -> bool:
        """Whether the job has to wait for reads, which have begun then."""
        job.num_in_memory = None
        if self.failure is not None:
            return False
        with self._guarded("plan a read"):
            return self._fetcher.begin(job)
        return False

    def fetched(self) -> list[Job]:
        """Jobs that need to wait no more."""
        if self.failure is None:
            with self._guarded("take what was read"):
                return self._fetcher.ended()
        return self._fetcher.release()

    def drop(self, job: Job) -> None:
        """The job has ended."""
        with self._guarded("drop a read"):
            self._fetcher.drop(job)

    def lent(self, job: Job, lent: Lent) -> Miss | None:
        """A job was lent state: count it, and tell why it isn't more as far as the disk knows better."""
        if self.failure is not None:
            return lent.miss
        with self._guarded("explain a miss"):
            if job.num_in_memory is not None and lent.length > job.num_in_memory:
                self.tier.restored(lent.length - job.num_in_memory)
            namespace, prompt = self.namespace(job), job.feed
            root = root_key(namespace).hex()
            here = self.cache.tree.walk(namespace, prompt).matched
            known, miss = self.tier.index.explain(root, prompt, lent.length, job.request.boundary)
            plan = self.tier.index.plan(root, prompt, 1 << 62)
            if miss is not None and plan.length > lent.length:
                return Miss("unread", lent.length, lent.length, len(prompt), miss.before, miss.ours, miss.theirs)
            if miss is not None and (lent.miss is None or known > here or lent.miss.kind == "no entry"):
                return miss
        return lent.miss

    # On the side

    def tend(self) -> None:
        """Write on, and give up memory that nobody used lately."""
        if self.failure is not None:
            return
        with self._guarded("write states"):
            self.tier.tend()
            idle, now = self.config.ssd_cache_demote_idle, time.monotonic()
            if idle and now >= self._demote_at:
                self._demote_at = now + min(DEMOTE_SECONDS, idle)
                self.tier.demotions += self.cache.demote(now - idle)

    def mark(self) -> int:
        """Have everything written that memory alone holds; how many states that are."""
        with self._guarded("write states"):
            count = self.tier.mark(self.cache.entries())
            self.tier.tend()
            return count
        return 0

    def count_missing(self) -> int:
        """States that memory alone holds."""
        with self._guarded("count states"):
            return self.tier.count_missing(self.cache.entries())
        return len(self.cache.entries())

    def flush(self, timeout: float, ask: Ask) -> FlushReport:
        """Have everything written that memory alone holds, on the thread that waits for it; `ask` has work done on the engine's."""
        begun = time.monotonic()
        deadline = begun + timeout
        counts = self.tier.writer.counts
        dropped, failed = counts.dropped, counts.failed
        marked = ask(self.mark, timeout)
        while time.monotonic() < deadline and self.failure is None and not self.tier.writer.is_paused:
            if not self.tier.num_dirty and self.tier.writer.flush(min(FLUSH_STEP, deadline - time.monotonic())):
                break
            ask(self.tend, deadline - time.monotonic())
            self.tier.writer.wait(FLUSH_STEP)
        missing = ask(self.count_missing, max(FLUSH_STEP, deadline - time.monotonic()))
        dropped, failed = counts.dropped - dropped, counts.failed - failed
        stats = self.tier.stats()
        pending, spills = stats["pending_snapshots"], stats["pending_spills"]
        heard = marked is not None and missing is not None
        return FlushReport(
            durable=heard and not (pending or spills or dropped or failed or missing or self.failure),
            flushed=max(0, (marked or 0) - (missing or 0) - pending),
            pending=pending,
            pending_spills=spills,
            pending_spill_bytes=stats["pending_spill_bytes"],
            dropped=dropped,
            failed=failed,
            missing=missing or 0,
            seconds=time.monotonic() - begun,
            entries=stats["entries"],
            longest=stats["longest_durable_prefix_tokens"],
        )

    def close(self) -> None:
        """The end: write what waits, for a while, and say what became durable."""
        with self._guarded("close"):
            if self.failure is None:
                self.mark()
            self.tier.close(CLOSE_SECONDS)
            stats = self.tier.stats()
            about = (stats["entries"], stats["bytes"], stats["dropped_spills"], stats["failed_spills"])
            log.info("SSD cache closed: %d files of %d bytes, %d states dropped, %d writes failed", *about)

    def stats(self) -> dict[str, Any]:
        """As plain JSON values; read on any thread."""
        return {**self.tier.stats(), "failure": self.failure}

    @contextmanager
    def _guarded(self, doing: str) -> Generator[None]:
        try:
            yield
        except Exception as error:
            # Reuse only saves work: whatever goes wrong in it, requests can be computed without.
            self.failure = f"{doing}: {error}"
            log.exception("the SSD cache failed to %s and is off", doing)
            self.cache.below = None
