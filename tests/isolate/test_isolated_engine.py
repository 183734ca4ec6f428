"""The engine in its own process: lives, deaths and freezes of a scripted child."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from stub_child import DIE, FULL, HANG, INVALID, SAY, SLOW

from gnomon.chat.constraint import Constraint
from gnomon.engine.api import (
    ChoiceFinished,
    Delta,
    EngineUnavailable,
    Event,
    Failed,
    Finished,
    InvalidRequest,
    QueueFull,
    Request,
    Usage,
)
from gnomon.isolate import IsolatedEngine, life
from gnomon.isolate.engine import Patience

CHILD = [sys.executable, str(Path(__file__).with_name("stub_child.py"))]
QUICK = Patience(load=300, silence=120, submit=120, early_death=0.05, pause=0.1, stop=60, restarts=100)
"""Quick to start a child again, and slow to call one frozen: on a machine under load it may get no turn for seconds."""


class Heard:
    """The events of one request."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self.ended.set()

    def wait(self) -> list[Event]:
        assert self.ended.wait(120), self.events
        return self.events


@pytest.fixture
def make() -> Iterator[Callable[..., IsolatedEngine]]:
    made: list[IsolatedEngine] = []

    def start(what: object = None, patience: Patience = QUICK) -> IsolatedEngine:
        made.append(IsolatedEngine(CHILD, what, patience))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def ask(engine: IsolatedEngine, order: int, name: str = "r") -> Heard:
    heard = Heard()
    engine.submit(Request(name, (order,)), heard)
    return heard


def whole(name: str = "r") -> list[Event]:
    return [
        Delta(name, 0, "one", (1,)),
        Delta(name, 0, " two", (2,)),
        ChoiceFinished(name, 0, "stop"),
        Finished(name, Usage(1, 2)),
    ]


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_answers_refusals_and_cancelling(make) -> None:
    engine = make()
    assert engine.wait().id == "stub"
    assert ask(engine, SAY).wait() == whole()
    with pytest.raises(QueueFull, match="64 requests wait") as full:
        ask(engine, FULL)
    assert full.value.retry_after == 7
    with pytest.raises(InvalidRequest, match="too long") as invalid:
        ask(engine, INVALID)
    assert (invalid.value.param, invalid.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(EngineUnavailable, match="no grammars here"):
        engine.compile(Constraint("regex", "a"))
    hanging = ask(engine, HANG, "h")
    with pytest.raises(InvalidRequest, match="in use"):
        ask(engine, SAY, "h")
    eventually(lambda: len(hanging.events) == 1)
    engine.cancel("h")
    assert hanging.wait()[-2] == ChoiceFinished("h", 0, "cancelled")
    eventually(lambda: engine.stats().get("batch") == {"configured": 8})
    assert engine.stats()["pid"] == engine.process()["pid"] != os.getpid()


def test_a_death_ends_the_answers_under_way_and_nothing_else(make) -> None:
    engine = make()
    engine.wait()
    pid = engine.process()["pid"]
    broken = ask(engine, HANG, "broken")
    eventually(lambda: len(broken.events) == 1)
    os.kill(pid, signal.SIGKILL)
    assert broken.wait() == [
        Delta("broken", 0, "one", (1,)),
        Failed("broken", "the engine's process was killed by SIGKILL during the answer", "engine_died"),
    ]
    # Asked while no child is there: it waits.
    assert ask(engine, SAY, "next").wait() == whole("next")
    assert engine.process()["restarts"] == 1
    assert engine.process()["pid"] != pid
    assert engine.health().state == "ok"


def test_what_had_no_answer_yet_is_asked_once_more(make, tmp_path: Path) -> None:
    engine = make(str(tmp_path / "marker"))
    engine.wait()
    assert ask(engine, SLOW).wait() == whole()
    assert engine.process()["restarts"] == 1
    # The one that kills every child is given up after the second.
    killer = ask(engine, DIE, "killer").wait()
    assert killer == [Failed("killer", "the engine's process was killed by SIGKILL during the answer", "engine_died")]
    assert engine.process()["restarts"] in (2, 3)


def test_a_refusal_by_the_next_child_is_heard(make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    engine = make(f"waits for {gate}")
    engine.wait()
    gate.unlink()
    os.kill(engine.process()["pid"], signal.SIGKILL)
    eventually(lambda: engine.process()["pid"] is None)
    assert engine.health().state == "loading"
    heard = ask(engine, INVALID)
    gate.touch()
    failed = heard.wait()[0]
    assert isinstance(failed, Failed)
    assert isinstance(failed.refusal, InvalidRequest)
    assert failed.refusal.param == "prompt"


def test_a_frozen_child_is_killed(make) -> None:
    engine = make()
    engine.wait()
    pid = engine.process()["pid"]
    frozen = ask(engine, HANG)
    eventually(lambda: len(frozen.events) == 1)
    os.kill(pid, signal.SIGSTOP)
    engine._patience = dataclasses.replace(QUICK, submit=2)
    with pytest.raises(EngineUnavailable, match="took no request within 2 s"):
        ask(engine, SAY, "impatient")
    eventually(lambda: engine.health().state == "stalled")
    with pytest.raises(EngineUnavailable, match="stands still"):
        ask(engine, SAY, "more")
    with pytest.raises(EngineUnavailable, match="stands still"):
        engine.compile(Constraint("regex", "a"))
    engine._patience = dataclasses.replace(QUICK, silence=2)
    failed = frozen.wait()[-1]
    engine._patience = QUICK
    assert isinstance(failed, Failed)
    assert failed.code == "engine_died"
    assert not Path(f"/proc/{pid}").exists()
    assert ask(engine, SAY, "next").wait() == whole("next")


def test_a_parent_that_stood_still_kills_no_child(make) -> None:
    """Nor when both stood still, as on a machine that was paused."""
    engine = make()
    engine.wait()
    pid = engine.process()["pid"]
    for both in (False, True):
        heard = Heard()

        def stand(event: Event, heard: Heard = heard, both: bool = both) -> None:
            # On the thread that listens to the child.
            if isinstance(event, Delta) and event.text == " two":
                if both:
                    os.kill(pid, signal.SIGSTOP)
                # Less than the pause by little: what a child under load may yet take to say something is no part of this.
                engine._patience = dataclasses.replace(QUICK, silence=3.5, submit=3.5)
                time.sleep(4)
                if both:
                    os.kill(pid, signal.SIGCONT)
            heard(event)

        engine.submit(Request(f"r{both}", (HANG,)), stand)
        engine.cancel(f"r{both}")
        assert isinstance(heard.wait()[-1], Finished)
        eventually(lambda: engine.health().state == "ok")
        engine._patience = QUICK
    assert (engine.process()["pid"], engine.process()["restarts"]) == (pid, 0)


def test_a_wait_during_which_the_parent_stood_still_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Late(Future[None]):
        paused, asked = 0.0, 0

        def result(self, timeout: float | None = None) -> None:
            nonlocal now
            self.asked += 1
            if self.asked == 1:
                now += 5 + self.paused
                raise TimeoutError

    monkeypatch.setattr(life.time, "monotonic", lambda: now)
    late = Late()
    late.paused = 90.0
    life.in_time(late, 5)
    assert late.asked == 2
    with pytest.raises(TimeoutError):
        life.in_time(Late(), 5)


@pytest.mark.slow
def test_a_child_that_freezes_within_a_message_is_killed(make) -> None:
    engine = make(None, dataclasses.replace(QUICK, silence=3))
    engine.wait()
    pid, go, heard = engine.process()["pid"], threading.Event(), Heard()

    def hold(event: Event) -> None:
        heard(event)
        if isinstance(event, Delta) and event.text == " two":
            assert go.wait(120)

    # While nobody reads, what the child says stands in the socket, and most of a large message still with the child.
    engine.submit(Request("held", (HANG,)), hold)
    engine.cancel("held")
    eventually(lambda: len(heard.events) == 2)
    vectors = engine.embed([()] * 300_000)
    time.sleep(1)
    os.kill(pid, signal.SIGSTOP)
    go.set()
    with pytest.raises(EngineUnavailable, match="SIGKILL"):
        vectors.result(120)
    assert not Path(f"/proc/{pid}").exists()
    assert ask(engine, SAY, "next").wait() == whole("next")


def test_a_model_that_cannot_be_loaded(make) -> None:
    engine = make("unloadable")
    with pytest.raises(RuntimeError, match="there is no such model"):
        engine.wait()
    assert engine.health().state == "failed"


def test_a_child_that_does_not_get_ready_is_given_up(make) -> None:
    with pytest.raises(TimeoutError, match=r"not ready within 0\.01 s"):
        make("never ready", Patience(load=0.01)).wait()


def test_restarts_are_limited(make) -> None:
    engine = make("dies early", Patience(early_death=10, pause=0.05, window=9_999_999, restarts=3))
    # The fourth waits until the window is over.
    eventually(lambda: engine.process()["restarts"] == 4)
    waits = re.compile(r"ended with code 3 and is being started again in 99\d{5} s")
    eventually(lambda: waits.search(engine.health().message or "") is not None)


def test_stopping_ends_the_child_and_tells_the_open_requests(make) -> None:
    engine = make()
    engine.wait()
    pid = engine.process()["pid"]
    hanging = ask(engine, HANG)
    assert not engine.drain(0.05)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        ask(engine, SAY, "late")
    engine.stop()
    assert hanging.wait()[-1] == Failed("r", "the server was stopped", "engine_stopped")
    assert not Path(f"/proc/{pid}").exists()


def test_a_child_that_ends_may_write_longer_than_it_may_be_silent(make, tmp_path: Path) -> None:
    written = tmp_path / "states"
    engine = make(f"writes {written}", dataclasses.replace(QUICK, stop=300))
    engine.wait()
    engine._patience = dataclasses.replace(QUICK, silence=2, stop=300)
    engine.stop()
    assert written.exists()


def test_a_child_that_stands_still_while_it_is_stopped_is_killed_in_the_end(make) -> None:
    engine = make(patience=dataclasses.replace(QUICK, silence=30, stop=1))
    engine.wait()
    pid = engine.process()["pid"]
    os.kill(pid, signal.SIGSTOP)
    engine.stop()
    assert not Path(f"/proc/{pid}").exists()


def test_the_child_ends_with_its_parent() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_isolated_engine import CHILD, IsolatedEngine\n"
        "engine = IsolatedEngine(CHILD, None); engine.wait(); print(engine.process()['pid'], flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    import subprocess

    with subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
