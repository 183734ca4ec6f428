"""The cells of benchmarks: each measured once, by whoever takes it first."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cells import Cell, add_arguments, results, run


def arguments(out: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser, str(out))
    return parser.parse_args(list(words))


class Counted:
    def __init__(self) -> None:
        self.done: list[str] = []

    def cell(self, name: str, found: dict[str, Any] | Exception | None = None) -> Cell:
        def measure() -> dict[str, Any]:
            self.done.append(name)
            if isinstance(found, Exception):
                raise found
            return found or {"value": name}

        return Cell(name, measure)


def test_each_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Counted()
    cells = [
        work.cell("quality turbo:k8v3 2048"),
        work.cell("speed 8 4096", ValueError("no room")),
        work.cell("speed 4 4096"),
    ]
    run(cells[:1], arguments(tmp_path / "deep"))
    run(cells, arguments(tmp_path / "deep"))
    run(cells, arguments(tmp_path / "deep"))
    assert work.done == ["quality turbo:k8v3 2048", "speed 8 4096", "speed 4 4096"]
    found = {one["cell"]: one for one in results(tmp_path / "deep")}
    assert found["quality turbo:k8v3 2048"]["value"] == "quality turbo:k8v3 2048"
    assert found["speed 8 4096"]["error"] == "no room"
    assert all(one["cell_seconds"] >= 0 for one in found.values())
    assert "speed 4 4096: 0.0 s" in capsys.readouterr().out


def test_what_another_process_measures_is_left_to_it(tmp_path: Path) -> None:
    work = Counted()
    cells = [work.cell("a"), work.cell("b")]
    with FileLock(tmp_path / "a.lock"):
        run(cells, arguments(tmp_path))
    assert work.done == ["b"]
    # It ended without a result: whoever comes next takes it.
    run(cells, arguments(tmp_path))
    assert work.done == ["b", "a"]


def test_which_and_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Counted()
    cells = [work.cell("quality 8"), work.cell("speed 8"), work.cell("speed 4")]
    run(cells, arguments(tmp_path, "--list", "--cells", "speed*"))
    assert capsys.readouterr().out.split("\n")[:2] == ["speed 8 ", "speed 4 "]
    run(cells, arguments(tmp_path, "--cells", "speed*", "--minutes", "-1"))
    assert work.done == []
    run(cells, arguments(tmp_path, "--cells", "*4", "quality*"))
    assert work.done == ["quality 8", "speed 4"]
    with pytest.raises(SystemExit, match="no cell matches x"):
        run(cells, arguments(tmp_path, "--cells", "x"))


def test_an_unexpected_failure_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run([Counted().cell("a", KeyError("bug"))], arguments(tmp_path))
    assert results(tmp_path) == []
