"""A machine that takes what it is told for steps and windows, with noise, and the policy on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from gnomon.config import SpeculationConfig
from gnomon.engine.speculation import Speculation
from gnomon.propose import Chance, Curve, Guess

if TYPE_CHECKING:
    from gnomon.engine.row import Row

WIDTHS = (2, 3, 5, 9, 17)
SIZES = (1, 2, 4, 8)


def curve_of(cost: Callable[[int], float], factor: float = 1.0, *, assumed: bool = False) -> Curve:
    """By positions in all. `factor` is how many times as dear as that windows are said to be."""
    return Curve(
        {rows: cost(rows) for rows in SIZES},
        {rows: {width: factor * cost(rows * width) for width in WIDTHS} for rows in SIZES},
        assumed=assumed,
    )


@dataclass
class Guessing:
    """A row's guesses: as likely as `chance` says, in that share of places."""

    chance_: Chance
    share: float
    draw: random.Random
    waits: bool = False
    looked: int = 0
    at: int = -1
    guess: Guess = field(default_factory=lambda: Guess((), ""))

    def look(self, prompt: Sequence[int], tokens: Sequence[int], limit: int) -> Guess:
        if self.at != len(tokens):
            self.at, self.looked = len(tokens), self.looked + 1
            there = self.draw.random() < self.share
            self.guess = Guess([1] * self.chance_.most if there else (), "simulated")
        return self.guess

    def chance(self, guess: Guess) -> Chance:
        return self.chance_

    def first(self, guess: Guess) -> float:
        return self.chance_.first

    def use(self, guess: Guess) -> None: ...

    def accepted(self, depth: int) -> int:
        """How many of so many guesses turn out right."""
        right, n = self.chance_.first, 0
        while n < depth and self.draw.random() < right:
            n, right = n + 1, self.chance_.later
        return n


@dataclass(eq=False)
class SimulatedRow:
    guesses: Guessing
    prompt: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list[int])
    open: bool = True
    left: int = 1 << 30


@dataclass
class Machine:
    """`cost` by positions in all. Some steps are delayed by `stall`."""

    cost: Callable[[int], float]
    draw: random.Random
    noise: float = 0.05
    stalls: float = 0.005
    stall: float = 50.0
    compiles: float = 0.0
    """What the first window of a width takes longer."""
    seen: set[int] = field(default_factory=set[int])

    def takes(self, positions: int) -> tuple[float, float]:
        """Seconds of a step, and those that it would take undisturbed."""
        calm = self.cost(positions)
        seconds = calm * self.draw.lognormvariate(0, self.noise)
        if self.draw.random() < self.stalls:
            seconds += self.stall * self.draw.random()
        if positions not in self.seen:
            self.seen.add(positions)
            seconds += self.compiles
        return seconds, calm


@dataclass
class Outcome:
    tokens: int = 0
    seconds: float = 0.0
    """As an undisturbed machine would have taken."""
    windows: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Simulation:
    """Rows that go on and on."""

    def __init__(
        self, machine: Machine, curve: Curve, chances: Sequence[Chance], share: float = 1.0, *, flat: bool = False
    ) -> None:
        self.machine, self.flat = machine, flat
        self.rows = [SimulatedRow(Guessing(chance, share, machine.draw)) for chance in chances]
        self.speculation = Speculation(SpeculationConfig(draft_kind="ngram"), vocab_size=9, curve=curve)
        self.was_plain = False

    def run(self, steps: int) -> Outcome:
        speculation, num_rows = self.speculation, len(self.rows)
        rows = cast("list[Row]", self.rows)
        made = Outcome()
        for _ in range(steps):
            drafts: Sequence[Sequence[int]] = ()
            if speculation.wants_window(rows, self.flat):
                drafts = speculation.drafts(rows, self.flat)
            if any(drafts):
                sizes = [len(draft) for draft in drafts]
                guesses = sum(sizes) if self.flat else max(sizes) * num_rows
                taken = [1 + row.guesses.accepted(size) for row, size in zip(self.rows, sizes, strict=True)]
                seconds, calm = self.machine.takes(num_rows + guesses)
                speculation.windowed(num_rows, guesses, seconds, sum(taken))
                made.windows += 1
            else:
                taken = [1] * num_rows
                seconds, calm = self.machine.takes(num_rows)
                speculation.stepped(num_rows, seconds, self.was_plain)
            self.was_plain = not any(drafts)
            for row, n in zip(self.rows, taken, strict=True):
                row.tokens.extend([1] * n)
            made.tokens += sum(taken)
            made.seconds += calm
        return made


def best_rate(cost: Callable[[int], float], chances: Sequence[Chance], share: float = 1.0) -> float:
    """Tokens per second at the best fixed depth, plain steps among them, with whole windows."""
    num_rows = len(chances)

    def rate(depth: int) -> float:
        tokens = num_rows + sum(chance.tokens(depth) for chance in chances)
        plain = num_rows / cost(num_rows)
        if not depth:
            return plain
        return (share * tokens + (1 - share) * num_rows) / (
            share * cost(num_rows * (1 + depth)) + (1 - share) * cost(num_rows)
        )

    return max(map(rate, range(17)))
