"""Blocks, orders and failures, with a fake engine that stalls, miscounts and crashes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gnomon.bench.compare import compare
from gnomon.bench.contenders import CommandContender, WorkerContender
from gnomon.bench.runner import Interrupted, Plan, Runner, order
from gnomon.bench.schema import Arm, Sample, Work
from gnomon.bench.workload import ArmFailed, Cell, Measurement, Workload

FAKE = Path(__file__).with_name("fake_engine.py")
CELL = Cell.parse("decode:32@0")
RATE = "decode_tokens_per_second"


def worker(name: str, **plan: Any) -> WorkerContender:
    return WorkerContender(Arm(name=name, kind="engine", command=(sys.executable, str(FAKE), json.dumps(plan))))


def measure(*contenders: Any, blocks: int = 6, cell: Cell = CELL, **plan: Any) -> list[Sample]:
    samples: list[Sample] = []
    Runner(contenders, samples.append, Plan(blocks, seed=10, **plan)).run([cell])
    return samples


def outcome(samples: list[Sample], metric: str = RATE, cell: str = "decode:32@0") -> Any:
    return compare(samples, cell, "A", "B", metric, primary=True)


def test_planted_slowdown_is_found_and_equal_arms_are_not() -> None:
    slower = outcome(measure(worker("A", rate=100), worker("B", rate=95)))
    assert slower.outcome == "measured loss"
    assert slower.ratio == pytest.approx(0.95, abs=0.002)
    assert outcome(measure(worker("A", rate=100), worker("B", rate=100))).outcome == "inconclusive"
    assert outcome(measure(worker("A", rate=95), worker("B", rate=100))).outcome == "repeatable win"


def test_order_alternates_and_workloads_are_shared() -> None:
    samples = [s for s in measure(worker("A", rate=100), worker("B", rate=100)) if s.block >= 0]
    assert [s.arm for s in samples] == list("ABBAABBAABBA")
    assert [s.seed for s in samples] == [10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15]
    assert [s.index for s in samples] == list(range(2, 14))


@pytest.mark.parametrize("arms", [2, 3, 4, 5])
def test_orders_are_balanced(arms: int) -> None:
    """Over two rounds of all orders every arm stands equally often in every place."""
    orders = [order(block, arms) for block in range(2 * arms)]
    for arm in range(arms):
        places = [o.index(arm) for o in orders]
        assert all(places.count(place) == 2 for place in range(arms))


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("crash", "failed", f"signal {signal.SIGABRT.value}"),
        ("count", "invalid", "output_tokens is 31, ordered were 32"),
        ("garbage", "failed", "no JSON"),
        ("raise", "failed", "out of memory"),
        ("negative", "invalid", "below 0"),
        ("metric", "invalid", "unknown metric 'speed'"),
        ("unsupported", "unsupported", "no such kernel here"),
    ],
)
def test_a_fault_costs_its_block_and_is_kept(fault: str, status: str, reason: str) -> None:
    samples = measure(worker("A", rate=100), worker("B", rate=150, faults={"2": fault}), blocks=7)
    bad = [s for s in samples if s.status != "ok"]
    assert [(s.block, s.arm, s.status) for s in bad] == [(2, "B", status)]
    assert reason in (bad[0].reason or "")
    found = outcome(samples)
    assert [e.block for e in found.excluded] == [2]
    assert reason in found.excluded[0].reason
    assert len(found.pairs) == 6
    # Half as fast again, but not in every block: that is no win.
    assert found.outcome == ("repeatable win" if fault == "unsupported" else "inconclusive")


def test_a_stall_is_cut_off_and_the_arm_restarted() -> None:
    contender = worker("B", rate=100, faults={"1": "stall"})
    contender.start()
    before = contender.measure(Workload(CELL, 1, 0)).details["pid"]
    with pytest.raises(ArmFailed, match="no answer within 0"):
        contender.measure(Workload(CELL, 2, 1, timeout=0.2))
    contender.stop()
    contender.start()
    assert contender.measure(Workload(CELL, 3, 2)).details["pid"] != before
    contender.stop()


def test_an_arm_that_never_starts_blocks_the_comparison() -> None:
    found = outcome(measure(worker("A", rate=100), worker("B", rate=100, start="die"), blocks=2))
    assert found.outcome == "blocked"
    assert "exit status 3: no such model" in found.reason
    assert found.next == "make B run"


def test_a_foreign_protocol_is_refused() -> None:
    samples = measure(worker("A", rate=100), worker("B", rate=100, protocol=7), blocks=1)
    assert {s.status for s in samples if s.arm == "B"} == {"failed"}
    assert all("protocol 7" in (s.reason or "") for s in samples if s.arm == "B")


def test_other_work_is_no_ratio() -> None:
    found = outcome(measure(worker("A", rate=100), worker("B", rate=200, work={"sampling": "temperature 1"})))
    assert (found.outcome, found.ratio) == ("inapplicable", None)
    assert "sampling is 'greedy' against 'temperature 1'" in found.reason


def test_thread_variables_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    contender = worker("A", rate=1)
    contender.start()
    contender.stop()
    assert contender.arm.effective == {"seen": "unset"}


class Scripted:
    """A contender in this process."""

    def __init__(self, name: str, log: list[str], fail: dict[int, BaseException] | None = None) -> None:
        self.arm = Arm(name=name, kind="engine")
        self.log = log
        self.fail = fail or {}

    def start(self) -> None:
        self.log.append(f"start {self.arm.name}")

    def measure(self, workload: Workload) -> Measurement:
        if workload.block in self.fail:
            raise self.fail[workload.block]
        work = Work(task="decode", prompt=str(workload.seed), prompt_tokens=1, output_tokens=32)
        return Measurement({RATE: 100.0}, work)

    def stop(self) -> None:
        self.log.append(f"stop {self.arm.name}")


def test_an_interrupt_keeps_what_was_measured() -> None:
    samples: list[Sample] = []
    log: list[str] = []
    arms = [Scripted("A", log), Scripted("B", log, {3: KeyboardInterrupt()})]
    with pytest.raises(Interrupted):
        Runner(arms, samples.append, Plan(6)).run([CELL])
    assert [s.status for s in samples] == ["ok"] * 8 + ["interrupted"]
    assert (samples[-1].block, samples[-1].arm) == (3, "B")
    assert log[-2:] == ["stop A", "stop B"]


def test_a_bug_in_an_arm_is_its_failure() -> None:
    samples: list[Sample] = []
    Runner([Scripted("A", []), Scripted("B", [], {0: ZeroDivisionError("x")})], samples.append, Plan(1)).run([CELL])
    assert [s.reason for s in samples] == [None, None, None, "ZeroDivisionError: x"]


def test_exclusive_arms_never_live_together() -> None:
    log: list[str] = []
    Runner([Scripted("A", log), Scripted("B", log)], lambda _: None, Plan(2, exclusive=True)).run([CELL])
    alive: set[str] = set()
    for entry in log:
        verb, name = entry.split()
        alive = alive | {name} if verb == "start" else alive - {name}
        assert len(alive) <= 1


def test_arms_need_distinct_names() -> None:
    with pytest.raises(ValueError, match="distinct names"):
        Runner([Scripted("A", []), Scripted("A", [])], lambda _: None, Plan(1))


def command(name: str, code: str) -> CommandContender:
    return CommandContender(Arm(name=name, kind="command", command=(sys.executable, "-c", code)))


def test_commands_are_timed_or_report_themselves() -> None:
    cell = Cell.parse("command")
    report = "import json; print('noise'); print(json.dumps({'metrics': {'seconds': 2.0 + {seed} * 0.001}}))"
    samples = measure(command("A", report), command("B", report.replace("2.0", "1.0")), blocks=5, cell=cell)
    found = outcome(samples, "seconds", "command")
    assert found.outcome == "repeatable win"
    assert found.pairs[0].baseline == pytest.approx(2.010)
    timed = measure(command("B", "import time; time.sleep(0.2)"), blocks=1, cell=cell)
    assert all(s.metrics["seconds"] > 0.2 for s in timed)


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("import sys; sys.exit('boom')", "failed", "exit status 1: boom"),
        ("import sys; print('needs Metal', file=sys.stderr); sys.exit(69)", "unsupported", "needs Metal"),
        ("print('{broken')", "failed", "no JSON"),
        ("print('{\"metrics\": 3}')", "failed", "malformed answer"),
    ],
)
def test_command_failures(code: str, status: str, reason: str) -> None:
    sample = measure(command("A", code), blocks=1, cell=Cell.parse("command"))[-1]
    assert sample.status == status
    assert reason in (sample.reason or "")


def test_a_missing_command_fails() -> None:
    contender = CommandContender(Arm(name="A", kind="command", command=("/nonexistent/command",)))
    assert "No such file" in (measure(contender, blocks=1, cell=Cell.parse("command"))[-1].reason or "")
