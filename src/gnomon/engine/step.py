"""The one step behind every generated token: propose, forward, verify, commit.

    window of row b   [pending, d1, d2 .. dk]       k = 0 in plain decoding
    forward           logits at every position
    draw              [t0, t1 .. tk]                 the sampler's own choice after pending, d1 .. dk
    verify            t0 == d1, t1 == d2 ..          a of them agree
    commit            t0 .. ta are the row's tokens  (ta: correction, or the bonus when all agree)
    roll back         k - a states

Asserted tokens take the place of what was drawn for them. Rows have windows of their own lengths: flat, one behind the other, where the
model takes that (`blocks.flat_test`), else padded to the longest.

Without proposals nothing has to be known before the next forward, so the read-back runs one step behind:

    build n+1 from the lazy tokens of n   ->   start it   ->   read and deliver n

Rows that could guess are asked each time whether it would pay, as of the tokens read back; only if so is the step in flight waited for.

A row with a constraint needs its token before its next draw, though not before its next forward:

    start the forward of n+1 from the lazy tokens of n   ->   read and deliver n   ->   find what may come next   ->   start the draw of n+1

Proposals that its grammar forbids are cut off before a window. What a grammar forces is known from the read-back on, so while windows are
made the read-back comes first: else a token of every forced piece would be drawn singly.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx
from mlx import nn

from gnomon.config import EngineConfig
from gnomon.engine.batch import Batch
from gnomon.engine.counters import Counters
from gnomon.engine.row import Row
from gnomon.engine.sampling import BatchSampler, Drawn
from gnomon.engine.speculation import Speculation
from gnomon.grammar import Words
from gnomon.kernels import dispatch
from gnomon.kernels.blocks import flat_test
from gnomon.propose.guesses import NOTHING
from gnomon.propose.strict import Strict

SETTLED = 8
"""Plain steps in a row after which the forwards of constrained rows no longer wait for the tokens before."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was started and not read back. A row may have closed since: its token is then dropped."""

    rows: Sequence[Row]
    drawn: Drawn
    settled: bool = True
    """Another step was under way while this one was prepared, where that is so in a row of plain steps."""


class Stepper:
    """Steps a batch. An exception out of `step` or `land` leaves the batch unusable; its rows can be rebuilt from their tokens."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        config: EngineConfig,
        counters: Counters,
        *,
        pad_safe: bool,
        speculation: Speculation | None = None,
    ) -> None:
        self.model = model
        self.batch = batch
        self.config = config
        self.counters = counters
        self.pad_safe = pad_safe
        self.speculation = speculation
        self.flight: Flight | None = None
        self._flat_room = flat_test(model)
        self._read, self._read_rows = 0.0, 0
        """When tokens were read back last, of how many rows; 0 if something else was computed since."""
        self._plain_steps = 0
        """Since the last window."""

    def step(self) -> bool:
        """Advance every row, delivering what was read back. False if nothing was left to advance."""
        batch, speculation = self.batch, self.speculation
        if batch.waits or self._all_end_in_flight() or (batch.has_constraints and not self._runs_ahead()):
            self.land()
        drafts: list[Sequence[int]] = []
        if speculation is not None and batch.has_guesses and speculation.wants_window(batch.rows, self._is_flat):
            self.land()
            batch.drop_closed()
            drafts = self._open_only(speculation.drafts(batch.rows, self._is_flat))
        batch.drop_closed()
        if not batch.rows:
            self.flight = None
            return False
        if any(drafts) and speculation is not None:
            # What a draft model takes is reckoned on its own.
            has_begun = self._read and self._read_rows == len(drafts) and speculation.draft is None
            begun = self._read if has_begun else time.perf_counter()
            guesses, num_tokens = self._window(drafts)
            self._read, self._read_rows = time.perf_counter(), len(drafts)
            speculation.windowed(len(drafts), guesses, self._read - begun, num_tokens)
            self._plain_steps = 0
        else:
            self._plain(speculation.asserted(batch.rows) if speculation is not None and batch.waits else {})
            self._plain_steps += 1
        return True

    def land(self) -> None:
        """Read back the step in flight and deliver its tokens."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self._deliver(flight)
            self._paced(flight)

    def disturbed(self) -> None:
        """Something else was computed since the last step: the time to the next says nothing of what a step takes."""
        self._read = 0.0
        if self.speculation is not None:
            self.speculation.disturbed()

    def _paced(self, flight: Flight) -> None:
        """A plain step was read back. From one such to the next, if nothing came between, is what a step takes."""
        now, num_rows = time.perf_counter(), len(flight.rows)
        if self._read and self._read_rows == num_rows and self.speculation is not None:
            self.speculation.stepped(num_rows, now - self._read, flight.settled)
        self._read, self._read_rows = now, num_rows

    def _runs_ahead(self) -> bool:
        """Whether forwards of constrained rows start before the tokens in flight are read: nothing was proposed lately."""
        batch, speculation = self.batch, self.speculation
        if self._plain_steps >= SETTLED or not batch.has_guesses:
            return True
        return speculation is not None and speculation.rests(len(batch.rows))

    def _all_end_in_flight(self) -> bool:
        """The step in flight makes the last token any row may have: another would be thrown away."""
        return self.flight is not None and all(row.left <= 1 for row in self.batch.rows if row.open)

    def _plain(self, asserted: Mapping[Row, int]) -> None:
        batch, config = self.batch, self.config
        state = batch.state
        if state is None:
            raise RuntimeError("rows without states")
        # Where every token is read before the next step, that is how plain steps go.
        settled = self.flight is not None or batch.waits or not config.pipeline
        with dispatch.step():
            state.begin(1)
            logits = self.model(batch.pending, cache=state.caches)
            state.commit()
        allowed = self._allowed(logits)
        try:
            with dispatch.step():
                drawn = self._with(asserted, batch.sampler.draw(logits, allowed=allowed))
            batch.sampler.commit(drawn.tokens, [1] * len(batch.rows))
        except Exception as error:  # noqa: BLE001  (whatever a row's processors raise is that row's own failure)
            logits, allowed = self._weed(logits, allowed, error)
            if not batch.rows:
                return
            with dispatch.step():
                drawn = self._with(asserted, batch.sampler.draw(logits, allowed=allowed))
            batch.sampler.commit(drawn.tokens, [1] * len(batch.rows))
        mx.async_eval(drawn.arrays(), batch.sampler.arrays())
        for row in asserted:
            if row.guesses is not None:
                row.guesses.tally.assert_one(Strict.source)
        before, self.flight = self.flight, Flight(batch.rows, drawn, settled)
        batch.pending = drawn.tokens
        if before is not None:
            self._deliver(before)
            self._paced(before)
        if not config.pipeline or (batch.has_fresh and config.early_first_token):
            self.land()
        batch.has_fresh = False

    def _with(self, asserted: Mapping[Row, int], drawn: Drawn) -> Drawn:
        """What was drawn, with what is asserted of some rows in its place."""
        if not asserted:
            return drawn
        said = mx.array([[asserted.get(row, -1)] for row in self.batch.rows], dtype=mx.int32)
        return replace(drawn, tokens=mx.where(said >= 0, said, drawn.tokens))

    def _allowed(self, logits: mx.array, drafts: Sequence[Sequence[int]] = ()) -> dict[int, Sequence[Words]]:
        """What constrained rows may draw at each position, found while the device computes the logits."""
        batch, counters = self.batch, self.counters
        if not batch.has_constraints:
            return {}
        mx.async_eval(logits)
        self.land()
        begun = time.perf_counter()
        allowed = batch.allowed(drafts)
        counters.masks += sum(map(len, allowed.values()))
        counters.mask_seconds += time.perf_counter() - begun
        return allowed

    def _weed(
        self, logits: mx.array, allowed: dict[int, Sequence[Words]], error: Exception
    ) -> tuple[mx.array, dict[int, Sequence[Words]]]:
        """Fail the rows whose draw raises on its own; the others' logits and what they may draw.

        Raises `error` when no row alone is to blame.
        """
        batch = self.batch
        self.land()
        alive: list[int] = []
        num_failed = 0
        for b, row in enumerate(batch.rows):
            if not row.open:
                continue
            sampler = BatchSampler()
            try:
                sampler.join([row.sampling()])
                own_words = {0: allowed[b]} if b in allowed else None
                sampler.commit(sampler.draw(logits[b : b + 1], allowed=own_words).tokens, [1])
            except Exception as own:  # noqa: BLE001  (see above)
                row.job.fail(own, "sampling_error")
                num_failed += 1
            else:
                alive.append(b)
        if not num_failed:
            raise error
        alive = [b for b in alive if batch.rows[b].open]
        batch.keep(alive)
        batch.resample()
        left = {place: allowed[b] for place, b in enumerate(alive) if b in allowed}
        return (logits[mx.array(alive)] if alive else logits), left

    def _open_only(self, drafts: list[Sequence[int]]) -> list[Sequence[int]]:
        """The drafts in the order of the batch after the rows whose proposer raised were dropped."""
        batch = self.batch
        found = dict(zip(batch.rows, drafts, strict=True))
        batch.drop_closed()
        return [found[row] for row in batch.rows]

    @property
    def _most_flat(self) -> int:
        """How many tokens a window over the rows as they are may have that holds no padding; 0 if there is none such."""
        state = self.batch.state
        if state is None or state.num_rows < 2 or not self.pad_safe:
            return 0
        return self._flat_room(state.caches)

    @property
    def _is_flat(self) -> bool:
        """Whether windows over the rows as they are hold no padding."""
        return self._most_flat > len(self.batch.rows)

    def _window(self, drafts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Verify the drafts. How many positions were computed beyond one of each row, and how many tokens came of it."""
        batch, counters = self.batch, self.counters
        rows, state = batch.rows, batch.state
        if state is None:
            raise RuntimeError("rows without states")
        width = 1 + max(map(len, drafts))
        # Where padding would disturb the model, rows with fewer guesses take whole windows too, and more of theirs is taken back.
        counts = [1 + len(draft) if self.pad_safe else width for draft in drafts]
        window = [[row.last, *draft, *[0] * (width - 1 - len(draft))] for row, draft in zip(rows, drafts, strict=True)]
        tokens = mx.array(window, dtype=mx.int32)
        flat = sum(counts) < width * len(rows) and sum(counts) <= self._most_flat
        fed = tokens
        if flat:
            real = [token for own, count in zip(window, counts, strict=True) for token in own[:count]]
            fed = mx.array(real, dtype=mx.int32)[:, None]
        with dispatch.step():
            state.begin(width, counts, flat=flat)
            logits = self.model(fed, cache=state.caches)
            state.commit()
        allowed = self._allowed(logits, drafts)
        with dispatch.step():
            drawn = batch.sampler.draw(logits, tokens[:, 1:], allowed, counts if flat else None)
        mx.eval(drawn.arrays())
        draws = cast("list[list[int]]", drawn.tokens.tolist())
        used = [
            row.guesses.used if draft and row.guesses is not None else NOTHING
            for row, draft in zip(rows, drafts, strict=True)
        ]
        for guess, draft, draw in zip(used, drafts, draws, strict=True):
            if guess.asserted:
                draw[: len(draft)] = draft
                if guess.after is not None:
                    draw[len(draft)] = guess.after
        # Nothing counts behind the last position whose mask is known.
        known = [draft[: len(allowed[b]) - 1] if b in allowed else draft for b, draft in enumerate(drafts)]
        accepted = [verify(draft, draw) for draft, draw in zip(known, draws, strict=True)]
        batch.sampler.commit(
            mx.array(draws, dtype=mx.int32) if any(guess.asserted for guess in used) else drawn.tokens,
            [a + 1 for a in accepted],
        )
        back = [count - 1 - a for count, a in zip(counts, accepted, strict=True)]
        if any(back):
            with dispatch.step():  # recurrent layers run again on what stays
                state.rollback(back)
        batch.pending = mx.array([[draw[a]] for draw, a in zip(draws, accepted, strict=True)], dtype=mx.int32)
        batch.has_fresh = False
        counters.window_steps += 1
        for b, (row, draft, a) in enumerate(zip(rows, drafts, accepted, strict=True)):
            if row.guesses is not None:
                row.guesses.tally.calls += 1
                if draft:
                    row.guesses.tally.add(len(draft), a, row.guesses.used)
            counters.guessed(len(draft), a)
            for position in range(a + 1):
                if not row.open:
                    break
                self._take(row, b, position, draws[b][position], drawn)
        return (sum(counts) if flat else width * len(rows)) - len(rows), sum(accepted) + len(rows)

    def _deliver(self, flight: Flight) -> None:
        tokens = cast("list[list[int]]", flight.drawn.tokens.tolist())
        for b, row in enumerate(flight.rows):
            if row.open:
                if row.guesses is not None:
                    row.guesses.tally.calls += 1
                self._take(row, b, 0, tokens[b][0], flight.drawn)
            else:
                self.counters.discarded_tokens += 1

    def _take(self, row: Row, b: int, position: int, token: int, drawn: Drawn) -> None:
        self.counters.generated_tokens += 1
        try:
            row.take(token, None if drawn.logprobs is None else drawn.logprobs.score(b, position))
        except Exception as error:  # noqa: BLE001  (text, stop strings and the sink belong to this request alone)
            row.job.fail(error, "output_error")


def verify(draft: Sequence[int], draws: Sequence[int]) -> int:
    """How many leading guesses the sampler drew itself."""
    for a, guess in enumerate(draft):
        if guess != draws[a]:
            return a
    return len(draft)
