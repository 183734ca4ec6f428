"""Geometry of the report's plots, in the units of an SVG view box; the page draws it.

Text isn't measured: labels stand above their row, and points of a scatter plot carry numbers that a list below explains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gnomon.bench.report import number
from gnomon.bench.schema import METRICS, Comparison

WIDTH = 360
ROW = 36
MARGIN = 10
WIDEST = math.log(4)
"""Ratios beyond 4 or below 1/4 are drawn at the edge: two blocks may give an interval of any width."""


@dataclass(frozen=True, slots=True)
class Line:
    """A row of dots along one axis, with a bar between `start` and `end` and a tick. `label` stands above it."""

    y: int
    label: str
    dots: tuple[float, ...]
    tick: float | None = None
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """A plot of rows over a common axis. `zero` is where no difference lies, if the axis is one of differences."""

    title: str
    height: int
    lines: tuple[Line, ...]
    low: str
    high: str
    zero: float | None = None
    width: int = WIDTH


@dataclass(frozen=True, slots=True)
class Point:
    """A numbered point and what the list below the plot says of it. `run` is the result that it comes from."""

    number: int
    x: float
    y: float
    label: str
    run: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """A plot of points; the axes' ends are written out."""

    title: str
    x_name: str
    y_name: str
    x_low: str
    x_high: str
    y_low: str
    y_high: str
    points: tuple[Point, ...]
    width: int = WIDTH
    height: int = 220


@dataclass(frozen=True, slots=True)
class Value:
    """A named pair of values for a scatter plot."""

    name: str
    x: float
    y: float
    run: str


def _scale(values: Sequence[float], low: float, high: float, start: float, end: float) -> tuple[float, ...]:
    """Values of low..high onto start..end; those beyond go to its ends, and where there is one value only, to the middle."""
    if low == high:
        return tuple((start + end) / 2 for _ in values)
    span = high - low
    return tuple(round(start + (end - start) * (min(max(v, low), high) - low) / span, 1) for v in values)


def distributions(metric: str, values: Mapping[str, Sequence[float]]) -> Rows | None:
    """All values of a metric, a row per arm, a tick at the median; None if there are none."""
    known = {name: own for name, own in values.items() if own}
    if not known:
        return None
    unit = METRICS[metric].unit
    every = [v for own in known.values() for v in own]
    low, high = min(every), max(every)
    lines = tuple(
        Line(
            ROW * n,
            f"{name} ({len(own)})",
            _scale(own, low, high, MARGIN, WIDTH - MARGIN),
            _scale([median(own)], low, high, MARGIN, WIDTH - MARGIN)[0],
        )
        for n, (name, own) in enumerate(known.items())
    )
    return Rows(f"{metric}, every sample", ROW * len(lines) + 20, lines, number(low, unit), number(high, unit))


def differences(comparisons: Sequence[Comparison]) -> Rows | None:
    """The ratio of every block and the interval of each comparison, on a logarithmic axis about 1; None without pairs."""
    paired = [c for c in comparisons if c.pairs]
    if not paired:
        return None
    ends = [abs(p.log_ratio) for c in paired for p in c.pairs]
    ends += [abs(math.log(bound)) for c in paired for bound in (c.lower, c.upper) if bound]
    reach = min(max(*ends, math.log(1.05)), WIDEST) if ends else WIDEST

    def place(log_ratio: float) -> float:
        return _scale([log_ratio], -reach, reach, MARGIN, WIDTH - MARGIN)[0]

    lines = tuple(
        Line(
            ROW * n,
            c.metric,
            tuple(place(p.log_ratio) for p in c.pairs),
            place(math.log(c.ratio)) if c.ratio else None,
            place(math.log(c.lower)) if c.lower else None,
            place(math.log(c.upper)) if c.upper else None,
        )
        for n, c in enumerate(paired)
    )
    low, high = f"{math.exp(-reach):.2f}", f"{math.exp(reach):.2f}"
    return Rows("ratio by block, with interval", ROW * len(lines) + 20, lines, low, high, place(0.0))


def scatter(title: str, x_metric: str, y_metric: str, values: Sequence[Value]) -> Scatter | None:
    """Values as numbered points; None if there are none."""
    if not values:
        return None
    xs, ys = [v.x for v in values], [v.y for v in values]
    across = _scale(xs, min(xs), max(xs), 30, WIDTH - 30)
    down = _scale(ys, min(ys), max(ys), 180, 32)
    x_unit, y_unit = METRICS[x_metric].unit, METRICS[y_metric].unit
    points = tuple(
        Point(n + 1, x, y, f"{v.name}: {number(v.x, x_unit)}, {number(v.y, y_unit)}", v.run)
        for n, (v, x, y) in enumerate(zip(values, across, down, strict=True))
    )
    return Scatter(
        title,
        x_metric,
        y_metric,
        number(min(xs), x_unit),
        number(max(xs), x_unit),
        number(min(ys), y_unit),
        number(max(ys), y_unit),
        points,
    )
