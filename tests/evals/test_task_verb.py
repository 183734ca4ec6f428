"""The verb against a server of its own: the starter's scores are lm-evaluation-harness', and it is above chance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.bench.store import load
from gnomon.cli.main import main
from gnomon.evals.task_run import last
from tiny_models import save

EVERYDAY = Path(__file__).parents[2] / "benchmarks" / "lm_eval" / "everyday.jsonl"


def run(words: list[str], capsys: pytest.CaptureFixture[str], cache: Path, status: int = 0) -> dict[str, object]:
    assert main(["eval", *words, "--json"], {"GNOMON_CACHE": str(cache)}) == status
    return json.loads(capsys.readouterr().out)


def test_a_model_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "few.jsonl"
    task.write_text("".join(EVERYDAY.read_text().splitlines(keepends=True)[:2]))
    model = save("llama", tmp_path / "m")
    told = run([str(model), "--task", str(task), "--kernels", "stock"], capsys, tmp_path)
    assert (told["answered"], told["failed"]) == (2, 0)
    summary = load(Path(str(told["file"]))).samples[-1]
    assert summary.metrics.keys() == {"accuracy", "weight_bytes"}
    same = run(["--compare", str(told["file"]), str(told["file"])], capsys, tmp_path)
    assert (same["only_first"], same["only_second"], same["p"]) == (0, 0, 1.0)


def test_what_can_t_be_asked_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, status, message in (
        (["--task", "nowhere"], 1, "the tasks that come with Gnomon are everyday-answers, everyday-choices"),
        (["--task", "everyday-choices", "--shots", "9"], 1, "--shots is 9, everyday-choices has 3 worked examples"),
        (["--task", "everyday-choices", "--server", "http://127.0.0.1:9"], 1, "127.0.0.1"),
        (["--perplexity", "x", "--server", "http://127.0.0.1:9"], 2, "--server is for --task"),
    ):
        assert main(["eval", *words], {"GNOMON_CACHE": str(tmp_path)}) == status
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_starter_s_scores_are_lm_evaluation_harness_s(
    starter_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run([str(starter_path), "--task", str(EVERYDAY)], capsys, tmp_path)
    # lm-eval 0.4.13 on the same items: acc 0.833, acc_norm 0.750 (docs/experiments.md).
    assert (told["right"], told["answered"], told["per_length"]) == (10, 12, 0.75)
    assert all(len(list(s.details["nats"])) == 4 for s in last(load(Path(str(told["file"]))).samples).values())  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "least"), [("everyday-choices", 0.4), ("everyday-answers", 0.25)])
def test_the_starter_is_above_chance(
    starter_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, least: float
) -> None:
    told = run([str(starter_path), "--task", task], capsys, tmp_path)
    assert told["failed"] == 0
    assert isinstance(told["lower"], float)
    assert told["lower"] > least
