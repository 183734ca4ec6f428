"""Two processes on one directory, killed at random points of a mixed run: no wrong bit comes back, and the directory stays whole."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gnomon.state.ssd.format import read

HERE = Path(__file__).parent
CAPS = {"llama": 3 << 20, "qwen3_5": 24 << 20, "gemma3": 24 << 20}
"""Room for what two processes hold in memory: with less, the end of a run truthfully says that not all of it became durable."""


def start(where: Path, model_type: str, seed: int, turns: int) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [
            sys.executable,
            str(HERE / "ssd_process.py"),
            str(where / "disk"),
            str(where / "captures"),
            model_type,
            str(seed),
            str(turns),
            str(CAPS[model_type]),
        ],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, int, bool]:
    """What a process that ran to its end says: restores, corrupt files, and whether all became durable."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    _, restores, corrupt, durable = out.splitlines()[-1].split()
    return int(restores), int(corrupt), durable == "True"


def kill_at_random(where: Path, model_type: str, rounds: int, turns: int) -> None:
    chance = random.Random(rounds)
    for number in range(rounds):
        pair = [start(where, model_type, 10 * number + i, 10_000) for i in range(2)]
        for process in pair:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in pair:
            time.sleep(chance.uniform(0.1, 1.5))
            assert process.poll() is None, "it found a wrong bit, or failed"
            process.send_signal(signal.SIGKILL)
        for process in pair:
            process.communicate(timeout=300)
    pair = [start(where, model_type, 1000 + i, turns) for i in range(2)]
    told = [ended(process) for process in pair]
    assert sum(restores for restores, _, _ in told) > 0
    # A kill leaves no half file under a name, so nothing was damaged.
    assert [corrupt for _, corrupt, _ in told] == [0, 0]
    assert all(durable for _, _, durable in told)
    files = list(where.glob("disk/*/*/*.safetensors"))
    assert 0 < sum(file.stat().st_size for file in files) <= CAPS[model_type]
    for file in files:
        read(file, verify=True)
    assert list(where.glob("disk/*/*/.*.tmp")) == []
    (index,) = where.glob("disk/*/index.sqlite")
    with sqlite3.connect(index) as db:
        assert {name for (name,) in db.execute("SELECT name FROM entries")} == {file.stem for file in files}


def test_two_processes_are_killed_and_started_again(tmp_path: Path) -> None:
    kill_at_random(tmp_path, "llama", rounds=1, turns=8)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3_5", "gemma3"])
def test_many_kills(model_type: str, tmp_path: Path) -> None:
    kill_at_random(tmp_path, model_type, rounds=12, turns=40)
