"""Several models in one pool: scripted children that load, wait, make room, fail and die."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_child import HANG, SAY
from test_isolated_engine import CHILD, QUICK, Heard, ask, eventually, whole

from gnomon.engine.api import (
    EngineUnavailable,
    Failed,
    FlushReport,
    Health,
    ModelInfo,
    ModelUnavailable,
    QueueFull,
    UnknownModel,
)
from gnomon.isolate import Entry, IsolatedEngine, Lease, Limits, ModelPool, Plan
from gnomon.isolate.pool import joined

NEED = 10
LONG = 300


def entry(name: str, what: str = "", need: int = NEED) -> Entry:
    return Entry(name, what or name, "llama", 1000, need, 1_700_000_000)


def starter(one: Entry, _: int | None) -> IsolatedEngine:
    return IsolatedEngine(CHILD, one.path, QUICK)


Pool = ModelPool[IsolatedEngine]


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def start(*entries: Entry, places: int = 1, room: int = 1000, enforced: bool = False, **how) -> Pool:
        how.setdefault("make", starter)
        pool = ModelPool(
            entries or [entry("a"), entry("b")], Plan(places, room, enforced), open=lambda _, engine: engine, **how
        )
        made.append(pool)
        return pool

    yield start
    for one in made:
        one.stop()


def get(pool: Pool, name: str | None) -> Lease[IsolatedEngine]:
    return pool.acquire(name).result(LONG)


def states(pool: Pool) -> dict[str, str]:
    return {one.id: row["state"] for one, row in pool.entries()}


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def pid_of(lease: Lease[IsolatedEngine]) -> int:
    return lease.parts.process()["pid"]


def test_a_cold_model_is_loaded_once_for_all_who_ask(make) -> None:
    pool = make()
    asked = [pool.acquire("b") for _ in range(5)]
    leases = [one.result(LONG) for one in asked]
    assert len({id(one.parts) for one in leases}) == 1
    assert leases[0].id == "b"
    rows = {one.id: row for one, row in pool.entries()}
    assert (rows["b"]["loads"], rows["b"]["leases"], rows["a"]["loads"]) == (1, 5, 0)
    for one in leases:
        one.release()
        one.release()
    assert {one.id: row["leases"] for one, row in pool.entries()} == {"a": 0, "b": 0}
    assert get(pool, None).id == "a"
    with pytest.raises(UnknownModel, match=r"there is no model 'A' here; there are a, b"):
        pool.acquire("A")


def test_the_next_model_starts_while_the_last_one_serves(make) -> None:
    pool = make()
    old = get(pool, "a")
    pid = pid_of(old)
    heard = ask(old.parts, HANG, "long")
    new = get(pool, "b")
    assert ask(new.parts, SAY, "new").wait() == whole("new")
    # The old one's answer is under way still, and it takes what its holder asks for more.
    assert states(pool) == {"a": "draining", "b": "resident"}
    assert ask(old.parts, SAY, "more").wait() == whole("more")
    old.parts.cancel("long")
    heard.wait()
    old.release()
    eventually(lambda: states(pool) == {"a": "cold", "b": "resident"})
    assert not alive(pid)


def test_where_two_do_not_fit_the_old_one_ends_first(make) -> None:
    pids: list[int] = []
    at_start: list[list[bool]] = []

    def starting(one: Entry, share: int | None) -> IsolatedEngine:
        assert share is None
        at_start.append([alive(pid) for pid in pids])
        return starter(one, share)

    pool = make(room=NEED * 2 - 1, make=starting)
    first = get(pool, "a")
    pids.append(pid_of(first))
    waiting = pool.acquire("b")
    eventually(lambda: states(pool)["a"] == "draining")
    # Who comes for the old one now comes after the one that waits.
    again = pool.acquire("a")
    time.sleep(0.2)
    assert not waiting.done()
    first.release()
    second = waiting.result(LONG)
    assert at_start == [[], [False]]
    assert not again.done()
    second.release()
    assert again.result(LONG).id == "a"


def test_the_one_used_longest_ago_goes_and_a_pinned_one_never(make) -> None:
    pool = make(*map(entry, "abcd"), places=2, pins=["a"])
    for name in "abb":
        get(pool, name).release()
    get(pool, "c").release()
    eventually(lambda: states(pool) == {"a": "resident", "b": "cold", "c": "resident", "d": "cold"})
    pool = make(*map(entry, "abc"), places=2)
    for name in "aba":
        get(pool, name).release()
    get(pool, "c").release()
    eventually(lambda: states(pool) == {"a": "resident", "b": "cold", "c": "resident"})


def test_pinned_places_and_budgets_refuse_with_the_numbers(make) -> None:
    pool = make(pins=["a"])
    get(pool, "a").release()
    with pytest.raises(ModelUnavailable, match="b has no place: a are pinned, and there are 1"):
        get(pool, "b")
    sizes = entry("a", need=10**9), entry("b", need=15 * 10**8), entry("c", need=3 * 10**9)
    pool = make(*sizes, places=2, room=2 * 10**9, enforced=True, pins=["a"])
    get(pool, "a").release()
    with pytest.raises(ModelUnavailable, match=r"b takes 2\.00 GB beside a, which are pinned.*budget is 2\.00 GB"):
        get(pool, "b")
    with pytest.raises(ModelUnavailable, match=r"c needs 3\.00 GB and --memory-budget is 2\.00 GB"):
        get(pool, "c")
    assert states(pool) == {"a": "resident", "b": "cold", "c": "cold"}


def test_without_a_budget_a_model_too_large_for_the_memory_is_loaded_alone(make) -> None:
    pool = make(entry("a"), entry("b", need=5000))
    get(pool, "a").release()
    assert get(pool, "b").id == "b"
    assert states(pool) == {"a": "cold", "b": "resident"}


def test_waiting_is_bounded_in_number_and_time(make) -> None:
    pool = make(room=NEED, limits=Limits(queue=2, wait=1.0))
    held = get(pool, "a")
    one, two = pool.acquire("b"), pool.acquire("b")
    with pytest.raises(QueueFull, match="2 requests wait for models to be loaded, and no more than 2 may"):
        pool.acquire("b")
    for waiting in (one, two):
        with pytest.raises(ModelUnavailable, match="b was not loaded within 1 s: it is cold"):
            waiting.result(LONG)
    # Nobody wants its place any more.
    eventually(lambda: states(pool)["a"] == "resident")
    get(pool, "a").release()
    pool.limits = dataclasses.replace(pool.limits, wait=LONG)
    left = pool.acquire("b")
    eventually(lambda: states(pool)["a"] == "draining")
    back = pool.acquire("a")
    assert left.cancel()
    assert back.result(LONG).parts is held.parts


def test_a_load_that_fails_fails_its_requests_alone(make) -> None:
    pool = make(entry("a"), entry("b", "unloadable"), entry("c", "dies early"), places=3, limits=Limits(retry=3600))
    lease = get(pool, "a")
    asked = pool.acquire("b"), pool.acquire("b")
    for one in asked:
        with pytest.raises(ModelUnavailable, match="b can't be loaded: there is no such model"):
            one.result(LONG)
    with pytest.raises(ModelUnavailable, match=r"no such model; it is tried again in \d+ s at the soonest"):
        pool.acquire("b")
    with pytest.raises(ModelUnavailable, match="c can't be loaded: the engine's process ended with code 3, 2 times"):
        get(pool, "c")
    assert states(pool) == {"a": "resident", "b": "failed", "c": "failed"}
    assert ask(lease.parts, SAY).wait() == whole()
    assert pool.health().state == "ok"
    pool.limits = dataclasses.replace(pool.limits, retry=0)
    with pytest.raises(ModelUnavailable, match=r"there is no such model$"):
        get(pool, "b")


def test_a_model_that_opens_badly_has_no_process_left(make) -> None:
    started: list[IsolatedEngine] = []

    def starting(one: Entry, share: int | None) -> IsolatedEngine:
        started.append(starter(one, share))
        return started[-1]

    def bad(one: Entry, _: IsolatedEngine) -> IsolatedEngine:
        raise KeyError(f"{one.id} has no tokenizer")

    pool = ModelPool([entry("a")], Plan(1, 100, False), starting, bad)
    try:
        with pytest.raises(ModelUnavailable, match="a has no tokenizer"):
            get(pool, "a")
        assert started[0].process()["pid"] is None
        assert started[0].health().state == "stopped"
    finally:
        pool.stop()


def test_idle_models_are_unloaded_and_pinned_ones_not(make) -> None:
    pool = make(places=2, pins=["a"], limits=Limits(idle_unload=0.6))
    get(pool, "a").release()
    held = get(pool, "b")
    pid = pid_of(held)
    time.sleep(1.2)
    assert states(pool) == {"a": "resident", "b": "resident"}
    held.release()
    eventually(lambda: states(pool) == {"a": "resident", "b": "cold"})
    assert not alive(pid)
    assert pool.health().state == "ok"
    assert get(pool, "b").id == "b"


def test_unloading_waits_for_those_who_use_it(make) -> None:
    pool = make()
    assert pool.unload("b", 1) is None
    held = get(pool, "a")
    with pytest.raises(ModelUnavailable, match="a is still used by 1 requests"):
        pool.unload("a", 0.1)
    held.release()
    eventually(lambda: states(pool)["a"] == "cold")
    about = pool.process()
    assert (about["pid"], about["restarts"], about["pool"]) == (
        None,
        None,
        {"resident": [], "default": "a", "places": 1},
    )
    with pytest.raises(UnknownModel):
        pool.unload("x", 1)


def test_the_death_of_one_touches_its_own_requests(make) -> None:
    pool = make(places=2)
    a, b = get(pool, "a"), get(pool, "b")
    broken, kept = Heard(), ask(b.parts, HANG, "kept")
    broken = ask(a.parts, HANG, "broken")
    eventually(lambda: len(broken.events) == len(kept.events) == 1)
    os.kill(pid_of(a), signal.SIGKILL)
    failed = broken.wait()[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "engine_died"
    assert len(kept.events) == 1
    assert pool.health().state == "ok"
    assert ask(a.parts, SAY, "next").wait() == whole("next")
    rows = {one.id: row for one, row in pool.entries()}
    assert (rows["a"]["restarts"], rows["b"]["restarts"]) == (1, 0)
    b.parts.cancel("kept")
    kept.wait()


def test_draining_refuses_those_who_wait_and_stopping_leaves_no_process(make) -> None:
    pool = make(places=2)
    a, b = get(pool, "a"), get(pool, "b")
    pids = [pid_of(a), pid_of(b)]
    heard = ask(b.parts, HANG, "open")
    assert not pool.drain(0.1)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        pool.acquire("a")
    assert pool.health().state == "draining"
    b.parts.cancel("open")
    heard.wait()
    assert pool.drain(LONG)
    pool.stop()
    assert not any(map(alive, pids))
    assert pool.health().state == "stopped"


def test_stopping_does_not_wait_for_a_model_that_is_being_loaded(make) -> None:
    pool = make(entry("a", "never ready"))
    # Other tests' browsers and the like may be this process's children too.
    before = set(psutil.Process().children())
    waiting = pool.acquire("a")
    eventually(lambda: len(set(psutil.Process().children()) - before) == 1)
    pool.stop()
    with pytest.raises(EngineUnavailable, match="the server was stopped"):
        waiting.result(LONG)
    assert set(psutil.Process().children()) <= before


def test_a_model_that_ends_leaves_the_pool_well(make, tmp_path: Path) -> None:
    pool = make(entry("a", f"writes {tmp_path / 'states'}"))
    lease = get(pool, "a")
    lease.release()
    unloading = threading.Thread(target=pool.unload, args=("a", LONG))
    unloading.start()
    eventually(lambda: lease.parts.health().state == "stopped")
    assert pool.health().state == "ok"
    unloading.join(LONG)
    assert states(pool)["a"] == "cold"


def test_those_who_wait_at_a_drain_hear_of_it(make) -> None:
    pool = make(room=NEED)
    held = get(pool, "a")
    waiting = pool.acquire("b")
    pool.drain(0)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        waiting.result(LONG)
    held.release()


def test_sections_of_one_model_and_counts_of_all(make) -> None:
    pool = make(places=2)
    a = get(pool, "a")
    get(pool, "b")
    eventually(lambda: all("pid" in engine.stats() for engine in pool.engines().values()))
    assert pool.stats()["pool"]["shown"] == "b"
    assert pool.stats("a")["pid"] == pid_of(a) == pool.stats("a")["isolation"]["pid"]
    with pytest.raises(UnknownModel):
        pool.stats("x")
    assert pool.flush(3) == FlushReport(True, entries=3)
    assert pool.close_session("open")
    assert not pool.close_session("other")
    counts = pool.stats()["pool"]
    assert (counts["resident"], counts["loads"], counts["taken_bytes"], counts["waiting"]) == (2, 2, 20, 0)


def test_joined_reports_count_one_directory_once() -> None:
    both = joined(
        [FlushReport(True, 2, entries=9, longest=100), FlushReport(False, 3, missing=1, entries=9, longest=40)]
    )
    assert both == FlushReport(False, 5, missing=1, entries=9, longest=100)
    assert joined([]).durable


@given(st.integers(1, 8), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_budget_is_shared_so_that_what_fits_is_certain(places: int, room: int, need: int) -> None:
    plan = Plan(places, room, True)
    share = plan.share(need)
    assert share <= room
    if plan.possible(need):
        assert share >= need
    if need * (places + 1) <= room:
        assert plan.fits([share] * (places + 1))
    assert Plan(places, room, False).share(need) == need


class Fake:
    """An engine without a process."""

    model = ModelInfo("fake", "/nowhere", "llama", 512, 257, (256,), 1000, 1_700_000_000)

    def __init__(self, ended: Callable[[], None]) -> None:
        self.ended = ended
        self.lock, self.stopped = threading.Lock(), False

    def wait(self, deaths: int | None = None) -> ModelInfo:
        time.sleep(random.random() / 300)
        return self.model

    def health(self) -> Health:
        return Health("ok")

    def stats(self) -> dict[str, object]:
        return {}

    def process(self) -> dict[str, object]:
        return {"pid": 1, "restarts": 0}

    def drain(self, timeout: float) -> bool:
        return True

    def stop(self) -> None:
        """As a real one, which a pool that ends may stop while it is leaving."""
        with self.lock:
            again, self.stopped = self.stopped, True
        if not again:
            self.ended()


@pytest.mark.parametrize("seed", range(4))
def test_many_requests_at_once_never_break_the_plan(seed: int) -> None:
    """Every request gets its model or gives up by itself, no more live than may, and pinned ones are loaded once."""
    dice = random.Random(seed)
    needs = {name: dice.randint(1, 60) for name in "abcdef"}
    pins = ["a"] if seed % 2 else []
    needs["a"] = 20
    plan = Plan(1 + len(pins), 100, True)
    live: list[str] = []
    broken: list[str] = []
    lock = threading.Lock()

    def starting(one: Entry, share: int | None) -> Fake:
        with lock:
            live.append(one.id)
            if len(live) > plan.places + 1 or sum(plan.share(needs[name]) for name in live) > plan.room:
                broken.append(f"{live}")

        def ended() -> None:
            with lock:
                live.remove(one.id)

        return Fake(ended)

    possible = [
        name for name in needs if not pins or name == "a" or plan.share(needs[name]) + plan.share(20) <= plan.room
    ]
    pool: ModelPool[str] = ModelPool(
        [entry(name, need=need) for name, need in needs.items()],
        plan,
        starting,  # pyright: ignore[reportArgumentType]
        lambda one, _: one.id,
        pins=pins,
    )
    got: list[bool] = []

    def client(number: int) -> None:
        mine = random.Random(f"{seed} {number}")
        for _ in range(12):
            name = mine.choice(possible)
            asked: Future[Lease[str]] = pool.acquire(name)
            if mine.random() < 0.2 and asked.cancel():
                continue
            try:
                lease = asked.result(LONG)
            except CancelledError:
                continue
            time.sleep(mine.random() / 500)
            got.append(lease.parts == name == lease.id)
            lease.release()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LONG)
    rows = {one.id: row for one, row in pool.entries()}
    pool.stop()
    assert not broken
    assert len(got) > 30
    assert all(got)
    assert not any(row["leases"] or row["waiting"] for row in rows.values())
    assert not pins or rows["a"]["loads"] <= 1
    eventually(lambda: not live)
