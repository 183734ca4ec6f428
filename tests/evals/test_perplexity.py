"""Perplexity through the engine, against mlx-lm's own `eval_ppl` on the same windows."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.perplexity import eval_ppl

from engine_fixtures import tiny_engine, tiny_model, tiny_tokenizer
from gnomon.bench.page import render
from gnomon.bench.store import Store, load
from gnomon.cli.main import main
from gnomon.evals.perplexity import measure, windows
from tiny_models import save

TEXT = "there is nothing in here that is not there already, said the captain to his sailors. " * 3


def test_whole_windows_only() -> None:
    assert windows(range(7), 3) == [(0, 1, 2), (3, 4, 5)]
    assert windows(range(6), 3) == [(0, 1, 2), (3, 4, 5)]
    for length, message in ((8, "the text has 7 tokens, fewer than one window of 8"), (1, "a window has 1 tokens")):
        with pytest.raises(ValueError, match=message):
            windows(range(7), length)


@pytest.mark.parametrize("model_type", ["llama", "gemma3"])
def test_it_is_mlx_lm_s(model_type: str) -> None:
    parts = windows(tiny_tokenizer().encode(TEXT), 20)
    assert len(parts) > 2
    told: list[int] = []
    with tiny_engine(model_type) as engine:
        found = measure(engine, parts, told.append)
    value, error = eval_ppl(tiny_model(model_type), mx.array(parts))
    assert (found.value, found.standard_error) == (pytest.approx(value, rel=1e-5), pytest.approx(error, rel=1e-4))
    assert found.tokens == 19 * len(parts)
    assert told == list(range(1, len(parts) + 1))


def test_the_verb_writes_what_the_report_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text, out = save("llama", tmp_path / "m"), tmp_path / "t.txt", tmp_path / "results"
    text.write_text(TEXT)
    arguments = ["eval", str(model), "--perplexity", str(text), "--window", "20", "--out", str(out), "--json"]
    assert main(arguments, {"GNOMON_CACHE": str(tmp_path / "cache")}) == 0
    told = json.loads(capsys.readouterr().out)
    run = load(Path(told["file"]))
    (sample,) = run.samples
    assert sample.metrics["perplexity"] == told["perplexity"]
    assert sample.details["tokens"] == told["tokens"]
    page = render([(Path(told["file"]), run)], [], out)
    assert "perplexity against size of weights" in page
    assert f"{told['perplexity']:.4g}" in page
    assert Store(out).rebuild().runs == 1


def test_a_text_that_is_too_short_or_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = save("llama", tmp_path / "m"), tmp_path / "t.txt"
    variables = {"GNOMON_CACHE": str(tmp_path / "cache")}
    assert main(["eval", str(model), "--perplexity", str(text)], variables) == 1
    assert f"{text} can't be read" in capsys.readouterr().err
    text.write_text("short")
    assert main(["eval", str(model), "--perplexity", str(text)], variables) == 1
    assert "fewer than one window of 512" in capsys.readouterr().err
