"""Which cells (row x window position) of a batch need which stage, with the stages' parameters as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import mlx.core as mx
import numpy as np

from gnomon.engine.api import HLG, SamplingParams
from gnomon.engine.sampling.randomness import Keys, Stream
from gnomon.engine.sampling.row import RowSampling, repeats

P = ParamSpec("P")


Place = tuple[int, int]
"""A row of the batch and a position of its window."""


class Part:
    """The cells a stage applies to."""

    def __init__(self, cells: list[int], rows: Sequence[RowSampling], places: Sequence[Place]) -> None:
        """`places` are those of all cells of the batch."""
        self.rows = rows
        self.places = [places[cell] for cell in cells]
        self.at = None if len(cells) == len(places) else mx.array(cells, dtype=mx.int32)
        """Index of the cells, None if they are all."""
        self.slots = mx.array([row for row, _ in self.places], dtype=mx.int32)
        """The row of the batch of each cell."""
        self.column = mx.zeros((0,))
        """The stage's parameter, one per cell: [n, 1]."""

    def with_column(self, value: Callable[[SamplingParams], float], dtype: mx.Dtype) -> Part:
        values = np.array([_within(value(row.params), dtype) for row in self.rows], dtype=np.float32)
        self.column = mx.array(values[:, None]).astype(dtype)
        return self

    def take(self, x: mx.array) -> mx.array:
        return x if self.at is None else x[self.at]

    def put(self, x: mx.array, values: mx.array) -> mx.array:
        """x with these values in this part's cells and every other cell as it was."""
        if self.at is None:
            return values
        # A copy of the handle: assignment would otherwise change the caller's array.
        result = mx.array(x)
        result[self.at] = values
        return result

    def apply(
        self, x: mx.array, stage: Callable[Concatenate[mx.array, P], mx.array], *args: P.args, **kwargs: P.kwargs
    ) -> mx.array:
        return self.put(x, stage(self.take(x), *args, **kwargs))


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of one set of rows, their windows and a dtype; None where no cell needs one."""

    bias: tuple[mx.array, mx.array, mx.array] | None
    repetition: Part | None
    presence: Part | None
    frequency: Part | None
    top_p: Part | None
    min_p: Part | None
    xtc: Part | None
    xtc_chance: mx.array | None
    xtc_exempt: tuple[mx.array, mx.array] | None
    xtc_keys: Keys | None
    top_k: tuple[tuple[int, Part], ...]
    hlg: Part | None
    curves: tuple[HLG, ...]
    sampled: Part | None
    token_keys: Keys | None

    @property
    def processes(self) -> bool:
        """Whether some cell's logits are changed before the log-softmax."""
        return any(stage is not None for stage in (self.bias, self.repetition, self.presence, self.frequency))


def make_plan(rows: Sequence[RowSampling], counts: Sequence[int], dtype: mx.Dtype) -> Plan:
    """Plan the stages for windows of `counts[b]` positions of these rows, on logits of `dtype`."""
    return _Planner(rows, counts, dtype).plan()


class _Planner:
    def __init__(self, rows: Sequence[RowSampling], counts: Sequence[int], dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._places = [(b, position) for b, count in enumerate(counts) for position in range(count)]
        self._cells = [rows[b] for b, _ in self._places]

    def plan(self) -> Plan:
        xtc = self._part(lambda p: not p.greedy and p.xtc_probability > 0, lambda p: p.xtc_threshold)
        bent = self._part(lambda p: not p.greedy and p.hlg is not None)
        sampled = self._part(lambda p: not p.greedy, self._gain)
        return Plan(
            bias=self._bias(),
            # A divisor: a smaller one would be no normal number, on some devices zero.
            repetition=self._part(repeats, lambda p: max(p.repetition_penalty, 4 / mx.finfo(self._dtype).max)),
            presence=self._part(lambda p: p.presence_penalty != 0, lambda p: p.presence_penalty),
            frequency=self._part(lambda p: p.frequency_penalty != 0, lambda p: p.frequency_penalty),
            top_p=self._part(lambda p: _plain(p) and 0 < p.top_p < 1, lambda p: p.top_p, mx.float32),
            min_p=self._part(lambda p: not p.greedy and p.min_p > 0, lambda p: math.log(p.min_p)),
            xtc=xtc,
            xtc_chance=mx.array([row.params.xtc_probability for row in xtc.rows]) if xtc else None,
            xtc_exempt=_exempt(xtc.rows) if xtc else None,
            xtc_keys=_keys(xtc, Stream.XTC),
            top_k=self._top_k(),
            hlg=bent,
            curves=tuple(row.params.hlg for row in bent.rows if row.params.hlg is not None) if bent else (),
            sampled=sampled,
            token_keys=_keys(sampled, Stream.TOKEN),
        )

    def _part(
        self,
        needs: Callable[[SamplingParams], bool],
        value: Callable[[SamplingParams], float] | None = None,
        dtype: mx.Dtype | None = None,
    ) -> Part | None:
        cells = [i for i, row in enumerate(self._cells) if needs(row.params)]
        if not cells:
            return None
        part = Part(cells, [self._cells[i] for i in cells], self._places)
        return part if value is None else part.with_column(value, dtype or self._dtype)

    def _gain(self, params: SamplingParams) -> float:
        # The likeliest of V tokens has at least -ln V, above -16: it must not overflow to -inf like the others.
        return min(1.0 / params.temperature, mx.finfo(self._dtype).max / 16)

    def _bias(self) -> tuple[mx.array, mx.array, mx.array] | None:
        triples = [
            (i, token, _within(bias, self._dtype))
            for i, row in enumerate(self._cells)
            for token, bias in dict(row.params.logit_bias).items()
        ]
        if not triples:
            return None
        cells, ids, values = zip(*triples, strict=True)
        return mx.array(cells, dtype=mx.int32), mx.array(ids, dtype=mx.int32), mx.array(values, dtype=mx.float32)

    def _top_k(self) -> tuple[tuple[int, Part], ...]:
        # One argpartition per k: it is what decides among equals, and mlx-lm's has this very kth.
        sizes = sorted({row.params.top_k for row in self._cells if _plain(row.params) and row.params.top_k > 0})
        parts = ((k, self._part(lambda p, k=k: _plain(p) and p.top_k == k)) for k in sizes)
        return tuple((k, part) for k, part in parts if part is not None)


def _within(value: float, dtype: mx.Dtype) -> float:
    """The value, or the nearest that leaves room in `dtype` for a logit to be added."""
    limit = mx.finfo(dtype).max / 2
    return min(max(value, -limit), limit)


def _plain(params: SamplingParams) -> bool:
    """Sampled, and not by HLG, which takes the place of top-p and top-k."""
    return not params.greedy and params.hlg is None


def _exempt(rows: Sequence[RowSampling]) -> tuple[mx.array, mx.array] | None:
    pairs = [(i, token) for i, row in enumerate(rows) for token in row.exempt]
    if not pairs:
        return None
    cells, ids = zip(*pairs, strict=True)
    return mx.array(cells, dtype=mx.int32), mx.array(ids, dtype=mx.int32)


def _keys(part: Part | None, stream: Stream) -> Keys | None:
    if part is None:
        return None
    return Keys([row.seed for row in part.rows], [row.choice for row in part.rows], stream)
