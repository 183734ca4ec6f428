"""The cross-check's verdicts on made-up rounds, and its server that keeps a pace."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import tiny_models

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "load_check"))

import paced
from check import METRICS, told

RATE, TOKENS, FIRST = METRICS


def rounds(*ratios: tuple[float, float, float]) -> list[dict[str, dict[str, float]]]:
    return [
        {"ours": {RATE: 2.0, TOKENS: 100.0, FIRST: 0.1}, "aiperf": {RATE: 2.0 * a, TOKENS: 100.0 * b, FIRST: 0.1 * c}}
        for a, b, c in ratios
    ]


def test_verdicts() -> None:
    # Equal but for noise about 1; 2 % off without noise, which is close enough; 10 % off without noise.
    table, agree = told(rounds((0.99, 1.02, 1.10), (1.01, 1.02, 1.10), (1.0, 1.02, 1.10)))
    assert not agree
    verdicts = [line.split("|")[-2].strip() for line in table.splitlines()[2:]]
    assert verdicts == ["agree", "agree", "**differ**"]
    assert "| 1.100 [1.100, 1.100] |" in table
    assert told(rounds((0.99, 1.02, 1.0), (1.01, 1.02, 1.01)))[1] is True


def test_noise_is_no_agreement() -> None:
    table, agree = told(rounds((0.5, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.0, 1.0)))
    assert not agree
    assert table.splitlines()[2].endswith("| too noisy to tell |")


def test_forwards_keep_the_pace_and_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: the first begins at once, the second waits for what is left, the third came late and waits for nothing."""
    now, slept = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(paced, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    path = tiny_models.save("llama", tmp_path / "model")
    ours, theirs = paced.paced(path, 2.0).model, load_model(path)[0]
    caches = [make_prompt_cache(model) for model in (ours, theirs)]
    for took in (0.5, 5.0, 0.0):
        answers = [model(mx.array([[3, 4]]), cache=cache) for model, cache in zip((ours, theirs), caches, strict=True)]
        assert mx.array_equal(*answers)
        now[0] += took
    assert slept == [0.0, 1.5, 0.0]
