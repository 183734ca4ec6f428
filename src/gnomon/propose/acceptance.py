"""How often guesses were right, lately."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

ROW_MEMORY = 0.9
"""What a trial weighs after the next one: a row's rate follows about its last ten."""
SHARED_MEMORY = 0.99
PRIOR_WEIGHT = 3.0
"""Trials that the prior is worth."""


@dataclass(slots=True)
class Share:
    """The decaying share of right trials, drawn towards a prior while there are few: a beta posterior's mean."""

    prior: float
    memory: float
    right: float = 0.0
    wrong: float = 0.0

    def add(self, was_right: bool) -> None:
        self.right = self.right * self.memory + was_right
        self.wrong = self.wrong * self.memory + (not was_right)

    @property
    def value(self) -> float:
        return (self.prior * PRIOR_WEIGHT + self.right) / (PRIOR_WEIGHT + self.right + self.wrong)


@dataclass(slots=True)
class Rate:
    """Acceptance of one kind of guess: of its first token, and of a token behind others that were right.

    The two differ: a copied passage that began well goes on well.
    """

    first: Share
    later: Share

    def add(self, position: int, was_right: bool) -> None:
        (self.later if position else self.first).add(was_right)


@dataclass(slots=True)
class Rates:
    """Rates by (source, grade): those of the whole engine, which a new row starts from."""

    shared: dict[tuple[str, int], Rate] = field(default_factory=dict[tuple[str, int], Rate])

    def of(self, source: str, grade: int, prior: float) -> Rate:
        """The engine's rate of a kind of guess, made from `prior` on first use."""
        key = source, grade
        if key not in self.shared:
            later = max(prior, 0.75)
            self.shared[key] = Rate(Share(prior, SHARED_MEMORY), Share(later, SHARED_MEMORY))
        return self.shared[key]

    def told(self) -> Iterator[tuple[str, float, float]]:
        """(name, first, later) of every kind that was seen."""
        for (source, grade), rate in sorted(self.shared.items()):
            yield f"{source}/{grade}" if grade else source, rate.first.value, rate.later.value


def row_rate(shared: Rate) -> Rate:
    """What a row knows at its start."""
    return Rate(Share(shared.first.value, ROW_MEMORY), Share(shared.later.value, ROW_MEMORY))
