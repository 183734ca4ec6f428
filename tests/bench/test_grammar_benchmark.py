"""The benchmark of grammars: it runs, an interrupted run goes on, and its table tells medians of pairs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from engine_fixtures import EOS_ID, tiny_tokenizer
from gnomon.chat.tool_choice import tool_call
from gnomon.chat.tools import GENERIC
from gnomon.grammar import Compiler, Vocabulary
from grammar import endless, main, table, tools


def pair(number: int, free: float, grammar: float) -> dict[str, Any]:
    arms = {
        arm: {"seconds": seconds, "cpu": 2 * seconds, "tokens": 10, "mask_seconds": 0.001}
        for arm, seconds in (("free", free), ("grammar", grammar))
    }
    return {"kind": "decode", "batch": 8, "pair": number, **arms}


def test_the_table() -> None:
    compiles = [
        {"kind": "compile", "batch": 50, "pair": i, "grammar": 0.01, "compile": 0.02 * (i + 1)} for i in range(3)
    ]
    text = table([*compiles, pair(0, 1.0, 1.1), pair(1, 1.0, 1.5), pair(2, 2.0, 2.0)])
    assert "| 8 | 3 | 1.100 (1.000 to 1.500) | 1.100 (1.000 to 1.500) | 100 µs |" in text
    assert "50 tools: 50 ms (30 to 70)" in text


def test_its_grammars_compile_and_do_not_end() -> None:
    compiler = Compiler(Vocabulary(tiny_tokenizer(), {EOS_ID}))
    matcher = compiler.compile(endless(3)).start()
    for token in tiny_tokenizer().encode('[{"name_3":"x","count_3":1,"kind_3":null}'):
        assert matcher.allows(token)
        matcher.advance(token)
    assert not matcher.accepting
    assert not compiler.compile(tool_call(GENERIC, tools(50, "a"))).gaps


@pytest.mark.slow
@pytest.mark.network
def test_it_runs_and_goes_on(starter_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grammar.jsonl"
    options = [str(starter_path), "--out", str(out), "--batch", "1", "2", "--tokens", "8", "--tools", "3"]
    main([*options, "--pairs", "1"])
    first = out.read_text()
    main([*options, "--pairs", "2"])
    assert out.read_text().startswith(first)
    cells = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({(cell["kind"], cell["batch"], cell["pair"]) for cell in cells}) == len(cells) == 6
    assert all(cell["grammar"]["tokens"] == cell["free"]["tokens"] for cell in cells if cell["kind"] == "decode")
    assert "3 tools: " in capsys.readouterr().out
