"""llama.cpp beside Gnomon: its HTTP server with a GGUF file, and its prefill and decode speed.

The package `xllamacpp` holds llama.cpp's server, built for AVX2. `--binary PATH` uses a `llama-server` that was built elsewhere instead,
on this machine for all that its processor has.

    uv run --no-project --with xllamacpp python benchmarks/llama_cpp_server.py serve FILE.gguf --port 8081 --threads 2
    uv run --no-project --with xllamacpp python benchmarks/llama_cpp_server.py cells FILE.gguf --cells prompt:257,decode:32@1024,batch:4x16
    uv run --with xllamacpp python benchmarks/llama_cpp_server.py worker FILE.gguf '{"vocabulary": 49152, "model_sha256": "..."}'

`cells` prints one JSON object with every sample. `worker` answers the orders of `gnomon.bench.contenders.WorkerContender` on the same
frozen token ids as the other sides: llama.cpp as an arm of a paired run. Prefill and decode times are llama.cpp's own, without HTTP; decode
rates count the tokens after the first. A depth is really prefilled; a worker's stays the same, so the server does it once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

BATCH_PROMPT = 16
"""Prompt tokens of each row of a batch cell."""
START_SECONDS = 300.0
CELL = re.compile(r"prompt:(\d+)|decode:(\d+)@(\d+)|batch:(\d+)x(\d+)")


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(a: argparse.Namespace, port: int) -> tuple[str, Callable[[], None], str]:
    """Start a server; returns what it is (build and processor features), how to end it, and its address."""
    address = f"http://127.0.0.1:{port}"
    if a.binary is not None:
        options = ["-m", str(a.gguf), "-c", str(a.context), "-np", str(a.slots), "-t", str(a.threads)]
        child = subprocess.Popen(
            [str(a.binary), *options, "-tb", str(a.threads), "--kv-unified", "--port", str(port), "--host", "127.0.0.1"],
            stdin=subprocess.DEVNULL, stdout=sys.stderr,
        )  # fmt: skip

        def end() -> None:
            child.terminate()
            child.wait(timeout=30)

        wait_ready(address, child)
        version = subprocess.run([str(a.binary), "--version"], capture_output=True, text=True, check=False)
        return " ".join((version.stderr or version.stdout).split()), end, address
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(a.gguf)
    params.n_ctx, params.n_parallel, params.kv_unified = a.context, a.slots, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = a.threads
    params.hostnames, params.port, params.verbosity = ["127.0.0.1"], port, 1
    held: list[Any] = [xllamacpp.Server(params)]
    wait_ready(address)
    return f"xllamacpp {xllamacpp.__version__}: {xllamacpp.get_system_info().strip()}", held.clear, address


def wait_ready(address: str, child: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until the server lists its model. Raises RuntimeError if it ends or takes too long."""
    deadline = time.perf_counter() + START_SECONDS
    while time.perf_counter() < deadline:
        if child is not None and child.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {child.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/v1/models", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"llama-server wasn't ready within {START_SECONDS:.0f} s")


def complete(address: str, prompt: Sequence[int], tokens: int, *, reuse: bool = False) -> dict[str, Any]:
    """A greedy completion of token ids that end-of-sequence tokens don't stop. Raises RuntimeError if another number of tokens came."""
    body = {
        "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": reuse,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"status {error.code}: {error.read().decode(errors='replace')[:300]}") from error
    counted = (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
    if counted != (len(prompt), tokens):
        raise RuntimeError(f"prompt and output tokens are {counted}, ordered were {(len(prompt), tokens)}")
    return answer


def measure(address: str, cell: str, ids: Callable[[int, int], Sequence[int]]) -> dict[str, float]:
    """The metrics of one cell; `ids(count, row)` are the tokens of a row's prompt. Raises ValueError for a cell that isn't known."""
    match = CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"cell {cell!r} is none of prompt:TOKENS, decode:TOKENS@DEPTH, batch:ROWSxTOKENS")
    prompt, steps, depth, rows, each = (int(group) if group else 0 for group in match.groups())
    if prompt:
        timings = complete(address, ids(prompt, 0), 1)["timings"]
        seconds = timings["prompt_ms"] / 1e3
        return {"prefill_tokens_per_second": prompt / seconds, "first_token_seconds": seconds}
    if steps:
        before = [*ids(depth, 1)] if depth else []
        if depth:
            complete(address, before, 1, reuse=True)
        answer = complete(address, [*before, *ids(1, 0)], steps, reuse=True)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if cached != depth:
            raise RuntimeError(f"{cached} tokens stood in the cache, ordered were {depth}")
        return {"decode_tokens_per_second": (steps - 1) / (answer["timings"]["predicted_ms"] / 1e3)}
    prompts = [ids(BATCH_PROMPT, row) for row in range(rows)]
    with ThreadPoolExecutor(rows) as pool:
        begun = time.perf_counter()

        def one(tokens: Sequence[int]) -> float:
            timings = complete(address, tokens, each)["timings"]
            return time.perf_counter() - begun - timings["predicted_ms"] / 1e3

        firsts = list(pool.map(one, prompts))
        total = time.perf_counter() - begun
    return {
        "aggregate_tokens_per_second": rows * each / total,
        "first_output_median_seconds": median(firsts),
        "first_output_max_seconds": max(firsts),
        "total_seconds": total,
    }


@contextmanager
def running(a: argparse.Namespace, cells: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A server with a slot for every row of the largest batch; yields what it is and its address."""
    a.slots = max([a.slots, *(int(m.group(4) or 1) for cell in cells if (m := CELL.fullmatch(cell)))])
    a.context = a.context * a.slots
    what, end, address = start(a, free_port())
    try:
        yield what, address
    finally:
        end()


def serve(a: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    what, end, address = start(a, a.port)
    print(f"{what}\n{address}", file=sys.stderr, flush=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    end()
    return 0


def run_cells(a: argparse.Namespace) -> int:
    """Measure every cell `--samples` times after one warm-up and print the result."""
    cells = a.cells.split(",")
    with running(a, cells) as (what, address):
        found: list[dict[str, Any]] = []
        for cell in cells:
            samples: list[dict[str, float]] = []
            for number in range(a.samples + 1):
                chosen = random.Random(f"{a.seed}:{cell}:{number}")

                def ids(count: int, _: int, source: random.Random = chosen) -> list[int]:
                    return [source.randrange(100, a.vocabulary) for _ in range(count)]

                samples.append(measure(address, cell, ids))
            kept = samples[1:]
            found.append({"cell": cell, "median": {k: median(s[k] for s in kept) for k in kept[0]}, "samples": kept})
        print(json.dumps({"system": what, "model": a.gguf.name, "threads": a.threads, "cells": found}, indent=1))
    return 0


def worker(a: argparse.Namespace) -> int:
    """Answer orders on standard input. Whatever the library prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from gnomon.bench.provenance import machine, sha256_ids
    from gnomon.bench.schema import Work
    from gnomon.bench.worker import serve as answer_orders
    from gnomon.bench.workload import Measurement, Unsupported, Workload

    settings: dict[str, Any] = json.loads(a.settings)

    class Side:
        """llama.cpp's server, measured as a worker's side."""

        def __init__(self, what: str, address: str) -> None:
            self.effective = {"build": what, "threads": a.threads, "slots": a.slots, "model": a.gguf.name}
            self._address = address

        def measure(self, workload: Workload) -> Measurement:
            cell = workload.cell
            if cell.task not in ("prompt", "decode", "batch"):
                raise Unsupported(f"{cell} goes through a server, not through a worker")
            prompts = [workload.ids(settings["vocabulary"], row, settings.get("eos", ())) for row in range(cell.rows)]
            depths = random.Random(cell.depth)

            def ids(count: int, row: int) -> Sequence[int]:
                if cell.depth and row == 1:
                    return [depths.randrange(100, settings["vocabulary"]) for _ in range(count)]
                return prompts[row]

            metrics = measure(self._address, str(cell), ids)
            work = Work(
                task=cell.task,
                model=settings.get("model_sha256"),
                prompt=sha256_ids(token for prompt in prompts for token in (*prompt, -1)),
                prompt_tokens=sum(map(len, prompts)),
                output_tokens=cell.rows * cell.output_tokens,
                concurrency=cell.rows,
                depth=cell.depth,
                machine=machine(),
            )
            return Measurement(metrics, work)

    with running(a, [f"batch:{settings.get('rows', 1)}x2"]) as (what, address):
        answer_orders(Side(what, address), sys.stdin, answers)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, measure or answer orders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    under = parser.add_subparsers(dest="mode", required=True)
    modes = {name: under.add_parser(name) for name in ("serve", "cells", "worker")}
    for one in modes.values():
        one.add_argument("gguf", type=Path, help="the model file")
        one.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
        one.add_argument("--slots", type=int, default=1, help="requests at once")
        one.add_argument("--binary", type=Path, help="a llama-server to run instead of the package's")
    modes["serve"].add_argument("--port", type=int, required=True)
    modes["serve"].add_argument("--context", type=int, default=8192, help="tokens of all slots together")
    for name in ("cells", "worker"):
        modes[name].add_argument("--context", type=int, default=8192, help="tokens of each slot")
    modes["cells"].add_argument("--cells", default="prompt:257,decode:32@0,decode:32@1024,batch:4x16")
    modes["cells"].add_argument("--samples", type=int, default=5)
    modes["cells"].add_argument("--seed", type=int, default=1)
    modes["cells"].add_argument("--vocabulary", type=int, default=32000, help="token ids are below this")
    modes["worker"].add_argument(
        "settings",
        help='JSON: "vocabulary", optionally "eos" (token ids), "model_sha256", "rows" (of the largest batch)',
    )
    a = parser.parse_args(argv)
    if not a.gguf.is_file():
        parser.error(f"there is no file {a.gguf}")
    return {"serve": serve, "cells": run_cells, "worker": worker}[a.mode](a)


if __name__ == "__main__":
    sys.exit(main())
