"""Paired log-ratios, their interval and the decision rule.

The unit of evidence is a block: one workload, measured under both arms back to back, the order alternating between blocks. Only the
first usable block of each workload seed counts. The interval is Student's t on the log-ratios of the blocks. It was chosen by simulation
at 5, 6 and 12 blocks over percentile, expanded percentile, BCa and studentised bootstraps and over a t with a term for the order
(`benchmarks/simulate_statistics.py`; numbers in docs/measuring.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import Literal

Outcome = Literal["repeatable win", "measured loss", "inconclusive", "inapplicable", "blocked"]

MIN_BLOCKS = 5
CONFIDENCE = 0.95
THRESHOLD = 0.03
"""A difference counts only above this share: 3 %."""
MAX_BLOCKS = 1000
METHOD = "student-t of paired log-ratios"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence bounds, as log-ratios (0 is no difference). `blocks` counts the distinct workloads behind it."""

    estimate: float
    lower: float
    upper: float
    blocks: int
    confidence: float = CONFIDENCE

    @property
    def half_width(self) -> float:
        return (self.upper - self.lower) / 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison concludes, why, and, where it is open, what would settle it."""

    outcome: Outcome
    reason: str
    next: str | None = None


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (modified Lentz; Numerical Recipes, section 6.4)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    total = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            total *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * total


def t_probability(t: float, df: float) -> float:
    """P(T <= t) of Student's t with `df` > 0 degrees of freedom."""
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1.0 - tail if t > 0 else tail


@lru_cache(maxsize=4096)
def t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p, by bisection to about 1e-12. Raises `ValueError` unless 0 < p < 1 and df > 0."""
    if not 0.0 < p < 1.0 or df <= 0:
        raise ValueError(f"a t quantile needs 0 < p < 1 and df > 0, not p={p}, df={df}")
    if p < 0.5:
        return -t_quantile(1.0 - p, df)
    low, high = 0.0, 1.0
    while t_probability(high, df) < p:
        high *= 2
    while high - low > 1e-13 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, df) < p else (low, middle)
    return (low + high) / 2


def interval(log_ratios: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of the mean log-ratio. Raises `ValueError` below two ratios or on a value that isn't finite."""
    n = len(log_ratios)
    if n < 2:
        raise ValueError(f"an interval needs at least 2 blocks, not {n}")
    if not all(math.isfinite(ratio) for ratio in log_ratios):
        raise ValueError("log-ratios must be finite")
    mean = fmean(log_ratios)
    half = t_quantile(0.5 + confidence / 2, n - 1) * stdev(log_ratios) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, confidence)


def percent(log_ratio: float) -> str:
    """A log-ratio as a signed percentage."""
    return f"{math.expm1(log_ratio) * 100:+.1f} %"


def blocks_needed(found: Interval, effect: float | None = None) -> int:
    """Blocks at which an interval of the same spread has a half width below `effect`, at most a thousand.

    `effect` is a log-ratio; it defaults to the estimate's size.
    """
    target = abs(found.estimate) if effect is None else effect
    spread = found.half_width * math.sqrt(found.blocks) / t_quantile(0.5 + found.confidence / 2, found.blocks - 1)
    low, high = MIN_BLOCKS, MAX_BLOCKS
    while low < high:
        n = (low + high) // 2
        if t_quantile(0.5 + found.confidence / 2, n - 1) * spread / math.sqrt(n) < target:
            high = n
        else:
            low = n + 1
    return low


def _more(blocks: int) -> str:
    return f"about {blocks} blocks at this spread" if blocks < MAX_BLOCKS else "a quieter machine or a longer workload"


def decide(log_ratios: Sequence[float], candidate_failures: int = 0) -> Verdict:
    """Apply the rule to log-ratios that are positive where the candidate is better.

    A win is more than 3 % with the lower bound above zero; a loss is its mirror image; everything else stays open. Fewer than five
    blocks decide nothing. A candidate that failed or did the wrong work in any block can lose but not win.
    """
    if len(log_ratios) < MIN_BLOCKS:
        return Verdict(
            "inconclusive",
            f"{len(log_ratios)} usable blocks of distinct workloads, {MIN_BLOCKS} are needed",
            f"measure {MIN_BLOCKS - len(log_ratios)} or more further blocks",
        )
    found = interval(log_ratios)
    text = f"{percent(found.estimate)} [{percent(found.lower)}, {percent(found.upper)}] over {found.blocks} blocks"
    large = abs(found.estimate) > math.log1p(THRESHOLD)
    if large and found.upper < 0:
        return Verdict("measured loss", text)
    if large and found.lower > 0:
        if candidate_failures:
            fix = "repair the candidate, then measure all blocks again"
            return Verdict("inconclusive", f"{text}, but the candidate failed {candidate_failures} times", fix)
        return Verdict("repeatable win", text)
    if large:
        step = _more(blocks_needed(found))
        return Verdict("inconclusive", f"{text}: the interval includes no difference", step)
    if found.lower > 0 or found.upper < 0:
        return Verdict(
            "inconclusive",
            f"{text}: repeatable, but not above the {THRESHOLD:.0%} that a default needs",
            "decide on other grounds, with this interval stated",
        )
    if max(abs(found.lower), abs(found.upper)) <= math.log1p(THRESHOLD):
        return Verdict("inconclusive", f"{text}: any difference is within {THRESHOLD:.0%}", "none: keep the incumbent")
    step = _more(blocks_needed(found, math.log1p(THRESHOLD)))
    return Verdict("inconclusive", f"{text}: the interval includes no difference", step)
