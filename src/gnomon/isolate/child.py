"""The child's side: an engine that is asked over the link."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from gnomon.engine.api import Engine
from gnomon.isolate.messages import (
    REPORT_SECONDS,
    Call,
    Cancel,
    Compile,
    Drop,
    Ready,
    Reply,
    Report,
    Start,
    Stop,
    Submit,
    Unloadable,
    Writer,
)


def run(descriptor: int, make: Callable[[Any], Engine]) -> int:
    """Make an engine from what the parent sends and serve it until the parent says stop or is gone. Returns the exit code.

    `make` raises ValueError, OSError, RuntimeError or ImportError for an engine that can't be made.
    """
    # The parent decides when to end; signals of a terminal or a supervisor reach it too.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    connection = Connection(descriptor)
    start = connection.recv()
    if not isinstance(start, Start):
        raise TypeError(f"the first message must be Start, got {type(start).__name__}")
    writer = Writer(connection, "isolate-writer")
    try:
        engine = make(start.what)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        writer.send(Unloadable(str(error) or type(error).__name__))
        writer.close()
        return 1
    ended = threading.Event()
    writer.send(Ready(engine.model))
    reports = threading.Thread(target=_report, args=(engine, writer, ended), name="isolate-reports", daemon=True)
    reports.start()
    try:
        _answer(connection, engine, writer)
    except EOFError:
        pass  # the parent is gone, and nobody else can ask this engine
    finally:
        ended.set()
        engine.stop()
        writer.close()
    return 0


def _report(engine: Engine, writer: Writer, ended: threading.Event) -> None:
    while not ended.wait(REPORT_SECONDS):
        writer.send(Report(engine.health(), engine.stats()))


def _answer(connection: Connection, engine: Engine, writer: Writer) -> None:
    under_way: dict[int, Future[Any]] = {}
    """Embeddings and scorings by the number of their message."""

    def answer_one(message: Compile | Call) -> None:
        def work() -> Any:
            if isinstance(message, Compile):
                return tuple(engine.compile(message.constraint))
            if message.name == "flush":
                return engine.flush(message.argument)
            return engine.close_session(message.argument)

        writer.send(_reply(message.number, work))

    def set_aside(number: int, work: Callable[[], Future[Any]]) -> None:
        def settle(done: Future[Any]) -> None:
            under_way.pop(number, None)
            if not done.cancelled():
                writer.send(_reply(number, done.result))

        asked = _reply(number, work)
        if asked.error is not None:
            writer.send(asked)
            return
        under_way[number] = asked.value
        asked.value.add_done_callback(settle)

    while True:
        match connection.recv():
            case Submit(number, request):
                writer.send(_reply(number, lambda request=request: engine.submit(request, writer.send)))
            case Call(number, "embed", prompts):
                set_aside(number, lambda prompts=prompts: engine.embed(prompts))
            case Call(number, "score", (prompts, top)):
                set_aside(number, lambda prompts=prompts, top=top: engine.score(prompts, top))
            case Drop(number):
                if (vectors := under_way.get(number)) is not None:
                    vectors.cancel()
            case Compile() | Call() as message:
                # A large grammar or a full queue of writes takes seconds, and requests don't wait for it.
                threading.Thread(target=answer_one, args=(message,), name="isolate-call", daemon=True).start()
            case Cancel(request_id, answered):
                engine.cancel(request_id, answered=answered)
            case Stop():
                return
            case other:
                raise TypeError(f"unknown message {type(other).__name__}")


def _reply(number: int, work: Callable[[], Any]) -> Reply:
    try:
        return Reply(number, work())
    except Exception as error:  # noqa: BLE001  (raised again where it was asked)
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return Reply(number, error=error)
