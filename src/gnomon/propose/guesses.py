"""One row's guesses: who makes them, how they turned out, and what that says of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from gnomon.propose.acceptance import Rate, Rates, row_rate
from gnomon.propose.policy import Chance
from gnomon.propose.proposer import Proposer

FIRST_PROBE = 32
MOST_PROBE = 512
"""Tokens between tries of a proposer that costs device time and does not pay; they double as long as it goes on not to."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What may come next, at most as far as the row may go. `certain`: it must come. `asserted`: it comes, whatever the model says,
    and then `after`."""

    tokens: Sequence[int]
    source: str
    grade: int = 0
    prior: float = 0.5
    certain: bool = False
    asserted: bool = False
    after: int | None = None

    def cut(self, size: int) -> Guess:
        """Its first `size` tokens."""
        if size >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:size], after=self.tokens[size] if self.asserted else None)


NOTHING = Guess((), "")


@dataclass(slots=True)
class Taken:
    """What came of one source's guesses. `spans` are the tokens it had accepted in each window."""

    drafted: int = 0
    accepted: int = 0
    spans: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class Tally:
    """What speculation did for one row. `calls` are forwards that gave it tokens, `lengths` the accepted tokens of each window."""

    calls: int = 0
    lengths: list[int] = field(default_factory=list[int])
    drafted_at: list[int] = field(default_factory=list[int])
    accepted_at: list[int] = field(default_factory=list[int])
    by_source: dict[str, Taken] = field(default_factory=dict[str, Taken])

    def add(self, drafted: int, accepted: int, guess: Guess = NOTHING) -> None:
        """One window of a guess."""
        self.lengths.append(accepted)
        taken = self.by_source.setdefault(guess.source, Taken())
        behind = guess.after is not None
        taken.drafted += drafted + behind
        taken.accepted += accepted + behind
        taken.spans.append(accepted + behind)
        for counts, n in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for position in range(n):
                counts[position] += 1

    def assert_one(self, source: str) -> None:
        """A plain step whose token was asserted."""
        taken = self.by_source.setdefault(source, Taken())
        taken.drafted += 1
        taken.accepted += 1
        taken.spans.append(1)


class RowGuesses:
    """The proposers of one row, in the order in which they are asked, and what became of their guesses.

    A guess needs no window to be judged: it is held against the tokens that then come, however they were computed. So acceptance is
    known also while nothing is speculated, and speculation begins again once it would pay.
    """

    def __init__(
        self, proposers: Sequence[Proposer], rates: Rates, num_legal: Callable[[Sequence[int]], int] | None = None
    ) -> None:
        """`num_legal` tells how many leading ids of a guess may come at all."""
        self._num_legal = num_legal
        self.proposers = sorted(proposers, key=lambda one: not one.certain)
        self.rates = rates
        self.tally = Tally()
        self.probe_at = 0
        """Generated tokens from which a batched proposer is tried though it doesn't seem to pay."""
        self._probe_after = FIRST_PROBE
        self._rates: dict[tuple[str, int], Rate] = {}
        self._looked = -1
        self._found = NOTHING
        self._judged: Guess | None = None
        self._at = 0

    def look(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Guess:
        """The first proposer's guess that has one, made once per place. Raises what a proposer raises."""
        if self._looked != len(generated):
            self._looked, self._found = len(generated), self._first(prompt, generated, limit)
            if self._judged is None and self._found.tokens:
                self._judged, self._at = self._found, 0
        return self._found

    def _first(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Guess:
        found, begins = NOTHING, False
        for proposer in self.proposers:
            tokens = proposer.propose(prompt, generated, limit)
            if self._num_legal is not None:
                tokens = tokens[: self._num_legal(tokens[:limit])]
            one = proposer
            guess = Guess(tokens, one.source, one.grade, one.prior, one.certain, one.asserted).cut(limit)
            size = len(found.tokens)
            if len(guess.tokens) > size and list(tokens[:size]) == list(found.tokens):
                found, begins = guess, proposer.begins
            if found.tokens and not begins:
                break
        return found

    @property
    def waits(self) -> bool:
        """Whether a proposer must see every token before the next is drawn."""
        return any(proposer.waits for proposer in self.proposers)

    @property
    def used(self) -> Guess:
        """The guess that a window tries."""
        return self._judged or NOTHING

    def chance(self, guess: Guess) -> Chance:
        """What a guess is worth by what is known of its kind."""
        if guess.certain:
            return Chance(1.0, 1.0, len(guess.tokens))
        rate = self.rate(guess.source, guess.grade, guess.prior)
        return Chance(rate.first.value, rate.later.value, len(guess.tokens))

    def first(self, guess: Guess) -> float:
        """How likely a guess begins rightly."""
        if guess.certain:
            return 1.0
        return self.rate(guess.source, guess.grade, guess.prior).first.value

    def rate(self, source: str, grade: int, prior: float) -> Rate:
        key = source, grade
        if key not in self._rates:
            self._rates[key] = row_rate(self.rates.of(source, grade, prior))
        return self._rates[key]

    def use(self, guess: Guess) -> None:
        """A window is about to try this guess."""
        self._judged, self._at = guess, 0

    def saw(self, token: int) -> None:
        """The row's next token is known."""
        guess = self._judged
        if guess is None:
            return
        was_right = guess.tokens[self._at] == token
        if not guess.certain:
            for rate in (
                self.rate(guess.source, guess.grade, guess.prior),
                self.rates.of(guess.source, guess.grade, guess.prior),
            ):
                rate.add(self._at, was_right)
        self._at += 1
        if not was_right or self._at == len(guess.tokens):
            self._judged = None

    def probed(self, generated: int, pays: bool) -> None:
        """A batched proposer was tried; when to do it again if it seems not to pay."""
        self._probe_after = FIRST_PROBE if pays else min(2 * self._probe_after, MOST_PROBE)
        self.probe_at = generated + self._probe_after


def total(tallies: Iterable[Tally]) -> Tally:
    """The tallies of a request's choices as one."""
    result = Tally()
    for tally in tallies:
        result.calls += tally.calls
        result.lengths += tally.lengths
        for mine, theirs in ((result.drafted_at, tally.drafted_at), (result.accepted_at, tally.accepted_at)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count
        for source, theirs in tally.by_source.items():
            mine = result.by_source.setdefault(source, Taken())
            mine.drafted += theirs.drafted
            mine.accepted += theirs.accepted
            mine.spans += theirs.spans
    return result
