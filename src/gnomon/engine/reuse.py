"""What the engine reuses: prompts start from the longest state that is held, and rows leave theirs behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from gnomon.engine.api import FlushReport
from gnomon.engine.budget import Budget
from gnomon.engine.disk import Ask, Disk
from gnomon.engine.prefill import Prefill
from gnomon.engine.row import Job, Row
from gnomon.engine.runner import Runner
from gnomon.state.batch_state import BatchState
from gnomon.state.buffer import round_slots
from gnomon.state.paged.pool import PagePart
from gnomon.state.prefix import BLOCK, PrefixCache, Sessions
from gnomon.state.prefix.block import common
from gnomon.state.snapshot import RowSnapshot

log = logging.getLogger(__name__)

RECENT = 32
"""Explanations kept for /stats."""


def cache_bytes(wanted: int, budget: Budget) -> int:
    """The cache's limit: what is wanted, but no more than half of what the weights leave of usable memory."""
    weights = budget.needs.weights if budget.needs is not None else 0
    share = int(max(0, budget.usable - weights) // 2) if budget.usable else wanted
    return min(wanted, share)


class Reuse:
    """Stands between the scheduler's jobs and the prefix cache. Everything runs on the engine thread except `stats`.

    A failure of the cache is nobody's request's: it is logged, the cache forgets everything, and the prompt is computed.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache | None,
        decode: Callable[[Sequence[int]], str],
        model: str | None = None,
    ) -> None:
        """`model` names the model in the identity of states; its path unless told."""
        self.runner = runner
        # A primed state isn't a function of its tokens.
        self.cache = cache if runner.prime is None else None
        self.decode = decode
        self.every = runner.config.checkpoint_every
        self.identity = identity(runner, model)
        self.disk: Disk | None = None
        self.sessions: Sessions | None = Sessions()
        self.failures = 0
        self.num_reclaims = 0
        self.recent: tuple[dict[str, object], ...] = ()
        self._shape = runner.new_state()
        self._peeked: dict[str, tuple[int, int]] = {}

    def namespace(self, job: Job) -> str:
        return f"{self.identity}\n{job.request.namespace}"

    # Before a prefill

    def num_cached(self, job: Job) -> int:
        """Prompt tokens that would be lent now."""
        cache = self.cache
        if cache is None:
            return 0
        seen = self._peeked.get(job.request.id)
        if seen is None or seen[0] != cache.version:
            seen = self._peeked[job.request.id] = cache.version, cache.peek(self.namespace(job), job.feed)
        return seen[1]

    def num_pages_in_use(self, job: Job) -> int:
        """Whole pages that this prompt would be lent now and that rows hold already."""
        if self.cache is None:
            return 0
        length, blocks, _ = self.cache.tree.walk(self.namespace(job), job.feed).usable(len(job.feed) - 1)
        parts = [block.parts[0] for block in blocks if block.end <= length]
        return sum(isinstance(part, PagePart) and part.hold.page.row_holds > 0 for part in parts)

    def may_join(self, job: Job, group: Sequence[Job]) -> bool:
        """False if one of the group is about to compute what this prompt begins with, or if one has to stop on its way."""
        if self.cache is None:
            return True
        if self._stops(job, 0) or self._stops(group[0], 0):
            return False
        for other in group:
            shared = common(tuple(job.feed), tuple(other.feed))
            if self._shape.can_cut(len(other.feed) - 1):
                gain = shared - max(self.num_cached(job), self.num_cached(other))
            else:
                gain = shared if shared >= len(other.feed) - 1 else 0
            if gain >= BLOCK:
                return False
        return True

    def new_prefill(self, jobs: Sequence[Job]) -> Prefill:
        """The prefill of what is not held of these prompts."""
        held = [self._lend(job) for job in jobs]
        stops = self._stops(jobs[0], jobs[0].num_cached) if len(jobs) == 1 else ()
        return self.runner.new_prefill([job.feed for job in jobs], held, stops)

    def _lend(self, job: Job) -> BatchState | None:
        self._peeked.pop(job.request.id, None)
        cache, state = self.cache, None
        job.num_cached, job.miss = 0, None
        if cache is None:
            return None
        with self._guarded("lend a state"):
            slots = round_slots(len(job.feed) + 1) if self.runner.pages is None else 0
            lent = cache.lend(self.namespace(job), job.feed, job.request.boundary, slots)
            if lent.snapshot is not None:
                state = self.runner.restored(lent.snapshot)
            job.num_cached = lent.length
            job.miss = self.disk.lent(job, lent) if self.disk is not None else lent.miss
            if self.sessions is not None and job.request.session is not None:
                self.sessions.lent(job.request.session, job.prompt, lent.length)
            self._tell(job)
        return state

    def _tell(self, job: Job) -> None:
        miss = job.miss
        if miss is None:
            return
        told = {"request": job.request.id, **miss.told(self.decode)}
        self.recent = (*self.recent, told)[-RECENT:]
        about = (job.request.id, miss.reused, miss.prompt_tokens, miss.position, miss.kind)
        log.info("request %s: %d of %d prompt tokens reused, no further than token %d: %s", *about)
        log.debug(
            "request %s: after %r comes %r, stored is %r",
            job.request.id,
            *(told[k] for k in ("before", "prompt", "stored")),
        )

    def _stops(self, job: Job, start: int) -> list[int]:
        """Where a prefill has to pause for a checkpoint. State that can be cut needs none."""
        drain = len(job.feed) - 1
        if self.cache is None or self._shape.can_cut(drain):
            return []
        stops = set(range(start - start % self.every + self.every, drain, self.every))
        if job.request.boundary is not None:
            stops.add(job.request.boundary)
        return sorted(stop for stop in stops if start < stop < drain)

    # After it

    def advanced(self, job: Job, prefill: Prefill) -> None:
        """A lone prompt's window is done, and more follow: lend what exists."""
        if self.cache is not None:
            self._publish(job, job.feed, prefill.state, 0, whole_only=not prefill.at_stop)

    def prefilled(self, job: Job, state: BatchState, b: int) -> None:
        """A prompt is done."""
        if self.cache is not None and job.open:
            self._publish(job, job.feed, state, b)

    def grown(self, row: Row, state: BatchState, b: int) -> None:
        """A row has another token: its whole blocks are lent, and written where there is a tier below, while it goes on."""
        length = len(row.job.prompt) + len(row.tokens)
        if self.cache is not None and length // BLOCK > row.num_lent // BLOCK:
            row.num_lent = length
            self._publish(row.job, [*row.job.prompt, *row.tokens], state, b, whole_only=True, is_prompt=False)

    def left(self, row: Row, state: BatchState, b: int) -> None:
        """A row has ended and is about to go. One whose request failed may have failed for its state."""
        if self.cache is not None and row.job.error is None:
            tokens = [*row.job.prompt, *row.tokens]
            self._publish(row.job, tokens, state, b, is_prompt=False)
            session = row.job.request.session
            if self.sessions is not None and session is not None:
                self.sessions.turn(session, tokens, self.cache.entries_of(self.namespace(row.job), tokens))

    def ended(self, job: Job) -> None:
        self._peeked.pop(job.request.id, None)
        if self.disk is not None:
            self.disk.drop(job)

    # A draft model's states

    def lend_companion(self, runner: Runner, namespace: str, tokens: Sequence[int]) -> RowSnapshot | None:
        """The longest state that `runner`'s model, another than the engine's own, left of a beginning of these tokens."""
        if self.cache is not None:
            with self._guarded("lend a draft model's state"):
                return self.cache.lend(f"draft {identity(runner)}\n{namespace}", tokens).snapshot
        return None

    def publish_companion(
        self, runner: Runner, namespace: str, tokens: Sequence[int], state: BatchState, b: int
    ) -> None:
        """Keep the state of these tokens, the first of row `b` of a state of `runner`'s model."""
        if self.cache is not None:
            with self._guarded("keep a draft model's state"):
                self.cache.publish(f"draft {identity(runner)}\n{namespace}", tokens, state, b, is_local=True)

    def allow(self, num_bytes: int | None) -> None:
        """How much memory requests leave for the cache; None if nobody limits it."""
        if self.cache is not None and num_bytes is not None:
            self.cache.allow(num_bytes)

    def shed(self, num_bytes: int) -> int:
        """Memory runs short: give up so much, or as much as can go. How many bytes went."""
        cache = self.cache
        if cache is None or not cache.num_bytes:
            return 0
        before = cache.num_bytes
        self.num_reclaims += 1
        cache.shed(num_bytes)
        return before - cache.num_bytes

    def check_integrity(self) -> None:
        """Raise RuntimeError when the cache's books are wrong."""
        if self.cache is not None:
            self.cache.check_integrity()
        if self.runner.pages is not None:
            self.runner.pages.check_integrity()

    def forget(self) -> None:
        """Nothing that is kept is worth anything any more."""
        if self.cache is not None:
            self.cache.clear()

    def flush(self, timeout: float, ask: Ask) -> FlushReport:
        """Write what memory alone holds. Called on any thread; `ask` has work done on the engine's."""
        return self.disk.flush(timeout, ask) if self.disk is not None else FlushReport(False)

    def close_session(self, session: str) -> bool:
        """Let a session's states go like others; False if there is none of that name."""
        return self.sessions is not None and self.sessions.close(session)

    def close(self) -> None:
        """The end of the engine."""
        if self.disk is not None:
            self.disk.close()

    def sections(self) -> dict[str, Any]:
        """For /stats, by section."""
        return {
            "prompt_cache": self.stats(),
            **({"ssd_cache": self.disk.stats()} if self.disk is not None else {}),
        }

    def stats(self) -> dict[str, Any]:
        """As plain JSON values; read on any thread."""
        cache = self.cache
        if cache is None:
            return {"enabled": False, "entries": 0, "bytes": 0, "max_bytes": 0, "hits": 0, "misses": 0}
        counts = cache.counts
        return {
            "enabled": True,
            "entries": cache.num_blocks + cache.num_checkpoints,
            "bytes": cache.num_bytes,
            "max_bytes": cache.max_bytes,
            "allowed_bytes": cache.allowed,
            "hits": counts.hits,
            "misses": counts.misses,
            "blocks": cache.num_blocks,
            "checkpoints": cache.num_checkpoints,
            "reused_tokens": counts.reused_tokens,
            "published_tokens": counts.published_tokens,
            "evictions": counts.evictions,
            "evicted_bytes": counts.evicted_bytes,
            "refused": counts.refused,
            "buffer_returns": counts.buffer_returns,
            "reclaims": self.num_reclaims,
            "failures": self.failures,
            "retention": cache.policy,
            "sessions": len(self.sessions) if self.sessions is not None else 0,
            "session_hits": self.sessions.hits if self.sessions is not None else 0,
            "session_misses": self.sessions.misses if self.sessions is not None else 0,
            "recent_misses": list(self.recent),
        }

    def _publish(
        self,
        job: Job,
        tokens: Sequence[int],
        state: BatchState,
        b: int,
        *,
        whole_only: bool = False,
        is_prompt: bool = True,
    ) -> None:
        boundary = job.request.boundary if is_prompt and job.record is None else None
        cache = self.cache
        if cache is not None:
            with self._guarded("keep a row's state"):
                cache.publish(self.namespace(job), tokens, state, b, boundary=boundary, whole_only=whole_only)

    @contextmanager
    def _guarded(self, doing: str) -> Generator[None]:
        try:
            yield
        except Exception:
            # Reuse only saves work: whatever goes wrong in it, the request can be computed without.
            self.failures += 1
            log.exception("the prefix cache failed to %s and forgets everything", doing)
            if self.cache is not None:
                self.cache.clear()
            if self.sessions is not None:
                self.sessions.clear()


def identity(runner: Runner, model: str | None = None) -> str:
    """What the bits of a state depend on beside the tokens; `model` stands for the weights, the path if none."""
    loaded, coding = runner.loaded, runner.coding
    scheme = coding.name if coding is not None else "plain"
    return "\n".join((model or str(loaded.path), loaded.model_type, version("mlx"), str(mx.default_device()), scheme))
