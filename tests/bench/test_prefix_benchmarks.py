"""The benchmarks of the prefix cache: what they measure in which order, and that an interrupted run goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from prefix_cache import OURS, STOCK, Cell, Results, Scope, minutes, report
from prefix_soak import Agent

SCOPE = Scope({1000: 3}, {1000: 2}, {}, 16, 2)
ABOUT = {"model": "m", "flags": [], "model_sha256": "s"}


def test_the_servers_take_turns_and_change_places() -> None:
    turns = [(cell.arm, cell.block) for cell in SCOPE.cells() if cell.kind == "turns"]
    assert turns == [(OURS, 0), (STOCK, 0), (STOCK, 1), (OURS, 1), (OURS, 2)]


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    cell = Cell("turns", OURS, 1000, 0)
    Results(path, ABOUT).add(cell, {"second_first_seconds": 0.5, "cold_first_seconds": 2.0})
    again = Results(path, ABOUT)
    assert [str(one) in again.cells for one in SCOPE.cells()][:2] == [True, False]
    for other in ({"model": "n"}, {"flags": ["--l1"]}, {"model_sha256": "t"}):
        with pytest.raises(SystemExit, match=next(iter(other))):
            Results(path, ABOUT | other)


def test_the_table_compares_blocks_that_both_have(tmp_path: Path) -> None:
    """Stock over ours is 3.0 / 0.5 and 4.0 / 2.0 seconds; the third block is ours alone."""
    results = Results(tmp_path / "r.json", ABOUT)
    for arm, block, seconds in ((OURS, 0, 0.5), (OURS, 1, 2.0), (OURS, 2, 9.0), (STOCK, 0, 3.0), (STOCK, 1, 4.0)):
        results.add(Cell("turns", arm, 1000, block), {"second_first_seconds": seconds})
    results.add(Cell("decode", OURS, 16, 2), {"rates": {"off": [10.0, 20.0], "memory": [11.0, 22.0]}})
    text = report(results)
    # The median of two log-ratios is that of their geometric mean: sqrt(6 * 2).
    assert "| second turn, 1000 tokens | 2.000 s (3) | 3.500 s (2) | 3.5x in 2 |" in text
    assert "cache memory against off: +10.0 % [+10.0 %, +10.0 %] in 2 blocks" in text


def test_the_plan_adds_up() -> None:
    """A history of 1000 tokens at 100 a second, and 56 more, after ten seconds of starting."""
    assert minutes(Cell("turns", OURS, 1000, 0), {OURS: 100.0}) == pytest.approx((10 + 10.56) / 60)


def test_an_agent_of_the_same_seed_asks_the_same_and_always_has_something_to_answer() -> None:
    one, other = Agent(7, 200), Agent(7, 200)
    acts: set[str] = set()
    for _ in range(300):
        acts.add(one.act())
        other.act()
        assert one.messages[-1]["role"] == "user"
        assert one.ask() == other.ask()
        answer = {"choices": [{"message": {"content": "the cat"}}]}
        one.hear(answer)
        other.hear(answer)
        size = sum(len(message["content"].split()) for message in one.messages)
        assert size <= 200 + 100
    assert acts == {"append", "branch", "edit", "again", "compact"}
