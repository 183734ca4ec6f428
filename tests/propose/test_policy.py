"""The policy against enumeration and hand-computed cases."""

from __future__ import annotations

import random

import pytest

from gnomon.propose import Chance, Curve, Proposer, Rates, RowGuesses, best_depth
from gnomon.propose.policy import MARGIN

FLAT = Curve({1: 1.0, 8: 1.0}, {1: {2: 1.0, 17: 1.0}, 8: {2: 1.0, 17: 1.0}})
"""Wide windows cost what a step costs."""
STEEP = Curve({1: 1.0}, {1: {2: 2.0, 17: 17.0}})
"""Every position costs a whole step."""


def test_expected_tokens_by_hand() -> None:
    # 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.8
    assert Chance(0.5, 0.8, 10).tokens(3) == pytest.approx(1.22)
    assert Chance(0.5, 0.8, 2).tokens(3) == pytest.approx(0.9)
    assert Chance(1.0, 1.0, 5).tokens(9) == 5


def test_free_windows_are_used_whole_and_costly_ones_never() -> None:
    likely = Chance(0.9, 0.9, 10)
    assert best_depth([likely], FLAT) == 10
    assert best_depth([likely], STEEP) == 0
    # Drafts that cost as much as a step each: even the surest give 2 tokens for 2 steps.
    assert best_depth([Chance(1.0, 1.0, 4)], FLAT, lambda depth: depth * 1.0) == 0


def test_an_unlikely_guess_is_not_worth_a_dearer_window() -> None:
    curve = Curve({1: 1.0}, {1: {2: 1.2, 3: 1.3, 5: 1.5}})
    # 1 + p tokens for 1.2: worth it from p = 0.2 and the margin on.
    assert best_depth([Chance(1.2 * (1 + MARGIN) - 1 - 0.01, 0.0, 10)], curve) == 0
    assert best_depth([Chance(1.2 * (1 + MARGIN) - 1 + 0.01, 0.0, 10)], curve) == 1
    # Certain guesses: 2 / 1.2, 3 / 1.3, 4 / 1.4 (between), 5 / 1.5: the rate still grows at 4.
    assert best_depth([Chance(1.0, 1.0, 4)], curve) == 4


def test_rows_without_guesses_pay_for_the_window_too() -> None:
    curve = Curve({1: 1.0, 2: 1.0}, {1: {2: 1.5}, 2: {2: 1.5}})
    sure, none = Chance(1.0, 1.0, 1), Chance(0.0, 0.0, 0)
    assert best_depth([sure], curve) == 1
    # 3 tokens for 1.5 are no more than 2 for 1.
    assert best_depth([sure, none], curve) == 0


def test_between_measured_points_costs_are_interpolated() -> None:
    curve = Curve({1: 1.0, 4: 4.0}, {1: {2: 2.0, 4: 4.0}, 4: {2: 8.0, 4: 16.0}})
    assert curve.step(2) == pytest.approx(2.0)
    assert curve.window(1, 3) == pytest.approx(3.0)
    assert curve.window(4, 6) == pytest.approx(24.0)
    assert curve.window(2, 2) == pytest.approx(4.0)


class Says(Proposer):
    """Proposes one thing after another."""

    source = "says"

    def __init__(self, *guesses: list[int]) -> None:
        self.guesses = list(guesses)

    def propose(self, prompt: object, generated: object, limit: int) -> list[int]:
        return self.guesses.pop(0) if self.guesses else []


def feed(guesses: RowGuesses, tokens: list[int]) -> None:
    generated: list[int] = []
    guesses.look([0], generated, 16)
    for token in tokens:
        generated.append(token)
        guesses.saw(token)
        guesses.look([0], generated, 16)


def test_guesses_are_judged_by_the_tokens_that_come_without_being_used() -> None:
    rates = Rates()
    guesses = RowGuesses([Says([1, 2, 3])], rates)
    feed(guesses, [1, 2, 9, 3])
    shared = rates.shared["says", 0]
    assert (shared.first.right, shared.first.wrong) == (1, 0)
    assert (shared.later.right, shared.later.wrong) == (pytest.approx(0.99), 1)
    assert guesses.tally.calls == 0
    assert guesses.tally.lengths == []


def test_a_rate_follows_a_change_within_a_few_dozen_trials() -> None:
    draw = random.Random(3)
    rates = Rates()
    guesses = RowGuesses([], rates)
    rate = guesses.rate("x", 0, 0.5)
    for chance in (0.9, 0.1, 0.9):
        for _ in range(60):
            rate.add(0, draw.random() < chance)
        assert abs(rate.first.value - chance) < 0.3


def test_what_is_certain_is_asked_first_and_trusted_whole() -> None:
    class Must(Says):
        certain = True

    guesses = RowGuesses([Says([5, 6]), Must([7])], Rates())
    found = guesses.look([0], [], 16)
    assert list(found.tokens) == [7]
    assert guesses.chance(found).tokens(5) == 1
