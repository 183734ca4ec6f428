"""Agents that talk and walk away leave nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tiny_models

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from children import running
from gnomon.bench.http import gnomon_command
from weeks_soak import Report, leaks, soak


def run(tmp_path: Path, seconds: float, agents: int, *flags: str) -> Report:
    model = tiny_models.save("llama", tmp_path / "model")
    command = gnomon_command(model, "--l1", "--batch", str(agents), "--prompt-cache", "0.003", *flags)
    with running(command, {"GNOMON_CACHE": str(tmp_path / "cache")}, timeout=400) as child:
        report = soak(child, seconds, agents, 0.4, seed=1, disk=None)
    assert report.failures == []
    assert report.answers > agents
    assert report.left_midway
    assert leaks(report) == []
    return report


@pytest.mark.xdist_group("soak")
def test_ninety_seconds_leave_nothing_behind(tmp_path: Path) -> None:
    run(tmp_path, 90.0, 8, "--isolate")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--isolate",)], ids=["one process", "isolated"])
def test_ninety_seconds_are_flat(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """What is held doesn't grow, on a machine that has nothing else to do."""
    report = run(tmp_path, 90.0, 8, *flags)
    assert set(report.left_midway) == {"at once", "after the first bytes", "torn"}
    assert report.growth("resident") < 1.15
    assert report.growth("active") < 1.25
    assert report.growth("descriptors") < 1.25
    assert report.growth("threads") < 1.25
