"""What the engine thread does, a turn at a time. Everything here runs on that thread only."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Sequence

import mlx.core as mx

from gnomon import bell
from gnomon.engine.aside import Aside
from gnomon.engine.batch import Batch
from gnomon.engine.budget import ceiling
from gnomon.engine.mailbox import Ask, Beside, Cancel, CloseSession, Stop, Submit, Wake
from gnomon.engine.memory import Memory
from gnomon.engine.persist import new_reuse
from gnomon.engine.pressure import Pressure, code_of, is_out_of_memory
from gnomon.engine.reuse import cache_bytes
from gnomon.engine.row import Job, Row
from gnomon.engine.runner import DeviceFailed, PagesLost, Runner, forked
from gnomon.engine.scheduler import Prepared, Scheduler
from gnomon.engine.served import Served, Shared
from gnomon.engine.settings import Host, Settings
from gnomon.engine.spans import Spans
from gnomon.engine.speculation import Speculation
from gnomon.freed import Freed
from gnomon.state.batch_state import BatchState
from gnomon.state.prefix import PrefixCache

log = logging.getLogger(__name__)

CLEAR_CACHE_STEPS = 256
"""As mlx-lm: buffers that MLX keeps for reuse are given back every so many steps."""
GAUGE_SECONDS = 0.25
MAX_REBUILDS = 3
"""Shared steps failing in a row, though every row steps well alone, after which their requests fail."""


class Core:
    """The open requests, their rows and states, and the policy over them.

    `turn` raises `DeviceFailed` when nothing can be computed any more; any other exception out of it is a defect here, after
    which `reset` makes the core usable again. Either way no request of the queue is lost unheard: the owner fails them.
    """

    def __init__(
        self,
        served: Served,
        settings: Settings,
        host: Host,
        shared: Shared,
        speculation: Speculation | None = None,
    ) -> None:
        """Raises what opening the cache's directory raises."""
        loaded, tokenizer, config = served.loaded, served.tokenizer, settings.engine
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.host = host
        self.mailbox = shared.mailbox
        self.counters = shared.counters
        self.heart = shared.heart
        self.on_close = shared.on_close
        self.runner = Runner(loaded, config, shared.counters, shared.heart, host.prime, served.coding, served.pages)
        self.speculation = speculation
        self.spans = Spans(host.tracer)
        self.ranks = host.ranks
        self.eos_ids = frozenset({*loaded.eos_token_ids, *tokenizer.eos_ids})
        binding = loaded.binding
        size = cache_bytes(config.prompt_cache, served.budget)
        self.reuse = new_reuse(
            self.runner,
            PrefixCache(size, config.cache_retention, pages=served.pages) if size else None,
            lambda ids: tokenizer.decode(ids, hide=False),
            settings.cache,
            served.operations,
            lambda: shared.mailbox.post(Wake()),
        )
        self.memory = Memory(served.budget, self.runner, self.reuse)
        self.pressure = Pressure(
            ceiling(config.memory_budget),
            config.prefill_chunk,
            self.memory.shed,
            enabled=config.memory_steps,
            active=self.mailbox.active_memory,
            windows=self.ranks is None,
        )
        self.scheduler = Scheduler(
            rows=config.batch if binding.batchable else 1,
            chunk=config.prefill_chunk,
            may_group=binding.batchable and binding.pad_safe,
            new_prefill=self.reuse.new_prefill,
            has_memory=self.has_memory,
            num_cached=self.reuse.num_cached,
            may_join=self.may_join,
        )
        self.aside = Aside(self.runner)
        self.freed = Freed()
        self.jobs: dict[str, Job] = {}
        """Open requests that reached this thread."""
        self.stopping = False
        self.gauges_due = 0.0
        self.num_rebuilds = 0
        """Shared steps that failed since one went well."""
        self.batch = Batch(self.left)
        self.stepper = self.runner.new_stepper(self.batch, speculation)
        self.take_gauges()

    # A turn

    @property
    def has_work(self) -> bool:
        return bool(self.jobs or self.aside.waiting)

    @property
    def is_waiting(self) -> bool:
        """Every open request waits for the disk: there is nothing to do before a command comes."""
        disk = self.reuse.disk
        return disk is not None and not self.aside.waiting and 0 < len(self.jobs) <= disk.num_waiting

    def turn(self) -> None:
        """Admit, prefill one window, start what is ready, step once, run one window of what is done aside."""
        self.heart.beat("scheduling")
        self.look()
        self.admit()
        self.prefill()
        self.start()
        self.step()
        self.reap()
        self.aside.turn()
        if not self.jobs:
            self.rest()
        self.tend()
        if time.monotonic() >= self.gauges_due:
            self.take_gauges()

    def tend(self) -> None:
        """What belongs to no request: states on their way to and from the disk, and memory that nobody uses."""
        self.freed.look(idle=not self.jobs)
        disk = self.reuse.disk
        if disk is not None:
            self.scheduler.waiting.extend(job for job in disk.fetched() if job.open)
            disk.tend()

    def digest(self) -> int:
        """Of what the requests have come to: the same in every process of those that hold the model together."""
        rows = ((row.job.request.id, row.index, len(row.tokens), row.last) for row in self.batch.rows)
        return zlib.crc32(repr((self.counters.generated_tokens, len(self.jobs), *rows)).encode())

    def read_mail(self, wait: float = 0.0) -> None:
        """Do what other threads asked, waiting up to `wait` seconds for a first command."""
        for command in self.mailbox.take(wait, self.digest):
            match command:
                case Submit(job):
                    self.jobs[job.request.id] = job
                    disk = self.reuse.disk
                    if disk is None or not disk.fetch(job):
                        self.scheduler.waiting.append(job)
                case Beside(side_job):
                    self.aside.waiting.append(side_job)
                case Cancel(request_id, answered):
                    # Unknown ids are those of requests that have ended.
                    if job := self.jobs.get(request_id):
                        job.cancel(answered=answered)
                        self.reap()
                        # Without open requests there is no further turn that would give the rows back.
                        if not self.jobs:
                            self.rest()
                case Stop():
                    self.stopping = True
                case Wake():
                    self.tend()
                case CloseSession(session, answer):
                    closed = self.reuse.close_session(session)
                    if answer is not None:
                        answer.set_result(closed)
                case Ask(work, answer):
                    try:
                        answer.set_result(work())
                    except Exception as error:  # noqa: BLE001  (handed to whoever asked)
                        answer.set_exception(error)

    def look(self) -> None:
        """See how much memory there is, and who may have how much of it."""
        pressure, scheduler = self.pressure, self.scheduler
        pressure.look()
        scheduler.chunk = pressure.chunk

    def admit(self) -> None:
        self.scheduler.num_running = self.batch.num_open
        for job in self.scheduler.admit():
            job.admitted = time.monotonic()
            self.spans.queued(job)
            self.counters.prompt_tokens += len(job.prompt)

    def has_memory(self, job: Job | None = None) -> bool:
        """Whether a request fits beside those admitted. What is reused gives way to them."""
        admitted = [other for other in self.jobs.values() if other.admitted and other.open]
        if job is not None and admitted and self.pressure.is_holding:
            return False
        return self.memory.has_room(job, admitted, self.scheduler.admitted)

    def may_join(self, job: Job, group: Sequence[Job]) -> bool:
        """Whether a prompt may share the window of a group: nothing is lost that reuse would save, and its scores fit."""
        together = ((len(one.prompt) - self.reuse.num_cached(one), len(one.prompt)) for one in (job, *group))
        return self.runner.workspace.has_room(together) and self.reuse.may_join(job, group)

    def prefill(self) -> None:
        """Advance one preparation by one window."""
        preparation = self.scheduler.next_preparation()
        if preparation is None:
            return
        self.stepper.disturbed()
        jobs, prefill = preparation.jobs, preparation.prefill
        begun, tokens = time.monotonic(), 0 if prefill.finished else prefill.num_tokens
        prefill.chunk = min(prefill.chunk, self.pressure.chunk)
        self.pressure.window_begins()
        try:
            self.runner.run_window(prefill)
        except Exception as error:  # noqa: BLE001  (any failure here has an owner among these requests, or the device is gone)
            self.end_ranks(error)
            self.runner.mend()
            self.heed(error)
            if len(jobs) > 1:
                self.prefill_apart(jobs, error)
            if len(jobs) == 1 or not any(job.open for job in jobs):
                # A device that is gone is nobody's own fault: everyone is told so then.
                self.runner.probe()
            if len(jobs) == 1:
                jobs[0].fail(error, code_of(error))
            self.scheduler.done(preparation)
            return
        self.pressure.window_ended()
        if tokens and self.spans.enabled:
            memory = {"activeBytes": mx.get_active_memory(), "peakBytes": mx.get_peak_memory()}
            self.spans.work(jobs, "prefill", begun, tokens=tokens, **memory)
        for job in jobs:
            try:
                job.tell_progress(min(prefill.done, len(job.prompt) - 1))
            except Exception as error:  # noqa: BLE001  (a sink's failure is its request's own)
                job.fail(error)
        if not prefill.finished:
            self.reuse.advanced(jobs[0], prefill)
        else:
            for b, job in enumerate(jobs):
                self.reuse.prefilled(job, prefill.state, b)
                job.prefilled = time.monotonic()
            self.scheduler.done(preparation)
            self.begin(jobs, prefill.state)

    def start(self) -> None:
        """Start further choices of requests with more choices than rows."""
        scheduler = self.scheduler
        while scheduler.prepared and self.batch.num_open < scheduler.rows:
            ready = scheduler.prepared[0]
            row = self.new_row(ready.job)
            is_last = not ready.job.num_unstarted
            if is_last or row is None:
                scheduler.prepared.popleft()
            if row is not None:
                self.batch.join([row], ready.state if is_last else forked(ready.state, 0))

    def step(self) -> None:
        rows = self.batch.num_open
        if not rows:
            self.stepper.flight = None
            self.batch.drop_closed()
            return
        self.heart.beat("decoding")
        counters = self.counters
        tokens, begun = counters.generated_tokens, time.perf_counter()
        started = time.monotonic()
        running = [row.job for row in self.batch.rows if row.open] if self.spans.enabled else []
        stepped = True
        try:
            stepped = self.stepper.step()
            if rows > 1:
                self.num_rebuilds = 0
        except Exception as error:  # noqa: BLE001  (whichever row is to blame is found by stepping each alone)
            self.end_ranks(error)
            self.rebuild(error)
        bell.ring()
        seconds = time.perf_counter() - begun
        counters.decode.add(counters.generated_tokens - tokens, seconds)
        self.grown()
        if stepped:
            counters.step(rows, seconds)
            self.spans.work(running, "step", started, rows=rows)
        if stepped and counters.steps % CLEAR_CACHE_STEPS == 0:
            mx.clear_cache()

    def heed(self, error: Exception) -> None:
        """An allocation that failed is a word on memory, too. Not before the pages are mended."""
        if is_out_of_memory(error):
            self.pressure.failed()

    def grown(self) -> None:
        """Rows have further tokens: lend and save what is due."""
        batch, saves = self.batch, self.host.saves
        for b, row in enumerate(batch.rows):
            if row.open and batch.state is not None:
                self.reuse.grown(row, batch.state, b)
                slot = row.job.slot
                if saves is not None and slot is not None and len(row.tokens) - row.num_saved >= saves.every:
                    row.num_saved = len(row.tokens)
                    saves.save(slot, row.record(slot.key))

    def settle(self, job: Job) -> None:
        """Keep what a request came to that was interrupted, or forget what was saved of it.

        A request that failed for a reason of its own would fail again where it goes on.
        """
        saves, slot = self.host.saves, job.slot
        if saves is None or slot is None:
            return
        if job.fatal or (job.cancelled and not job.answered):
            row = job.rows[0] if job.rows else None
            if row is not None and len(row.tokens) >= saves.every and len(row.tokens) > row.num_saved:
                saves.save(slot, row.record(slot.key))
            saves.keep(slot)
        else:
            saves.remove(slot)

    def reap(self) -> None:
        """Say goodbye to requests that ended."""
        for job in [job for job in self.jobs.values() if not job.open]:
            del self.jobs[job.request.id]
            self.counters.ended(job)
            self.settle(job)
            self.reuse.ended(job)
            self.spans.end(job)
            self.on_close(job)
            self.has_memory()
            self.memory.tidy()

    def rest(self) -> None:
        """Nothing is open: hold no rows and no spare memory, and see that the books are straight."""
        self.batch.drop_closed()
        self.close()
        self.pressure.idle()
        self.check_integrity()
        self.take_gauges()

    # Rows

    def begin(self, jobs: Sequence[Job], state: BatchState) -> None:
        """Start the choices of prefilled requests: the first takes its row of `state`, others take copies."""
        first: dict[int, Row] = {}
        for b, job in enumerate(jobs):
            rows = [row for row in (self.new_row(job) for _ in range(self.scheduler.need(job))) if row is not None]
            if not job.open:
                continue
            for row in rows[1:]:
                self.batch.join([row], forked(state, b))
            if job.num_unstarted:
                self.scheduler.prepared.append(Prepared(job, forked(state, b)))
            first[b] = rows[0]
        if not first:
            return
        if len(first) < len(jobs):
            state.keep(list(first))
        self.batch.join(list(first.values()), state)

    def new_row(self, job: Job) -> Row | None:
        """The request's next choice; None, and the request failed, when its text output or proposer can't be made."""
        if not job.open:
            return None
        try:
            return job.begin_row(self.tokenizer, self.eos_ids, self.speculation)
        except Exception as error:  # noqa: BLE001  (both are made from this request's own fields)
            job.fail(error)
            return None

    def left(self, row: Row, state: BatchState, b: int) -> None:
        """A closed row is about to go: what it leaves is kept."""
        self.reuse.left(row, state, b)
        if self.speculation is not None:
            self.speculation.leave(row)

    # Failures

    def prefill_apart(self, jobs: Sequence[Job], error: Exception) -> None:
        """A window over several prompts failed: prefill each alone, so that only those to blame fail."""
        log.warning("prefill of %d prompts together failed, trying each alone: %s", len(jobs), error)
        self.counters.recoveries += 1
        for job in jobs:
            if job.open:
                job.num_cached, job.miss = 0, None
                try:
                    prefill = self.runner.prefill_alone(job.feed)
                except Exception as own:  # noqa: BLE001  (this request alone was in the window)
                    self.heed(own)
                    job.fail(own, code_of(own))
                else:
                    self.begin([job], prefill.state)

    def rebuild(self, error: Exception) -> None:
        """A shared step failed and left states undefined: recompute each row's from its tokens and step it alone.

        A row whose own step fails too is to blame and fails with its request; the others go on, a token further. That costs a
        prefill of every row, so it is not repeated without end.
        """
        rows = [row for row in self.batch.rows if row.open]
        self.drop_batch()
        self.stepper = self.runner.new_stepper(self.batch, self.speculation)
        mx.clear_cache()
        self.runner.mend()
        self.heed(error)
        self.num_rebuilds += 1
        if len(rows) == 1 or self.num_rebuilds > MAX_REBUILDS:
            for row in rows:
                row.job.fail(error, code_of(error))
        else:
            if is_out_of_memory(error):
                # Each alone would fit, and all together not again: whoever came last makes room.
                max((row.job for row in rows), key=lambda job: job.admitted).fail(error, code_of(error))
            log.warning("a step of %d rows failed, trying each alone: %s", len(rows), error, exc_info=error)
            self.counters.recoveries += 1
        for row in rows:
            self.read_mail()
            if row.open:
                try:
                    state = self.runner.step_alone(row)
                except Exception as own:  # noqa: BLE001  (this row alone was in the step)
                    self.heed(own)
                    row.job.fail(own, code_of(own))
                else:
                    if row.open:
                        self.batch.join([row], state)
        if not self.batch.rows:
            self.runner.probe()

    def end_ranks(self, error: Exception) -> None:
        """Where several processes hold the model, one that failed in its middle can't be tried again alone. Raises `DeviceFailed` then."""
        if self.ranks is not None:
            raise DeviceFailed(self.ranks.lost or f"rank {self.ranks.rank} failed: {error}") from error

    def reset(self, error: Exception) -> None:
        """Fail every request that was admitted and forget all state. Raises `DeviceFailed`."""
        self.end_ranks(error)
        self.counters.recoveries += 1
        if isinstance(error, PagesLost):
            self.reuse.forget()
        for job in self.jobs.values():
            if job.admitted:
                job.fail(error)
        self.drop_batch()
        self.stepper = self.runner.new_stepper(self.batch, self.speculation)
        self.scheduler.drop_closed()
        self.reap()
        mx.clear_cache()
        self.runner.probe()

    def fail_all(self, error: Exception, code: str) -> None:
        """The end: every open request hears that the engine can't go on."""
        for job in self.jobs.values():
            job.fail(error, code, fatal=True)
        self.aside.fail_all(error)
        self.reap()

    def close(self) -> None:
        """Let go of all states, after what still computes on them."""
        mx.synchronize()
        self.drop_batch()
        self.stepper.flight = None
        self.scheduler.drop_closed()
        self.memory.tidy()
        mx.clear_cache()

    def drop_batch(self) -> None:
        """Let go of all rows and of whatever is computed for them."""
        self.batch.clear()
        if self.speculation is not None:
            self.speculation.forget()

    def check_integrity(self) -> None:
        """Raise RuntimeError when the books of an idle core aren't empty."""
        self.batch.check_integrity()
        self.reuse.check_integrity()
        scheduler = self.scheduler
        if scheduler.has_work or self.batch.rows or scheduler.num_reserved:
            raise RuntimeError(
                f"idle with {len(scheduler.waiting)} waiting, {scheduler.num_preparing} preparing and "
                f"{len(self.batch.rows)} running"
            )

    def take_gauges(self) -> None:
        """Read what only this thread may read: sizes of arrays and MLX's memory."""
        counters = self.counters
        states = [self.batch.state, *(ready.state for ready in self.scheduler.prepared)]
        under_way = (self.scheduler.long, self.scheduler.short)
        states += [one.prefill.state for one in under_way if one is not None]
        counters.kv_bytes = self.memory.kv_bytes(states)
        if self.speculation is not None and self.speculation.draft is not None:
            counters.kv_bytes += self.speculation.draft.nbytes()
        counters.active_rows = self.batch.num_open
        counters.memory = {
            "active_bytes": mx.get_active_memory(),
            "peak_bytes": max(self.pressure.peak, mx.get_peak_memory()),
            "cache_bytes": mx.get_cache_memory(),
        }
        self.gauges_due = time.monotonic() + GAUGE_SECONDS
