"""Several models behind one server, each in a process of its own: loaded when asked for, ended when others need their place."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gnomon.engine.api import (
    EngineUnavailable,
    FlushReport,
    Health,
    ModelInfo,
    ModelUnavailable,
    QueueFull,
    Supervised,
    UnknownModel,
)
from gnomon.isolate.engine import IsolatedEngine
from gnomon.isolate.member import Lease, Member, Waiter
from gnomon.isolate.plan import Entry, Plan

log = logging.getLogger(__name__)
P = TypeVar("P")

TICK = 0.5
"""Seconds between looks at what no one tells of: deadlines, idle models, engines that failed."""
DEATHS = 2
"""Of a child that isn't ready yet, after which its model can't be loaded."""
LET_GO = 5.0
"""Seconds that cancelled requests get for their last event once nobody waits for them."""
FLUSH = 60.0
"""Seconds that a model which goes may write its states."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what waits for models. Times are in seconds."""

    queue: int = 64
    wait: float = 600.0
    idle_unload: float = 0.0
    """A model that was not asked for so long is unloaded; 0 keeps it."""
    retry: float = 10.0
    """A model that couldn't be loaded is not tried again for so long."""


class ModelPool(Generic[P]):
    """The models of `entries`, the first of which is the default.

    `make` starts the process of a model, given the bytes it may take (None without a budget); `open` then makes whatever callers need
    beside it, which their leases hold. A thread decides what is loaded and what goes; models are loaded one at a time, on threads of
    their own. A new model starts while the old ones serve if all fit by `plan`; else those used longest ago end first.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        plan: Plan,
        make: Callable[[Entry, int | None], IsolatedEngine],
        open: Callable[[Entry, IsolatedEngine], P],
        *,
        pins: Iterable[str] = (),
        limits: Limits | None = None,
    ) -> None:
        pinned = set(pins)
        self.plan = plan
        self.limits = limits or Limits()
        self._make = make
        self._open = open
        self._members: dict[str, Member[P]] = {
            entry.id: Member(entry, plan.share(entry.need), entry.id in pinned) for entry in entries
        }
        self._default = self._members[entries[0].id]
        self._model: ModelInfo | None = None
        self._shown = self._default
        self._changed = threading.Condition()
        self._draining = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model-pool", daemon=True)
        self._thread.start()

    # Asking for a model

    def acquire(self, model: str | None) -> Future[Lease[P]]:
        """A lease of the model of this id, or of the default; the future comes true when it is resident, and may be cancelled.

        Raises UnknownModel, QueueFull, or an EngineUnavailable with the reason; the future may fail with ModelUnavailable.
        """
        with self._changed:
            if self._draining or self._stopping:
                raise EngineUnavailable("the server is shutting down")
            member = self._named(model)
            now = time.monotonic()
            lease: Future[Lease[P]] = Future()
            if member.state == "resident":
                lease.set_result(self._lease(member))
                return lease
            if member.state == "failed":
                again = member.failed_at + self.limits.retry - now
                if again > 0:
                    raise ModelUnavailable(f"{member.failure}; it is tried again in {again:.0f} s at the soonest")
                member.state = "cold"
            waiting = sum(len(one.waiters) for one in self._members.values())
            if waiting >= self.limits.queue:
                raise QueueFull(
                    f"{waiting} requests wait for models to be loaded, and no more than {self.limits.queue} may", 5
                )
            member.waiters.append(Waiter(lease, now, now + self.limits.wait))
            self._changed.notify_all()
            return lease

    def _named(self, model: str | None) -> Member[P]:
        if model is None:
            return self._default
        found = self._members.get(model)
        if found is None:
            raise UnknownModel(f"there is no model {model!r} here; there are {', '.join(self._members)}")
        return found

    def _lease(self, member: Member[P]) -> Lease[P]:
        """The lock is held, and the member is resident."""
        parts = member.parts
        if parts is None:
            raise RuntimeError(f"{member.id} is resident and was not opened")
        member.leases += 1
        member.requests += 1
        member.used = time.monotonic()
        self._shown = member
        given = [member]

        def release() -> None:
            with self._changed:
                if given:
                    given.clear()
                    member.leases -= 1
                    member.used = time.monotonic()
                    if member.state != "resident" or not member.leases:
                        self._changed.notify_all()

        return Lease(member.id, parts, release)

    def _lend(self, member: Member[P]) -> None:
        """To all who wait for it; the lock is held."""
        for waiter in member.waiters:
            if waiter.lease.set_running_or_notify_cancel():
                waiter.lease.set_result(self._lease(member))
        member.waiters.clear()

    def unload(self, model: str, timeout: float) -> FlushReport | None:
        """End a model's process once nobody uses it, waiting up to `timeout` seconds; what it left on disk, None if it had no process.

        Raises UnknownModel, and ModelUnavailable when it is being loaded or is still in use at the end: it goes when it is let go.
        """
        with self._changed:
            member = self._named(model)
            if member.state in ("cold", "failed"):
                return None
            if member.state == "loading":
                raise ModelUnavailable(f"{model} is being loaded")
            member.drain()
            process = member.engine
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: member.engine is not process, timeout):
                raise ModelUnavailable(f"{model} is still used by {member.leases} requests and goes when they end")
            return member.flushed

    # The whole, as a server watches over it

    @property
    def model(self) -> ModelInfo:
        """The default's, loaded or not."""
        if self._model is None:
            raise EngineUnavailable(f"{self._default.id} is not loaded yet")
        return self._model

    def health(self) -> Health:
        """Well while any model is, and while none is loaded."""
        if self._stopping:
            return Health("stopped")
        if self._draining:
            return Health("draining")
        ill: Health | None = None
        with self._changed:
            # Those that go are stopped by and by, which is no illness.
            staying = [
                one.engine for one in self._members.values() if one.engine is not None and one.state == "resident"
            ]
        for engine in staying:
            health = engine.health()
            if health.state == "ok":
                return health
            # A model that failed is taken out of the pool; the server goes on.
            ill = Health("stalled", health.beat_age, health.message) if health.state == "failed" else health
        return ill or Health("ok")

    def engines(self) -> Mapping[str, Supervised]:
        """Of the models that have one, by id."""
        with self._changed:
            return {
                one.id: one.engine
                for one in self._members.values()
                if one.engine is not None and one.state != "loading"
            }

    def entries(self) -> list[tuple[Entry, Mapping[str, Any]]]:
        """All models, the default first, each with what is known of its state."""
        with self._changed:
            return [(one.entry, one.row()) for one in self._members.values()]

    def stats(self, model: str | None = None) -> Mapping[str, Any]:
        """The engine's sections of one model, by default of the one asked for last, and the pool's own. Raises UnknownModel."""
        with self._changed:
            shown = self._shown if model is None else self._named(model)
            engine = shown.engine
        sections = {} if engine is None else engine.stats()
        return {**sections, "isolation": self._process(shown), "pool": self._pool(shown)}

    def process(self) -> Mapping[str, Any]:
        """The default's process, with nulls while it has none, and which models are loaded."""
        with self._changed:
            resident = [one.id for one in self._members.values() if one.state == "resident"]
            about = {"resident": resident, "default": self._default.id, "places": self.plan.places}
            return {**self._process(self._default), "pool": about}

    def _process(self, member: Member[P]) -> Mapping[str, Any]:
        if member.engine is not None:
            return member.engine.process()
        none = dict.fromkeys(("pid", "restarts", "socket"))
        return {"isolated": True, **none, "state": member.state, "open_requests": 0}

    def _pool(self, shown: Member[P]) -> dict[str, Any]:
        with self._changed:
            rows = [one.row() for one in self._members.values()]
        live = [row for row in rows if row["state"] in ("loading", "resident", "draining")]
        return {
            "places": self.plan.places,
            "default": self._default.id,
            "shown": shown.id,
            "resident": sum(row["state"] == "resident" for row in rows),
            "waiting": sum(row["waiting"] for row in rows),
            "queue_limit": self.limits.queue,
            "loads": sum(row["loads"] for row in rows),
            "room_bytes": self.plan.room,
            "budget": self.plan.enforced,
            "taken_bytes": sum(row["share_bytes"] for row in live),
            "models": rows,
        }

    def flush(self, timeout: float) -> FlushReport:
        """As the engine's, of all models that are loaded."""
        reports = _each([lambda one=one: one.flush(timeout) for one in self.engines().values()])
        return joined(reports)

    def close_session(self, session: str) -> bool:
        return any(_each([lambda one=one: one.close_session(session) for one in self.engines().values()]))

    def drain(self, timeout: float) -> bool:
        """Refuse new requests, also those that wait, and give the open ones of all models up to `timeout` seconds."""
        with self._changed:
            self._draining = True
            self._refuse("the server is shutting down")
            self._changed.notify_all()
        return all(_each([lambda one=one: one.drain(timeout) for one in self.engines().values()]))

    def stop(self) -> None:
        """End all processes, giving them time to write what they hold."""
        with self._changed:
            self._stopping = True
            self._refuse("the server was stopped")
            engines = [one.engine for one in self._members.values() if one.engine is not None]
            self._changed.notify_all()
        _each([one.stop for one in engines])
        self._thread.join()

    def _refuse(self, reason: str) -> None:
        for member in self._members.values():
            _fail(member, EngineUnavailable(reason))

    # Deciding, on the thread; the lock is held in each of these

    def _run(self) -> None:
        with self._changed:
            while not self._stopping:
                try:
                    self._turn(time.monotonic())
                except (
                    Exception
                ):  # whatever it is, the next turn may fare better, and without this thread nothing is loaded
                    log.exception("the model pool's turn failed")
                self._changed.wait(TICK)

    def _turn(self, now: float) -> None:
        members = self._members.values()
        for member in members:
            self._look(member, now)
        cold = [one for one in members if one.waiters and one.state == "cold"]
        if not any(one.state == "loading" for one in members):
            if cold:
                self._provide(min(cold, key=lambda one: one.waiters[0].since))
            else:
                self._revive()
        for member in members:
            if member.state == "draining" and not member.leases and not member.leaving:
                member.leaving = True
                self._aside(self._leave, member)

    def _revive(self) -> None:
        """Those who wanted a model's place have given up: it stays."""
        for member in self._members.values():
            if member.making_room and not member.leaving and len(self._staying()) < self.plan.places:
                member.state, member.making_room = "resident", False
                self._lend(member)

    def _look(self, member: Member[P], now: float) -> None:
        while member.waiters and (member.waiters[0].lease.cancelled() or member.waiters[0].deadline <= now):
            waiter = member.waiters.popleft()
            if waiter.lease.set_running_or_notify_cancel():
                reason = f"{member.id} was not loaded within {self.limits.wait:g} s: it is {member.state}"
                waiter.lease.set_exception(ModelUnavailable(reason))
        for waiter in [one for one in member.waiters if one.lease.cancelled()]:
            member.waiters.remove(waiter)
        if member.state != "resident" or member.engine is None:
            return
        health = member.engine.health()
        idle = self.limits.idle_unload
        if health.state == "failed":
            self._failed(member, f"{member.id} failed: {health.message}")
            member.drain()
        elif idle and not member.pinned and not member.leases and now - member.used >= idle:
            log.info("%s was not asked for in %.0f s and is unloaded", member.id, now - member.used)
            member.drain()

    def _staying(self) -> list[Member[P]]:
        return [one for one in self._members.values() if one.state in ("loading", "resident")]

    def _provide(self, wanted: Member[P]) -> None:
        """Load a model, or make room for it."""
        staying = self._staying()
        live = [one for one in self._members.values() if one.live]
        if not self.plan.possible(wanted.entry.need):
            return self._refused(
                wanted,
                f"{wanted.id} needs {wanted.entry.need / 1e9:.2f} GB and --memory-budget is {self.plan.room / 1e9:.2f} GB",
            )
        pinned = [one for one in staying if one.pinned]
        if len(pinned) >= self.plan.places:
            return self._refused(
                wanted, f"{wanted.id} has no place: {_names(pinned)} are pinned, and there are {self.plan.places}"
            )
        if self.plan.enforced and not self._room(wanted, pinned):
            return self._refused(
                wanted,
                f"{wanted.id} takes {wanted.share / 1e9:.2f} GB beside {_names(pinned)}, which are pinned, and "
                f"--memory-budget is {self.plan.room / 1e9:.2f} GB",
            )
        if self.plan.fits([one.share for one in (*live, wanted)]) and len(live) <= self.plan.places:
            return self._start(wanted)
        going = sorted((one for one in staying if not one.pinned), key=_last_used)
        while going and not self._room(wanted, [*pinned, *going]):
            going.pop(0).drain(making_room=True)
        if not self._room(wanted, [*pinned, *going]) and len(live) == len(pinned):
            # Advice stops nothing: without a budget it is the operator's machine.
            log.warning("%s is loaded although it may not fit beside %s", wanted.id, _names(pinned) or "anything")
            self._start(wanted)
        return None

    def _room(self, wanted: Member[P], others: Sequence[Member[P]]) -> bool:
        return len(others) <= self.plan.places and self.plan.fits([one.share for one in (*others, wanted)])

    def _refused(self, member: Member[P], reason: str) -> None:
        log.warning("%s", reason)
        _fail(member, ModelUnavailable(reason))

    def _start(self, member: Member[P]) -> None:
        member.state = "loading"
        self._aside(self._load, member)

    def _failed(self, member: Member[P], reason: str) -> None:
        log.error("%s", reason)
        member.failure, member.failed_at = reason, time.monotonic()

    def _aside(self, work: Callable[[Member[P]], None], member: Member[P]) -> None:
        threading.Thread(target=work, args=(member,), name=f"model-pool {member.id}", daemon=True).start()

    # Loading and ending, on threads of their own

    def _load(self, member: Member[P]) -> None:
        started = time.monotonic()
        log.info("loading %s", member.id)
        engine: IsolatedEngine | None = None
        try:
            with self._changed:
                if self._stopping:
                    return
                engine = self._make(member.entry, member.share if self.plan.enforced else None)
                member.engine = engine
            model = engine.wait(DEATHS)
            parts = self._open(member.entry, engine)
        except Exception as error:  # noqa: BLE001  (whatever its files make of it, this model can't be had, and others can)
            if engine is not None:
                engine.stop()
            with self._changed:
                member.engine, member.state = None, "failed"
                self._failed(member, f"{member.id} can't be loaded: {error}")
                _fail(member, ModelUnavailable(str(member.failure)))
                self._changed.notify_all()
            return
        with self._changed:
            now = time.monotonic()
            member.parts, member.state, member.failure, member.used = parts, "resident", None, now
            member.loads += 1
            member.load_seconds = now - started
            if member is self._default:
                self._model = model
            self._lend(member)
            staying = self._staying()
            others = sorted((one for one in staying if one is not member and not one.pinned), key=_last_used)
            for one in others[: max(0, len(staying) - self.plan.places)]:
                one.drain(making_room=True)
            log.info("%s is loaded (%.1f s)", member.id, member.load_seconds)
            self._changed.notify_all()

    def _leave(self, member: Member[P]) -> None:
        engine = member.engine
        if engine is None:
            raise RuntimeError(f"{member.id} has no process to end")
        report: FlushReport | None = None
        engine.drain(LET_GO)
        if "ssd_cache" in engine.stats():
            report = engine.flush(FLUSH)
            if not report.durable:
                log.warning("%s goes with %d states that are not on disk", member.id, report.missing)
        engine.stop()
        with self._changed:
            member.engine = member.parts = None
            member.state = "failed" if member.failure is not None else "cold"
            member.leaving = member.making_room = False
            member.flushed = report
            log.info("%s is unloaded", member.id)
            if member.state == "failed":
                _fail(member, ModelUnavailable(str(member.failure)))
            self._changed.notify_all()


def joined(reports: Sequence[FlushReport]) -> FlushReport:
    """What became durable in all; entries and the longest prefix are of one directory that all share."""

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in reports)

    return FlushReport(
        durable=all(one.durable for one in reports),
        flushed=total("flushed"),
        pending=total("pending"),
        pending_spills=total("pending_spills"),
        pending_spill_bytes=total("pending_spill_bytes"),
        dropped=total("dropped"),
        failed=total("failed"),
        missing=total("missing"),
        seconds=max((one.seconds for one in reports), default=0.0),
        entries=max((one.entries for one in reports), default=0),
        longest=max((one.longest for one in reports), default=0),
    )


def _last_used(member: Member[Any]) -> tuple[bool, float]:
    """Orders models by when they were of use, those in use last."""
    return member.leases > 0, member.used


def _names(members: Sequence[Member[Any]]) -> str:
    return ", ".join(one.id for one in members)


def _fail(member: Member[Any], error: EngineUnavailable) -> None:
    """Tell all who wait for a model why they don't get it."""
    for waiter in member.waiters:
        if waiter.lease.set_running_or_notify_cancel():
            waiter.lease.set_exception(error)
    member.waiters.clear()


R = TypeVar("R")


def _each(works: Sequence[Callable[[], R]]) -> list[R]:
    """The results of all, done at once."""
    results: list[R] = []
    threads = [threading.Thread(target=lambda work=work: results.append(work()), daemon=True) for work in works]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return results
