"""Servers as arms: a child process per server, measured through its streaming completions route as any client would."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import httpx
import psutil

from gnomon.bench.environment import child_environment
from gnomon.bench.provenance import machine, sha256_text
from gnomon.bench.schema import Arm, Work
from gnomon.bench.workload import ArmFailed, ArmTimedOut, Measurement, Workload

START_TIMEOUT = 300.0
POLL_SECONDS = 0.02
MEMORY_SECONDS = 0.05
REUSED_SHARE = 0.1
"""A prompt of which a cache supplied more than this share is no cold one."""


class Rejected(ArmFailed):
    """The server refused a request for now: status 429 or 503."""


class Cut(Exception):
    """The client went away in the midst of a stream, at `at` (`perf_counter`), as it was told to."""

    def __init__(self, at: float) -> None:
        super().__init__("the client ended the stream")
        self.at = at


@dataclass(slots=True)
class Streamed:
    """One streamed completion: instants in seconds of `perf_counter`, counts from usage, the text, and why it ended."""

    begun: float
    headers: float = 0.0
    first_byte: float = 0.0
    first_event: float = 0.0
    outputs: list[float] = field(default_factory=list[float])
    ended: float = 0.0
    text: str = ""
    finish: str | None = None
    done: bool = False
    usage: dict[str, Any] | None = None

    def event(self, data: str) -> None:
        """Take the data of one server-sent event. Raises `ArmFailed` if it reports an error or is no JSON."""
        now = time.perf_counter()
        if data == "[DONE]":
            self.done = True
            return
        self.first_event = self.first_event or now
        try:
            chunk: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise ArmFailed(f"an event is no JSON: {data[:200]}") from error
        if not isinstance(chunk, dict):  # pyright: ignore[reportUnnecessaryIsInstance]  (it is whatever the server wrote)
            raise ArmFailed(f"an event is no JSON object: {data[:200]}")
        if "error" in chunk:
            raise ArmFailed(f"the stream ended with an error: {chunk['error']}")
        for choice in chunk.get("choices", []):
            if choice.get("text"):
                self.text += choice["text"]
                self.outputs.append(now)
            if choice.get("finish_reason") is not None:
                self.finish = choice["finish_reason"]
                self.ended = now
        self.usage = chunk.get("usage") or self.usage

    def check(self) -> None:
        """Raise `ArmFailed` for a stream that lacks usage, finish reason, end marker or text: none of its numbers would mean anything."""
        missing = {
            "usage": self.usage is None,
            "a finish reason": self.finish is None,
            "the end marker": not self.done,
            "text": not self.outputs,
        }
        lacking = [name for name, absent in missing.items() if absent]
        if lacking:
            raise ArmFailed(f"the stream lacks {' and '.join(lacking)}")
        counted = checked_usage(self.usage)["completion_tokens"]
        # One piece more is no miscount: what was held back, of a character or of a stop string, follows the last token's text by itself.
        if counted + 1 < len(self.outputs):
            raise ArmFailed(f"usage counts {counted} tokens, and {len(self.outputs)} pieces of text came")

    @property
    def completion_tokens(self) -> int:
        return int((self.usage or {})["completion_tokens"])

    @property
    def prompt_tokens(self) -> int:
        return int((self.usage or {})["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int(((self.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first output, which counts as one token; None if there are no two outputs to time."""
        if self.completion_tokens < 2 or self.ended <= self.outputs[0]:
            return None
        return (self.completion_tokens - 1) / (self.ended - self.outputs[0])

    @property
    def longest_gap(self) -> float:
        """Longest silence between two outputs, in seconds."""
        return max((b - a for a, b in pairwise(self.outputs)), default=0.0)


def checked_usage(usage: object) -> dict[str, Any]:
    """A response's `usage`. Raises `ArmFailed` if it lacks one of the two counts or one isn't a count."""
    found = cast("dict[str, Any]", usage) if isinstance(usage, dict) else {}
    for name in ("prompt_tokens", "completion_tokens"):
        count = found.get(name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ArmFailed(f"usage.{name} is {count!r}, not a count")
    return found


def refusal(status: int, said: bytes) -> ArmFailed:
    """The failure that a status other than 200 is, with what the server said."""
    text = f"status {status}: {said.decode(errors='replace')[:300]}"
    return Rejected(text) if status in (429, 503) else ArmFailed(text)


def stream_completion(
    client: httpx.Client,
    prompt: str,
    tokens: int,
    begun: float | None = None,
    *,
    model: str | None = None,
    cut_after: int | None = None,
) -> Streamed:
    """Stream a greedy completion of a text prompt.

    With `cut_after` the client goes away once so many pieces of text have come, and `Cut` is raised. Raises `Rejected` for status 429 or
    503, `ArmFailed` for any other but 200, for a broken stream, and for one that ended before it was to be cut.
    """
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        body["model"] = model
    found = Streamed(time.perf_counter() if begun is None else begun)
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            found.headers = time.perf_counter()
            if response.status_code != 200:
                raise refusal(response.status_code, response.read())
            rest = b""
            for data in response.iter_raw():
                found.first_byte = found.first_byte or time.perf_counter()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        found.event(line[5:].strip().decode(errors="replace"))
                if cut_after is not None and len(found.outputs) >= cut_after and found.finish is None:
                    response.close()
                    raise Cut(time.perf_counter())
    except httpx.TimeoutException as error:
        raise ArmTimedOut(f"no data for too long: {type(error).__name__}") from error
    except httpx.HTTPError as error:
        raise ArmFailed(f"{type(error).__name__}: {error}") from error
    found.check()
    if cut_after is not None:
        raise ArmFailed(f"the stream ended after {found.completion_tokens} tokens, before it was cut off")
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants, added up: pages they share count more than once. 0 once it is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for member in family:
        try:
            total += member.memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


class MemoryWatch:
    """Samples the resident memory of a process tree every 50 ms while in use; `peak` is the largest seen, in bytes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = resident_bytes(pid)

    def _run(self) -> None:
        while not self._stop.wait(MEMORY_SECONDS):
            self.peak = max(self.peak, resident_bytes(self._pid))

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, resident_bytes(self._pid))


def free_port() -> int:
    """A TCP port of the loopback that nothing holds: below those that systems give out by themselves (from 32,768 on Linux, from
    49,152 elsewhere), of which any might be another's before the server that it is for has taken it. Raises OSError."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("of a hundred TCP ports between 20000 and 32767 none is free")


def load_client(url: str, timeout: float = 30.0) -> httpx.Client:
    """A client that makes a connection for each request: none waits for another's, and none meets one that the server has just closed as
    idle. `timeout` in seconds."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(base_url=url, timeout=timeout, trust_env=False, limits=limits)


class ServerContender:
    """A server in a child process. `command(port)` is its command line; it must serve `/v1/models` and `/v1/completions`.

    `stream:NxT` cells send N requests at once; `start:T` cells start the server anew and count from the start of its process.
    """

    def __init__(self, arm: Arm, command: Callable[[int], Sequence[str]], model_sha256: str | None = None) -> None:
        self.arm = arm
        self._command = command
        self.model_sha256 = model_sha256
        self._child: subprocess.Popen[bytes] | None = None
        self._client: httpx.Client | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the contender)
        self._spawned = 0.0
        self._ready = 0.0
        self.served: str | None = None

    def start(self) -> None:
        """Start the server and wait until it lists its models and, where it has `/health`, is well."""
        if self._child is not None and self._child.poll() is None:
            return
        self.stop()
        port = free_port()
        self._log.seek(0)
        self._log.truncate()
        self._spawned = time.perf_counter()
        self._child = subprocess.Popen(
            list(self._command(port)),
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._client = load_client(f"http://127.0.0.1:{port}")
        deadline = self._spawned + START_TIMEOUT
        while True:
            if self._child.poll() is not None:
                raise ArmFailed(f"the server ended with exit status {self._child.returncode}: {self._tail()}")
            with suppress(httpx.TransportError):
                answer = self._client.get("/v1/models")
                # A server that lists its models while it loads them says so under /health, if it has that.
                if answer.status_code == 200 and self._client.get("/health").status_code < 500:
                    self.served = served_id(answer) if self.arm.kind == "command" else None
                    break
            if time.perf_counter() > deadline:
                raise ArmTimedOut(f"the server wasn't ready within {START_TIMEOUT:.0f} s: {self._tail()}")
            time.sleep(POLL_SECONDS)
        self._ready = time.perf_counter()

    @property
    def client(self) -> httpx.Client:
        """The client of the running server. Raises `ArmFailed` if it isn't running."""
        if self._client is None:
            raise ArmFailed("the server isn't running")
        return self._client

    @property
    def pid(self) -> int:
        """The server's process. Raises `ArmFailed` if it isn't running."""
        if self._child is None:
            raise ArmFailed("the server isn't running")
        return self._child.pid

    @property
    def ready_seconds(self) -> float:
        """Seconds from the start of the process until the server listed its models."""
        return self._ready - self._spawned

    def measure(self, workload: Workload) -> Measurement:
        """Measure one cell through HTTP."""
        if workload.cell.task == "start":
            self.stop()
            self.start()
        child, client = self._child, self._client
        if child is None or client is None:
            raise ArmFailed("the server isn't running")
        cell = workload.cell
        client.timeout = httpx.Timeout(workload.timeout)
        prompts = [workload.text(row) for row in range(cell.rows)]
        with MemoryWatch(child.pid) as memory, ThreadPoolExecutor(cell.rows) as pool:
            begun = time.perf_counter()
            found = list(
                pool.map(
                    lambda prompt: stream_completion(client, prompt, cell.output_tokens, model=self.served), prompts
                )
            )
        metrics = self._metrics(workload, found, begun)
        metrics["peak_resident_bytes"] = float(memory.peak)
        metrics["resident_bytes"] = float(resident_bytes(child.pid))
        prompt_tokens, cached = sum(s.prompt_tokens for s in found), sum(s.cached_tokens for s in found)
        work = Work(
            task=cell.task,
            model=self.model_sha256,
            prompt=sha256_text("\n".join(prompts)),
            prompt_tokens=prompt_tokens,
            output_tokens=sum(s.completion_tokens for s in found),
            concurrency=cell.rows,
            cache="cold" if cached <= REUSED_SHARE * prompt_tokens else f"{cached} tokens reused",
            machine=machine(),
        )
        text = sha256_text("\n".join(s.text for s in found))
        return Measurement(metrics, work, {"text_sha256": text, "cached_tokens": cached})

    def _metrics(self, workload: Workload, found: Sequence[Streamed], begun: float) -> dict[str, float]:
        firsts = [s.outputs[0] - s.begun for s in found]
        end = max(s.ended for s in found)
        if workload.cell.task == "start":
            return {
                "ready_seconds": self._ready - self._spawned,
                "first_answer_seconds": found[0].outputs[0] - self._spawned,
                "total_seconds": end - self._spawned,
            }
        if workload.cell.rows > 1:
            return {
                "aggregate_tokens_per_second": sum(s.completion_tokens for s in found) / (end - begun),
                "first_output_median_seconds": median(firsts),
                "first_output_max_seconds": max(firsts),
                "total_seconds": end - begun,
            }
        one = found[0]
        metrics = {
            "headers_seconds": one.headers - one.begun,
            "first_byte_seconds": one.first_byte - one.begun,
            "first_event_seconds": one.first_event - one.begun,
            "first_output_seconds": firsts[0],
            "total_seconds": end - one.begun,
        }
        if one.decode_rate is not None:
            metrics["decode_tokens_per_second"] = one.decode_rate
            metrics["longest_gap_seconds"] = one.longest_gap
        return metrics

    def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL if it is still there ten seconds later."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"


def served_id(answer: httpx.Response) -> str | None:
    """The model id to ask for: the one that is listed, or None if there are several to choose from or the list isn't as OpenAI's."""
    try:
        listed: list[dict[str, Any]] = answer.json()["data"]
        return str(listed[0]["id"]) if len(listed) == 1 else None
    except (ValueError, LookupError, TypeError):
        return None


def gnomon_command(model: Path, *flags: str) -> Callable[[int], list[str]]:
    """Command line of Gnomon's server of `model`, by port."""
    return lambda port: [sys.executable, "-m", "gnomon.cli.main", "serve", str(model), "--port", str(port), *flags]


def mlx_lm_command(model: Path, *flags: str) -> Callable[[int], list[str]]:
    """Command line of mlx-lm's server of `model`, by port."""
    return lambda port: [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(port), *flags]
