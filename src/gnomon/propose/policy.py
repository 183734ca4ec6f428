"""How many tokens to guess: as many as make the most tokens per second on this machine, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MARGIN = 0.03
"""Speculation must promise so much more than plain decoding, since both sides of the comparison are estimates."""


@dataclass(frozen=True, slots=True)
class Chance:
    """A guess of `most` tokens, of which the first is right with probability `first`, and each later one, if all before it are, with
    `later`."""

    first: float
    later: float
    most: int

    def tokens(self, depth: int) -> float:
        """Tokens that a window with the first `depth` guesses is expected to get accepted."""
        total, right = 0.0, self.first
        for _ in range(min(depth, self.most)):
            total += right
            right *= self.later
        return total


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a step by batch size and window width: `plain[B]` of a pipelined plain step, `windows[B][M]` of a window of M positions
    with its read-back and rollback. Between measured points costs are interpolated, outside extrapolated."""

    plain: Mapping[int, float]
    windows: Mapping[int, Mapping[int, float]]
    assumed: bool = False
    """Not measured: costs are in a unit of their own, and only their ratios mean something."""

    def step(self, num_rows: int) -> float:
        """Seconds of a plain step."""
        return _between(self.plain, num_rows)

    def window(self, num_rows: int, width: int) -> float:
        """Seconds of a window of `width` >= 2 positions."""
        return _between({rows: _between(by_width, width) for rows, by_width in self.windows.items()}, num_rows)


def best_depth(
    chances: Sequence[Chance],
    curve: Curve,
    draft_cost: Callable[[int], float] = lambda depth: 0.0,  # noqa: ARG005  (of guesses that cost nothing)
    premium: float = 1.0,
) -> int:
    """The depth with the most expected tokens per second for a batch with these chances, one per row; 0 when plain steps have more.

    Rows with shorter guesses ride along in a window: it costs what its width costs. `draft_cost(depth)` is what making the guesses
    takes, in seconds; `premium` is how many times as much as measured windows turned out to cost.
    """
    num_rows = len(chances)
    best, best_rate = 0, (1 + MARGIN) * num_rows / curve.step(num_rows)
    for depth in range(1, max((one.most for one in chances), default=0) + 1):
        expected = num_rows + sum(one.tokens(depth) for one in chances)
        rate = expected / (premium * curve.window(num_rows, 1 + depth) + draft_cost(depth))
        if rate > best_rate:
            best, best_rate = depth, rate
    return best


def _between(known: Mapping[int, float], at: int) -> float:
    """The value at `at` on the line through the nearest two known points, never less than the least known one."""
    if at in known:
        return known[at]
    points = sorted(known)
    if len(points) == 1:
        return known[points[0]]
    above = next((i for i, point in enumerate(points) if point > at), len(points) - 1)
    low, high = points[max(0, above - 1)], points[max(1, above)]
    value = known[low] + (known[high] - known[low]) * (at - low) / (high - low)
    return max(value, min(known.values()))
