"""How many tokens to guess: as many as make the most tokens per second on this machine, or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MARGIN = 0.03
"""Speculation must promise so much more than plain decoding, since both sides of the comparison are estimates."""

MOST_GUESSES = 16
"""Most tokens guessed for a row and step."""


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


class Costs(ABC):
    """What steps cost, in seconds or another unit."""

    @abstractmethod
    def step(self, num_rows: int) -> float:
        """Of a plain step."""

    @abstractmethod
    def window(self, num_rows: int, width: float) -> float:
        """Of a window of `width` positions, on the average of the rows where each has its own. Below 2 it is between a plain step and a
        window of 2."""

    @abstractmethod
    def windows_of(self, num_rows: int, most: int) -> Sequence[float]:
        """Of windows that hold 0, 1 .. `most` guesses in all (or more), whichever row's; [0] is a plain step's."""


@dataclass(frozen=True, eq=False)
class Curve(Costs):
    """Seconds of a step by batch size and window width: `plain[B]` of a pipelined plain step, `windows[B][M]` of a window of M positions
    with its read-back and rollback. Between measured points costs are interpolated, outside extrapolated."""

    plain: Mapping[int, float]
    windows: Mapping[int, Mapping[int, float]]
    assumed: bool = False
    """Not measured: costs are in a unit of their own, and only their ratios mean something."""

    _known: dict[tuple[int, float], float] = field(default_factory=dict[tuple[int, float], float], repr=False)
    _windows: dict[int, list[float]] = field(default_factory=dict[int, list[float]], repr=False)

    def step(self, num_rows: int) -> float:
        return self._at(num_rows, 1)

    def window(self, num_rows: int, width: float) -> float:
        return self._at(num_rows, width)

    def windows_of(self, num_rows: int, most: int) -> Sequence[float]:
        costs = self._windows.setdefault(num_rows, [self.step(num_rows)])
        while len(costs) <= most:
            costs.append(self.window(num_rows, 1 + len(costs) / num_rows))
        return costs

    def _at(self, num_rows: int, width: float) -> float:
        key = num_rows, width
        if key not in self._known:
            self._known[key] = (
                _between(self.plain, num_rows)
                if width == 1
                else _between(
                    {
                        rows: _between({1: _between(self.plain, rows), **by_width} if width < 2 else by_width, width)
                        for rows, by_width in self.windows.items()
                    },
                    num_rows,
                )
            )
        return self._known[key]


def best_depth(
    chances: Sequence[Chance],
    costs: Costs,
    draft_cost: Callable[[int], float] = lambda depth: 0.0,  # noqa: ARG005  (of guesses that cost nothing)
    least: int = 0,
) -> int:
    """The depth with the most expected tokens per second for a batch with these chances, one per row; 0 when plain steps have more.

    Rows with shorter guesses ride along in a window: it costs what its width costs. `draft_cost(depth)` is what making the guesses
    takes, in the unit of `costs`. At `least` so many are taken, whether that pays or not.
    """
    num_rows = len(chances)
    best, best_rate = least, 0.0 if least else (1 + MARGIN) * num_rows / costs.step(num_rows)
    expected = float(num_rows)
    going = [(chance.first, chance.later, chance.most) for chance in chances if chance.most]
    depth = 0
    while going:
        depth += 1
        expected += sum(right for right, _, _ in going)
        if depth >= least:
            rate = expected / (costs.window(num_rows, 1 + depth) + draft_cost(depth))
            if rate > best_rate:
                best, best_rate = depth, rate
        going = [(right * later, later, most) for right, later, most in going if most > depth]
    return best


def best_depths(chances: Sequence[Chance], costs: Costs, least: Sequence[int] | None = None) -> list[int]:
    """How many guesses of each row make the most expected tokens per second, where a window costs what its positions cost, whichever
    row's: the likeliest ones. All 0 when plain steps have more, unless `least` of some row's are taken whether that pays or not."""
    num_rows = len(chances)
    depths = [0] * num_rows if least is None else list(least)
    expected = float(num_rows)
    places: list[tuple[float, int]] = []
    for row, chance in enumerate(chances):
        right, later, taken = chance.first, chance.later, depths[row]
        for n in range(chance.most):
            if n < taken:
                expected += right
            else:
                places.append((-right, row))
            right *= later
    # Guesses behind another are never likelier than it: each row's come in their order.
    places.sort()
    first = sum(depths)
    windows = costs.windows_of(num_rows, first + len(places))
    best, best_rate = 0, (1 + MARGIN) * num_rows / costs.step(num_rows)
    if first:
        best_rate = expected / windows[first]
    for count, (wrong, _) in enumerate(places, 1):
        expected -= wrong
        rate = expected / windows[first + count]
        if rate > best_rate:
            best, best_rate = count, rate
    for _, row in places[:best]:
        depths[row] += 1
    return depths


def _between(known: Mapping[int, float], at: float) -> float:
    """The value at `at` on the line through the nearest two known points, never less than the least known one."""
    if at in known:
        return known[int(at)]
    points = sorted(known)
    if len(points) == 1:
        return known[points[0]]
    above = next((i for i, point in enumerate(points) if point > at), len(points) - 1)
    low, high = points[max(0, above - 1)], points[max(1, above)]
    value = known[low] + (known[high] - known[low]) * (at - low) / (high - low)
    return max(value, min(known.values()))
