"""One server on a bound address, and ending well: a bounded drain at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from types import FrameType
from typing import Any, TypeVar, cast

import uvicorn
from fastapi import FastAPI

from gnomon.config import HTTPConfig
from gnomon.engine.api import FlushReport, Supervised
from gnomon.serve.keys import KeyRing
from gnomon.serve.listen import StartupError, address_of
from gnomon.serve.protocol import Protocol

logger = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_SECONDS = 5.0
"""How long responses may take to reach their clients once the engine has ended."""


class Server(uvicorn.Server):
    """Serves until a signal or the engine's end.

    At the first SIGTERM or SIGINT no more connections are taken, the open requests may finish for `shutdown_timeout` seconds, and
    what is left then hears an error; at the second they hear it at once.
    """

    def __init__(
        self, app: FastAPI, engine: Supervised, http: HTTPConfig, ready: Callable[[], None] | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("Any", partial(Protocol, head_seconds=app.state.services.timing.head)),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # The frame refuses with a proper body; this is for heads that never end.
                h11_max_incomplete_event_size=http.header_limit + 4096,
                timeout_graceful_shutdown=int(FLUSH_SECONDS),
            )
        )
        self.app = app
        self.engine = engine
        self.drain_timeout = http.shutdown_timeout
        self.ready = ready
        self.exit_code = 0
        self._force = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn raises the signals again at the end, so that a clean drain would look like a death by signal.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, self.handle_exit, one, None)
        keys: KeyRing = self.app.state.services.keys
        # Without a file of keys a hangup ends the server, as it ends any program whose terminal goes.
        if keys.path is not None:
            loop.add_signal_handler(signal.SIGHUP, lambda: keys.refresh(force=True))
        try:
            yield
        finally:
            for one in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(one)
            loop.remove_signal_handler(signal.SIGHUP)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  (uvicorn's signature)
        name = signal.Signals(sig).name
        if self.should_exit:
            logger.warning("%s again: stopping at once", name)
            self.force_exit = True
            self._force.set()
        else:
            logger.info("%s: open requests may finish for %g s", name, self.drain_timeout)
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.ready is not None:
            self.ready()

    async def on_tick(self, counter: int) -> bool:
        health = self.engine.health()
        if health.state in ("failed", "stopped") and not self.should_exit:
            logger.error("the engine has %s: %s", health.state, health.message or "no reason given")
            self.exit_code = 1
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        begun = time.monotonic()
        if self.exit_code == 0:
            draining = asyncio.ensure_future(in_thread(lambda: self.engine.drain(self.drain_timeout)))
            forced = asyncio.ensure_future(self._force.wait())
            await asyncio.wait({draining, forced}, return_when=asyncio.FIRST_COMPLETED)
            if not (draining.done() and draining.result()):
                logger.warning("requests were still open: they end with an error")
            left = max(0.0, self.drain_timeout - (time.monotonic() - begun))
            if not forced.done() and "ssd_cache" in self.engine.stats():
                flushing = asyncio.ensure_future(in_thread(lambda: self.engine.flush(left)))
                await asyncio.wait({flushing, forced}, return_when=asyncio.FIRST_COMPLETED)
                _report(flushing.result() if flushing.done() else None)
                flushing.cancel()
            forced.cancel()
            draining.cancel()
        await asyncio.wait({asyncio.ensure_future(in_thread(self.engine.stop))}, timeout=FLUSH_SECONDS)
        await super().shutdown(sockets)


def _report(report: FlushReport | None) -> None:
    """Log what of the cache the next start will find."""
    if report is not None and report.durable:
        about = (report.entries, report.longest, report.seconds)
        logger.info("the SSD cache is durable: %d files, the longest prefix has %d tokens (%.1f s)", *about)
    elif report is not None:
        lost = (report.pending + report.pending_spills, report.dropped, report.failed, report.missing)
        logger.warning("the SSD cache isn't durable: %d states pending, %d dropped, %d failed, %d missing", *lost)
    else:
        logger.warning("the SSD cache was not flushed")


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work()` on a daemon thread: unlike an executor's, it can't keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_result: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_result(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, work())
        except Exception as error:  # noqa: BLE001  (handed to whoever awaits)
            outcome = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop closed: nobody awaits
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="server-wait", daemon=True).start()
    return await future


@contextlib.contextmanager
def serving(app: FastAPI, engine: Supervised, bound: socket.socket, config: HTTPConfig) -> Generator[str]:
    """The address at which a thread of this process serves `app` until the block ends; the engine is stopped then.

    Raises StartupError when it can't start.
    """
    started = threading.Event()
    server = Server(app, engine, config, started.set)

    def run() -> None:
        asyncio.run(server.serve([bound]))

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    try:
        while not started.wait(0.05):
            if not thread.is_alive():
                raise StartupError(f"can't serve at {address_of(bound)}: the log says why")
        yield address_of(bound)
    finally:
        server.should_exit = True
        thread.join()
        app.state.services.preparation.close()


def serve(
    app: FastAPI, engine: Supervised, bound: socket.socket, config: HTTPConfig, ready: Callable[[], None] | None = None
) -> int:
    """Serve `app` on a socket from `bind` until a signal, and return the process's exit code: 1 if the engine failed.

    `ready` is called once connections are taken. The engine is stopped at the end.
    """

    async def main() -> int:
        server = Server(app, engine, config, ready)
        try:
            await server.serve([bound])
        finally:
            app.state.services.preparation.close()
            if config.unix is not None:
                config.unix.unlink(missing_ok=True)
        return server.exit_code

    return asyncio.run(main())
