"""A soak for a server that runs for weeks: agents that talk and walk away, and what is left behind when they have gone.

Eight agents (those of prefix_soak.py) talk to one server at once. A share of their answers is streamed and left in the middle, some before
the first byte, some with the connection torn. Reported is what the process held over time (resident memory, MLX's, descriptors, sockets,
threads, files) and what was still there after the last one left.

    uv run python benchmarks/weeks_soak.py MODEL [--seconds 1200] [--agents 8] [--leave 0.25] [--disk DIR] [--out FILE]
        [--every-model] [--flag=--isolate ...]

With --every-model the agents share the models that the server lists among them: for --model-pool.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from children import Child, running
from gnomon.bench.http import gnomon_command
from prefix_soak import Agent, disk_bytes

SETTLE_SAMPLES, SETTLE_PAUSE = 150, 0.2
"""How often, and every how many seconds, it is looked whether the server has let go of what the last clients left: no time, so that a soak
may be stopped and go on."""
SOCKET_SECONDS = 3600.0


@dataclass
class Sample:
    """What the server held at a time. Sizes in bytes; `sockets` are those of clients."""

    seconds: float
    resident: int
    active: int
    cache: int
    disk: int
    descriptors: int
    sockets: int
    threads: int
    processes: int
    rows: int
    open: int


@dataclass
class Report:
    """Of all agents together. `left` is what was there after they had gone and the server had settled."""

    answers: int = 0
    left_midway: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    before: Sample | None = None
    samples: list[Sample] = field(default_factory=list)
    left: Sample | None = None
    seconds: float = 0.0

    def growth(self, name: str) -> float:
        """Median of the last quarter of samples over that of the second."""
        values = [getattr(sample, name) for sample in self.samples]
        quarter = max(1, len(values) // 4)
        return statistics.median(values[-quarter:]) / max(1, statistics.median(values[quarter : 2 * quarter] or values))


def processes(pid: int) -> list[psutil.Process]:
    """The server and, under isolation, its child."""
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def every_engine(child: Child) -> list[dict[str, Any]]:
    """/stats of each engine that has reported."""
    stats = child.stats()
    if "pool" not in stats:
        return [stats]
    live = [row["id"] for row in stats["pool"]["models"] if row["pid"] is not None]
    each = [child.stats(model=name) for name in live]
    return [one for one in each if "memory" in one]


def take(child: Child, begun: float, disk: Path | None) -> Sample:
    while True:
        engines, all_of_it = every_engine(child), processes(child.pid)
        try:
            held = [(one.memory_info().rss, one.num_fds(), one.num_threads()) for one in all_of_it]
            break
        except psutil.NoSuchProcess:  # a pool ended one meanwhile
            continue
    resident, descriptors, threads = (sum(numbers) for numbers in zip(*held, strict=True))
    return Sample(
        time.monotonic() - begun,
        resident,
        sum(one["memory"]["active_bytes"] for one in engines),
        sum(one["prompt_cache"]["bytes"] for one in engines),
        disk_bytes(disk),
        descriptors,
        len([c for c in all_of_it[0].net_connections("tcp") if c.status != psutil.CONN_LISTEN]),
        threads,
        len(all_of_it),
        sum(one["batch"]["active_rows"] for one in engines),
        sum(one["engine"]["open_requests"] for one in engines),
    )


def leave(child: Child, body: dict[str, Any], chance: random.Random) -> str:
    """Ask for a stream and go; how."""
    how = chance.choice(["at once", "after the first bytes", "torn"])
    host, port = child.url.removeprefix("http://").split(":")
    data = json.dumps({**body, "stream": True, "max_tokens": 200}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), SOCKET_SECONDS) as raw:
        raw.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        if how != "at once":
            raw.recv(chance.randint(1, 4096))
        if how == "torn":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return how


def soak(
    child: Child, seconds: float, agents: int, leaving: float, seed: int, disk: Path | None, models: Sequence[str] = ()
) -> Report:
    """Let the agents talk for so long, each to its own of `models`, if there are any."""
    report, lock = Report(), threading.Lock()
    begun = time.monotonic()
    # An engine in a process of its own tells its sections from its first report on.
    while "memory" not in child.stats():
        time.sleep(0.1)
    report.before = take(child, begun, disk)

    def live(number: int) -> None:
        agent = Agent(seed * 1000 + number, 400)
        asked = {"model": models[number % len(models)]} if models else {}
        while time.monotonic() - begun < seconds:
            agent.act()
            body = {**agent.ask(), "session_id": f"agent {number}", **asked}
            try:
                if agent.chance.random() < leaving:
                    how = leave(child, body, agent.chance)
                    with lock:
                        report.left_midway[how] += 1
                    continue
                answer = child.post("/v1/chat/completions", body)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is counted and the soak goes on)
                with lock:
                    report.failures.append(f"{type(error).__name__}: {error}")
                continue
            agent.hear(answer)
            with lock:
                report.answers += 1
                report.prompt_tokens += answer["usage"]["prompt_tokens"]
                report.reused_tokens += answer["usage"]["cache"]["tokens"]

    def watch() -> None:
        pause = max(0.5, seconds / 120)
        while time.monotonic() - begun < seconds:
            time.sleep(pause)
            sample = take(child, begun, disk)
            with lock:
                report.samples.append(sample)

    with ThreadPoolExecutor(agents + 1) as pool:
        for done in [pool.submit(watch), *(pool.submit(live, number) for number in range(agents))]:
            done.result()
    report.seconds = time.monotonic() - begun
    for _ in range(SETTLE_SAMPLES):
        report.left = take(child, begun, disk)
        if not report.left.rows and not report.left.open and report.left.sockets <= 1 + report.before.sockets:
            break
        time.sleep(SETTLE_PAUSE)
    return report


def leaks(report: Report) -> list[str]:
    """What was left behind that should have gone, in words."""
    before, left = report.before, report.left
    if before is None or left is None:
        return ["nothing was measured"]
    found = [f"{getattr(left, name)} {name}" for name in ("rows", "open") if getattr(left, name)]
    # The client keeps some connections of its own alive for a few seconds; the server's caches open files as they come. Further engines,
    # which a pool may have, have each what one has.
    more = max(0, left.processes - before.processes)
    for name, most, each in (("sockets", 4, 0), ("descriptors", 16, 10), ("threads", 12, 18)):
        grown = getattr(left, name) - getattr(before, name) - more * each
        if grown > most:
            found.append(f"{grown} {name} more than before")
    return found


def told(report: Report) -> str:
    """A few lines for people."""
    before, left = report.before, report.left
    shown = ("resident", "active", "cache", "descriptors", "sockets", "threads", "processes", "disk")
    lines = [
        f"{report.answers} answers in {report.seconds:.0f} s, {len(report.failures)} failed; left midway: {dict(report.left_midway)}",
        f"{report.reused_tokens} of {report.prompt_tokens} prompt tokens reused",
        "median of the last quarter over the second: "
        + ", ".join(f"{name} {report.growth(name):.3f}" for name in ("resident", "active", "descriptors", "threads")),
    ]
    for name, sample in (("before", before), ("after", left)):
        if sample is not None:
            lines.append(f"{name}: " + ", ".join(f"{one} {getattr(sample, one)}" for one in shown))
    return "\n".join([*lines, f"left behind: {', '.join(leaks(report)) or 'nothing'}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Soak a server of its own; 1 if a request failed or something was left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an MLX model directory")
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--leave", type=float, default=0.25, help="share of the answers that nobody hears the end of")
    parser.add_argument("--budget", type=float, default=0.02, help="GiB of memory for the cache")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--disk", type=Path, help="directory that the server's flags have it write to; its size is watched"
    )
    parser.add_argument("--every-model", action="store_true", help="agents share the models that the server lists")
    parser.add_argument("--flag", action="append", default=[], help="further flag of the server; may be repeated")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    a = parser.parse_args(argv)
    flags = ["--batch", str(a.agents), "--prompt-cache", str(a.budget), *a.flag]
    with running(gnomon_command(a.model, *flags)) as child:
        listed = child.client.get("/v1/models").json()["data"] if a.every_model else []
        models = [model["id"] for model in listed]
        report = soak(child, a.seconds, a.agents, a.leave, a.seed, a.disk, models)
    print(told(report))
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(vars(report), default=vars, indent=1))
    return 1 if report.failures or leaks(report) else 0


if __name__ == "__main__":
    sys.exit(main())
