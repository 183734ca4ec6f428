"""Memory: what requests are predicted to take, and the limit that an operator may set on it."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx
import psutil

from gnomon.config import KvScheme
from gnomon.engine.row import Job
from gnomon.engine.workspace import Workspace
from gnomon.models.fit import PREFILL, TRANSIENT_PER_TOKEN, Needs, measure_needs, usable
from gnomon.models.load import LoadedModel

CEILING = 0.85
"""Share of the memory beyond which what is kept for reuse gives way to what runs."""


MIN_CONTEXT = 2
"""Tokens of the shortest request: one of the prompt and one of the answer."""


BESIDE_SCORES = 0.25
"""What masks and products take beside scores that are held whole, as a share of these. The transient covers the scores themselves."""


NO_SCORES = Workspace()


class OverBudget(ValueError):
    """The model alone takes more than the operator allows."""


@dataclass(frozen=True, slots=True)
class Budget:
    """`limit` bytes is the operator's; None is advice only, and nothing is refused. `needs` is None where there are no files to measure.

    `kv_limit` bytes is the operator's for the states of admitted requests alone. `workspace` says what attention holds beside those.
    """

    needs: Needs | None
    limit: int | None
    usable: int
    kv_limit: int | None = None
    workspace: Workspace = NO_SCORES

    @property
    def max_safe_context(self) -> int | None:
        """Tokens of one request that should fit."""
        return self.needs.max_context(self.usable) if self.needs is not None else None

    def max_context(self, n: int) -> int | None:
        """The most tokens each of `n` choices may reach with nothing else running; None without a limit."""
        if self.needs is None or self.limit is None:
            return None
        low, high = 0, self.needs.max_positions or 1 << 24
        if self._total([(high, n)]) <= self.limit:
            return high
        while low < high - 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._total([(middle, n)]) <= self.limit else (low, middle)
        return low

    def kv(self, context: int, n: int) -> int | None:
        """Bytes that the states of `n` choices take at `context` tokens each; None where the model can't be measured."""
        return math.ceil(self.needs.kv(context) * n) if self.needs is not None else None

    def kv_context(self, n: int) -> int | None:
        """The most tokens of context that `kv_limit` holds for each of `n` choices; None without one."""
        if self.kv_limit is None or self.needs is None:
            return None
        low, high = 0, self.needs.max_positions or 1 << 24
        if self.needs.kv(high) * n <= self.kv_limit:
            return high
        while low < high - 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.needs.kv(middle) * n <= self.kv_limit else (low, middle)
        return low

    def projected_kv(self, jobs: Iterable[Job]) -> int:
        """Bytes of the states of these requests, each grown to its limit."""
        return sum(self.kv(len(job.prompt) + job.limit, job.num_unfinished) or 0 for job in jobs)

    def has_kv(self, jobs: Iterable[Job], shared: int = 0) -> bool:
        """Whether the states of these requests fit together, each grown to its limit. `shared` bytes of them are one another's."""
        return self.kv_limit is None or self.projected_kv(jobs) - shared <= self.kv_limit

    def has_room(self, jobs: Iterable[Job]) -> bool:
        """Whether these requests fit together, each grown to its limit."""
        left = self.left(jobs)
        return left is None or left >= 0

    def left(self, jobs: Iterable[Job], shared: int = 0) -> int | None:
        """Bytes of the limit that these requests leave, each grown to its own; negative if they don't fit, None without a limit.

        `shared` bytes of their states are one another's.
        """
        if self.limit is None:
            return None
        return int(
            self.limit + shared - self._total([(len(job.prompt) + job.limit, job.num_unfinished) for job in jobs])
        )

    def _total(self, choices: Iterable[tuple[int, int]]) -> float:
        """Weights, states of (context, number of choices), and the transient of one prefill window, in bytes."""
        if self.needs is None:
            return 0.0
        choices = list(choices)
        longest = max((context for context, _ in choices), default=0)
        states = sum(self.needs.kv(context) * n for context, n in choices)
        beside = BESIDE_SCORES * self.workspace.nbytes(PREFILL, longest) + self.workspace.beside(PREFILL, longest)
        return self.needs.weights + states + min(PREFILL, longest) * TRANSIENT_PER_TOKEN + beside


@contextmanager
def allocator_limits(limit: int | None) -> Generator[None]:
    """Hold MLX's allocator to the operator's limit, and on Metal keep weights wired, as mlx-lm does while it generates."""
    memory = mx.set_memory_limit(limit) if limit is not None else None
    wired = None
    if mx.metal.is_available():
        wired = mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
    try:
        yield
    finally:
        if memory is not None:
            mx.set_memory_limit(memory)
        if wired is not None:
            mx.set_wired_limit(wired)


def ceiling(limit: int | None) -> int:
    """Bytes in use by MLX beyond which the cache gives way: a share of what the device recommends, or of the operator's `limit`."""
    info = mx.device_info()
    size = int(info.get("max_recommended_working_set_size") or info.get("memory_size") or psutil.virtual_memory().total)
    return int(CEILING * min(size, size if limit is None else limit))


def budget_for(
    loaded: LoadedModel,
    limit: int | None,
    kv: KvScheme | None = None,
    draft: LoadedModel | None = None,
    kv_limit: int | None = None,
) -> Budget:
    """Measure a loaded model under a scheme of keys and values, and with it the one that drafts for it, whose are plain.

    Raises `OverBudget` when not even one token fits, and ValueError when there is a limit of either kind and the model can't be measured.
    """
    try:
        needs = measure_needs(loaded.path, kv)
        if draft is not None:
            its = measure_needs(draft.path)
            needs = replace(needs, weights=needs.weights + its.weights, full=needs.full + its.full)
    except (OSError, ValueError):
        if limit is not None or kv_limit is not None:
            raise
        needs = None
    ram = int(mx.device_info().get("memory_size") or psutil.virtual_memory().total)
    budget = Budget(needs, limit, int(usable(ram, limit)), kv_limit)
    if limit is not None and not budget.max_context(1):
        raise OverBudget(
            f"the model's weights take {loaded.weight_bytes} bytes, and with one token of context that is more than "
            f"the memory budget of {limit} bytes"
        )
    if kv_limit is not None and needs is not None and not needs.kv(1):
        raise ValueError(
            f"--kv-budget bounds keys and values, and {loaded.model_type} keeps none: its states have a fixed size, which --batch bounds"
        )
    if kv_limit is not None and (budget.kv_context(1) or 0) < MIN_CONTEXT:
        raise OverBudget(
            f"the state of {MIN_CONTEXT} tokens, a prompt's and an answer's, takes {budget.kv(MIN_CONTEXT, 1)} bytes, and that is more "
            f"than --kv-budget, {kv_limit} bytes"
        )
    return budget


def shared_budget(budget: Budget, weights: int, ram: int) -> Budget:
    """The same for a model that several processes hold, `weights` bytes of it this one, the smallest of which has `ram` bytes."""
    needs = None if budget.needs is None else replace(budget.needs, weights=weights)
    return replace(budget, needs=needs, usable=int(usable(ram, budget.limit)))
