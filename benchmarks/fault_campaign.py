"""A campaign of faults against a real server, with figures: what its clients saw, and how long until it served again.

Every fault has a server of its own, over a tiny random model unless MODEL is given. Nothing may hang, and nothing that was promised may be
lost: answers under way end with an error, stored responses stay, everybody else is served.

    uv run python benchmarks/fault_campaign.py [MODEL] [--only NAME,..] [--out FILE]

A fault that this machine can't be given (a full disk needs root, a clock that jumps a C compiler) is said to be not run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from children import Child, running
from gnomon.bench.http import gnomon_command

ROOT = Path(__file__).resolve().parent.parent
RECOVERY_SECONDS = 120.0
ASK = {"prompt": "abc", "max_tokens": 12, "temperature": 0}
LONG = {"prompt": "abc", "max_tokens": 50_000, "ignore_eos": True, "stream": True}


class NotRun(Exception):
    """This machine can't be given the fault; the message says why."""


@dataclass(frozen=True, slots=True)
class Field:
    """Where the campaign takes place."""

    model: Path
    directory: Path

    @contextmanager
    def server(self, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Child]:
        around = {"GNOMON_CACHE": str(self.directory / "cache"), **(environment or {})}
        with running(gnomon_command(self.model, "--l1", *flags), around, timeout=RECOVERY_SECONDS) as child:
            yield child


def answer(child: Child) -> str:
    return child.post("/v1/completions", ASK)["choices"][0]["text"]


@contextmanager
def streaming(child: Child) -> Iterator[Callable[[], str]]:
    """A stream that has begun; what is yielded reads the rest."""
    with child.client.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data:")

        def rest() -> str:
            try:
                return "\n".join(lines)
            except httpx.RemoteProtocolError:
                return "the connection was cut"

        yield rest


def recovered(child: Child, expected: str) -> float:
    """Seconds until the server answers as before."""
    begun = time.monotonic()
    while time.monotonic() - begun < RECOVERY_SECONDS:
        try:
            assert answer(child) == expected
            return time.monotonic() - begun
        except (RuntimeError, httpx.TransportError):
            time.sleep(0.1)
    raise AssertionError(f"no answer for {RECOVERY_SECONDS:.0f} s")


def engine_pid(child: Child) -> int:
    return child.client.get("/engine").json()["pid"]


def lose_child(field: Field, harm: Callable[[Child, int], None]) -> dict[str, Any]:
    """Harm the engine's process while it streams; everything that must hold then."""
    with field.server("--isolate") as child:
        expected = answer(child)
        kept = child.post("/v1/responses", {"input": "abc", "max_output_tokens": 8, "store": True})["id"]
        with streaming(child) as rest:
            before, begun = engine_pid(child), time.monotonic()
            harm(child, before)
            told = rest()
            ended = time.monotonic() - begun
        assert "engine_died" in told, told[-300:]
        back = recovered(child, expected)
        assert engine_pid(child) != before
        assert child.client.get(f"/v1/responses/{kept}").status_code == 200
        restarts = child.client.get("/engine").json()["restarts"]
    return {"stream_ended_seconds": ended, "recovered_seconds": back, "restarts": restarts}


def killed_child(field: Field) -> dict[str, Any]:
    """SIGKILL of the engine's process in the middle of a stream."""
    return lose_child(field, lambda _, pid: os.kill(pid, signal.SIGKILL))


def frozen_child(field: Field) -> dict[str, Any]:
    """SIGSTOP of the engine's process: it neither dies nor says anything."""
    return lose_child(field, lambda _, pid: os.kill(pid, signal.SIGSTOP))


def child_without_memory(field: Field) -> dict[str, Any]:
    """No further page for the engine's process, while a prompt comes that needs many."""
    if sys.platform != "linux":
        raise NotRun("the memory of a running process can be limited on Linux only")

    def harm(child: Child, pid: int) -> None:
        psutil.Process(pid).rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))
        body = {**ASK, "prompt": "a long prompt " * 2000}
        threading.Thread(
            target=lambda: httpx.post(f"{child.url}/v1/completions", json=body, timeout=60), daemon=True
        ).start()

    return lose_child(field, harm)


def full_disk(field: Field) -> dict[str, Any]:
    """The SSD cache's file system has no room: answers go on, and the failures are counted."""
    place = field.directory / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        raise NotRun(f"no small file system: {mounted.stderr.strip()}")
    try:
        with field.server("--ssd-cache", str(place), "--ssd-cache-min-free", "0") as child:
            expected = answer(child)
            for n in range(12):
                child.post("/v1/completions", {**ASK, "prompt": f"{n} " * 700})
            flushed = child.client.post("/admin/cache/flush", json={})
            again = answer(child)
            stats = child.stats()["ssd_cache"]
        assert again == expected
        lost = {key: stats[key] for key in ("failed_spills", "dropped_spills") if key in stats}
        assert flushed.status_code in (200, 503)
        assert flushed.status_code == 503 or not any(lost.values())
        return {"flush_status": flushed.status_code, **lost, "disk_bytes": stats.get("bytes")}
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def port_in_use(field: Field) -> dict[str, Any]:
    """A second server on the same port says so at once, and harms the first one in nothing."""
    with field.server() as child:
        expected, port = answer(child), child.url.rsplit(":", 1)[1]
        begun = time.monotonic()
        command = [sys.executable, "-m", "gnomon.cli.main", "serve", str(field.model), "--port", port, "--no-open"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=RECOVERY_SECONDS, check=False)
        refused = time.monotonic() - begun
        assert second.returncode not in (0, None)
        assert "is taken" in second.stderr
        assert answer(child) == expected
    return {"refused_seconds": refused}


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) {
    const char *path = getenv("CLOCK_SHIFT");
    FILE *file = path ? fopen(path, "r") : 0;
    long seconds = 0;
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int told = real(id, at);
    if (id == CLOCK_REALTIME) at->tv_sec += shift();
    return told;
}
time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}
"""


def clock_jump(field: Field) -> dict[str, Any]:
    """The wall clock jumps a day ahead and a year back while an answer is made; intervals are another clock's."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        raise NotRun("a C compiler on Linux is needed to shift a process's clock")
    source, library, shift = field.directory / "shim.c", field.directory / "shim.so", field.directory / "shift"
    source.write_text(SHIM)
    shift.write_text("0")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    with field.server(environment={"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(shift)}) as child:
        expected, seen = answer(child), list[int]()
        for seconds in (86_400, -31_536_000, 0):
            with child.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 400}) as response:
                lines = response.iter_lines()
                first = next(lines)
                shift.write_text(str(seconds))
                told = [first, *lines]
            assert told[-2] == "data: [DONE]" or told[-1] == "data: [DONE]"
            made = child.post("/v1/completions", ASK)
            assert made["choices"][0]["text"] == expected
            seen.append(round((made["created"] - time.time()) / 86_400))
            assert child.client.get("/health").status_code == 200
            assert 0 <= child.stats()["engine"]["beat_age_seconds"] < 30
        # The jump was one: the dates that clients are told follow it.
        assert seen == [1, -365, 0], seen
    return {"days_told": seen}


def slow_reader(field: Field) -> dict[str, Any]:
    """A client that reads one byte a second; others are served meanwhile, and memory doesn't grow for it."""
    with field.server() as child:
        answer(child)
        host, port = child.url.removeprefix("http://").split(":")
        body = json.dumps(LONG).encode()
        before, times = child.resident_bytes, list[float]()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(15):
                assert len(raw.recv(1)) == 1
                begun = time.monotonic()
                answer(child)
                times.append(time.monotonic() - begun)
                time.sleep(1)
            grown = child.resident_bytes - before
        recovered_rows(child)
    assert grown < 100 << 20, grown
    return {"slowest_other_seconds": max(times), "grown_mib": round(grown / 2**20, 1)}


def recovered_rows(child: Child) -> None:
    """Wait until nothing is under way."""
    end = time.monotonic() + RECOVERY_SECONDS
    while child.stats()["engine"]["open_requests"]:
        assert time.monotonic() < end, "a request of a client that left is still open"
        time.sleep(0.1)


def idle_connections(field: Field) -> dict[str, Any]:
    """Five hundred clients that connect and say nothing."""
    with field.server() as child, ExitStack() as held:
        expected = answer(child)
        host, port = child.url.removeprefix("http://").split(":")
        idle = [held.enter_context(socket.create_connection((host, int(port)), 20)) for _ in range(500)]
        begun = time.monotonic()
        assert answer(child) == expected
        served = time.monotonic() - begun
        begun = time.monotonic()
        for one in idle:
            one.settimeout(60)
            assert one.recv(1) == b""
        closed = time.monotonic() - begun
    return {"answer_seconds": served, "all_closed_seconds": closed}


def garbage(field: Field) -> dict[str, Any]:
    """Two hundred connections that send random bytes, and as many that begin a request and tear."""
    chance = random.Random(1)
    with field.server() as child:
        expected = answer(child)
        host, port = child.url.removeprefix("http://").split(":")
        for n in range(400):
            with socket.create_connection((host, int(port)), 20) as raw:
                start = b"" if n % 2 else b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999\r\n"
                raw.sendall(start + chance.randbytes(chance.randint(1, 4000)))
        assert answer(child) == expected
        recovered_rows(child)
        assert child.client.get("/health").status_code == 200
    return {"connections": 400}


def vanished_model(field: Field) -> dict[str, Any]:
    """The model's directory goes while it serves; the engine's process dies; the directory comes back."""
    model = field.directory / "vanishing"
    shutil.copytree(field.model, model)
    own = Field(model, field.directory)
    with own.server("--isolate") as child:
        expected = answer(child)
        away = model.rename(field.directory / "away")
        assert answer(child) == expected
        os.kill(engine_pid(child), signal.SIGKILL)
        begun, told = time.monotonic(), "nothing"
        # Refusals with a reason until it gives up, and ends.
        while (ended := not psutil.pid_exists(child.pid) or psutil.Process(child.pid).status() == "zombie") is False:
            try:
                health = child.client.get("/health")
                assert health.status_code == 503
                told = health.json().get("reason", health.text)
            except httpx.TransportError:
                continue
            if time.monotonic() - begun > RECOVERY_SECONDS:
                break
            time.sleep(0.2)
        seconds = time.monotonic() - begun
        away.rename(model)
        back = None if ended else recovered(child, expected)
    assert told != "nothing"
    return {"told": told[-200:], "ended": ended, "seconds": seconds, "recovered_seconds": back}


FAULTS: dict[str, Callable[[Field], dict[str, Any]]] = {
    "killed child": killed_child,
    "frozen child": frozen_child,
    "child without memory": child_without_memory,
    "full disk": full_disk,
    "port in use": port_in_use,
    "clock jump": clock_jump,
    "slow reader": slow_reader,
    "idle connections": idle_connections,
    "garbage": garbage,
    "vanished model": vanished_model,
}


def tiny_model(path: Path) -> Path:
    for folder in ("cli", "chat"):
        sys.path.insert(0, str(ROOT / "tests" / folder))
    from tiny_directory import make

    return make(path)


def run(name: str, model: Path | None) -> dict[str, Any]:
    """The figures of one fault, or what went wrong with it."""
    with tempfile.TemporaryDirectory() as directory:
        field = Field(model or tiny_model(Path(directory) / "tiny"), Path(directory))
        alarm = threading.Timer(600, lambda: os._exit(70))
        alarm.daemon = True
        alarm.start()
        try:
            return {"fault": name, "held": True, **FAULTS[name](field)}
        except NotRun as error:
            return {"fault": name, "held": None, "not_run": str(error)}
        except Exception as error:  # noqa: BLE001  (the campaign goes on and tells of it)
            return {"fault": name, "held": False, "error": f"{type(error).__name__}: {error}"}
        finally:
            alarm.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 if a fault did more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--only", default="", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON lines")
    a = parser.parse_args(argv)
    names = [name.strip() for name in a.only.split(",")] if a.only else list(FAULTS)
    results: list[dict[str, Any]] = []
    for name in names:
        result = run(name, a.model)
        results.append(result)
        figures = {key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()}
        print(json.dumps(figures), flush=True)
    if a.out is not None:
        a.out.write_text("".join(json.dumps(result) + "\n" for result in results))
    return 1 if any(result["held"] is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
