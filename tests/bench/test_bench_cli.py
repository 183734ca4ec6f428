"""`gnomon bench` as users call it, through the command line's own entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon.bench import session
from gnomon.bench.store import Store
from gnomon.cli.bench import parse_settings
from gnomon.cli.main import main

from . import records, tiny_directory


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine does meanwhile is another test's matter."""
    monkeypatch.setattr(session, "preflight", records.preflight)


def run(tmp_path: Path, *words: str) -> int:
    return main(["bench", *words], {"GNOMON_CACHE": str(tmp_path / "cache")})


def only_result(folder: Path) -> dict:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def command(seconds: float) -> str:
    """A command that reports a time of its own making, a little different for every seed."""
    code = f"import json; print(json.dumps(dict(metrics=dict(seconds={seconds} * (1 + {{seed}} * 1e-4)))))"
    return f'cmd:{sys.executable} -c "{code}"'


def test_ab_of_commands_finds_what_was_planted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(tmp_path, "ab", command(2.0), command(2.1), "--blocks", "5", "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert "measured loss" in text
    saved = only_result(out)
    assert saved["comparisons"][0]["outcome"] == "measured loss"
    assert saved["comparisons"][0]["ratio"] == pytest.approx(2.0 / 2.1, rel=1e-6)
    assert [s["block"] for s in saved["samples"]] == [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert saved["provenance"]["packages"]["mlx"]
    assert saved["complete"]


def test_ab_of_equal_commands_finds_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(tmp_path, "ab", command(2.0), command(2.0), "--blocks", "5", "--out", str(out)) == 0
    assert only_result(out)["comparisons"][0]["outcome"] == "inconclusive"


def _git(root: Path, *arguments: str) -> None:
    name = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(root), *name, *arguments], check=True, capture_output=True)


def test_ab_of_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command in two commits of a repository, whose script says what it cost."""
    repository = tmp_path / "repository"
    repository.mkdir()
    _git(repository, "init", "-q")
    for seconds in ("3.0", "1.5"):
        (repository / "cost.py").write_text(f"import json; print(json.dumps(dict(metrics=dict(seconds={seconds}))))")
        _git(repository, "add", "cost.py")
        _git(repository, "commit", "-qm", seconds)
    monkeypatch.chdir(repository)
    out = tmp_path / "out"
    words = ("ab", "rev:HEAD~1", "rev:HEAD", "--run", f"{sys.executable} cost.py", "--blocks", "5", "--out", str(out))
    assert run(tmp_path, *words) == 0
    saved = only_result(out)
    assert saved["comparisons"][0]["outcome"] == "repeatable win"
    assert saved["comparisons"][0]["ratio"] == pytest.approx(2.0)
    assert len({arm["revision"] for arm in saved["arms"]}) == 2
    assert not (repository / ".git" / "worktrees").exists() or not list((repository / ".git" / "worktrees").iterdir())


def test_native_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tiny_directory.write(tmp_path / "tiny"), tmp_path / "out"
    words = ("native", str(path), "--cells", "decode:6@20", "--blocks", "1", "--ours", "batch=2", "--out", str(out))
    assert run(tmp_path, *words) == 0
    saved = only_result(out)
    assert [s["status"] for s in saved["samples"]] == ["ok"] * 4
    assert saved["samples"][0]["work"] == saved["samples"][1]["work"]
    assert saved["provenance"]["model_sha256"] == saved["samples"][0]["work"]["model"]
    ours = next(arm for arm in saved["arms"] if arm["name"] == "gnomon")
    assert (ours["settings"], ours["effective"]["batch"]) == ({"batch": 2}, 2)
    assert run(tmp_path, "list", "--out", str(out)) == 0
    assert "native, tiny" in capsys.readouterr().out


def test_a_busy_machine_is_refused_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = records.preflight(verdict="busy", problems=("a sensor reads 99 °C (limit 90 °C)",))
    monkeypatch.setattr(session, "preflight", lambda: busy)
    assert run(tmp_path, "ab", "cmd:true", "cmd:true", "--busy", "refuse", "--out", str(tmp_path / "out")) == 75
    assert "blocked: the machine is busy: a sensor reads 99 °C" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ab", "speed", "cmd:true"), "arm 'speed' is unknown"),
        (("ab", "set:", "set:"), "needs a model: --on MODEL"),
        (("ab", "cmd:", "cmd:true"), "the command is empty"),
        (("ab", "cmd:true", "mlx-lm", "--on", "MODEL"), "both arms must be commands, or none"),
        (("ab", "rev:no-such-thing", "cmd:true"), "no-such-thing"),
        (("native", "MODEL", "--cells", "decode:6"), "none of prompt:TOKENS"),
        (("native", "MODEL", "--cells", "prompt:0"), "too small"),
        (("native", "MODEL", "--ours", "batch"), "'batch' is not KEY=VALUE"),
        (("native", "MODEL", "--blocks", "0"), "at least 1 is needed"),
        (("native", "/nowhere"), "not a model directory"),
        (("model", "/nowhere"), "config.json"),
    ],
)
def test_wrong_use_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    path = str(tiny_directory.write(tmp_path / "tiny"))
    assert run(tmp_path, *(path if word == "MODEL" else word for word in words)) == 1
    assert message in capsys.readouterr().err


def test_settings_are_json_or_text() -> None:
    assert parse_settings("a=1, b=true,c=x,d=1.5") == {"a": 1, "b": True, "c": "x", "d": 1.5}
    assert parse_settings("") == {}


def test_list_reports_what_it_cant_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(tmp_path / "out").save(records.run(records.pairs([(1.0, 2.0)])))
    (tmp_path / "out" / "x.json").write_text("{}")
    assert run(tmp_path, "list", "--out", str(tmp_path / "out")) == 0
    shown = capsys.readouterr()
    assert "cut short: no end was written" in shown.out
    assert "unreadable: x.json" in shown.err
