"""Clients that hold on to the server without asking it anything: each is let go, and nobody waits for them."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from fake_engine import FakeEngine, Job, Live, eventually, live_server

from gnomon.config import HTTPConfig
from gnomon.serve.services import Timing

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextmanager
def trickling(raw: socket.socket, data: bytes, pause: float = 0.01) -> Iterator[None]:
    """Send one byte at a time, forever steady, until the other side has had enough."""
    done = threading.Event()

    def send() -> None:
        for byte in data:
            if done.wait(pause):
                return
            try:
                raw.sendall(bytes([byte]))
            except OSError:
                return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def heard(raw: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    raw.settimeout(120)
    found = b""
    try:
        while more := raw.recv(65536):
            found += more
    except ConnectionResetError:
        pass
    return found


def connect(live: Live[FakeEngine], begin: bytes = b"") -> socket.socket:
    """A connection on which `begin` lies before the server takes it: no clock of the server runs against this thread."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go.wait(120)

    live.server.servers[0].get_loop().call_soon_threadsafe(hold)
    assert held.wait(120)
    raw = socket.create_connection(("127.0.0.1", live.port), 120)
    raw.sendall(begin)
    go.set()
    return raw


@pytest.fixture
def files() -> Iterator[None]:
    """Both ends of five hundred connections, where a process may have a thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_head_that_comes_byte_by_byte_is_not_waited_for() -> None:
    with (
        live_server(FakeEngine(), timing=Timing(head=0.3)) as live,
        connect(live, HEAD) as raw,
        trickling(raw, b"x-filler: " + b"x" * 10_000),
    ):
        answer = heard(raw)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"head_timeout" in answer


def test_nor_is_the_second_head_of_a_connection() -> None:
    with (
        live_server(FakeEngine(), timing=Timing(head=0.3)) as live,
        connect(live, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n") as raw,
    ):
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")
        with trickling(raw, HEAD + b"x-filler: " + b"x" * 10_000):
            assert b"head_timeout" in heard(raw)


def test_a_whole_head_stops_the_clock() -> None:
    """The answer may take as long as it takes."""
    go = threading.Event()

    def script(job: Job) -> None:
        assert go.wait(120)
        job.finish()
        job.end()

    body = b'{"prompt": "x", "max_tokens": 4}'
    asked = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with live_server(FakeEngine(script), timing=Timing(head=0.3)) as live, connect(live, asked) as raw:
        time.sleep(0.6)
        go.set()
        assert heard(raw).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("files")
def test_nobody_waits_for_five_hundred_silent_connections() -> None:
    with live_server(FakeEngine(), timing=Timing(head=600)) as live, ExitStack() as held:
        for _ in range(500):
            held.enter_context(connect(live))
        answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 4})
        assert answer.status_code == 200
        assert len(live.server.server_state.connections) >= 500


@pytest.mark.usefixtures("files")
def test_five_hundred_silent_connections_are_let_go() -> None:
    with live_server(FakeEngine(), timing=Timing(head=0.3)) as live, ExitStack() as held:
        silent = [held.enter_context(connect(live)) for _ in range(500)]
        assert all(heard(one) == b"" for one in silent)
        eventually(lambda: not live.server.server_state.connections)


def test_a_body_that_comes_byte_by_byte() -> None:
    """Each pause is short, and all of it together would take days."""
    with live_server(FakeEngine(), timing=Timing(read=0.3, pace=10_000)) as live, connect(live) as raw:
        raw.sendall(HEAD + b"content-length: 1000000\r\n\r\n")
        with trickling(raw, b"{" + b" " * 10_000):
            answer = heard(raw)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in answer


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 64, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n", b"\r\n" * 2000 + b"\xff"]
)
def test_garbage_on_the_socket_is_refused_and_forgotten(garbage: bytes) -> None:
    with live_server(FakeEngine(), timing=Timing(head=0.5)) as live:
        with connect(live, garbage) as raw:
            answer = heard(raw)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))
        # A client that gets no turn for half a second is one whose head is late.
        eventually(lambda: httpx.get(f"{live.url}/health").status_code == 200)


def test_one_key_s_slow_bodies_take_no_other_key_s_places() -> None:
    http = HTTPConfig(api_keys=("slow", "other"), key_concurrency=2)
    body = {"prompt": "x", "max_tokens": 4}
    with live_server(FakeEngine(), http=http, timing=Timing(read=600.0)) as live, ExitStack() as held:
        for _ in range(2):
            raw = held.enter_context(connect(live))
            raw.sendall(HEAD + b"authorization: Bearer slow\r\ncontent-length: 100\r\n\r\n{")
        with httpx.Client(base_url=live.url, timeout=120) as client:

            def status(key: str) -> int:
                return client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).status_code

            eventually(lambda: status("slow") == 429)
            assert status("other") == 200
            held.close()
            eventually(lambda: status("slow") == 200)
