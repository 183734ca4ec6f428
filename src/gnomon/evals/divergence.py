"""Kullback-Leibler divergence of a candidate's next-token distributions from a reference's, position by position, and its summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
FIELDS: Final = ("kl", "kl_upper", "agree", "reference_nats", "nats")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distributions:
    """What is kept of a step's `n` positions: `logits` (n, vocabulary), or (n, top) with `ids` (n, top) int32 and, each (n,) float32,
    `normaliser` (log-sum-exp over all), `rest` (probability of those left out), `rest_plogp` and `chosen` (the next token's logit);
    `best` (n,) int32 is the likeliest token."""

    logits: mx.array
    best: mx.array
    ids: mx.array | None = None
    normaliser: mx.array | None = None
    rest: mx.array | None = None
    rest_plogp: mx.array | None = None
    chosen: mx.array | None = None

    def arrays(self) -> dict[str, mx.array]:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: array for name, array in named.items() if array is not None}


def condense(logits: mx.array, targets: mx.array, top: int) -> Distributions:
    """What is kept of logits (n, vocabulary) whose next tokens are `targets` (n,)."""
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    if top >= logits.shape[-1]:
        return Distributions(logits, best)
    ids = mx.argpartition(-logits, top - 1, axis=-1)[:, :top].astype(mx.int32)
    wide = logits.astype(mx.float32)
    normaliser = mx.logsumexp(wide, axis=-1)
    # What is kept counts as impossible from here on.
    others = mx.put_along_axis(wide - normaliser[:, None], ids, mx.array(-mx.inf), axis=-1)
    probabilities = mx.exp(others)
    return Distributions(
        mx.take_along_axis(logits, ids, axis=-1),
        best,
        ids,
        normaliser,
        probabilities.sum(axis=-1),
        mx.where(probabilities > 0, probabilities * others, 0.0).sum(axis=-1),
        mx.take_along_axis(wide, targets[:, None], axis=-1)[:, 0],
    )


@dataclass(frozen=True, slots=True)
class Positions:
    """A window's positions, each array (n,): divergence in nats and an upper bound of it (equal where the whole vocabulary was kept),
    whether both name the same likeliest token (0 or 1), and the nats of the text's next token on both sides."""

    kl: Floats
    kl_upper: Floats
    agree: Floats
    reference_nats: Floats
    nats: Floats

    @classmethod
    def join(cls, parts: Sequence[Positions]) -> Positions:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS))

    def after(self, start: int) -> Positions:
        """All but the first `start` positions."""
        return Positions(*(getattr(self, name)[start:] for name in FIELDS))


def compare(kept: Distributions, logits: mx.array, targets: mx.array) -> Positions:
    """A step's positions: the reference's distributions against logits (n, vocabulary), in float32. Next tokens are `targets` (n,).

    Rounding makes divergences of the order of 1e-7 nats of either sign; they count as not below 0. Where only the likeliest tokens were
    kept, the rest is one outcome for the lower value (which never exceeds the divergence, by the log-sum inequality), and for the
    upper one all of the rest lies on the candidate's least likely token.
    """
    wide = logits.astype(mx.float32)
    q = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
    agree = mx.argmax(logits, axis=-1).astype(mx.int32) == kept.best
    nats = -mx.take_along_axis(q, targets[:, None], axis=-1)[:, 0]
    given = kept.logits.astype(mx.float32)
    if kept.ids is None:
        p = given - mx.logsumexp(given, axis=-1, keepdims=True)
        lower = upper = (mx.exp(p) * (p - q)).sum(axis=-1)
        reference = -mx.take_along_axis(p, targets[:, None], axis=-1)[:, 0]
    else:
        lower, upper, reference = _bounds(kept, given, q)
    found = [lower, mx.maximum(upper, lower), agree, reference, nats]
    found[:2] = [mx.maximum(one, 0.0) for one in found[:2]]
    mx.eval(*found)
    return Positions(*(np.array(one.astype(mx.float32), dtype=np.float64) for one in found))


def _bounds(kept: Distributions, given: mx.array, q: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    ids, normaliser, rest, plogp, chosen = kept.ids, kept.normaliser, kept.rest, kept.rest_plogp, kept.chosen
    if ids is None or normaliser is None or rest is None or plogp is None or chosen is None:
        raise ValueError("a reference of the likeliest tokens lacks what it says of the others")
    p = given - normaliser[:, None]
    same = (mx.exp(p) * (p - mx.take_along_axis(q, ids, axis=-1))).sum(axis=-1)
    others = mx.logsumexp(mx.put_along_axis(q, ids, mx.array(-mx.inf), axis=-1), axis=-1)
    least = mx.put_along_axis(q, ids, mx.array(mx.inf), axis=-1).min(axis=-1)
    some = rest > 0
    lower = same + mx.where(some, rest * (mx.log(mx.where(some, rest, 1.0)) - others), 0.0)
    return lower, same + mx.where(some, plogp - rest * least, 0.0), normaliser - chosen


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with the bounds of its 95 % interval; None where one text can't tell."""

    value: float
    lower: float | None
    upper: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A comparison over all positions of all windows: divergences in nats, agreement of the likeliest token as a share, perplexities.

    `mean_upper` bounds the mean where only the likeliest tokens of the reference were kept.
    """

    mean: Interval
    median: Interval
    percentile_99: Interval
    largest: float
    agreement: Interval
    mean_upper: float
    perplexity_reference: float
    perplexity: float
    positions: int
    texts: int


def summarise(windows: Sequence[Positions], seed: int = 0) -> Summary:
    """Everything over all positions; intervals by the percentile bootstrap over windows, which are what is independent here.

    Raises ValueError without a position.
    """
    every = Positions.join(windows)
    if not every.kl.size:
        raise ValueError("no position is left to compare")
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(windows), (RESAMPLES, len(windows))) if len(windows) > 1 else None
    by_kl, by_agreement = [window.kl for window in windows], [window.agree for window in windows]

    def over(groups: Sequence[Floats], statistic: Callable[[Floats], Any]) -> Interval:
        value = float(statistic(np.concatenate(groups)))
        if draws is None:
            return Interval(value, None, None)
        found = [float(statistic(np.concatenate([groups[i] for i in draw]))) for draw in draws]
        low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return Interval(value, float(low), float(high))

    return Summary(
        mean=over(by_kl, np.mean),
        median=over(by_kl, np.median),
        percentile_99=over(by_kl, lambda values: np.quantile(values, 0.99)),
        largest=float(every.kl.max()),
        agreement=over(by_agreement, np.mean),
        mean_upper=float(every.kl_upper.mean()),
        perplexity_reference=math.exp(every.reference_nats.mean()),
        perplexity=math.exp(every.nats.mean()),
        positions=int(every.kl.size),
        texts=len(windows),
    )
