"""The file of measured step costs: what is measured again, and what is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine_fixtures import tiny_loaded
from gnomon.config import EngineConfig
from gnomon.engine import costs
from gnomon.engine.counters import Counters
from gnomon.engine.heart import Heart
from gnomon.engine.runner import Runner
from gnomon.propose import Chance, best_depth, best_depths


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that were measured, in order; a window of M positions of B rows takes B + M seconds."""
    sizes: list[int] = []

    def measure(runner: Runner, rows: int, widths: tuple[int, ...]) -> Mapping[int, float]:
        sizes.append(rows)
        return {1: 0.5 * rows, **{width: float(rows + width) for width in widths}}

    monkeypatch.setattr(costs, "_measured", measure)
    return sizes


def runner(model_type: str = "llama") -> Runner:
    return Runner(tiny_loaded(model_type), EngineConfig(prompt_cache=0), Counters(), Heart(1000))


def test_what_was_measured_is_kept(tmp_path: Path, measured: list[int]) -> None:
    cache = tmp_path / "deep"
    first = costs.curve_of(runner(), name="stock", most_rows=2, cache=cache)
    assert measured == [1, 2]
    assert (first.step(2), first.window(2, 9)) == (1.0, 11.0)
    again = costs.curve_of(runner(), name="stock", most_rows=8, cache=cache)
    assert measured == [1, 2, 4, 8], "only the sizes that lack"
    assert again.window(1, 17) == 18.0
    costs.curve_of(runner(), name="native avx2 x2", most_rows=1, cache=cache)
    costs.curve_of(runner("qwen3"), name="stock", most_rows=1, cache=cache)
    assert measured == [1, 2, 4, 8, 1, 1], "other kernels, another model"
    assert [path.name for path in cache.iterdir()] == [costs.FILE]


def test_what_proved_wrong_is_corrected_in_the_file_and_nothing_else(tmp_path: Path, measured: list[int]) -> None:
    loaded = runner().loaded
    costs.correct(loaded, 1, {1: 0.1}, name="stock", cache=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing was kept"
    costs.curve_of(runner(), name="stock", most_rows=2, cache=tmp_path)
    costs.correct(loaded, 2, {1: 0.25, 9: 30.0}, name="stock", cache=tmp_path)
    curve = costs.curve_of(runner(), name="stock", most_rows=2, cache=tmp_path)
    assert measured == [1, 2]
    assert (curve.step(1), curve.window(1, 9)) == (0.5, 10.0)
    assert (curve.step(2), curve.window(2, 3), curve.window(2, 9)) == (0.25, 5.0, 30.0)


def test_a_start_that_is_broken_off_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Runner, rows: int, widths: tuple[int, ...]) -> Mapping[int, float]:
        if rows == 4:
            raise KeyboardInterrupt
        return {1: 1.0, **dict.fromkeys(widths, 2.0)}

    monkeypatch.setattr(costs, "_measured", broken)
    with pytest.raises(KeyboardInterrupt):
        costs.curve_of(runner(), name="stock", most_rows=8, cache=tmp_path)
    (kept,) = json.loads((tmp_path / costs.FILE).read_text())["seconds"].values()
    assert sorted(kept) == ["1", "2"]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0, "seconds": {}}'])
def test_a_file_that_cannot_be_used_is_measured_over(tmp_path: Path, measured: list[int], text: str) -> None:
    (tmp_path / costs.FILE).write_text(text)
    costs.curve_of(runner(), name="stock", most_rows=1, cache=tmp_path)
    assert measured == [1]
    assert json.loads((tmp_path / costs.FILE).read_text())["format"] == costs.FORMAT


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "mamba"])
def test_a_measurement_leaves_no_gap(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    monkeypatch.setattr(costs, "REPEATS", 1)
    curve = costs.curve_of(runner(model_type), name="stock", most_rows=2, cache=None)
    for rows in (1, 2):
        widths = curve.windows[rows]
        # With the widest that native CPU kernels take at once: between the others the next one's price would not be seen.
        assert list(widths) == sorted({*costs.WIDTHS, {1: 8, 2: 4}[rows]})
        assert curve.plain[rows] > 0
        assert list(widths.values()) == sorted(widths.values()), "no window is said to cost less than a narrower one"


def test_costs_that_are_assumed_let_a_batch_wait_for_none() -> None:
    sure = Chance(1.0, 1.0, 16)
    none = Chance(0.0, 0.0, 0)
    curve = costs.assumed_curve(8, name="stock")
    # Alone: (1 + d) tokens for 3 + 1 + d positions, against 1 for 4.
    assert best_depth([sure], curve) == 16
    assert best_depth([Chance(1.0, 1.0, 1)], curve) == 1
    # One of eight: 8 + d tokens for 3 + 8 + 8 d positions, against 8 for 11. All eight: 8 + 8 d for as many.
    assert best_depth([sure, *[none] * 7], curve) == 0
    assert best_depth([sure] * 8, curve) == 16
    # Without padding one of eight makes 8 + d for 3 + 8 + d positions. At 0.7 it is 8.7 for 12, less than 8 for 11.
    assert best_depths([sure, *[none] * 7], curve) == [16, *[0] * 7]
    assert best_depths([Chance(0.7, 0.9, 16), *[none] * 7], curve) == [0] * 8
    # Native CPU kernels take eight positions at once: alone 8 tokens for 12.5 against 1 for 5.5, and no more in proportion for more.
    # Eight rows are a whole step, and every further position costs what a row does: nothing is won even by guesses that are sure.
    cpu = costs.assumed_curve(8, name="native avx2 x2")
    assert (cpu.step(1), cpu.step(8), cpu.window(1, 9), cpu.window(8, 2)) == (5.5, 12.5, 14.0625, 25.0)
    assert best_depth([sure], cpu) == 7
    assert best_depth([sure, *[none] * 3], cpu) == 0
    assert best_depths([sure] * 8, cpu) == best_depths([sure, *[none] * 7], cpu) == [0] * 8
    # Where a step costs 30 positions, 8 + d for 38 + 8 d is still less than 8 for 38 from d = 1 on for one, and more for two.
    card = costs.assumed_curve(8, name="native cuda x0")
    assert best_depth([sure, *[none] * 7], card) == 0
    assert best_depth([sure, sure, *[none] * 6], card) == 16
    assert curve.assumed
    assert card.step(4) == pytest.approx(34.0)
