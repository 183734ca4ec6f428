"""The memory of a running engine: who may come in, what gives way, and what is told of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from gnomon.engine.budget import Budget
from gnomon.engine.reuse import Reuse
from gnomon.engine.row import Job
from gnomon.engine.runner import Runner
from gnomon.state.batch_state import BatchState


class Memory:
    """Stands between the budget, which predicts, and what is held: rows' states, pages, and what is kept for reuse."""

    def __init__(self, budget: Budget, runner: Runner, reuse: Reuse) -> None:
        self.budget = budget
        self.runner = runner
        self.reuse = reuse
        self.pages: dict[str, int] = {}
        """For /stats, as of the last gauges."""

    def has_room(self, job: Job | None, admitted: Iterable[Job], waiting: Collection[Job]) -> bool:
        """Whether a request fits beside those admitted. What is reused gives way to them.

        `waiting` are those of the admitted that have no state yet. Pages that several need are counted once.
        """
        jobs = list(admitted)
        shared = self._shared_bytes(waiting if job is None else [job, *waiting])
        if job is not None:
            jobs.insert(0, job)
            if not self.budget.has_kv(jobs, shared):
                return False
        left = self.budget.left(jobs, shared)
        if left is not None and left < 0:
            return False
        pages = self.runner.pages
        if left is not None and pages is not None:
            left += pages.page_bytes * sum(0 < page.row_holds < page.holds for page in pages.pages())
        self.reuse.allow(left)
        return True

    def shed(self, num_bytes: int) -> int:
        """What is kept for reuse gives way when memory runs short, by so much or as far as it goes. How many bytes went."""
        went = self.reuse.shed(num_bytes)
        self.tidy()
        return went

    def tidy(self) -> None:
        """Give back what is held for pages that nobody needs. Between forwards only."""
        if self.runner.pages is not None:
            self.runner.pages.tidy()

    def kv_bytes(self, states: Iterable[BatchState | None]) -> int:
        """Bytes that states of rows take, spare capacity included; pages that several rows hold count once."""
        pages = self.runner.pages
        if pages is not None:
            self.pages = pages.stats()
            return self.pages["page_bytes"] * self.pages["held_by_rows"]
        return sum(state.nbytes() for state in states if state is not None)

    def sections(self) -> dict[str, Any]:
        """For /stats, by section; read on any thread."""
        return {"paged_kv": {"enabled": self.runner.pages is not None, **self.pages}}

    def _shared_bytes(self, waiting: Iterable[Job]) -> int:
        """Bytes that the budget counts more than once: whole pages of several rows, and those that rows have and others will be lent."""
        pages, budget = self.runner.pages, self.budget
        if pages is None or (budget.limit is None and budget.kv_limit is None):
            return 0
        whole = [hold.page for table in list(pages.tables) for hold in table.whole()]
        lent = sum(self.reuse.num_pages_in_use(job) for job in waiting)
        return pages.page_bytes * (len(whole) - len(set(whole)) + lent)
