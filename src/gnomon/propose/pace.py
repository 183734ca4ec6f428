"""What steps and windows turn out to cost while rows run: whatever was measured or assumed before is only where this begins."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gnomon.propose.policy import MARGIN, MOST_GUESSES, Costs, Curve

FEW = 4
"""Plain steps of so many rows that must have been timed before windows of them are weighed."""
PATIENCE = 64
"""Plain steps after which that is waited for no longer: other work may keep any from being timed."""
FIRST_RECHECK, MOST_RECHECK = 32, 1024
"""Windows without a timed plain step between them after which `FEW` plain steps are made; doubled each time."""
LAST_PLAIN, LAST_WINDOWS = 15, 7
"""Times that are kept, of which the middle one counts."""
OUTLIER = 3.0
"""A first window of its size that takes so many times as long as was thought is not believed: kernels are compiled then."""
AGE = 32
"""Windows of so many rows after which the oldest time of a size that had none lately is forgotten."""
TRY_RATE = 1 / 256
"""Share of the time of plain steps that tries of windows which don't seem to pay may cost."""
MOST_TRIES = 2.0
"""Most plain steps' time that can be saved up for such tries."""
MOST_LOST = 16.0
"""Plain steps' time that one try counts at most, so that even after one that was disturbed there is another."""
VAIN = 1 / 16
"""What looking for a guess to try counts where there is none worth it."""
CHECK = 2048
"""Timed plain steps of so many rows after which the costs that were measured before are compared."""
STRAY = 1.15
"""A cost that is so many times off at two comparisons in a row, either way, is corrected where costs are kept."""


class Typical:
    """The middle of the last few times; of one or two the lesser, since what disturbs only adds."""

    def __init__(self, last: int) -> None:
        self._times: deque[float] = deque(maxlen=last)
        self._value: float | None = None
        self.seen_at = 0

    def __len__(self) -> int:
        return len(self._times)

    def add(self, value: float) -> None:
        self._times.append(value)
        self._value = None

    def forget_oldest(self) -> None:
        self._times.popleft()
        self._value = None

    @property
    def value(self) -> float:
        """Raises ValueError when there is none."""
        if self._value is None:
            ordered = sorted(self._times)
            self._value = min(ordered) if len(ordered) < 3 else ordered[(len(ordered) - 1) // 2]
        return self._value


@dataclass(slots=True)
class OfRows:
    """What is known of steps of so many rows. `sizes` are the times of windows over the curve's, by `size_of` their guesses."""

    plain: Typical = field(default_factory=lambda: Typical(LAST_PLAIN))
    sizes: dict[int, Typical] = field(default_factory=dict[int, Typical])
    num_plain: int = 0
    num_windows: int = 0
    unchecked: int = 0
    """Windows since a plain step was timed."""
    recheck: int = FIRST_RECHECK
    owed: int = FEW
    """Plain steps to time before windows go on."""
    waited: int = 0
    tries: float = MOST_TRIES
    """Plain steps' time that tries may cost now."""
    was_outlier: bool = False
    """The last window was one that is not believed."""
    doubted: set[int] = field(default_factory=set[int])
    """Sizes whose last window was."""
    strays: dict[int, bool] = field(default_factory=dict[int, bool])
    """Widths whose costs were off at the last comparison, and whether they were too low."""


@dataclass(slots=True)
class Window:
    """A window whose cost isn't complete yet: the first steps behind it may be slower for it."""

    num_rows: int
    guesses: int
    seconds: float
    tokens: int
    is_try: bool


class Pace(Costs):
    """Costs in plain steps of as many rows, learnt from the steps that are made, beginning with a curve's.

    A window is held against plain steps of the same rows at the same time, so that a load on all of them or a long context changes
    nothing. Sizes of windows that had no try are taken to be as much off as the nearest ones that had, or to lie on a line with them if
    that is less. Windows are not weighed before plain steps were timed, and those are timed again now and then; windows that don't
    seem to pay are tried at a bounded cost.
    """

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.rows: dict[int, OfRows] = {}
        self.tried = 0
        """Windows that were made though they did not seem to pay."""
        self.outliers = 0
        self._open: Window | None = None
        self._priors: dict[tuple[int, int], float] = {}
        self._factors: dict[tuple[int, int], float] = {}
        self._windows: dict[tuple[int, int], float] = {}
        self._costs: dict[int, list[float]] = {}
        self._chances: dict[int, float] = {}

    # What steps cost

    def step(self, num_rows: int) -> float:  # noqa: ARG002  (the unit)
        return 1.0

    def window(self, num_rows: int, width: float) -> float:
        """Plain steps' time of a window of `width` positions, on the average of the rows; never less than one."""
        return self._window(num_rows, round((width - 1) * num_rows))

    def windows_of(self, num_rows: int, most: int) -> Sequence[float]:
        costs = self._costs.setdefault(num_rows, [1.0])
        while len(costs) <= most:
            costs.append(self._window(num_rows, len(costs)))
        return costs

    def seconds(self, num_rows: int) -> float | None:
        """Of a plain step; None while a curve that was assumed is all there is."""
        own = self.rows.get(num_rows)
        if own is not None and len(own.plain):
            return own.plain.value
        timed = [rows for rows, other in self.rows.items() if len(other.plain)]
        if timed:
            near = min(timed, key=lambda rows: abs(math.log(rows / num_rows)))
            return self.rows[near].plain.value * self.curve.step(num_rows) / self.curve.step(near)
        return None if self.curve.assumed else self.curve.step(num_rows)

    def least_chance(self, num_rows: int) -> float:
        """No window of these rows makes more than plain steps unless its guesses are right more often than this, on the average: from 1 on
        none does."""
        if num_rows not in self._chances:
            most, n, least = MOST_GUESSES * num_rows, 1, float("inf")
            while n <= most:
                least = min(least, ((1 + MARGIN) * self._window(num_rows, n) - 1) * num_rows / n)
                n += max(1, n // 8)
            self._chances[num_rows] = least
        return self._chances[num_rows]

    # When not to ask

    def rests(self, num_rows: int) -> bool:
        """Whether plain steps come next, so that they are timed."""
        own = self._of(num_rows)
        return own.owed > 0 and own.waited < PATIENCE

    def rested(self, num_rows: int) -> None:
        """A plain step was made for that, timed or not."""
        own = self._of(num_rows)
        own.waited += 1
        if own.waited == PATIENCE:
            own.owed, own.unchecked = 0, 0

    def may_try(self, num_rows: int) -> bool:
        """Whether a window that does not seem to pay may be made, to see."""
        return self._of(num_rows).tries > 0

    def looked_in_vain(self, num_rows: int) -> None:
        """There was nothing to try."""
        self._of(num_rows).tries -= VAIN

    # What steps took

    def stepped(self, num_rows: int, seconds: float, settled: bool = True) -> None:
        """From one read-back to that of a plain step. Not `settled`: nothing was under way while it was prepared, for a window came before,
        which is to blame for what that takes longer."""
        if not settled:
            before = self._open
            usual = self.seconds(num_rows)
            if before is not None and before.num_rows == num_rows and usual is not None:
                before.seconds += seconds - usual
            return
        self._close()
        own = self._of(num_rows)
        own.plain.add(seconds)
        own.num_plain += 1
        own.tries = min(MOST_TRIES, own.tries + TRY_RATE)
        if own.owed:
            own.owed -= 1
            own.waited = 0
        if not own.owed:
            own.unchecked = 0

    def windowed(self, num_rows: int, guesses: int, seconds: float, tokens: int, is_try: bool = False) -> None:
        """From the read-back before to that of a window with `guesses` more positions in all than rows, which gave `tokens`."""
        self._close()
        own = self._of(num_rows)
        own.num_windows += 1
        own.unchecked += 1
        if own.unchecked >= own.recheck:
            own.recheck = min(MOST_RECHECK, 2 * own.recheck)
            own.owed, own.waited, own.unchecked = FEW, 0, 0
        self._open = Window(num_rows, guesses, seconds, tokens, is_try)

    def disturbed(self) -> None:
        """Something else was computed."""
        self._close()

    def corrections(self, num_rows: int) -> Mapping[int, float]:
        """Seconds by width of what is known to have been measured wrongly; width 1 is a plain step. To be asked every `CHECK` steps."""
        own, curve = self._of(num_rows), self.curve
        if curve.assumed or num_rows not in curve.windows or not len(own.plain):
            return {}
        plain = own.plain.value
        now = {1: plain}
        now |= {
            width: plain * self.window(num_rows, width)
            for width in curve.windows[num_rows]
            if own.sizes and min(own.sizes) - 4 <= size_of((width - 1) * num_rows) <= max(own.sizes) + 4
        }
        before = {1: curve.plain[num_rows], **curve.windows[num_rows]}
        strays = {
            width: s > before[width] for width, s in now.items() if abs(math.log(s / before[width])) > math.log(STRAY)
        }
        stand = {width: now[width] for width, low in strays.items() if own.strays.get(width) is low}
        own.strays = strays
        return stand

    def stats(self) -> dict[str, Any]:
        """As plain JSON values, by number of rows; read on any thread."""
        told: dict[str, Any] = {}
        for rows, own in sorted(dict(self.rows).items()):
            sizes = dict(own.sizes)
            told[str(rows)] = {
                "plain": {"timed": own.num_plain, "seconds": own.plain.value if len(own.plain) else None},
                "windows": own.num_windows,
                "over_curve": {
                    str(round(2 ** (size / 4))): round(times.value, 3)
                    for size, times in sorted(sizes.items())
                    if len(times)
                },
                "pays": self.least_chance(rows) < 1,
                "rests": self.rests(rows),
            }
        return {"by_rows": told, "tried": self.tried, "outliers": self.outliers}

    # Within

    def _of(self, num_rows: int) -> OfRows:
        own = self.rows.get(num_rows)
        if own is None:
            own = self.rows[num_rows] = OfRows()
        return own

    def _expected(self, num_rows: int, guesses: int) -> float:
        key = num_rows, guesses
        if key not in self._priors:
            self._priors[key] = self.curve.window(num_rows, 1 + guesses / num_rows) / self.curve.step(num_rows)
        return self._priors[key]

    def _window(self, num_rows: int, guesses: int) -> float:
        key = num_rows, guesses
        if key not in self._windows:
            size, own = size_of(guesses), self._of(num_rows).sizes
            cost = self._expected(num_rows, guesses) * self._factor(num_rows, size)
            if own and size not in own:
                # The curve's form may be wrong as well. What looks too good by either is tried once, what looks too bad never would be.
                near = max((other for other in own if other < size), default=min(own))
                known = round(2 ** (near / 4))
                each = (self._expected(num_rows, known) * own[near].value - 1) / known
                cost = min(cost, 1 + each * guesses)
            self._windows[key] = max(1.0, cost)
        return self._windows[key]

    def _factor(self, num_rows: int, size: int) -> float:
        """How many times as much as the curve says windows of this size take."""
        key = num_rows, size
        if key not in self._factors:
            own = self.rows.get(num_rows)
            sizes = own.sizes if own is not None else {}
            if not sizes:
                tried = [rows for rows, other in self.rows.items() if other.sizes]
                near = min(tried, key=lambda rows: abs(math.log(rows / num_rows)), default=None)
                sizes = {} if near is None else self.rows[near].sizes
            self._factors[key] = _nearest(sizes, size)
        return self._factors[key]

    def _close(self) -> None:
        window, self._open = self._open, None
        if window is None:
            return
        plain = self.seconds(window.num_rows)
        if plain is None or window.seconds <= 0 or plain <= 0:
            return
        own, size = self._of(window.num_rows), size_of(window.guesses)
        took = window.seconds / plain
        thought = self._window(window.num_rows, window.guesses)
        if size not in own.sizes and size not in own.doubted and took > OUTLIER * thought and not own.was_outlier:
            own.was_outlier = True
            own.doubted.add(size)
            self.outliers += 1
            return
        own.was_outlier = False
        own.doubted.discard(size)
        if window.is_try:
            self.tried += 1
            own.tries -= min(MOST_LOST, max(0.0, took - window.tokens / window.num_rows))
        times = own.sizes.setdefault(size, Typical(LAST_WINDOWS))
        times.add(took / self._expected(window.num_rows, window.guesses))
        times.seen_at = own.num_windows
        if own.num_windows % AGE == 0:
            for other, old in list(own.sizes.items()):
                if own.num_windows - old.seen_at >= AGE:
                    old.forget_oldest()
                    if not len(old):
                        del own.sizes[other]
        self._factors.clear()
        self._windows.clear()
        self._costs.clear()
        self._chances.clear()


def size_of(guesses: int) -> int:
    """Windows of this many guesses and about as many: each number up to 8 for itself, then four sizes to a doubling."""
    return round(4 * math.log2(max(1, guesses)))


def _nearest(sizes: Mapping[int, Typical], at: int) -> float:
    """The value at `at`, between the nearest two on a line of logarithms, beyond the last as there; 1 if there are none."""
    if at in sizes:
        return sizes[at].value
    low = max((size for size in sizes if size < at), default=None)
    high = min((size for size in sizes if size > at), default=None)
    if low is None or high is None:
        only = high if low is None else low
        return 1.0 if only is None else sizes[only].value
    share = (at - low) / (high - low)
    return sizes[low].value ** (1 - share) * sizes[high].value ** share
