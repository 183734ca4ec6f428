"""Where the time of a generated token goes outside the products: CPU per thread and wall, in process and over HTTP, in interleaved rounds.

    uv run python benchmarks/step_profile.py MODEL [--rounds 4] [--tokens 200] [--rows 1 8] [--prompt 32] [--kernels native]
                                                   [--random-1b DIR [--bits 4]]

One process: the engine's thread, the server's thread, and the kernels' threads (MLX's stream and the pool). The client of the HTTP rounds
is another process that only reads. Every round is printed when it is done; the two ways take turns in going first. CPU seconds are the
scheduler's for each thread, so a busy machine disturbs them little; wall is from the first token to the last. --random-1b makes a model of
the shape of Llama 3.2 1B with random weights in DIR, with MODEL's tokenizer, and measures that.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import HTTPConfig, SamplingDefaults, resolve
from gnomon.engine.api import Delta, Event, Failed, Finished, Request, SamplingParams
from gnomon.engine.engine import Engine, load
from gnomon.engine.settings import Settings
from gnomon.serve.app import create_app
from gnomon.serve.listen import bind
from gnomon.serve.server import serving
from speculation import make_1b

CLIENT = """
import json, sys, threading, time, http.client
host, port, rows, tokens, prompt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])
def one(i):
    c = http.client.HTTPConnection(host, port, timeout=600)
    c.request("POST", "/v1/completions", json.dumps({"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True,
        "temperature": 0, "ignore_eos": True, "prompt_cache": False}), {"content-type": "application/json"})
    r = c.getresponse()
    assert r.status == 200, r.read()
    first = last = None
    while line := r.readline():
        if line.startswith(b"data: {"):
            last = time.monotonic()
            first = first or last
    times[i] = first, last
times = [None] * rows
threads = [threading.Thread(target=one, args=(i,)) for i in range(rows)]
for t in threads: t.start()
for t in threads: t.join()
print(json.dumps([min(t[0] for t in times), max(t[1] for t in times)]))
"""


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds per step."""

    wall: float
    engine: float
    server: float
    kernels: float


def cpu_seconds() -> dict[int, float]:
    """CPU seconds of this process's threads by id."""
    found: dict[int, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue
    return found


def measured(run: Callable[[], float], steps: int) -> Round:
    """Run something that gives its wall seconds, and share out what the threads did meanwhile."""
    before = cpu_seconds()
    wall = run()
    after = cpu_seconds()
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    by_kind = {"engine": 0.0, "server": 0.0, "kernels": 0.0}
    for task, seconds in after.items():
        name = names.get(task)
        kind = "engine" if name == "gnomon-engine" else "kernels" if name is None else "server"
        by_kind[kind] += seconds - before.get(task, 0.0)
    each = 1e3 / steps
    return Round(wall * each, by_kind["engine"] * each, by_kind["server"] * each, by_kind["kernels"] * each)


def in_process(engine: Engine, prompt: Sequence[int], rows: int, tokens: int) -> float:
    """Seconds from the first token to the last of as many requests together."""
    times: list[float] = []
    ended = threading.Semaphore(0)

    def sink(event: Event) -> None:
        if isinstance(event, Delta):
            times.append(time.monotonic())
        elif isinstance(event, Failed):
            raise SystemExit(event.message)
        elif isinstance(event, Finished):
            ended.release()

    for row in range(rows):
        request = Request(
            id=f"r{time.monotonic_ns()}-{row}", prompt=tuple(prompt), max_tokens=tokens, ignore_eos=True,
            sampling=SamplingParams(temperature=0.0),
        )  # fmt: skip
        engine.submit(request, sink)
    for _ in range(rows):
        ended.acquire()
    return times[-1] - times[0]


def over_http(address: str, prompt: Sequence[int], rows: int, tokens: int) -> float:
    """The same as a client in another process sees it."""
    host, port = address.removeprefix("http://").split(":")
    words = [sys.executable, "-c", CLIENT, host, port, str(rows), str(tokens), str(list(prompt))]
    first, last = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return last - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an MLX model directory")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--kernels", choices=("native", "int8", "stock"), default="native")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--random-1b", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of the random model (default: bfloat16)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    path = args.model if args.random_1b is None else make_1b(args.random_1b, args.model, args.bits)
    config = resolve()
    kernel = replace(config.kernel, kernels=args.kernels, threads=args.threads)
    settings = Settings(engine=replace(config.engine, batch=max(args.rows), prompt_cache=0), kernels=kernel)
    tokenizer = Tokenizer.load(path)
    http = replace(HTTPConfig(), port=0)
    prompt = [5 + (7 * i) % 1000 for i in range(args.prompt)]
    with load(path, settings) as engine, bind(http) as bound:
        app = create_app(engine, tokenizer, ChatTemplate(tokenizer), http, SamplingDefaults())
        with serving(app, engine, bound, http) as address:
            found = {rows: profile(engine, address, prompt, rows, args) for rows in args.rows}
    for rows, rounds in found.items():
        print(table(f"{path.name}, {args.kernels} kernels, {rows} rows, {args.tokens} tokens", rounds))


def profile(
    engine: Engine, address: str, prompt: Sequence[int], rows: int, args: argparse.Namespace
) -> dict[str, list[Round]]:
    """Rounds of both ways, by their names."""
    ways = {"in process": partial(in_process, engine), "HTTP": partial(over_http, address)}
    for run in ways.values():
        run(prompt, rows, args.tokens)
    found: dict[str, list[Round]] = {name: [] for name in ways}
    for turn in range(args.rounds):
        for name in sorted(ways, reverse=turn % 2 == 0):
            found[name].append(measured(lambda run=ways[name]: run(prompt, rows, args.tokens), args.tokens))
            print(f"{rows} rows, round {turn}, {name}: {found[name][-1]}", flush=True)
    return found


def table(title: str, found: dict[str, list[Round]]) -> str:
    """Medians of the rounds, and HTTP's wall time over the other's, round by round."""
    lines = [
        f"{title}: ms per step, medians of {len(found['HTTP'])} rounds",
        "| | wall | engine thread | server thread | kernel threads |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, rounds in found.items():
        cells = (statistics.median(getattr(r, f) for r in rounds) for f in ("wall", "engine", "server", "kernels"))
        lines.append(f"| {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
    ratios = [over.wall / within.wall for over, within in zip(found["HTTP"], found["in process"], strict=True)]
    lines.append(f"HTTP / in process: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
