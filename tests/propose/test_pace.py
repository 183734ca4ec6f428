"""What is learnt of costs from steps, on simulated machines: the policy comes close to the best fixed depth, whatever it was told."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated import Machine, Simulation, best_rate, curve_of

from gnomon.propose import Chance, Curve, Pace
from gnomon.propose.pace import FEW, FIRST_RECHECK, MOST_TRIES, PATIENCE, size_of

ROWS = st.sampled_from([1, 2, 4, 8])
CHANCES = st.builds(Chance, st.floats(0.05, 1), st.floats(0.3, 1), st.sampled_from([4, 10, 16]))


def machine_of(rows: int, fixed: float, each: float, tile: int, jump: float) -> Callable[[int], float]:
    """Bound by memory up to a point (`fixed`), by positions beyond it, and in windows by what is launched for them (`jump`)."""

    def cost(positions: int) -> float:
        seconds = fixed + each * positions
        if tile and positions > tile:
            seconds = (fixed + each * tile) / tile * positions
        return seconds * (jump if positions > rows else 1.0)

    return cost


MACHINES = st.tuples(
    st.sampled_from([0.5, 3.0, 5.0, 30.0]),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from([0, 8]),
    st.sampled_from([1.0, 1.0, 2.0, 10.0]),
)


@given(ROWS, MACHINES, CHANCES, st.floats(-1, 1), st.booleans(), st.sampled_from([0.0, 500.0]), st.integers(0, 1 << 16))
@example(1, (30.0, 1.0, 0, 10.0), Chance(0.9, 0.95, 16), -1.0, True, 500.0, 0)
@example(8, (30.0, 1.0, 0, 10.0), Chance(1.0, 1.0, 16), -1.0, True, 0.0, 0)
@example(1, (5.0, 0.3, 0, 1.0), Chance(0.95, 0.95, 16), 1.0, False, 500.0, 0)
@settings(max_examples=12)
def test_whatever_was_assumed_the_best_depth_is_found(
    rows: int,
    shape: tuple[float, float, int, float],
    chance: Chance,
    wrong: float,
    assumed: bool,
    compiles: float,
    seed: int,
) -> None:
    cost, chances = machine_of(rows, *shape), [chance] * rows
    told = curve_of(lambda positions: 3.0 + positions, 10**wrong, assumed=assumed)
    simulation = Simulation(Machine(cost, random.Random(seed), compiles=compiles), told, chances)
    start = simulation.run(200)
    later = simulation.run(1200)
    best, plain = best_rate(cost, chances), rows / cost(rows)
    assert later.rate >= 0.8 * best
    assert later.rate >= 0.97 * plain, "no more is lost than tries may cost"
    # A handful of windows, each of which can't be dearer than the dearest.
    lost = start.seconds - start.tokens / plain
    assert lost <= 12 * cost(rows * 17)


@given(ROWS, MACHINES, st.floats(-1, 1), st.integers(0, 1 << 16))
@settings(max_examples=6)
def test_prose_loses_nothing(rows: int, shape: tuple[float, float, int, float], wrong: float, seed: int) -> None:
    """Guesses that are seldom there and nearly always wrong."""
    cost, chances = machine_of(rows, *shape), [Chance(0.05, 0.5, 10)] * rows
    told = curve_of(lambda positions: 3.0 + positions, 10**wrong)
    simulation = Simulation(Machine(cost, random.Random(seed)), told, chances, 0.3)
    simulation.run(200)
    assert simulation.run(1500).rate >= 0.98 * rows / cost(rows)


def test_windows_that_become_cheap_or_dear_are_taken_up_and_given_up() -> None:
    chances, dear = [Chance(0.9, 0.95, 16)], [True]

    def cost(positions: int) -> float:
        return 30.0 + positions if positions == 1 or not dear[0] else 600.0

    simulation = Simulation(Machine(cost, random.Random(5)), curve_of(lambda n: 30.0 + n), chances)
    simulation.run(300)
    assert simulation.run(1500).windows <= 5
    dear[0] = False
    simulation.run(9000)
    assert simulation.run(500).rate >= 0.95 * best_rate(cost, chances)
    dear[0] = True
    simulation.run(100)
    assert simulation.run(1500).rate >= 0.98 / cost(1)


def test_where_no_guess_could_pay_hardly_any_is_looked_for() -> None:
    cost, chances = machine_of(8, 0.5, 1.0, 0, 1.5), [Chance(0.02, 0.02, 10)] * 8
    simulation = Simulation(Machine(cost, random.Random(1)), curve_of(cost), chances)
    simulation.run(2000)
    assert simulation.rows[0].guesses.looked < 2000 / 10


def steady(told: Curve, rows: int = 1, plain: float = 1.0) -> Pace:
    pace = Pace(told)
    for _ in range(FEW):
        pace.stepped(rows, plain)
    return pace


LINE = Curve({1: 1.0}, {1: {2: 2.0, 3: 3.0, 5: 5.0, 9: 9.0, 17: 17.0}})


def test_a_load_on_all_steps_changes_nothing() -> None:
    pace = steady(LINE, plain=3.0)
    for _ in range(5):
        pace.windowed(1, 4, 15.0, 5)
    pace.disturbed()
    assert pace.window(1, 5) == pytest.approx(5.0)
    assert pace.seconds(1) == 3.0


def test_one_disturbed_step_of_a_few_is_not_believed() -> None:
    pace = steady(LINE)
    pace.stepped(1, 50.0)
    for seconds in (2.5, 50.0, 2.5, 2.5):
        pace.windowed(1, 4, seconds, 5)
    pace.disturbed()
    assert (pace.seconds(1), pace.window(1, 5)) == (1.0, pytest.approx(2.5))


def test_a_first_window_that_compiles_is_left_out_but_not_two_in_a_row() -> None:
    pace = steady(LINE)
    pace.windowed(1, 4, 500.0, 5)
    pace.disturbed()
    assert pace.window(1, 5) == 5.0
    pace.windowed(1, 4, 40.0, 5)
    pace.disturbed()
    assert pace.window(1, 5) == pytest.approx(40.0)


def test_a_window_answers_for_the_slow_steps_behind_it() -> None:
    pace = steady(LINE)
    pace.windowed(1, 4, 2.0, 5)
    pace.stepped(1, 1.7, settled=False)
    pace.stepped(1, 1.3, settled=False)
    pace.stepped(1, 1.0)
    assert pace.window(1, 5) == pytest.approx(3.0)
    assert pace.seconds(1) == 1.0


def test_plain_steps_are_timed_before_windows_and_again_now_and_then() -> None:
    pace = Pace(LINE)
    assert pace.rests(1)
    for _ in range(FEW):
        pace.stepped(1, 1.0)
    assert not pace.rests(1)
    for _ in range(FIRST_RECHECK):
        assert not pace.rests(1)
        pace.windowed(1, 4, 2.0, 5)
    assert pace.rests(1)
    for _ in range(PATIENCE):
        assert pace.rests(1)
        pace.rested(1)
    assert not pace.rests(1), "it isn't waited for without end"


def test_tries_cost_what_plain_steps_saved_up() -> None:
    pace = steady(LINE)
    assert pace.may_try(1)
    pace.windowed(1, 16, 17.0, 1, is_try=True)
    pace.disturbed()
    plain = 0
    while not pace.may_try(1):
        pace.stepped(1, 1.0)
        plain += 1
    # Sixteen steps' time beyond the token that came of it.
    assert plain == pytest.approx((16 - MOST_TRIES) * 256, rel=0.01)


def test_costs_of_rows_that_were_never_together_are_taken_from_the_nearest() -> None:
    told = curve_of(lambda n: 4.0 + n)
    pace = steady(told, rows=4, plain=16.0)
    pace.windowed(4, 4, 36.0, 8)
    pace.disturbed()
    # Plain steps take twice as long as measured; windows, 12 to 8 there, 36 to 16.
    assert pace.seconds(8) == pytest.approx(24.0)
    assert pace.window(4, 2) == pytest.approx(36 / 16)
    assert pace.window(8, 1.5) == pytest.approx(16 / 12 * 1.5)


def test_what_stays_wrong_is_told_for_the_file_both_ways() -> None:
    pace = steady(Curve({1: 1.0}, {1: {2: 2.0, 5: 5.0, 17: 17.0}}), plain=0.5)
    for _ in range(7):
        pace.windowed(1, 4, 5.0, 5)
    pace.disturbed()
    assert pace.corrections(1) == {}, "once is not for long"
    assert pace.corrections(1) == {1: 0.5}, "windows of 5 take what was measured, others had no try"
    for _ in range(7):
        pace.windowed(1, 4, 8.0, 5)
    pace.disturbed()
    assert pace.corrections(1) == {1: 0.5}
    assert pace.corrections(1) == {1: 0.5, 5: pytest.approx(8.0)}


def test_sizes_are_exact_for_few_guesses_and_coarse_for_many() -> None:
    assert len({size_of(n) for n in range(1, 9)}) == 8
    assert size_of(128) == 28
