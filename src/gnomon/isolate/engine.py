"""The parent's side: an `Engine` whose work is done by a child process that is started again when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Literal

from gnomon.chat.constraint import Constraint
from gnomon.engine.api import (
    ChoiceFinished,
    Delta,
    EngineError,
    EngineUnavailable,
    Event,
    Failed,
    Finished,
    FlushReport,
    Health,
    InvalidRequest,
    ModelInfo,
    Replayed,
    Request,
    Sink,
    TokenLogprob,
)
from gnomon.isolate.life import AWAY, Child, Patience, Ticket, how_it_ended, in_time, tell
from gnomon.isolate.messages import (
    Call,
    Cancel,
    Compile,
    Drop,
    Happened,
    Ready,
    Reply,
    Report,
    Start,
    Stop,
    Submit,
    Unloadable,
    Writer,
)

log = logging.getLogger(__name__)

_ANSWER = (Delta, Replayed, ChoiceFinished)
_LAST = (Finished, Failed)


class IsolatedEngine:
    """Starts `command` with the number of a socket as its last argument, sends it `what`, and asks it for everything.

    When the child dies, answers under way end with `Failed` of code `engine_died`; requests of which nothing was delivered yet are
    asked once more of the next child. A child whose reports stop is killed. Use `wait` before serving.
    """

    def __init__(self, command: Sequence[str], what: object, patience: Patience | None = None) -> None:
        self._command = tuple(command)
        self._what = what
        self._patience = patience or Patience()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tickets: dict[str, Ticket] = {}
        self._replies: dict[int, Future[Any]] = {}
        self._numbers = count(1)
        self._aside: set[int] = set()
        """Embeddings and scorings whose future is open."""
        self._child: Child | None = None
        """The one that is ready."""
        self._model: ModelInfo | None = None
        self._unloadable: str | None = None
        self._report: Report | None = None
        self._draining = False
        self._stopping = False
        self._restarts = 0
        self._deaths: deque[float] = deque()
        self._message = "the engine's process is starting"
        self._death = ""
        """How the last child ended."""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="isolate", daemon=True)
        self._thread.start()

    # The door

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise EngineUnavailable(self._unloadable or self._message)
        return self._model

    def wait(self, deaths: int | None = None) -> ModelInfo:
        """Wait until the first child is ready, or `deaths` of them have died.

        Raises RuntimeError with the reason when it can't load, TimeoutError when it doesn't.
        """

        def given_up() -> bool:
            return self._stopping or (deaths is not None and self._restarts >= deaths)

        with self._changed:
            self._changed.wait_for(
                lambda: self._model is not None or self._unloadable is not None or given_up(), self._patience.load
            )
        if self._unloadable is not None:
            raise RuntimeError(self._unloadable)
        if self._model is None and given_up():
            died = f"the engine's process {self._death}, {self._restarts} times before it was ready"
            raise RuntimeError("the server was stopped" if self._stopping else died)
        if self._model is None:
            raise TimeoutError(f"the engine's process was not ready within {self._patience.load:g} s")
        return self._model

    def restart_with(self, what: object) -> None:
        """What later children are sent in place of the first one's."""
        self._what = what

    def submit(self, request: Request, sink: Sink) -> None:
        """Hand a request to the child; while none is ready it waits for the next. Events reach `sink` on a thread of this object.

        Raises what the child's engine raises, and EngineUnavailable when it does not answer.
        """
        with self._lock:
            if self._draining or self._stopping:
                raise EngineUnavailable("the server is shutting down")
            if self._unloadable is not None:
                raise EngineUnavailable(self._unloadable)
            if request.id in self._tickets:
                raise InvalidRequest(f"request id {request.id!r} is in use", "id")
            child = self._child
            if child is not None and child.silence > self._patience.submit:
                raise EngineUnavailable("the engine's process stands still")
            self._tickets[request.id] = Ticket(request, sink)
            if child is None:
                return
            reply = self._ask(child, Submit(next(self._numbers), request))
        try:
            in_time(reply, self._patience.submit)
        except (EngineError, FutureTimeout) as error:
            with self._changed:
                self._tickets.pop(request.id, None)
                self._changed.notify_all()
            if isinstance(error, EngineError):
                raise
            child.writer.send(Cancel(request.id))
            raise EngineUnavailable(
                f"the engine's process took no request within {self._patience.submit:g} s"
            ) from error
        except ConnectionError:
            return  # it died: the ticket goes to the next child

    def compile(self, constraint: Constraint) -> Sequence[str]:
        """Make ready to enforce a constraint. Raises `Unenforceable`, or EngineUnavailable while no child can say."""
        with self._lock:
            child = self._child
            if child is None:
                raise EngineUnavailable(self._message)
            reply = self._ask(child, Compile(next(self._numbers), constraint))
        patience, end = self._patience, time.monotonic() + self._patience.compile
        while True:
            try:
                return reply.result(patience.submit)
            except FutureTimeout as error:
                # Requests for other models may wait behind this one.
                if child.silence > patience.submit:
                    raise EngineUnavailable("the engine's process stands still") from error
                if time.monotonic() >= end:
                    raise EngineUnavailable(
                        f"the engine's process did not compile the grammar within {patience.compile:g} s"
                    ) from error
            except ConnectionError as error:
                raise EngineUnavailable("the engine's process did not compile the grammar") from error

    def embed(self, prompts: Sequence[tuple[int, ...]]) -> Future[list[list[float]]]:
        """Vectors of length 1. The child's refusals come by the future; whoever cancels it stops the work."""
        return self._later("embed", prompts)

    def score(self, prompts: Sequence[tuple[int, ...]], top: int) -> Future[list[tuple[TokenLogprob, ...]]]:
        """Scores of the prompts' tokens but the first. The child's refusals come by the future; whoever cancels it stops the work."""
        return self._later("score", (prompts, top))

    def _later(self, name: Literal["embed", "score"], argument: Any) -> Future[Any]:
        made: Future[Any] = Future()
        with self._lock:
            child = self._child
            if self._draining or self._stopping:
                raise EngineUnavailable("the server is shutting down")
            if child is None:
                raise EngineUnavailable(self._message)
            number = next(self._numbers)
            reply = self._ask(child, Call(number, name, argument))
            self._aside.add(number)

        def settle(done: Future[Any]) -> None:
            if not made.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is None:
                made.set_result(done.result())
            else:
                made.set_exception(EngineUnavailable(str(error)) if isinstance(error, ConnectionError) else error)

        def settled(_: Future[Any]) -> None:
            with self._changed:
                self._aside.discard(number)
                dropped = self._replies.pop(number, None)
                self._changed.notify_all()
            if dropped is not None:
                child.writer.send(Drop(number))

        made.add_done_callback(settled)
        reply.add_done_callback(settle)
        return made

    def flush(self, timeout: float) -> FlushReport:
        """Write every state that only memory holds, waiting up to `timeout` seconds."""
        report = self._call("flush", timeout, timeout + self._patience.submit)
        return report if isinstance(report, FlushReport) else FlushReport(False)

    def close_session(self, session: str) -> bool:
        """Hold on to a session's states no longer; False if there is no such session, or no child to ask."""
        return bool(self._call("close_session", session, self._patience.compile))

    def _call(self, name: Literal["flush", "close_session"], argument: Any, timeout: float) -> Any:
        """What the child's engine returns; None when there is none, or it does not answer in time."""
        with self._lock:
            child = self._child
            if child is None:
                return None
            reply = self._ask(child, Call(next(self._numbers), name, argument))
        try:
            return reply.result(timeout)
        except (FutureTimeout, ConnectionError):
            return None

    def cancel(self, request_id: str, *, answered: bool = False) -> None:
        """Stop a request; its sink still gets its last event. Unknown ids are ignored. `answered` as the engine's own."""
        ended: list[tuple[Ticket, Event]] = []
        with self._changed:
            ticket, child = self._tickets.get(request_id), self._child
            if ticket is None:
                return
            if child is None:
                del self._tickets[request_id]
                self._changed.notify_all()
                ended.append((ticket, Failed(request_id, "the request was cancelled", "cancelled")))
            else:
                ticket.cancelled = True
                child.writer.send(Cancel(request_id, answered))
        tell(ended)

    def health(self) -> Health:
        report, child = self._report, self._child
        if self._stopping:
            return Health("stopped")
        if self._unloadable is not None:
            return Health("failed", 0.0, self._unloadable)
        if child is None or report is None:
            return Health("loading", 0.0, self._message)
        silence = child.silence
        if silence > self._patience.submit:
            return Health("stalled", silence, f"the engine's process has said nothing for {silence:.0f} s")
        if self._draining:
            return Health("draining", report.health.beat_age)
        return report.health

    def stats(self) -> Mapping[str, Any]:
        """What the child last reported, and about the child itself."""
        report = self._report
        return {**(report.stats if report is not None else {}), "isolation": self.process()}

    def process(self) -> Mapping[str, Any]:
        """The child's process, as plain JSON values."""
        child = self._child
        return {
            "isolated": True,
            "pid": child.process.pid if child is not None else None,
            "restarts": self._restarts,
            "socket": "an unnamed pair",
            "state": self.health().state,
            "open_requests": len(self._tickets),
        }

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait up to `timeout` seconds for the open ones; True if all ended by themselves."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._tickets and not self._aside, timeout)

    def stop(self) -> None:
        """End the child, giving it time to write what it holds. Open requests get `Failed`."""
        with self._changed:
            already, self._stopping = self._stopping, True
            child = self._child
            self._changed.notify_all()
        self._wake.set()
        if child is not None and not already:
            child.writer.send(Stop())
        self._thread.join(self._patience.stop + 5)

    # Lives of the child, on the thread

    def _run(self) -> None:
        while not self._stopping:
            child = self._spawn()
            try:
                self._listen(child)
            finally:
                self._bury(child)
            if self._unloadable is not None:
                return
            if not self._stopping:
                with self._changed:
                    self._restarts += 1
                    self._changed.notify_all()
                self._rest(child)

    def _spawn(self) -> Child:
        ours, theirs = socket.socketpair()
        # A read within a message would wait for ever; reading begins only when there is something.
        patience = self._patience.silence
        ours.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(patience), int(patience % 1 * 1e6))
        )
        with theirs:
            # A session of its own: signals from the terminal reach the parent alone.
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno())], pass_fds=(theirs.fileno(),), start_new_session=True
            )
        connection = Connection(ours.detach())
        child = Child(process, connection, Writer(connection, "isolate-writer"))
        child.writer.send(Start(self._what))
        return child

    def _listen(self, child: Child) -> None:
        """Until the child is gone, frozen, or ended as asked."""
        limit, looked = 0.0, time.monotonic()
        # The connection's own way to wait makes all this anew for every message.
        ready = select.poll()
        ready.register(child.connection.fileno(), select.POLLIN)
        while True:
            if self._stopping and not child.ready:
                return  # it has nothing to write
            if self._stopping and not limit:
                child.writer.send(Stop())
                limit = time.monotonic() + self._patience.stop
            now = time.monotonic()
            if limit and now > limit:
                log.warning("the engine's process did not end within %g s: killed", self._patience.stop)
                return
            if now - looked > AWAY:
                # This process stood still itself (a debugger, a machine that was paused): that silence is not the child's.
                child.heard += now - looked
            looked = now
            if not ready.poll(100):
                silence, allowed = child.silence, self._patience.silence if child.ready else self._patience.load
                # A child that ends reports no more.
                if not limit and silence > allowed:
                    log.error(
                        "the engine's process (pid %d) said nothing for %.0f s: killed", child.process.pid, silence
                    )
                    return
                continue
            try:
                message = child.connection.recv()
            except BlockingIOError:
                log.error("the engine's process (pid %d) stopped within a message: killed", child.process.pid)
                return
            except (EOFError, OSError):
                return
            child.heard = time.monotonic()
            self._hear(child, message)

    def _hear(self, child: Child, message: object) -> None:
        match message:
            case Happened(events):
                self._deliver(events)
            case Report():
                self._report = message
            case Reply(number, value, error):
                with self._lock:
                    reply = self._replies.pop(number, None)
                if reply is not None and error is None:
                    reply.set_result(value)
                elif reply is not None:
                    reply.set_exception(error)
            case Ready(model):
                self._welcome(child, model)
            case Unloadable(reason):
                with self._changed:
                    self._unloadable = reason
                    self._changed.notify_all()
            case _:
                raise TypeError(f"unknown message {type(message).__name__}")

    def _welcome(self, child: Child, model: ModelInfo) -> None:
        child.ready = time.monotonic()
        with self._changed:
            self._child, self._model = child, model
            self._report = self._report or Report(Health("ok"), {})
            waiting = list(self._tickets.values())
            replies = [(one, self._ask(child, Submit(next(self._numbers), one.request))) for one in waiting]
            self._changed.notify_all()
        for ticket, reply in replies:
            reply.add_done_callback(lambda done, ticket=ticket: self._resubmitted(ticket, done))
        if self._restarts:
            log.warning("the engine's process runs again (pid %d), %d requests go on", child.process.pid, len(waiting))

    def _resubmitted(self, ticket: Ticket, reply: Future[None]) -> None:
        error = reply.exception()
        if error is None or isinstance(error, ConnectionError):
            return
        with self._changed:
            self._tickets.pop(ticket.request.id, None)
            self._changed.notify_all()
        refusal = error if isinstance(error, EngineError) else None
        tell([(ticket, Failed(ticket.request.id, str(error), "refused", refusal=refusal))])

    def _deliver(self, events: Sequence[Event]) -> None:
        heard: list[tuple[Ticket, Event]] = []
        with self._changed:
            for event in events:
                ticket = self._tickets.get(event.request_id)
                if ticket is None:
                    continue
                if isinstance(event, _ANSWER):
                    ticket.begun = True
                if isinstance(event, _LAST):
                    del self._tickets[event.request_id]
                    self._changed.notify_all()
                heard.append((ticket, event))
        tell(heard)

    def _bury(self, child: Child) -> None:
        """The child is dead or has to be: settle what it leaves."""
        with self._changed:
            self._child = None
            replies, self._replies = list(self._replies.values()), {}
        if child.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._stopping or self._unloadable is not None:
                    child.process.wait(1.0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGKILL)
        code = child.process.wait()
        # Writes fail by now; the number of a socket closed under one might be another's the next moment.
        child.writer.close()
        child.connection.close()
        how = self._death = how_it_ended(code)
        if not self._stopping and self._unloadable is None:
            log.error("the engine's process (pid %d) %s", child.process.pid, how)
        for reply in replies:
            reply.set_exception(ConnectionError(f"the engine's process {how}"))
        ended: list[tuple[Ticket, Event]] = []
        with self._changed:
            self._message = f"the engine's process {how} and is being started again"
            for name, ticket in list(self._tickets.items()):
                again = not (ticket.begun or ticket.retried or ticket.cancelled)
                if again and not self._stopping and self._unloadable is None:
                    ticket.retried = True
                    continue
                del self._tickets[name]
                reason = "the server was stopped" if self._stopping else f"the engine's process {how} during the answer"
                ended.append((ticket, Failed(name, reason, "engine_stopped" if self._stopping else "engine_died")))
            self._changed.notify_all()
        tell(ended)

    def _rest(self, child: Child) -> None:
        """Wait as long as the limits on restarts ask for."""
        now, patience, wait = time.monotonic(), self._patience, 0.0
        if not child.ready or now - child.ready < patience.early_death:
            wait = patience.pause
        while self._deaths and now - self._deaths[0] > patience.window:
            self._deaths.popleft()
        if len(self._deaths) >= patience.restarts:
            wait = max(wait, patience.window - (now - self._deaths[0]))
        if wait > 0:
            self._message += f" in {wait:.0f} s"
            log.warning("the engine's process is started again in %.0f s", wait)
            self._wake.wait(wait)
        self._deaths.append(time.monotonic())

    def _ask(self, child: Child, message: Submit | Compile | Call) -> Future[Any]:
        """Send a message whose number is new; the lock is held."""
        reply = self._replies[message.number] = Future[Any]()
        child.writer.send(message)
        return reply
