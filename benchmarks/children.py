"""Servers in child processes, for the benchmarks that talk to them by HTTP."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import httpx

from gnomon.bench.environment import child_environment
from gnomon.bench.http import free_port, resident_bytes

START_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Child:
    """A server that answers. `ready_seconds` went from its start until it listed its models."""

    url: str
    pid: int
    ready_seconds: float
    client: httpx.Client

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    def stats(self, **query: str) -> dict[str, Any]:
        """GET /stats, which Gnomon has."""
        try:
            return self.client.get("/stats", params=query).json()
        except httpx.TransportError:
            # The server may close a kept connection in the moment in which it is used.
            return self.client.get("/stats", params=query).json()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON of an answer. Raises RuntimeError with what it says where its status isn't 200."""
        response = self.client.post(path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.status_code} {response.text[:300]}")
        return response.json()


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    return " / ".join(log.read().decode(errors="replace").strip().splitlines()[-3:])


@contextmanager
def running(
    command: Callable[[int], Sequence[str]], environment: Mapping[str, str] | None = None, timeout: float = 3600.0
) -> Iterator[Child]:
    """Start a server and end it with SIGTERM, or SIGKILL half a minute later. Raises RuntimeError with what it said if it doesn't start."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        begun = time.perf_counter()
        process = subprocess.Popen(
            list(command(port)),
            env=child_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, trust_env=False)
        try:
            while True:
                with suppress(httpx.TransportError):
                    if client.get("/v1/models").status_code == 200:
                        break
                if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                    raise RuntimeError(f"the server didn't start (exit status {process.poll()}): {_last_words(log)}")
                time.sleep(0.05)
            try:
                yield Child(f"http://127.0.0.1:{port}", process.pid, time.perf_counter() - begun, client)
            except Exception as error:
                if process.poll() is not None:
                    error.add_note(f"the server ended with exit status {process.poll()}: {_last_words(log)}")
                raise
        finally:
            client.close()
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
