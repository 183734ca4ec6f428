"""One sampler for the rows of a batch.

    logits ─ bias ─ repetition ─ presence ─ frequency ─ log-softmax ─┬─ top-p ─ min-p ─ XTC ─ top-k ─ 1/T ─ +Gumbel ─ argmax
                                                                     ├─ min-p ─ XTC ─ HLG ─ 1/T ─ +Gumbel ─ argmax
                                                                     ├─ argmax (greedy)
                                                                     └─ logprobs (if asked)

Each stage sees only the cells (row x window position) that need it, and runs only if some do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from gnomon.engine.api import HLG, SamplingParams
from gnomon.engine.sampling import filters, hlg, processors
from gnomon.engine.sampling.history import History, look_back
from gnomon.engine.sampling.logprobs import Logprobs
from gnomon.engine.sampling.randomness import Stream, gumbel, step_keys, uniform
from gnomon.engine.sampling.row import RowSampling, repeats


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens int32 [B, L] drawn at every window position, lazy, with log-probabilities for the rows that asked."""

    tokens: mx.array
    logprobs: Logprobs | None = None

    def arrays(self) -> list[mx.array]:
        """What to evaluate."""
        return [self.tokens, *(self.logprobs.arrays() if self.logprobs else ())]


@dataclass(frozen=True, slots=True)
class _Part:
    """The cells a stage applies to. `at` is None if that is all of them."""

    rows: tuple[RowSampling, ...]
    cells: tuple[int, ...]
    at: mx.array | None

    def column(self, values: Sequence[float], dtype: mx.Dtype) -> mx.array:
        return mx.array(np.array(values, dtype=np.float32)[:, None]).astype(dtype)

    def take(self, x: mx.array) -> mx.array:
        return x if self.at is None else x[self.at]

    def apply(self, x: mx.array, stage: Callable[[mx.array], mx.array]) -> mx.array:
        """x with the stage's result in this part's cells and every other cell as it was."""
        return self.put(x, stage(self.take(x)))

    def put(self, x: mx.array, values: mx.array) -> mx.array:
        if self.at is None:
            return values
        # A copy of the handle: assignment would otherwise change the caller's array.
        result = mx.array(x)
        result[self.at] = values
        return result


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which cells need which stage, for one window width; made once per set of rows."""

    sampled: _Part | None
    bias: tuple[mx.array, mx.array, mx.array] | None
    repetition: _Part | None
    presence: _Part | None
    frequency: _Part | None
    top_p: _Part | None
    min_p: _Part | None
    xtc: _Part | None
    xtc_exempt: tuple[mx.array, mx.array] | None
    top_k: tuple[tuple[int, _Part], ...]
    hlg: _Part | None
    curves: tuple[HLG, ...] = field(default=())


def _plan(rows: Sequence[RowSampling], width: int) -> _Plan:
    cells = [row for row in rows for _ in range(width)]

    def part(needs: Callable[[SamplingParams], bool]) -> _Part | None:
        chosen = tuple(i for i, row in enumerate(cells) if needs(row.params))
        if not chosen:
            return None
        at = None if len(chosen) == len(cells) else mx.array(chosen, dtype=mx.int32)
        return _Part(tuple(cells[i] for i in chosen), chosen, at)

    def plain(p: SamplingParams) -> bool:
        return not p.greedy and p.hlg is None

    biases = [(i, token, bias) for i, row in enumerate(cells) for token, bias in dict(row.params.logit_bias).items()]
    xtc = part(lambda p: not p.greedy and p.xtc_probability > 0)
    exempt = [(i, token) for i, row in enumerate(xtc.rows if xtc else ()) for token in row.exempt]
    sizes = sorted({row.params.top_k for row in cells if plain(row.params) and row.params.top_k > 0})
    bent = part(lambda p: not p.greedy and p.hlg is not None)
    return _Plan(
        sampled=part(lambda p: not p.greedy),
        bias=(
            mx.array([i for i, _, _ in biases], dtype=mx.int32),
            mx.array([token for _, token, _ in biases], dtype=mx.int32),
            mx.array([bias for _, _, bias in biases], dtype=mx.float32),
        )
        if biases
        else None,
        repetition=part(repeats),
        presence=part(lambda p: p.presence_penalty != 0),
        frequency=part(lambda p: p.frequency_penalty != 0),
        top_p=part(lambda p: plain(p) and 0 < p.top_p < 1),
        min_p=part(lambda p: not p.greedy and p.min_p > 0),
        xtc=xtc,
        xtc_exempt=(
            mx.array([i for i, _ in exempt], dtype=mx.int32),
            mx.array([token for _, token in exempt], dtype=mx.int32),
        )
        if exempt
        else None,
        top_k=tuple((k, chosen) for k in sizes if (chosen := part(lambda p, k=k: plain(p) and p.top_k == k))),
        hlg=bent,
        curves=tuple(row.params.hlg for row in bent.rows if row.params.hlg is not None) if bent else (),
    )


class BatchSampler:
    """Draws for the rows of one batch, in the batch's order. All calls come from the engine thread."""

    def __init__(self, rows: Sequence[RowSampling] = ()) -> None:
        self._rows: list[RowSampling] = []
        self._steps: list[int] = []
        self._history: History | None = None
        self._plans: dict[int, _Plan] = {}
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

    def draw(self, logits: mx.array, drafts: mx.array | None = None) -> Drawn:
        """Draw a token at every position of logits [B, L, V], of any float dtype.

        Position l of row b is output step `steps[b] + l` and its penalties see drafts[b, :l] (int [B, L-1]) as already generated.
        Nothing advances until `commit`. Raises ValueError if the shapes don't fit the rows.
        """
        batch, width, vocab = logits.shape
        if batch != len(self._rows):
            raise ValueError(f"logits hold {batch} rows, but the batch has {len(self._rows)}")
        if (0 if drafts is None else drafts.shape[1]) != width - 1:
            raise ValueError(f"a window of {width} positions needs {width - 1} drafts per row")
        plan = self._plans.get(width)
        if plan is None:
            plan = self._plans[width] = _plan(self._rows, width)
        scores = self._process(logits.reshape(batch * width, vocab), plan, drafts, width)
        logprobs = filters.log_softmax(scores)
        tokens = self._pick(logprobs, plan, width).astype(mx.int32).reshape(batch, width)
        return Drawn(tokens, self._score(logprobs.reshape(batch, width, vocab), tokens))

    def commit(self, tokens: mx.array, counts: Sequence[int]) -> None:
        """Advance each row by the first counts[b] of tokens [B, L] (0 <= counts[b] <= L; the tokens may be lazy)."""
        if self._history is not None:
            self._history.append(tokens, counts)
        self._steps = [step + count for step, count in zip(self._steps, counts, strict=True)]

    def arrays(self) -> list[mx.array]:
        """The state to evaluate with a step, so that no graph builds up."""
        return [] if self._history is None else [self._history.ids]

    def _process(self, x: mx.array, plan: _Plan, drafts: mx.array | None, width: int) -> mx.array:
        if plan.bias is not None:
            x = processors.add_bias(x, *plan.bias)
        history = self._history
        if history is None:
            return x
        ids = history.with_drafts(drafts)

        def seen(part: _Part, sizes: Sequence[int]) -> tuple[mx.array, mx.array]:
            ends = [history.lengths[cell // width] + cell % width for cell in part.cells]
            rows = ids[mx.array([cell // width for cell in part.cells], dtype=mx.int32)]
            return look_back(rows, ends, sizes, x.shape[-1])

        if part := plan.repetition:
            mask = processors.presence_mask(
                *seen(part, [row.params.repetition_context_size for row in part.rows]), x.shape[-1]
            )
            penalty = part.column([row.params.repetition_penalty for row in part.rows], x.dtype)
            x = part.apply(x, lambda y: processors.repetition(y, mask, penalty))
        if part := plan.presence:
            mask = processors.presence_mask(
                *seen(part, [row.params.presence_context_size for row in part.rows]), x.shape[-1]
            )
            penalty = part.column([row.params.presence_penalty for row in part.rows], x.dtype)
            x = part.apply(x, lambda y: processors.presence(y, mask, penalty))
        if part := plan.frequency:
            window, counts = seen(part, [row.params.frequency_context_size for row in part.rows])
            penalty = part.column([row.params.frequency_penalty for row in part.rows], x.dtype)
            x = part.apply(x, lambda y: processors.frequency(y, window, counts, penalty))
        return x

    def _pick(self, logprobs: mx.array, plan: _Plan, width: int) -> mx.array:
        sampled = plan.sampled
        if sampled is None:
            return mx.argmax(logprobs, axis=-1)
        x, vocab = logprobs, logprobs.shape[-1]
        if part := plan.top_p:
            mass = part.column([row.params.top_p for row in part.rows], mx.float32)
            x = part.apply(x, lambda y: filters.top_p(y, mass))
        if part := plan.min_p:
            ratios = part.column([math.log(row.params.min_p) for row in part.rows], x.dtype)
            x = part.apply(x, lambda y: filters.min_p(y, ratios))
        if part := plan.xtc:
            threshold = part.column([row.params.xtc_threshold for row in part.rows], x.dtype)
            chance = mx.array([row.params.xtc_probability for row in part.rows], dtype=mx.float32)
            applies = ~(uniform(self._keys(part, Stream.XTC, width)) > chance)
            x = part.apply(x, lambda y: filters.xtc(y, threshold, applies, plan.xtc_exempt))
        for k, part in plan.top_k:
            if k < vocab:
                x = part.apply(x, lambda y, k=k: filters.top_k(y, k))
        if part := plan.hlg:
            pivot = hlg.pivots(part.take(logprobs), plan.curves)
            x = part.apply(x, lambda y: hlg.tone_curve(y, pivot, plan.curves))
        gains = sampled.column([1.0 / row.params.temperature for row in sampled.rows], x.dtype)
        noise = gumbel(self._keys(sampled, Stream.TOKEN, width), vocab)
        drawn = mx.argmax(sampled.take(x) * gains + noise, axis=-1)
        return drawn if sampled.at is None else sampled.put(mx.argmax(logprobs, axis=-1), drawn)

    def _keys(self, part: _Part, stream: Stream, width: int) -> np.ndarray:
        steps = [self._steps[cell // width] + cell % width for cell in part.cells]
        return step_keys([row.seed for row in part.rows], [row.choice for row in part.rows], steps, stream)

    def _score(self, logprobs: mx.array, tokens: mx.array) -> Logprobs | None:
        wanted = {i: row.params.logprobs for i, row in enumerate(self._rows) if row.params.logprobs is not None}
        if not wanted:
            return None
        slots = {row: slot for slot, row in enumerate(wanted)}
        if len(slots) < len(self._rows):
            at = mx.array(list(slots), dtype=mx.int32)
            logprobs, tokens = logprobs[at], tokens[at]
        return Logprobs(logprobs, tokens, slots, wanted)
