"""`gnomon bench serve` as users call it: arms by name and command, legs, resuming, and what the table says; with scripted servers."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from gnomon.bench import suite
from gnomon.bench.provenance import provenance, sha256_file
from gnomon.bench.runner import Plan, Runner
from gnomon.bench.schema import Run, Sample
from gnomon.bench.store import Store
from gnomon.bench.workload import Cell
from gnomon.cli.main import main

from . import records, tiny_directory

SERVER = Path(__file__).with_name("scripted_server.py")


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine does meanwhile is another test's matter."""
    monkeypatch.setattr(suite, "preflight", records.preflight)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory.write(tmp_path_factory.mktemp("tiny"))


def arm(name: str, **plan: object) -> str:
    return f"{name}={sys.executable} {SERVER} {{port}} {shlex.quote(json.dumps(plan))} {{model}}"


def bench(tmp_path: Path, *words: str) -> tuple[int, list[Run]]:
    status = main(["bench", "serve", *words, "--out", str(tmp_path / "out")], {"GNOMON_CACHE": str(tmp_path / "cache")})
    return status, [run for _, run in Store(tmp_path / "out").runs()[0]]


def test_legs_are_runs_and_a_resumed_suite_measures_only_what_lacks(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model), "--arm", arm("fast"), "--arm", arm("slow", gap=0.02), "--blocks", "1", "--warmups", "0"]
    status, runs = bench(tmp_path, *words, "--legs", "decode=stream:1x6,parity")
    assert status == 0
    assert [run.name.split(", ")[1] for run in runs] == ["decode", "parity"]
    assert all(run.complete and run.kind == "serve" for run in runs)
    (primary,) = (c for c in runs[0].comparisons if c.primary)
    assert (primary.candidate, primary.baseline, primary.metric) == ("fast", "slow", "decode_tokens_per_second")
    assert runs[1].comparisons == ()
    assert "decode `stream:1x6`" in capsys.readouterr().out
    before = [run.id for run in runs]
    status, runs = bench(tmp_path, *words, "--legs", "decode=stream:1x6,cancellation=cancel:200", "--resume")
    assert status == 0
    assert [run.id for run in runs][:2] == before
    assert [run.name.split(", ")[1] for run in runs] == ["decode", "parity", "cancellation"]


def test_another_model_takes_no_ratio_and_a_failed_candidate_an_exit_status(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "other.gguf"
    weights.write_bytes(b"other weights")
    status, (run,) = bench(
        tmp_path, str(model), "--arm", arm("a", fault="no usage"), "--arm", arm("b"), "--weights", f"b={weights}",
        "--blocks", "1", "--warmups", "0", "--legs", "decode=stream:1x6",
    )  # fmt: skip
    assert status == 1
    works = {s.arm: s.work for s in run.samples}
    assert works["a"] is None
    assert works["b"] is not None
    assert works["b"].model == sha256_file(weights)
    assert "a: 1 of 1 did not count (failed: the stream lacks usage)" in capsys.readouterr().out


def test_weights_that_the_directory_was_made_from_are_the_same_model(tmp_path: Path, model: Path) -> None:
    weights = tmp_path / "w.gguf"
    weights.write_bytes(b"weights")
    made = tmp_path / "made"
    made.mkdir()
    (made / "gnomon.json").write_text(json.dumps({"sha256": sha256_file(weights)}))
    one = suite.side("x=serve {port}", {"x": weights})
    assert suite.model_of(one, made, "m", None) == "m"
    assert suite.model_of(one, model, "m", None) == sha256_file(weights)
    assert suite.model_of(suite.side("x=serve {port}", {}), made, "m", None) is None
    assert suite.model_of(suite.side("gnomon", {}), made, "m", None) == "m"


def test_command_lines_of_arms(tmp_path: Path) -> None:
    ours = suite.command_line(suite.side("serial", {}), tmp_path, 81, tmp_path)
    assert ours == [
        sys.executable,
        "-m",
        "gnomon.cli.main",
        "serve",
        str(tmp_path.resolve()),
        "--port",
        "81",
        "--batch",
        "1",
    ]
    other = suite.side("x=llama-server -m 'a b.gguf' --port {port} --slot-save-path {state}", {})
    theirs = suite.command_line(other, tmp_path, 82, tmp_path)
    assert theirs == ["llama-server", "-m", "a b.gguf", "--port", "82", "--slot-save-path", str(tmp_path)]


@pytest.mark.parametrize(
    ("arms", "weights", "message"),
    [
        (["ollama"], [], "none of gnomon"),
        (["x=serve"], [], "{port}"),
        (["gnomon", "gnomon=serve {port}"], [], "distinct names"),
        (["gnomon"], ["gnomon=/no/such/file"], "a file that exists"),
        (["gnomon"], [f"other={SERVER}"], "no such arm"),
    ],
)
def test_wrong_arms_are_refused(arms: list[str], weights: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        suite.sides(arms, weights)


def test_every_leg_has_a_cell_of_every_size() -> None:
    for name, cells in suite.LEGS.items():
        assert [str(Cell.parse(text)) for text in cells.values()] == list(cells.values()), name
    assert [name for name, _ in suite.legs("all", "small")] == list(suite.LEGS)
    with pytest.raises(ValueError, match="leg 'tides' is none of"):
        suite.legs("tides", "small")


def test_a_live_server_of_a_tiny_model(model: Path) -> None:
    """One real server, started once, through all legs that don't start it anew. Its random text may end early where that is told."""
    again = ("readiness", "restart", "memory")
    cells = [cell for name, cell in suite.legs("all", "small") if name not in again]
    origin = provenance(model)
    samples: list[Sample] = []
    with suite.contenders(suite.sides(["gnomon"], []), model, origin, None) as arms:
        Runner(arms, samples.append, Plan(1, warmups=0)).run(cells)
        assert arms[0].served is None
    assert [(s.cell, s.status, s.reason) for s in samples] == [(str(cell), "ok", None) for cell in cells]
    assert {s.work.model for s in samples if s.work is not None} == {origin.model_sha256}
    by_cell = {s.cell: s.metrics for s in samples}
    assert set(by_cell["ttft:24"]) >= {"cold_first_output_seconds", "cached_first_output_seconds"}
    assert by_cell["turns:2x2@12"]["reused_share"] > 0


@pytest.mark.slow
def test_every_leg_on_the_starter(tmp_path: Path, starter_path: Path) -> None:
    """The bounded smoke: all legs on a real server, once."""
    status, runs = bench(
        tmp_path, str(starter_path), "--arm", "gnomon", "--size", "small", "--blocks", "1", "--warmups", "0"
    )
    assert status == 0
    assert [run.name.split(", ")[1] for run in runs] == list(suite.LEGS)
    assert [(s.cell, s.reason) for run in runs for s in run.samples if s.status != "ok"] == []


@pytest.mark.slow
def test_mlx_lms_server_beside_it(tmp_path: Path, starter_path: Path) -> None:
    """Both do the same work: a ratio isn't refused."""
    legs = "decode=stream:1x4,first-token=ttft:8,conversations=turns:1x2@4"
    status, runs = bench(
        tmp_path,
        str(starter_path),
        "--arm",
        "gnomon",
        "--arm",
        "mlx_lm.server",
        "--legs",
        legs,
        "--blocks",
        "1",
        "--warmups",
        "0",
    )
    assert status == 0
    assert [(s.cell, s.arm, s.reason) for run in runs for s in run.samples if s.status != "ok"] == []
    assert [c.reason for run in runs for c in run.comparisons if c.outcome == "inapplicable"] == []
