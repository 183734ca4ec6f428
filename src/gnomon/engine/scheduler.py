"""Who runs next: first come, first served into rows; chunks of long prompts and groups of short ones take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gnomon.engine.prefill import Prefill
from gnomon.engine.row import Job
from gnomon.state.batch_state import BatchState

NewPrefill = Callable[[Sequence[Job]], Prefill]


@dataclass(eq=False, slots=True)
class Preparation:
    """Prompts being prefilled together."""

    jobs: Sequence[Job]
    prefill: Prefill


@dataclass(eq=False, slots=True)
class Prepared:
    """A prefilled request with choices to start. More choices than rows start as rows free up, each from a copy of `state`."""

    job: Job
    state: BatchState


@dataclass(eq=False)
class Scheduler:
    """The policy. `rows` is how many may run; a request takes `min(n, rows)` of them and waits until so many are free.

    Requests are admitted strictly in order. Of the admitted ones one long prompt at a time advances a chunk per turn, and every
    other turn goes to the short ones behind it, grouped into one window of at most `chunk` slots.
    """

    rows: int
    chunk: int
    may_group: bool
    new_prefill: NewPrefill
    has_memory: Callable[[Job], bool]
    """Whether a request fits beside those admitted."""
    num_cached: Callable[[Job], int] = lambda _: 0
    """Prompt tokens whose state would be lent now."""
    may_join: Callable[[Job, Sequence[Job]], bool] = lambda _job, _group: True
    """Whether prefilling a request with these loses nothing: it may do better to wait for what they compute."""
    waiting: deque[Job] = field(default_factory=deque[Job])
    admitted: deque[Job] = field(default_factory=deque[Job])
    long: Preparation | None = None
    short: Preparation | None = None
    """Short prompts under way; one that pauses for a checkpoint takes more than one turn."""
    prepared: deque[Prepared] = field(default_factory=deque[Prepared])
    num_running: int = 0
    """Rows decoding now; the owner of the batch keeps it up to date."""
    _short_turn: bool = False

    def need(self, job: Job) -> int:
        """Rows a request takes at once."""
        return min(job.request.n, self.rows)

    @property
    def num_reserved(self) -> int:
        under_way = [job for one in (self.long, self.short) if one is not None for job in one.jobs]
        jobs = [*self.admitted, *under_way]
        return sum(self.need(job) for job in jobs if job.open)

    @property
    def num_free(self) -> int:
        return self.rows - self.num_running - self.num_reserved

    @property
    def num_preparing(self) -> int:
        return len(self.admitted) + (self.long is not None) + (self.short is not None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.admitted or self.long or self.short or self.prepared)

    def may_admit(self, job: Job) -> bool:
        """Rows freed up go to the remaining choices of a running request first."""
        return not self.prepared and self.need(job) <= self.num_free and self.has_memory(job)

    def admit(self) -> Iterator[Job]:
        """Move requests that fit from the queue to preparation, in order."""
        while self.waiting and self.may_admit(self.waiting[0]):
            job = self.waiting.popleft()
            self.admitted.append(job)
            yield job

    def next_preparation(self) -> Preparation | None:
        """Whose window runs this turn."""
        self.drop_closed()
        if self.long is None:
            first = next((job for job in self.admitted if self._is_long(job)), None)
            if first is not None:
                self.admitted.remove(first)
                self.long = Preparation([first], self.new_prefill([first]))
        has_short = self.short is not None or any(map(self._is_short, self.admitted))
        if self.long is not None and not (self._short_turn and has_short):
            self._short_turn = True
            return self.long
        self._short_turn = False
        if self.short is None and (group := self._take_group()):
            self.short = Preparation(group, self.new_prefill(group))
        return self.short

    def done(self, preparation: Preparation) -> None:
        """A preparation has finished: its rows run now."""
        if preparation is self.long:
            self.long = None
        if preparation is self.short:
            self.short = None

    def drop_closed(self) -> None:
        """Forget requests that ended while they waited or were prepared."""
        self.waiting = deque(job for job in self.waiting if job.open)
        self.admitted = deque(job for job in self.admitted if job.open)
        self.prepared = deque(ready for ready in self.prepared if ready.job.open)
        if self.long is not None and not self.long.jobs[0].open:
            self.long = None
        if self.short is not None and not any(job.open for job in self.short.jobs):
            self.short = None

    def _drain(self, job: Job) -> int:
        """Prompt tokens to prefill."""
        return len(job.feed) - 1 - self.num_cached(job)

    def _is_short(self, job: Job) -> bool:
        return self._drain(job) <= self.chunk

    def _is_long(self, job: Job) -> bool:
        return not self._is_short(job)

    def _take_group(self) -> list[Job]:
        """Short prompts, in order, whose padded window stays within a chunk."""
        group: list[Job] = []
        width = 0
        for job in filter(self._is_short, self.admitted):
            drain = self._drain(job)
            wider = max(width, drain)
            # A prompt with nothing to drain joins the batch as it is, alone.
            if group and (not self.may_group or not drain or not width or wider * (len(group) + 1) > self.chunk):
                break
            if group and not self.may_join(job, group):
                break
            group.append(job)
            width = wider
        for job in group:
            self.admitted.remove(job)
        return group
