"""Shares of right answers: how sure one is, and whether two differ."""

from __future__ import annotations

import math
from typing import Final

Z: Final = 1.959963984540054
"""Standard normal quantile of 97.5 %."""


def wilson(right: int, number: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson, JASA 22, 1927). Raises ValueError without trials or with more hits than trials."""
    if number < 1 or not 0 <= right <= number:
        raise ValueError(f"{right} of {number} is no proportion")
    share, square = right / number, Z * Z
    middle = (share + square / (2 * number)) / (1 + square / number)
    half = Z * math.sqrt(share * (1 - share) / number + square / (4 * number * number)) / (1 + square / number)
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact probability that pairs in which one of two alone is right fall at least so unevenly, if both are equally good
    (McNemar, Psychometrika 12, 1947, by the binomial distribution). Pairs in which both are right, or wrong, tell nothing."""
    number, fewer = only_first + only_second, min(only_first, only_second)
    # Whole numbers: a power of two of thousands of pairs is no float.
    tail = 2 * sum(math.comb(number, k) for k in range(fewer + 1))
    return min(1.0, tail / 2**number)
