"""The serving suite's legs against a scripted server: hand-computed values, and for each fault what is recorded instead of a number."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gnomon.bench import legs
from gnomon.bench.http import Rejected, Streamed
from gnomon.bench.legs import LegContender, Parity, Probe
from gnomon.bench.runner import Plan, Runner
from gnomon.bench.schedule import Arrival, arrival_times, met, summary
from gnomon.bench.schema import Arm, Sample
from gnomon.bench.sources import stated_memory, system_memory
from gnomon.bench.workload import ArmFailed, ArmTimedOut, Cell, Measurement, Schedule, Workload

SERVER = Path(__file__).with_name("scripted_server.py")


def server(name: str = "A", parity: Parity | None = None, **plan: Any) -> LegContender:
    return LegContender(
        Arm(name=name, kind="command"),
        lambda port: [sys.executable, str(SERVER), str(port), json.dumps(plan)],
        "f" * 64,
        parity=parity,
    )


@contextmanager
def running(**plan: Any) -> Iterator[LegContender]:
    contender = server(**plan)
    contender.start()
    try:
        yield contender
    finally:
        contender.stop()


def one(cell: str, timeout: float = 300.0, **plan: Any) -> Measurement:
    with running(**plan) as contender:
        return contender.measure(Workload(Cell.parse(cell), 1, 0, timeout=timeout))


def record(cell: str, *contenders: LegContender, blocks: int = 1) -> list[Sample]:
    samples: list[Sample] = []
    Runner(contenders, samples.append, Plan(blocks, warmups=0)).run([Cell.parse(cell)])
    return samples


def test_first_tokens_cold_and_cached() -> None:
    """Reading takes 1 ms a word; the repeats' words are all known but the last."""
    found = one("ttft:100", memory=True, read=0.001)
    words = found.work.prompt_tokens // 3
    assert words > 110
    assert found.metrics["cold_first_output_seconds"] >= words * 0.001
    assert found.metrics["cached_first_output_seconds"] > 0
    assert found.details["repeats_cached_tokens"] == [words - 1, words - 1]
    assert (found.work.output_tokens, found.work.model) == (6, "f" * 64)


def test_a_repeat_without_reuse_is_no_cached_first_token() -> None:
    found = one("ttft:8")
    assert "cached_first_output_seconds" not in found.metrics
    assert found.details["repeats_cached_tokens"] == [0, 0]


def test_a_cold_prompt_that_was_cached_is_a_failure() -> None:
    (sample,) = record("prefill:8", server(cached=15))
    assert (sample.status, sample.reason) == ("failed", "the prompt was to be cold, and 15 of 20 tokens were cached")
    assert not sample.metrics


def test_prefill_counts_the_tokens_of_usage() -> None:
    found = one("prefill:8", prompt_tokens=700, gap=0.02)
    rate, seconds = found.metrics["prefill_tokens_per_second"], found.metrics["cold_first_output_seconds"]
    assert rate == pytest.approx(700 / seconds)
    assert seconds > 0.04


def test_depth_may_reuse_its_beginning_and_never_the_nonce() -> None:
    with running(memory=True, gap=0.002) as arm:
        first = arm.measure(Workload(Cell.parse("depth:6@50"), 1, 0))
        second = arm.measure(Workload(Cell.parse("depth:6@50"), 2, 1))
    assert first.details["cached_tokens"] == 0
    assert isinstance(second.details["cached_tokens"], int)
    assert 50 < second.details["cached_tokens"] < second.work.prompt_tokens - 5
    assert first.work.prompt != second.work.prompt
    assert first.work.cache == second.work.cache


def test_restart_reuses_what_lies_on_disk(tmp_path: Path) -> None:
    kept = one("restart:40", memory=True, state=str(tmp_path / "kept.json"), read=0.002)
    lost = one("restart:40", memory=True, read=0.002)
    for found, reuse in ((kept, True), (lost, False)):
        cached = found.details["cached_tokens_after_restart"]
        assert isinstance(cached, int)
        assert (cached > 40) is reuse
        assert found.metrics["ready_seconds"] > 0
    assert lost.metrics["restarted_first_output_seconds"] >= 40 * 0.002
    assert kept.work == lost.work


def test_a_server_that_lists_its_model_while_it_loads_isnt_ready() -> None:
    with running(loading=0.4) as arm:
        assert arm.ready_seconds >= 0.4
        assert arm.served == "scripted"


def test_clients_of_a_closed_loop_wait_for_their_answers() -> None:
    found = one("loop:3x4x2", gap=0.02)
    assert found.work.output_tokens == 24
    assert found.metrics["total_seconds"] >= 4 * 2 * 0.02
    assert found.metrics["aggregate_tokens_per_second"] == pytest.approx(24 / found.metrics["total_seconds"])


def test_arrivals_follow_their_law() -> None:
    constant = Schedule("constant", 4.0, 1, 1)
    assert arrival_times(constant, 3, 1) == [0, 0.25, 0.5]
    poisson = Schedule("poisson", 4.0, 1, 1)
    times = arrival_times(poisson, 4000, 7)
    assert times == arrival_times(poisson, 4000, 7)
    assert times != arrival_times(poisson, 4000, 8)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    # Of an exponential law, mean and deviation are 1 / rate and a share of exp(-1) exceeds the mean; 5 standard errors.
    assert sum(gaps) / 4000 == pytest.approx(0.25, abs=5 * 0.25 / 4000**0.5)
    assert sum(g > 0.25 for g in gaps) / 4000 == pytest.approx(0.3679, abs=5 * 0.0077)


def streamed(begun: float, first: float, ended: float, tokens: int = 5) -> Streamed:
    usage = {"completion_tokens": tokens, "prompt_tokens": 3}
    return Streamed(begun, outputs=[first], ended=ended, usage=usage)


def test_goodput_by_hand() -> None:
    """Of four requests one is refused, one late to begin, one slow to go on: one in ten seconds meets both objectives."""
    law = Schedule("constant", 1.0, first=1.0, pace=0.5)
    arrivals = [
        Arrival(100.0, 100.0, streamed(100.0, 100.9, 102.5)),
        Arrival(
            101.0, 101.6, streamed(101.6, 102.2, 103.0)
        ),  # within 1 s of being sent, 1.2 s after its scheduled arrival
        Arrival(102.0, 102.0, streamed(102.0, 102.5, 110.0)),
        Arrival(103.0, 103.0, Rejected("status 429: full")),
    ]
    assert [met(law, a) for a in arrivals] == [True, False, False, False]
    found = summary(law, 100.0, arrivals)
    assert found["goodput_requests_per_second"] == pytest.approx(1 / 10)
    assert (found["objectives_met"], found["rejected_requests"]) == (0.25, 1)
    assert found["first_output_median_seconds"] == pytest.approx(0.9)
    assert found["aggregate_tokens_per_second"] == pytest.approx(15 / 10)
    assert "first_output_p95_seconds" not in found
    with pytest.raises(ArmFailed, match="all 1 requests were refused"):
        summary(law, 100.0, arrivals[3:])


def test_a_scheduled_cell_says_what_was_offered() -> None:
    found = one("constant:6x4@20:5:5", gap=0.02)
    late, arrivals = found.details["sent_late_max_seconds"], found.details["arrivals_seconds"]
    assert isinstance(late, float)
    assert late >= 0
    assert arrivals == [n / 20 for n in range(6)]
    assert found.work.task == "constant"


def test_refusals_under_load_are_outcomes_not_failures() -> None:
    """Two at once are served; that others came meanwhile shows that the schedule doesn't wait for answers."""
    (sample,) = record("constant:6x4@50:5:5", server(gap=0.3, slots=2))
    assert sample.status == "ok"
    assert 1 <= sample.metrics["rejected_requests"] <= 4
    assert sample.metrics["objectives_met"] == pytest.approx(1 - sample.metrics["rejected_requests"] / 6)
    assert sample.work is not None
    assert sample.work.output_tokens == 24


@pytest.mark.parametrize("fault", ["no usage", "die", "500"])
def test_a_broken_answer_voids_the_whole_schedule(fault: str) -> None:
    (sample,) = record("constant:4x4@50:5:5", server(fault=fault, after=2))
    assert sample.status == "failed"
    assert not sample.metrics


def test_cancellation_measures_both_the_rest_and_the_next_request() -> None:
    found = one("cancel:400", gap=0.02)
    assert found.metrics["freed_seconds"] >= legs.QUIET_SECONDS
    assert found.metrics["next_first_output_seconds"] > 0.01
    assert found.work.output_tokens == 4  # the calm and the following request; of the cut ones there is no usage
    with pytest.raises(ArmFailed, match="before it was cut off"):
        one("cancel:4")


def test_a_server_is_free_when_its_processor_time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of one processor for half a second, as a server that goes on with nobody's request uses it; then nothing."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(legs, "time", SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    monkeypatch.setattr(legs, "cpu_seconds", lambda _: min(0.5 * now, 0.25))
    assert legs.at_rest(1, 0.0, 20) == pytest.approx(0.5)
    monkeypatch.setattr(legs, "cpu_seconds", lambda _: 0.5 * now)
    with pytest.raises(ArmTimedOut, match="still busy"):
        legs.at_rest(1, now, 0.3)


def test_conversations_reuse_their_history() -> None:
    found = one("turns:2x3@20", memory=True)
    # The second and third rounds know all of the first and of both: about a half and two thirds.
    assert 0.5 < found.metrics["reused_share"] < 0.75
    assert found.metrics["later_first_output_median_seconds"] > 0
    assert found.work.output_tokens == 2 * 3 * 4
    assert one("turns:2x3@20").work.cache == found.work.cache


def test_memory_by_source() -> None:
    stats = {"memory": {"active_bytes": 5, "peak_bytes": 7, "cache_bytes": 0}, "batch": {"kv_bytes": 3}}
    found = one("memory:4@8", stats=stats, gap=0.1).metrics
    assert (found["active_bytes"], found["peak_active_bytes"], found["kv_bytes"]) == (5, 7, 3)
    assert 0 < found["idle_resident_bytes"] <= found["peak_resident_bytes"]
    if sys.platform == "linux":
        parts = sum(found[n] for n in ("anonymous_bytes", "file_backed_bytes", "shared_memory_bytes"))
        assert parts == pytest.approx(found["proportional_bytes"], rel=0.01)
    assert "active_bytes" not in one("memory:4@8").metrics
    assert system_memory(2**22 + 5) == {}
    assert stated_memory({"memory": {"active_bytes": None, "peak_bytes": True}, "prompt_cache": 3}) == {}


def test_parity_names_the_difference() -> None:
    """Three arms: the first one's text holds; another tokenizer is drift, not another text."""
    common = Parity()
    arms = [
        server("A", common, text="the Rhine"),
        server("same", common, text="the Rhine"),
        server("other text", common, text="the Rhone"),
        server("drift", common, text="the Rhone", prompt_tokens=21),
        server("no usage", common, fault="no usage"),
        server("nonsense", common, fault="nonsense"),
    ]
    samples = {s.arm: s for s in record("parity:8", *arms)}
    assert [samples[name].status for name in ("A", "same")] == ["ok", "ok"]
    reasons = {name: s.reason or "" for name, s in samples.items() if s.status == "failed"}
    assert reasons["other text"] == "completion: the text differs from A's at character 6: 'one' against 'ine'"
    assert reasons["drift"].startswith("completion: tokenizer or template drift: the prompt has 21 tokens, A's 20")
    assert "usage.prompt_tokens is None" in reasons["no usage"]
    assert "answered nonsense" in reasons["nonsense"]


def test_parity_of_finish_and_count() -> None:
    base = Probe("text", 3, 8, "length")
    assert base.against(base, "A") is None
    assert "finish reason" in (Probe("text", 3, 8, "stop").against(base, "A") or "")
    assert "7 output tokens" in (Probe("text", 3, 7, "length").against(base, "A") or "")
    assert "in nothing else" in (Probe(" text", 3, 8, "length").against(base, "A") or "")
    assert "character 4" in (Probe("texts", 3, 8, "length").against(base, "A") or "")


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("undercount", "failed", "usage counts 1 tokens, and 3 pieces of text came"),
        ("overcount", "invalid", "output_tokens is 9, ordered were 6"),
        ("null count", "failed", "usage.completion_tokens is None, not a count"),
        ("malformed", "failed", "an event is no JSON"),
        ("list", "failed", "an event is no JSON object"),
        ("500", "failed", "status 500: "),
        ("no usage", "failed", "the stream lacks usage"),
    ],
)
def test_a_fault_is_recorded_with_its_reason_and_the_next_sample_counts(fault: str, status: str, reason: str) -> None:
    """The faulty arm stays out alone: the other one's samples of the block stand."""
    samples = record("stream:1x6", server("good"), server("bad", fault=fault))
    by_arm = {s.arm: s for s in samples}
    assert by_arm["good"].status == "ok"
    assert by_arm["bad"].status == status
    assert (by_arm["bad"].reason or "").startswith(reason)
    assert status == "invalid" or not by_arm["bad"].metrics


def test_cells_read_back_as_they_are_written() -> None:
    for text in (
        "parity:64", "cancel:512", "ttft:700", "prefill:16000", "restart:700", "depth:32@2000", "memory:16@1000", "loop:4x2x32",
        "poisson:10x24@1.5:1:0.1", "constant:40x64@1:2:0.1", "turns:3x3@150",
    ):  # fmt: skip
        assert str(Cell.parse(text)) == text
    for text in ("poisson:10x24@0:1:1", "loop:0x1x4", "ttft:0", "turns:1x0@5", "poisson:10x24@1.5"):
        with pytest.raises(ValueError, match="cell"):
            Cell.parse(text)


def test_long_prompts_share_no_beginning() -> None:
    cell = Cell.parse("turns:8x4@30")
    heads = {
        Workload(cell, seed, block).long_text(30, row).split()[0]
        for seed in range(3)
        for block in range(3)
        for row in range(8)
    }
    assert len(heads) == 72
    assert len(Workload(cell, 1, 0).long_text(500).split()) == 1 + 500 + 17
