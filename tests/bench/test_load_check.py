"""The cross-check with an independent load generator: verdicts, arithmetic, the server that streams by the clock, and AIPerf itself."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import tiny_directory
from gnomon.bench.http import Streamed, load_client

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "load_check"))

from check import core_list, one_round, report, served_metrics, told, truth
from generators import (
    FIRST,
    METRICS,
    PACE,
    RATE,
    TOKENS,
    AIPerf,
    Load,
    Order,
    aiperf_metrics,
    answer_of,
    loop_metrics,
    ours,
    reported_by,
)
from timed import timed_command

from children import running


def rounds(*ratios: tuple[float, float, float]) -> list[dict[str, dict[str, float]]]:
    return [
        {
            "ours": {RATE: 2.0, TOKENS: 100.0, FIRST: 0.1, PACE: 0.02},
            "aiperf": {RATE: 2.0 * a, TOKENS: 100.0 * b, FIRST: 0.1 * c, PACE: 0.02},
        }
        for a, b, c in ratios
    ]


def test_verdicts() -> None:
    # Equal but for noise about 1; 2 % off without noise, which is close enough; 10 % off without noise; the same.
    table, agree = told(rounds((0.99, 1.02, 1.10), (1.01, 1.02, 1.10), (1.0, 1.02, 1.10)))
    assert not agree
    verdicts = [line.split("|")[-2].strip() for line in table.splitlines()[2:]]
    assert verdicts == ["agree", "agree", "**differ**", "agree"]
    assert "| 1.100 [1.100, 1.100] |" in table
    assert told(rounds((0.99, 1.02, 1.0), (1.01, 1.02, 1.01)))[1] is True


def test_noise_is_no_agreement() -> None:
    table, agree = told(rounds((0.5, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.0, 1.0)))
    assert not agree
    assert table.splitlines()[2].endswith("| too noisy to tell |")


def test_core_lists() -> None:
    assert (core_list("1"), core_list("0,2"), core_list("0-3,8")) == ({1}, {0, 2}, {0, 1, 2, 3, 8})


def answer(begun: float, outputs: list[float], ended: float, tokens: int) -> Streamed:
    return Streamed(begun, outputs=outputs, ended=ended, usage={"prompt_tokens": 5, "completion_tokens": tokens})


def test_arithmetic_of_both_sides() -> None:
    """Two answers of 5 tokens in pieces. The suite counts from the start at 9.5 to the last end at 14.5, AIPerf from the first request
    at 10 to the last text at 14: 2 answers and 10 tokens in 5 or in 4 seconds; the first texts come after 1 and 2 seconds; four further
    tokens take 2 and 2.5 seconds to the ends, 2 and 2 to the last texts."""
    answers = [answer(10.0, [11.0, 12.0, 13.0], 13.0, 5), answer(10.0, [12.0, 14.0], 14.5, 5)]
    assert loop_metrics(9.5, answers) == {RATE: 0.4, TOKENS: 2.0, FIRST: 1.5, PACE: 0.5625}
    assert aiperf_metrics(answers) == {RATE: 0.5, TOKENS: 2.5, FIRST: 1.5, PACE: 0.5}


def test_raw_records_become_answers() -> None:
    """Two texts in one piece of the stream carry its one instant; the end and usage come in others, and the marker counts for nothing."""

    def at(seconds: float, *data: str) -> dict[str, Any]:
        return {"perf_ns": int(seconds * 1e9), "packets": [{"name": "data", "value": one} for one in data]}

    text = '{"choices": [{"index": 0, "text": "%s", "finish_reason": null}], "usage": null}'
    end = '{"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}'
    usage = '{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}'
    found = answer_of(
        {
            "start_perf_ns": 2_000_000_000,
            "responses": [
                at(2.5, text % "a"),
                at(3.0, text % "b", text % "c"),
                at(3.25, end),
                at(3.5, usage, "[DONE]"),
            ],
        }
    )
    assert (found.begun, found.outputs, found.ended) == (2.0, [2.5, 3.0, 3.0], 3.25)
    assert (found.text, found.completion_tokens, found.finish, found.done) == ("abc", 4, "length", True)


def test_reports_are_read_in_seconds() -> None:
    report = {
        "request_throughput": {"unit": "requests/sec", "avg": 3.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 60.0},
        "time_to_first_token": {"unit": "ms", "avg": 999.0, "p50": 250.0},
        "inter_token_latency": {"unit": "us", "avg": 999.0, "p50": 500.0},
    }
    assert reported_by(report) == {RATE: 3.0, TOKENS: 60.0, FIRST: 0.25, PACE: 0.0005}


def test_commands_of_both_loads(tmp_path: Path) -> None:
    """A closed loop has a warm-up and looks for work so often; a schedule carries its times, in milliseconds, and neither."""
    one = AIPerf("http://127.0.0.1:1", tmp_path, "m", before=("w",))
    command = one.command(Order([["a"], ["b"]], 4), tmp_path)
    assert [command[command.index(f) + 1] for f in ("--concurrency", "--request-count", "--request-rate")] == [
        "2",
        "2",
        "500",
    ]
    assert (tmp_path / "prompts.jsonl").read_text() == '{"text": "w"}\n{"text": "a"}\n{"text": "b"}\n'
    command = one.command(Order([["a"], ["b"]], 4, [0.0, 0.0125]), tmp_path)
    assert "--fixed-schedule" in command
    assert not {"--concurrency", "--request-rate", "--warmup-request-count"} & set(command)
    assert (
        tmp_path / "prompts.jsonl"
    ).read_text() == '{"text": "a", "timestamp": 0.0}\n{"text": "b", "timestamp": 12.5}\n'


@pytest.fixture(scope="module")
def timed() -> Generator[str]:
    with running(timed_command(0.2, 0.02)) as child:
        yield child.url


TINY = 1e-9
"""Seconds, and ratios, that rounding may take."""
PROMPTS = [["a river", "a sea"], ["a lake", "a pond"], ["an isle", "a cape"]]


def record_of(url: str) -> list[dict[str, Any]]:
    known = {prompt for mine in PROMPTS for prompt in mine}
    return [one for one in httpx.get(f"{url}/record", trust_env=False).json() if one["prompt"] in known]


def test_the_clock_server_and_the_suite_on_it(timed: str) -> None:
    """Whatever the machine does, nothing comes before its time: a first token 0.2 s after its request at the earliest, ten 0.38 s; six of
    them for three clients in no less than 0.76 s; and each instant of the server lies inside what its client saw."""
    order = Order(PROMPTS, 10)
    with load_client(timed) as client:
        load = ours(client, order)
    known = truth(0.2, 0.02, order)
    assert known == {RATE: 6 / 0.76, TOKENS: 60 / 0.76, FIRST: 0.2, PACE: 0.02}
    record = record_of(timed)
    assert sorted(one["prompt"] for one in record) == sorted(order.texts)
    assert [a.completion_tokens for a in load.answers] == [10] * 6
    for one in record:
        assert one["first"] >= one["arrived"] + 0.2 - TINY
        assert one["ended"] >= one["arrived"] + 0.38 - TINY
    for values in (load.reported, served_metrics(record)):
        assert values[RATE] <= known[RATE] + TINY
        assert values[TOKENS] <= known[TOKENS] + TINY
        assert values[FIRST] >= known[FIRST] - TINY
    # The server has a request after it was begun, and the client a token after it went out, each in its order.
    for seen, was in (
        ([a.begun for a in load.answers], [one["arrived"] for one in record]),
        ([one["first"] for one in record], [a.outputs[0] for a in load.answers]),
        ([one["ended"] for one in record], [a.ended for a in load.answers]),
    ):
        assert all(a <= b for a, b in zip(sorted(seen), sorted(was), strict=True))


def test_the_truth_of_a_schedule() -> None:
    """Four requests by a schedule whose last one comes after 1.5 s and takes 0.2 + 9 * 0.02 s."""
    known = truth(0.2, 0.02, Order([["a", "b"], ["c", "d"]], 10, [0.0, 0.5, 0.75, 1.5]))
    assert known == {RATE: 4 / 1.88, TOKENS: 40 / 1.88, FIRST: 0.2, PACE: 0.02}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [None, [0.0, 0.4, 0.5, 1.1, 1.2, 1.9]], ids=["loop", "schedule"])
def test_aiperf_and_the_suite_agree_with_the_clock(timed: str, tmp_path: Path, times: list[float] | None) -> None:
    """Both measure the server's clock: answers of 0.2 + 59 * 0.02 = 1.38 s, two for each of three clients or six on a schedule."""
    if shutil.which("uv") is None:
        pytest.skip("uv, which makes AIPerf's environment, isn't here")
    model = tiny_directory.write(tmp_path / "model")
    found: dict[str, dict[str, float]] = {}
    loads: dict[str, Load] = {}
    for side in ("ours", "aiperf"):
        order = Order([[f"{side} {times is None} {n} {m}" for m in range(2)] for n in range(3)], 60, times)
        if side == "ours":
            with load_client(timed) as client:
                load = ours(client, order)
        else:
            warm = [f"warm {n}" for n in range(3)]
            load = AIPerf(timed, model, "timed", before=warm).run(order, tmp_path / "aiperf")
        record = [
            one for one in httpx.get(f"{timed}/record", trust_env=False).json() if one["prompt"] in set(order.texts)
        ]
        assert len(record) == len(load.answers) == 6
        loads[side] = load
        found |= one_round(load, side, record) | {"truth": truth(0.2, 0.02, order)}
    assert found["truth"][RATE] == pytest.approx(6 / (2.76 if times is None else 3.28))
    # AIPerf's documented arithmetic on its own records gives its report, but for its rates: they divide by its whole phase, which begins
    # before the first request is handed out and ends after the last has come back.
    mine = aiperf_metrics(loads["aiperf"].answers)
    whole = json.loads(next(tmp_path.rglob("profile_export_aiperf.json")).read_text())
    assert 6 / whole["benchmark_duration"]["avg"] == pytest.approx(mine[RATE], rel=1e-4)
    for metric in (FIRST, PACE):
        assert found["aiperf"][metric] == pytest.approx(mine[metric], rel=1e-6)
    for metric in METRICS:
        for side in ("ours", "aiperf"):
            assert found[side][metric] == pytest.approx(found["truth"][metric], rel=0.1), (side, metric)
            assert found[side][metric] == pytest.approx(found[f"{side}, served"][metric], rel=0.1), (side, metric)
    assert "AIPerf / ours" in report([found, found])[0]
