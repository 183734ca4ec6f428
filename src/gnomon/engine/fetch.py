"""Prompts whose beginning is on disk wait for it before they are admitted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gnomon.engine.row import Job
from gnomon.state.keys import root_key
from gnomon.state.prefix import Adopted, PrefixCache
from gnomon.state.ssd.format import Entry, Packed
from gnomon.state.ssd.index import Plan
from gnomon.state.ssd.pack import unpack
from gnomon.state.ssd.tier import SSDTier

log = logging.getLogger(__name__)

MAX_SECONDS = 30.0
"""A disk that is slower than that is not waited for."""
MAX_TRIES = 3
"""Reads for one prompt: files may go, or turn out damaged, between the plan and the read."""


@dataclass(eq=False, slots=True)
class _Fetch:
    job: Job
    plan: Plan
    wanted: frozenset[str]
    """Names of the files that memory doesn't hold already."""
    begun: float = field(default_factory=time.monotonic)
    tries: int = 1


class Fetcher:
    """Reads what the disk has more of a prompt than memory, and puts it there. On the engine's thread."""

    def __init__(self, cache: PrefixCache, tier: SSDTier, namespace: Callable[[Job], str]) -> None:
        self.cache = cache
        self.tier = tier
        self.namespace = namespace
        self._open: dict[str, _Fetch] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, job: Job) -> bool:
        """Whether the job has to wait for reads, which have begun then."""
        fetch = self._planned(job)
        if fetch is None:
            return False
        self._open[job.request.id] = fetch
        return True

    def ended(self) -> list[Job]:
        """Jobs that need to wait no more."""
        jobs: list[Job] = []
        for request_id, got in self.tier.reader.take().items():
            fetch = self._open.get(request_id)
            if fetch is not None and not (self._arrived(fetch, got) and self._again(fetch)):
                del self._open[request_id]
                jobs.append(fetch.job)
        late = [one for one in self._open.values() if time.monotonic() - one.begun > MAX_SECONDS]
        for fetch in late:
            log.warning(
                "request %s: the SSD cache took more than %.0f s to read %d files, and isn't waited for",
                fetch.job.request.id,
                MAX_SECONDS,
                len(fetch.wanted),
            )
            self.drop(fetch.job)
            jobs.append(fetch.job)
        return jobs

    def drop(self, job: Job) -> None:
        """The job wants nothing any more."""
        if self._open.pop(job.request.id, None) is not None:
            self.tier.reader.cancel(job.request.id)

    def release(self) -> list[Job]:
        """Stop waiting: all jobs that did."""
        jobs = [fetch.job for fetch in self._open.values()]
        for job in jobs:
            self.drop(job)
        return jobs

    def _planned(self, job: Job) -> _Fetch | None:
        cache, namespace, prompt = self.cache, self.namespace(job), job.feed
        here = cache.peek(namespace, prompt)
        plan = self.tier.index.plan(root_key(namespace).hex(), prompt, cache.allowed)
        if plan.length <= here:
            return None
        blocks = {block.key: block for block in cache.tree.walk(namespace, prompt).blocks if not block.is_ghost}

        def is_here(entry: Entry) -> bool:
            block = blocks.get(entry.key)
            return block is not None and all(block.parts[i] is not None for i in entry.layers)

        wanted = [entry for entry in plan.blocks if not is_here(entry)]
        if plan.checkpoint is not None:
            wanted.append(plan.checkpoint)
        if not wanted:
            return None
        if job.num_in_memory is None:
            job.num_in_memory = here
        self.tier.reader.fetch(job.request.id, wanted)
        return _Fetch(job, plan, frozenset(entry.name for entry in wanted))

    def _again(self, fetch: _Fetch) -> bool:
        """Plan anew without what turned out to be gone."""
        after = self._planned(fetch.job) if fetch.tries < MAX_TRIES and fetch.job.open else None
        if after is None:
            return False
        after.tries, after.begun = fetch.tries + 1, fetch.begun
        self._open[fetch.job.request.id] = after
        return True

    def _arrived(self, fetch: _Fetch, got: dict[str, Packed | None]) -> bool:
        """Put into memory what was read; whether something of it was missing."""
        path: list[Adopted] = []
        for entry in fetch.plan.blocks:
            packed = got.get(entry.name)
            if packed is None and entry.name in fetch.wanted:
                break
            path.append(Adopted(entry.tokens, unpack(packed) if packed is not None else None, entry.count))
        is_whole = len(path) == len(fetch.plan.blocks)
        last, checkpoint = fetch.plan.checkpoint, None
        if last is not None and is_whole and (packed := got.get(last.name)) is not None:
            checkpoint = last.end, unpack(packed)
        self.cache.adopt(self.namespace(fetch.job), path, checkpoint)
        at = [last] if last is not None else []
        self.tier.writer.touch([*at, *reversed(fetch.plan.blocks[: len(path)])])
        self.tier.restore_seconds_last = time.monotonic() - fetch.begun
        return None in got.values()
