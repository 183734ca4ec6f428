"""Listening, and ending well: one address, one server on it, and a bounded drain at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import uvicorn
from fastapi import FastAPI

from gnomon.config import HTTPConfig
from gnomon.engine.api import FlushReport, Supervised
from gnomon.serve.auth import is_loopback
from gnomon.serve.keys import KeyFileError, KeyRing
from gnomon.serve.protocol import Protocol

logger = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_SECONDS = 5.0
"""How long responses may take to reach their clients once the engine has ended."""
PROBE_SECONDS = 1.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


class StartupError(Exception):
    """The server can't start where it was told to."""


def bind(config: HTTPConfig) -> socket.socket:
    """The bound socket, not yet listening, so that it can be had before a model is loaded.

    Raises StartupError when the address is reachable from elsewhere and no key protects it, when something already answers there,
    when the file of keys can't be used, or when it can't be bound.
    """
    try:
        keys = KeyRing.of(config)
    except KeyFileError as error:
        raise StartupError(f"--api-key-file: {error}") from error
    if config.unix is not None:
        return _bind_unix(config.unix)
    host = config.host.strip("[]")
    if not is_loopback(host) and not keys.required:
        raise StartupError(
            f"--host {config.host} is reachable from other machines: "
            "set --api-key (or GNOMON_API_KEY) or --api-key-file, or bind 127.0.0.1"
        )
    if config.port:
        there = answering(WILDCARDS.get(host, host), config.port)
        if there is not None:
            raise StartupError(f"port {config.port} is taken: {there}; stop it or choose another --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"can't listen on {config.host}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise StartupError(f"can't listen on {config.host} port {config.port}: {error}") from error
    return bound


def _bind_unix(path: Path) -> socket.socket:
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise StartupError(f"--unix {path} exists and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_SECONDS)
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
            else:
                raise StartupError(f"--unix {path} is taken: something listens there")
    bound = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise StartupError(f"can't listen on --unix {path}: {error}") from error
    finally:
        os.umask(before)
    return bound


def answering(host: str, port: int) -> str | None:
    """What answers `GET /v1` at an address, in words; None if nothing does."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", "/v1")
        response = connection.getresponse()
        status, body = response.status, response.read(65_536)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    with contextlib.suppress(ValueError):
        about: Any = json.loads(body)
        if isinstance(about, dict) and "name" in about:
            about = cast("dict[str, Any]", about)
            return f"{about['name']} {about.get('version', '')} already serves {about.get('model')} there"
    return f"something there answers /v1 with status {status}"


def address_of(bound: socket.socket) -> str:
    """Where clients find it: `http://127.0.0.1:8080`, or `unix:PATH`."""
    name: Any = bound.getsockname()
    if bound.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[0], name[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
