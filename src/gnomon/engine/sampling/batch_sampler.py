"""One sampler for the rows of a batch.

    logits ─ bias ─ repetition ─ presence ─ frequency ─ allowed ─ log-softmax ─┬─ top-p ─ min-p ─ XTC ─ top-k ─ 1/T ─ +Gumbel ─ argmax
                                                                     ├─ min-p ─ XTC ─ HLG ─ 1/T ─ +Gumbel ─ argmax
                                                                     ├─ argmax (greedy)
                                                                     └─ logprobs (if asked)

Each stage sees only the cells (row x window position) that need it, and runs only if some do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from gnomon.engine.api import SamplingParams
from gnomon.engine.sampling import filters, hlg, processors
from gnomon.engine.sampling.history import History, look_back
from gnomon.engine.sampling.logprobs import Logprobs
from gnomon.engine.sampling.plan import Part, Plan, make_plan
from gnomon.engine.sampling.randomness import gumbel, uniform
from gnomon.engine.sampling.row import RowSampling
from gnomon.grammar import Words


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens int32 [B, L] drawn at every window position, lazy, with log-probabilities for the rows that asked."""

    tokens: mx.array
    logprobs: Logprobs | None = None

    def arrays(self) -> list[mx.array]:
        """What to evaluate."""
        return [self.tokens, *(self.logprobs.arrays() if self.logprobs else ())]


class BatchSampler:
    """Draws for the rows of one batch, in the batch's order. All calls come from the engine thread."""

    def __init__(self, rows: Sequence[RowSampling] = ()) -> None:
        self._rows: list[RowSampling] = []
        self._steps: list[int] = []
        self._history: History | None = None
        self._plans: dict[tuple[int, mx.Dtype], Plan] = {}
        self.join(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def steps(self) -> list[int]:
        """The output step each row draws next."""
        return list(self._steps)

    def join(self, rows: Sequence[RowSampling]) -> None:
        """Add rows behind those that are there."""
        if not rows:
            return
        joining = [bool(row.penalty_windows) for row in rows]
        if self._history is not None or any(joining):
            here = self._history or History([()] * len(self._rows), [False] * len(self._rows))
            here.join(History([row.remembered() for row in rows], joining))
            self._history = here
        self._rows += rows
        self._steps += [row.step for row in rows]
        self._plans.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._rows = [self._rows[row] for row in rows]
        self._steps = [self._steps[row] for row in rows]
        if self._history is not None:
            self._history.keep(rows)
            if not self._history.wanted:
                self._history = None
        self._plans.clear()

    def draw(
        self,
        logits: mx.array,
        drafts: mx.array | None = None,
        allowed: Mapping[int, Sequence[Words]] | None = None,
        counts: Sequence[int] | None = None,
    ) -> Drawn:
        """Draw a token at every position of logits [B, L, V], of any float dtype. With `counts` they are [tokens, 1, V], those of the first
        counts[b] >= 1 of L positions of each row, row by row; what is said of the others means nothing.

        Position l of row b is output step `steps[b] + l` and its penalties see drafts[b, :l] (int [B, L-1]) as already generated.
        `allowed[b][l]` are the ids that row b may draw at position l, a bit each (uint32 words, least significant bit first); positions
        behind the last of them and other rows may draw any. Nothing advances until `commit`. Raises ValueError if the shapes don't fit
        the rows.
        """
        num_rows, vocab = len(self._rows), logits.shape[-1]
        if counts is None:
            if logits.shape[0] != num_rows:
                raise ValueError(f"logits hold {logits.shape[0]} rows, but the batch has {num_rows}")
            width = logits.shape[1]
            each = [width] * num_rows
        else:
            each, width = list(counts), max(counts)
            if len(each) != num_rows or logits.shape[:2] != (sum(each), 1):
                raise ValueError(f"logits {logits.shape} don't hold {each} positions of {num_rows} rows")
        if (0 if drafts is None else drafts.shape[1]) != width - 1:
            raise ValueError(f"a window of {width} positions needs {width - 1} drafts per row")
        plan = self._plan(each, logits.dtype, keep=counts is None)
        scores = self._process(logits.reshape(-1, vocab), plan, drafts)
        if plan.processes:
            # Extreme parameters overflow, and infinity has no log-softmax.
            scores = mx.minimum(scores, mx.finfo(scores.dtype).max)
        if allowed:
            scores = _masked(scores, allowed, each)
        logprobs = filters.log_softmax(scores)
        tokens = self._pick(logprobs, plan).view(mx.int32)  # what was uint32: no kernel
        if counts is None:
            tokens = tokens.reshape(num_rows, width)
            return Drawn(tokens, self._score(logprobs.reshape(num_rows, width, vocab), tokens))
        # A row's last cell stands in for the positions it doesn't have.
        cells = [[start + min(i, n - 1) for i in range(width)] for start, n in zip(_starts(each), each, strict=True)]
        at = mx.array(cells, dtype=mx.int32)
        tokens = tokens[at]
        return Drawn(tokens, self._score(logprobs, tokens, at))

    def _plan(self, counts: Sequence[int], dtype: mx.Dtype, keep: bool) -> Plan:
        if not keep:
            return make_plan(self._rows, counts, dtype)
        key = counts[0] if counts else 0, dtype
        if key not in self._plans:
            self._plans[key] = make_plan(self._rows, counts, dtype)
        return self._plans[key]

    def commit(self, tokens: mx.array, counts: Sequence[int]) -> None:
        """Advance each row by the first counts[b] of tokens [B, L] (0 <= counts[b] <= L; the tokens may be lazy)."""
        if self._history is not None:
            self._history.append(tokens, counts)
        self._steps = [step + count for step, count in zip(self._steps, counts, strict=True)]

    def arrays(self) -> list[mx.array]:
        """The state to evaluate with a step, so that no graph builds up."""
        return [] if self._history is None else [self._history.ids]

    def _process(self, x: mx.array, plan: Plan, drafts: mx.array | None) -> mx.array:
        if plan.bias is not None:
            x = processors.add_bias(x, *plan.bias)
        history = self._history
        if history is None:
            return x
        ids, vocab = history.with_drafts(drafts), x.shape[-1]

        def seen(part: Part, size: Callable[[SamplingParams], int]) -> tuple[mx.array, mx.array]:
            ends = [history.lengths[row] + position for row, position in part.places]
            return look_back(ids[part.slots], ends, [size(row.params) for row in part.rows], vocab)

        if part := plan.repetition:
            mask = processors.presence_mask(*seen(part, lambda p: p.repetition_context_size), vocab)
            x = part.apply(x, processors.repetition, mask, part.column)
        if part := plan.presence:
            mask = processors.presence_mask(*seen(part, lambda p: p.presence_context_size), vocab)
            x = part.apply(x, processors.presence, mask, part.column)
        if part := plan.frequency:
            x = part.apply(x, processors.frequency, *seen(part, lambda p: p.frequency_context_size), part.column)
        return x

    def _pick(self, logprobs: mx.array, plan: Plan) -> mx.array:
        if plan.sampled is None or plan.token_keys is None:
            return mx.argmax(logprobs, axis=-1)
        x, vocab = logprobs, logprobs.shape[-1]
        if part := plan.top_p:
            x = part.apply(x, filters.top_p, part.column)
        if part := plan.min_p:
            x = part.apply(x, filters.min_p, part.column)
        if (part := plan.xtc) and plan.xtc_chance is not None and plan.xtc_keys is not None:
            applies = ~(uniform(plan.xtc_keys.at(self._steps_of(part))) > plan.xtc_chance)
            x = part.apply(x, filters.xtc, part.column, applies, plan.xtc_exempt)
        for k, part in plan.top_k:
            if k < vocab:
                x = part.apply(x, filters.top_k, k)
        if part := plan.hlg:
            x = part.apply(x, hlg.tone_curve, hlg.pivots(part.take(logprobs), plan.curves), plan.curves)
        part = plan.sampled
        noise = gumbel(plan.token_keys.at(self._steps_of(part)), vocab)
        drawn = mx.argmax(part.take(x) * part.column + noise, axis=-1)
        return drawn if part.at is None else part.put(mx.argmax(logprobs, axis=-1), drawn)

    def _steps_of(self, part: Part) -> list[int]:
        return [self._steps[row] + position for row, position in part.places]

    def _score(self, logprobs: mx.array, tokens: mx.array, cells: mx.array | None = None) -> Logprobs | None:
        """The scores of tokens [B, L] by logprobs [B, L, V], or [cells, V] with the cell of each position in `cells` [B, L]."""
        wanted = {i: row.params.logprobs for i, row in enumerate(self._rows) if row.params.logprobs is not None}
        if not wanted:
            return None
        slots = {row: slot for slot, row in enumerate(wanted)}
        if len(slots) < len(self._rows):
            at = mx.array(list(slots), dtype=mx.int32)
            tokens = tokens[at]
            logprobs, cells = (logprobs[at], None) if cells is None else (logprobs, cells[at])
        if cells is not None:
            logprobs = logprobs[cells]
        return Logprobs(logprobs, tokens, slots, wanted)


def _starts(counts: Sequence[int]) -> list[int]:
    """Each row's first cell."""
    return [0, *accumulate(counts)][:-1]


def _masked(x: mx.array, allowed: Mapping[int, Sequence[Words]], counts: Sequence[int]) -> mx.array:
    """Scores [cells, V] with what the rows in `allowed` may not draw at their leading positions at -inf."""
    total, vocab = x.shape
    first = _starts(counts)
    cells = {first[row] + position: given for row, masks in allowed.items() for position, given in enumerate(masks)}
    words = np.zeros((len(cells), -(-vocab // 32)), dtype=np.uint32)
    for slot, given in zip(words, cells.values(), strict=True):
        count = min(len(slot), len(given))
        slot[:count] = given[:count]
    packed = mx.array(words)
    if len(cells) == total:
        # Rows come in the batch's order, and so do their positions.
        return processors.allow(x, packed)
    at = mx.array(list(cells), dtype=mx.int32)
    # A copy of the handle: assignment would otherwise change the caller's array.
    result = mx.array(x)
    result[at] = processors.allow(x[at], packed)
    return result
