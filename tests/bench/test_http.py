"""Servers as arms, against a scripted server: counts from usage, broken streams refused, memory and start measured, the table's script."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gnomon.bench.http import MemoryWatch, ServerContender, Streamed, resident_bytes
from gnomon.bench.runner import Plan, Runner
from gnomon.bench.schema import Arm, Sample
from gnomon.bench.store import load
from gnomon.bench.workload import ArmFailed, ArmTimedOut, Cell, Workload

from . import tiny_directory

SERVER = Path(__file__).with_name("scripted_server.py")


def server(name: str = "A", **plan: Any) -> ServerContender:
    return ServerContender(
        Arm(name=name, kind="server"), lambda port: [sys.executable, str(SERVER), str(port), json.dumps(plan)]
    )


def one(cell: str, **plan: Any) -> Any:
    contender = server(**plan)
    contender.start()
    try:
        return contender.measure(Workload(Cell.parse(cell), 1, 0, timeout=plan.pop("timeout", 300)))
    finally:
        contender.stop()


def test_counts_come_from_usage_not_from_chunks() -> None:
    """Twelve tokens in six chunks."""
    found = one("stream:1x12", gap=0.01)
    assert (found.work.output_tokens, found.work.prompt_tokens) == (12, 20)
    metrics = found.metrics
    assert 0 < metrics["headers_seconds"] <= metrics["first_byte_seconds"] <= metrics["first_event_seconds"]
    assert 0.02 < metrics["first_event_seconds"] <= metrics["first_output_seconds"] < metrics["total_seconds"]
    assert "decode_tokens_per_second" in metrics


def streamed(tokens: int, *pieces: str) -> Streamed:
    found = Streamed(0.0)
    for piece in pieces:
        found.event(json.dumps({"choices": [{"text": piece, "finish_reason": None}]}))
    found.event(json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}))
    found.event(json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}))
    found.event("[DONE]")
    return found


def test_what_was_held_back_may_follow_the_last_tokens_text() -> None:
    """A last token " a" with the first byte of a character is told as " a" and, since nothing follows, a sign for that byte."""
    streamed(2, "The", " a", "\ufffd").check()
    with pytest.raises(ArmFailed, match="usage counts 2 tokens, and 4 pieces of text came"):
        streamed(2, "The", " ", "a", "\ufffd").check()


def test_rates_by_hand() -> None:
    usage = {"completion_tokens": 12, "prompt_tokens": 3}
    stream = Streamed(10.0, outputs=[11.0, 11.5, 13.0], ended=13.2, usage=usage)
    assert stream.decode_rate == pytest.approx(11 / 2.2)
    assert stream.longest_gap == 1.5
    assert Streamed(10.0, outputs=[11.0], ended=11.0, usage=usage).decode_rate is None
    assert Streamed(10.0, outputs=[11.0], ended=12.0, usage={"completion_tokens": 1}).decode_rate is None


def test_requests_run_at_once() -> None:
    """None of them is answered before all have come."""
    found = one("stream:8x6", gap=0.05, together=8)
    assert found.work.concurrency == 8
    assert found.work.output_tokens == 48
    assert 0 < found.metrics["aggregate_tokens_per_second"] < 48 / (6 * 0.05)
    assert found.metrics["first_output_max_seconds"] >= found.metrics["first_output_median_seconds"] > 0.1


def test_start_counts_from_the_process() -> None:
    metrics = one("start:2", gap=0.02).metrics
    assert 0 < metrics["ready_seconds"] < metrics["first_answer_seconds"]
    assert metrics["first_answer_seconds"] - metrics["ready_seconds"] > 0.04
    assert metrics["resident_bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no usage", "lacks usage"),
        ("no finish", "lacks a finish reason"),
        ("no end", "lacks the end marker"),
        ("error", "out of memory"),
        ("status", "status 503: .*draining"),
        ("die", "ProtocolError"),
    ],
)
def test_broken_streams_are_failures(fault: str, message: str) -> None:
    with pytest.raises(ArmFailed, match=message):
        one("stream:1x6", fault=fault)


def test_a_stalled_stream_times_out() -> None:
    contender = server(fault="stall")
    contender.start()
    with pytest.raises(ArmTimedOut, match="no data for too long"):
        contender.measure(Workload(Cell.parse("stream:1x6"), 1, 0, timeout=0.3))
    contender.stop()


def test_a_wrong_count_is_invalid_and_a_warm_cache_other_work() -> None:
    samples: list[Sample] = []
    Runner([server(fault="count")], samples.append, Plan(1, warmups=0)).run([Cell.parse("stream:1x6")])
    assert [(s.status, s.reason) for s in samples] == [("invalid", "output_tokens is 5, ordered were 6")]
    assert one("stream:1x6", cached=2).work.cache == "cold"
    assert one("stream:1x6", cached=15).work.cache == "15 tokens reused"


def test_a_server_that_ends_says_why() -> None:
    contender = server(fault="exit")
    with pytest.raises(ArmFailed, match="exit status 1: cannot bind"):
        contender.start()


def test_prompts_differ_between_rows_blocks_and_seeds_but_not_between_arms() -> None:
    cell = Cell.parse("stream:8x4")
    texts = [Workload(cell, seed, block).text(row) for seed in range(3) for block in range(3) for row in range(8)]
    assert len(set(texts)) == len(texts)
    assert Workload(cell, 1, 0).text(3) == Workload(cell, 1, 0, timeout=5).text(3)
    assert Workload(cell, 1, 0).text() != Workload(cell, 1, 0, attempt=2).text()


PEAK = """
for size in (1, 40 << 20, 1):
    block = b"x" * size
    print(len(block), flush=True)
    input()
"""


def test_memory_watch_sees_a_peak_that_is_gone() -> None:
    """In a process of its own: children of other tests that end meanwhile would count among this one's."""
    with subprocess.Popen(
        [sys.executable, "-c", PEAK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = resident_bytes(child.pid)
        with MemoryWatch(child.pid) as watch:
            for _ in range(2):
                child.stdin.write("\n")
                child.stdin.flush()
                child.stdout.readline()
                deadline = time.monotonic() + 300
                while watch.peak <= before + (30 << 20):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            assert resident_bytes(child.pid) < before + (10 << 20)
        child.communicate("\n")
    assert watch.peak > before + (30 << 20)
    assert resident_bytes(2**22 + 5) == 0


def test_malformed_events() -> None:
    with pytest.raises(ArmFailed, match="no JSON"):
        Streamed(0.0).event("{")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "serve_table.py"
    spec = importlib.util.spec_from_file_location("serve_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_table"] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_of_scripted_servers(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script's whole way, with scripted servers in place of real ones and one of them a tenth as fast."""

    def fakes(model: Path, sha: str | None, flags: object) -> Any:
        names = (script.OURS, script.SERVER, script.LIBRARY)
        return tuple(server(name, gap=gap) for name, gap in zip(names, (0.005, 0.05, 0.005), strict=True))

    monkeypatch.setattr(script, "contenders", fakes)
    model = tiny_directory.write(tmp_path / "tiny")
    status = script.main([str(model), "--quick", "--out", str(tmp_path / "out"), "--requests", "2"])
    (path,) = (tmp_path / "out").glob("*.json")
    run = load(path)
    assert status == 0
    assert run.diagnostic
    assert run.complete
    assert path.with_suffix(".md").read_text() in capsys.readouterr().out
    faster = next(c for c in run.comparisons if c.baseline == script.SERVER and c.metric == "decode_tokens_per_second")
    assert faster.ratio is not None
    assert faster.ratio > 1.5
    assert {c.metric for c in run.comparisons if c.primary} == script.PRIMARY
    starts = [s for s in run.samples if s.cell == "start:2"]
    assert [s.block for s in starts] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
