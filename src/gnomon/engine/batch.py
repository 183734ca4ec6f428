"""The running rows: their requests, layer states, samplers and the token each feeds next, kept in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from gnomon.engine.row import Row
from gnomon.engine.sampling import BatchSampler
from gnomon.grammar import GrammarFailed, Words
from gnomon.state.batch_state import BatchState


class Batch:
    """Rows enter and leave between steps. `pending` [B, 1] int32 may be lazy: the tokens of a step that was not read back yet."""

    def __init__(self, on_leave: Callable[[Row, BatchState, int], None] | None = None) -> None:
        """`on_leave` is told of a closed row, and which row of the state is its, before it goes."""
        self.on_leave = on_leave
        self.rows: list[Row] = []
        """Replaced, never changed in place: a step in flight keeps the list it was built over."""
        self.state: BatchState | None = None
        self.sampler = BatchSampler()
        self.pending: mx.array | None = None
        self.has_fresh = False
        """Some row has not made its first step yet."""

    @property
    def num_open(self) -> int:
        return sum(row.open for row in self.rows)

    @property
    def has_guesses(self) -> bool:
        return any(row.guesses is not None for row in self.rows)

    @property
    def waits(self) -> bool:
        """Whether some row's tokens must be read before its next forward."""
        return any(row.guesses is not None and row.guesses.waits for row in self.rows)

    @property
    def has_constraints(self) -> bool:
        return any(row.constraint is not None for row in self.rows)

    def allowed(self, drafts: Sequence[Sequence[int]] = ()) -> dict[int, Sequence[Words]]:
        """What each constrained row may draw next and behind each id of its draft, by its place.

        A row whose grammar gives up fails with its request.
        """
        found: dict[int, Sequence[Words]] = {}
        for b, row in enumerate(self.rows):
            if row.constraint is not None and row.open:
                try:
                    found[b] = row.constraint.along(drafts[b] if drafts else ())
                except GrammarFailed as error:
                    row.job.fail(error, "grammar_failed")
        return found

    def join(self, rows: Sequence[Row], state: BatchState, pending: mx.array | None = None) -> None:
        """Add rows with their states. `pending` [n, 1] defaults to each row's last known token. Takes `state` over."""
        if pending is None:
            pending = mx.array([[row.last] for row in rows], dtype=mx.int32)
        if self.state is None or self.pending is None:
            self.state, self.pending = state, pending
        else:
            self.state.join(state)
            self.pending = mx.concatenate([self.pending, pending])
        self.sampler.join([row.sampling() for row in rows])
        self.rows = [*self.rows, *rows]
        self.has_fresh = self.has_fresh or any(not row.tokens for row in rows)
        if len(self.rows) > 1:
            for row in self.rows:
                row.job.batched = True

    def drop_closed(self) -> None:
        """Let go of the rows that were closed."""
        closed = [b for b, row in enumerate(self.rows) if not row.open]
        if closed and self.state is not None:
            if self.on_leave is not None:
                for b in closed:
                    self.on_leave(self.rows[b], self.state, b)
            self.keep(self.state.order_without(closed))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        if not rows or self.state is None or self.pending is None:
            self.clear()
            return
        self.state.keep(rows)
        self.sampler.keep(rows)
        self.pending = self.pending[mx.array(list(rows))]
        self.rows = [self.rows[b] for b in rows]

    def resample(self) -> None:
        """Build the sampler anew from what the rows have generated so far."""
        self.sampler = BatchSampler()
        self.sampler.join([row.sampling() for row in self.rows])

    def clear(self) -> None:
        self.rows, self.state, self.pending, self.sampler, self.has_fresh = [], None, None, BatchSampler(), False

    def check_integrity(self) -> None:
        """Raise RuntimeError when rows, states, samplers and pending tokens disagree."""
        have = (
            len(self.rows),
            len(self.state.lengths) if self.state is not None else 0,
            self.pending.shape[0] if self.pending is not None else 0,
        )
        if len(set(have)) > 1:
            raise RuntimeError(f"batch of {have[0]} rows has {have[1]} states and {have[2]} pending tokens")
        if self.state is not None:
            self.state.check_integrity()
