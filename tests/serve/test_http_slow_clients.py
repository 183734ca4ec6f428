"""Clients that hold on to the server without asking it anything: each is let go, and nobody waits for them."""

from __future__ import annotations

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
    raw.settimeout(20)
    found = b""
    try:
        while more := raw.recv(65536):
            found += more
    except ConnectionResetError:
        pass
    return found


def connect(live: Live[FakeEngine]) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), 20)


def test_a_head_that_comes_byte_by_byte_is_not_waited_for() -> None:
    with (
        live_server(FakeEngine(), timing=Timing(head=0.3)) as live,
        connect(live) as raw,
        trickling(raw, HEAD + b"x-filler: " + b"x" * 10_000),
    ):
        answer = heard(raw)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"head_timeout" in answer


def test_nor_is_the_second_head_of_a_connection() -> None:
    with live_server(FakeEngine(), timing=Timing(head=1.0)) as live, connect(live) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")
        with trickling(raw, HEAD + b"x-filler: " + b"x" * 10_000):
            assert b"head_timeout" in heard(raw)


def test_a_whole_head_stops_the_clock() -> None:
    """The answer may take as long as it takes."""
    go = threading.Event()

    def script(job: Job) -> None:
        assert go.wait(20)
        job.finish()
        job.end()

    with live_server(FakeEngine(script), timing=Timing(head=1.0)) as live, connect(live) as raw:
        body = b'{"prompt": "x", "max_tokens": 4}'
        raw.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        time.sleep(1.2)
        go.set()
        assert heard(raw).startswith(b"HTTP/1.1 200 ")


def test_five_hundred_silent_connections() -> None:
    with live_server(FakeEngine(), timing=Timing(head=2.0)) as live, ExitStack() as held:
        silent = [held.enter_context(connect(live)) for _ in range(500)]
        answer = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x", "max_tokens": 4}, timeout=20)
        assert answer.status_code == 200
        assert all(heard(one) == b"" for one in silent)
        eventually(lambda: len(live.server.server_state.connections) <= 1)


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
        with connect(live) as raw:
            raw.sendall(garbage)
            answer = heard(raw)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))
        assert httpx.get(f"{live.url}/health").status_code == 200


def test_one_key_s_slow_bodies_take_no_other_key_s_places() -> None:
    http = HTTPConfig(api_keys=("slow", "other"), key_concurrency=2)
    body = {"prompt": "x", "max_tokens": 4}
    with live_server(FakeEngine(), http=http, timing=Timing(read=5.0)) as live, ExitStack() as held:
        for _ in range(2):
            raw = held.enter_context(connect(live))
            raw.sendall(HEAD + b"authorization: Bearer slow\r\ncontent-length: 100\r\n\r\n{")
        with httpx.Client(base_url=live.url, timeout=20) as client:

            def status(key: str) -> int:
                return client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).status_code

            eventually(lambda: status("slow") == 429)
            assert status("other") == 200
            held.close()
            eventually(lambda: status("slow") == 200)
