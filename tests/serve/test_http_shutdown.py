"""Signals and the engine's death, on a real process."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fake_engine import eventually, user

HERE = Path(__file__).parent


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str

    def ended(self) -> int:
        return self.process.wait(300)


@contextlib.contextmanager
def running(mode: str, timeout_ms: int, *more: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "serving_process.py"), mode, str(timeout_ms), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, process.stderr.read() if process.stderr else ""
        yield Running(process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def streaming(url: str, text: str = "Hi") -> Iterator[Iterator[str]]:
    """An open stream, after its first text."""
    with httpx.stream("POST", url + "/v1/chat/completions", json=user(text, stream=True), timeout=120) as response:
        lines = response.iter_lines()
        for line in lines:
            if '"content":"A"' in line:
                break
        yield lines


def refuses(url: str) -> bool:
    """Whether nothing listens at `url`; False too for a connection the closing socket still took and then dropped."""
    try:
        httpx.get(url + "/health")
    except httpx.ConnectError:
        return True
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return False
    return False


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_streams_finish(sig: signal.Signals) -> None:
    with running("short", 30_000) as server, streaming(server.url) as lines:
        server.process.send_signal(sig)
        rest = list(lines)
        assert any('"content":"B"' in line for line in rest)
        assert "data: [DONE]" in rest
        assert server.ended() == 0
        assert refuses(server.url)


def test_what_does_not_finish_in_time_hears_an_error() -> None:
    with running("deaf", 100) as server, streaming(server.url) as lines:
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert "engine_stopped" in rest[-1]
        assert not any("[DONE]" in line for line in rest)
        assert server.ended() == 0


def test_a_second_signal_does_not_wait() -> None:
    with running("deaf", 1_000_000) as server, streaming(server.url) as lines:
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: refuses(server.url))
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            assert not any("[DONE]" in line for line in lines)


def test_an_engine_that_dies_takes_the_process_with_it() -> None:
    with running("fatal", 30_000) as server, streaming(server.url) as lines:
        # The stream of one request waits; another brings the device down.
        answer = httpx.post(server.url + "/v1/chat/completions", json=user("die"), timeout=120)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_failed"
        rest = [line for line in lines if line]
        assert "engine_failed" in rest[-1]
        assert server.ended() == 1
        assert server.process.stderr is not None
        assert "the device is gone" in server.process.stderr.read()


def test_a_request_that_has_not_arrived_hears_of_the_end() -> None:
    with running("ok", 1500) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 120) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
            assert httpx.get(server.url + "/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert b"the server stopped before the request had arrived" in raw.makefile("rb").read()
        assert server.ended() == 0
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()
