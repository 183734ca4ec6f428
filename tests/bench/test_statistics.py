"""The interval and the decision rule, against textbook values, by simulation, and by symmetry."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.bench.statistics import MIN_BLOCKS, THRESHOLD, blocks_needed, decide, interval, t_probability, t_quantile

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "simulate_statistics.py"


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_statistics", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate_statistics"] = module
    spec.loader.exec_module(module)
    return module


# Two-sided 95 % and 99 % points of any printed t table.
@pytest.mark.parametrize(
    ("p", "df", "value"),
    [
        (0.975, 1, 12.706205), (0.975, 2, 4.302653), (0.975, 4, 2.776445), (0.975, 5, 2.570582), (0.975, 11, 2.200985),
        (0.975, 30, 2.042272), (0.975, 120, 1.979930), (0.995, 4, 4.604095), (0.95, 10, 1.812461), (0.5, 3, 0.0),
    ],
)  # fmt: skip
def test_t_quantile_of_printed_tables(p: float, df: float, value: float) -> None:
    assert t_quantile(p, df) == pytest.approx(value, abs=1e-6)
    assert t_quantile(1 - p, df) == pytest.approx(-value, abs=1e-6)


def test_t_with_one_degree_is_cauchy() -> None:
    for t in (-7.0, -1.0, -0.2, 0.0, 0.4, 3.0):
        assert t_probability(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)


@pytest.mark.parametrize(("p", "df"), [(0.0, 4), (1.0, 4), (0.9, 0)])
def test_t_quantile_refuses(p: float, df: float) -> None:
    with pytest.raises(ValueError, match="t quantile"):
        t_quantile(p, df)


def test_interval_of_students_sleep_data() -> None:
    """Student 1908: extra hours of sleep, paired; the classical 95 % interval is 0.70 to 2.46."""
    differences = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    found = interval(differences)
    assert found.estimate == pytest.approx(1.58)
    assert (found.lower, found.upper) == (pytest.approx(0.7001, abs=1e-4), pytest.approx(2.4599, abs=1e-4))


@pytest.mark.parametrize("ratios", [[], [0.1], [0.1, math.nan], [math.inf, 0.0]])
def test_interval_refuses(ratios: list[float]) -> None:
    with pytest.raises(ValueError, match=r"blocks|finite"):
        interval(ratios)


finite = st.lists(st.floats(-1, 1), min_size=2, max_size=20)


@settings(deadline=None)
@given(finite)
def test_swapping_arms_swaps_win_and_loss(ratios: list[float]) -> None:
    mirror = {"repeatable win": "measured loss", "measured loss": "repeatable win", "inconclusive": "inconclusive"}
    assert decide([-r for r in ratios]).outcome == mirror[decide(ratios).outcome]


@settings(deadline=None)
@given(finite, st.integers(1, 3))
def test_a_failing_candidate_never_wins(ratios: list[float], failures: int) -> None:
    with_failures, without = decide(ratios, failures), decide(ratios)
    assert with_failures.outcome != "repeatable win"
    if without.outcome != "repeatable win":
        assert with_failures == without


@settings(deadline=None)
@given(finite)
def test_a_win_is_large_certain_and_of_enough_blocks(ratios: list[float]) -> None:
    if decide(ratios).outcome == "repeatable win":
        found = interval(ratios)
        assert found.blocks >= MIN_BLOCKS
        assert math.exp(found.estimate) > 1 + THRESHOLD
        assert found.lower > 0


@pytest.mark.parametrize(
    ("ratios", "outcome", "reason", "step"),
    [
        ([0.2] * 4, "inconclusive", "4 usable blocks", "1 or more further blocks"),
        ([0.05, 0.051, 0.049, 0.05, 0.052], "repeatable win", "+5.2 %", None),
        ([-0.05, -0.051, -0.049, -0.05, -0.052], "measured loss", "-4.9 %", None),
        ([0.02, 0.021, 0.019, 0.02, 0.022], "inconclusive", "not above the 3%", "other grounds"),
        ([0.001, -0.002, 0.0, 0.002, -0.001], "inconclusive", "within 3%", "keep the incumbent"),
        ([0.2, -0.1, 0.1, 0.0, 0.05], "inconclusive", "includes no difference", "blocks at this spread"),
        ([0.1, -0.1, 0.1, -0.08, -0.01], "inconclusive", "includes no difference", "blocks at this spread"),
    ],
)
def test_outcomes(ratios: list[float], outcome: str, reason: str, step: str | None) -> None:
    verdict = decide(ratios)
    assert verdict.outcome == outcome
    assert reason in verdict.reason
    if step is None:
        assert verdict.next is None
    else:
        assert verdict.next is not None
        assert step in verdict.next


def test_blocks_needed_suffice() -> None:
    found = interval([0.2, -0.1, 0.1, 0.0, 0.05])
    n = blocks_needed(found)
    spread = found.half_width * math.sqrt(5) / t_quantile(0.975, 4)
    assert t_quantile(0.975, n - 1) * spread / math.sqrt(n) < found.estimate
    assert t_quantile(0.975, n - 2) * spread / math.sqrt(n - 1) >= found.estimate


@pytest.mark.parametrize("blocks", [5, 6, 12])
def test_coverage_and_false_positives(simulation: ModuleType, blocks: int) -> None:
    """What docs/measuring.md states: at least 94 % coverage, at most 6 % of equal arms called anything (4 % jitter being the worst)."""
    trials = 3000
    for noise in simulation.NOISES.values():
        rng = np.random.default_rng((5, blocks))
        d, order = simulation.log_ratios(noise, rng, trials, blocks, 0.0)
        covered, win, loss = simulation.shares(simulation.student(d, order, rng), 0.0)
        assert covered > 0.94
        assert win + loss < 0.06


def test_percentile_bootstraps_would_not_do(simulation: ModuleType) -> None:
    """The reason for Student's t: at five blocks the bootstraps' 95 % is far less."""
    rng = np.random.default_rng(3)
    d, order = simulation.log_ratios(simulation.NOISES["quiet (1 % jitter)"], rng, 500, 5, 0.0)
    for method in ("percentile", "BCa"):
        assert simulation.shares(simulation.METHODS[method](d, order, rng), 0.0)[0] < 0.90


def test_planted_slowdown_is_found_and_equal_arms_are_not(simulation: ModuleType) -> None:
    noise = simulation.NOISES["quiet (1 % jitter)"]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        slower, _ = simulation.log_ratios(noise, rng, 1, 6, -math.log(1.05))
        equal, _ = simulation.log_ratios(noise, rng, 1, 6, 0.0)
        assert decide(list(slower[0])).outcome == "measured loss"
        assert decide(list(equal[0])).outcome == "inconclusive"


def test_the_script_applies_the_rule_of_the_package(simulation: ModuleType) -> None:
    rng = np.random.default_rng(9)
    d, order = simulation.log_ratios(simulation.NOISES["jittery (4 %)"], rng, 300, 5, 0.06)
    _, win, loss = simulation.shares(simulation.student(d, order, rng), 0.06)
    outcomes = [decide(list(row)).outcome for row in d]
    assert win == outcomes.count("repeatable win") / 300
    assert loss == outcomes.count("measured loss") / 300
