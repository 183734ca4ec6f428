"""Agents under a small budget: what may be reused is, and memory stays where it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tiny_models

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from children import running
from gnomon.bench.http import gnomon_command
from prefix_soak import Report, soak


def run(tmp_path: Path, model_type: str, turns: int, budget: str) -> Report:
    model = tiny_models.save(model_type, tmp_path / "model")
    command = gnomon_command(model, "--l1", "--batch", "4", "--prompt-cache", budget)
    with running(command, {"GNOMON_CACHE": str(tmp_path / "cache")}, timeout=400) as child:
        report = soak(child, turns, 4, seed=1, most_words=250, disk=None)
    assert report.failures == []
    assert report.turns == turns
    assert all(sample.cache_bytes <= sample.max_cache_bytes for sample in report.samples)
    return report


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    report = run(tmp_path, "llama", 16, "0.002")
    assert report.reused_share > 0.4
    assert report.acts["append"] > 0
    # The line that changes with every request costs nothing.
    assert report.misses["no entry"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3_5", "gemma3"])
def test_a_long_soak(model_type: str, tmp_path: Path) -> None:
    """Nothing grows once the budget is used up: neither what MLX holds nor the process."""
    report = run(tmp_path, model_type, 200, "0.003")
    assert {"append", "branch", "edit", "again", "compact"} <= set(report.acts)
    assert report.misses["evicted"] > 0
    assert report.reused_share > 0.3
    assert report.growth("active_bytes") < 1.25
    assert report.growth("resident_bytes") < 1.15
