"""The cross-check's verdicts on made-up rounds."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "load_check"))

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
