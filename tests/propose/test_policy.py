"""The policy against enumeration and hand-computed cases."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.propose import Chance, Curve, Pace, Proposer, Rates, RowGuesses, best_depth, best_depths
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


def test_where_positions_cost_alike_the_likeliest_guesses_are_taken_whichever_rows() -> None:
    # A step of two rows costs 4, each further position 1: 2 / 4 tokens in plain steps.
    curve = Curve({2: 4.0}, {2: {2: 6.0, 17: 36.0}})
    sure, likely, vague = Chance(1.0, 0.9, 3), Chance(0.6, 0.5, 8), Chance(0.2, 0.9, 8)
    # 3 / 5, 3.9 / 6, 4.71 / 7, then 4.91 / 8 or 5.31 / 8: a guess pays while it is likelier than what the window makes per position.
    assert best_depths([sure, vague], curve) == [3, 0]
    assert best_depths([vague, sure], curve) == [0, 3]
    assert best_depths([sure, likely], curve) == [3, 0]
    # 2.6 / 5 is more than 3 % better than 2 / 4, 2.9 / 6 is less.
    assert best_depths([likely, vague], curve) == [1, 0]
    assert best_depths([vague, vague], curve) == [0, 0]


def test_what_is_asserted_comes_in_the_windows_that_make_the_most_of_it() -> None:
    # Plain steps win, but a window must be: of 2, 3 and 4 positions for 3, 3.3 and 6, the second gives 3 tokens for 3.3.
    curve = Curve({1: 1.0, 2: 1.0}, {1: {2: 3.0, 3: 3.3, 4: 6.0}, 2: {2: 6.0, 3: 9.0}})
    sure, likely, none = Chance(1.0, 1.0, 3), Chance(0.9, 0.9, 3), Chance(0.0, 0.0, 0)
    assert best_depth([sure], curve) == best_depths([sure], curve)[0] == 0
    assert best_depth([sure], curve, least=1) == 2
    assert best_depths([sure], curve, least=[1]) == [2]
    # 3 / 3.5 for one more position of two rows, 4 / 6 for two: nothing else is worth it.
    assert best_depths([likely, sure], curve, least=[0, 1]) == [0, 1]
    # Each gets its own, however sure the other's are.
    assert best_depths([sure, sure], curve, least=[1, 1]) == [1, 1]
    assert best_depths([none, none], curve, least=[0, 0]) == [0, 0]


@given(
    st.lists(st.builds(Chance, st.floats(0, 1), st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=3),
    st.floats(0.01, 2.0),
)
def test_no_other_choice_of_depths_makes_more(chances: list[Chance], each: float) -> None:
    num_rows = len(chances)
    curve = Curve({num_rows: 1.0}, {num_rows: {2: 1 + each * num_rows, 3: 1 + 2 * each * num_rows}})

    def rate(depths: Sequence[int]) -> float:
        tokens = num_rows + sum(chance.tokens(depth) for chance, depth in zip(chances, depths, strict=True))
        return tokens / (1 + each * sum(depths)) / (1 if any(depths) else 1 / (1 + MARGIN))

    best = max(map(rate, product(*(range(chance.most + 1) for chance in chances))))
    depths = best_depths(chances, curve)
    assert rate(depths) == pytest.approx(best)
    if max(chance.first for chance in chances) <= Pace(curve).least_chance(num_rows):
        assert not any(depths)
        assert best_depth(chances, curve) == 0


def test_between_measured_points_costs_are_interpolated() -> None:
    curve = Curve({1: 1.0, 4: 4.0}, {1: {2: 2.0, 4: 4.0}, 4: {2: 8.0, 4: 16.0}})
    assert curve.step(2) == pytest.approx(2.0)
    assert curve.window(1, 3) == pytest.approx(3.0)
    assert curve.window(4, 6) == pytest.approx(24.0)
    assert curve.window(2, 2) == pytest.approx(4.0)
    # A row of four with one guess has 5 positions: between a plain step and a window of 2.
    assert curve.window(4, 1.25) == pytest.approx(5.0)


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
