"""Does an independent load generator measure what our own suite measures? AIPerf and the suite's closed loop, in turns, on one server.

uv run python benchmarks/load_check/check.py MODEL [--server URL] [--pace SECONDS] [--cores SERVER GENERATOR] [--rounds 5]
        [--clients 4] [--calls 6] [--tokens 48] [--words N] [--out FOLDER]

MODEL is served by a child process unless --server names one that runs already; AIPerf reads its tokenizer. A generator takes processor
time from a server beside it, and the two generators don't take alike: with --pace a server of the model's first layer alone begins
forwards at most so often, whatever the processor does (a request waits for the next one: let --words make them many, so that this counts
little); with --cores server and generators have a core each (the server's `--flags='--threads 1'`). AIPerf comes from the Python registry
into an environment of its own (uv). Prompts, limits and sampling are the same on both sides, no prompt comes twice, and who goes first
alternates. Rounds that FOLDER holds from earlier calls are joined. For each metric the ratio of AIPerf's value over ours has Student's
interval over the rounds' log-ratios: the two agree if it holds 1, or lies within 5 % of 1; an interval wider than a factor of 1.25 either
way tells nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from paced import shallow

from children import running
from gnomon.bench.environment import child_environment
from gnomon.bench.http import Streamed, gnomon_command, stream_completion
from gnomon.bench.statistics import interval
from gnomon.bench.workload import Cell, Workload

AIPERF = "aiperf==0.13.0"
METRICS = {
    "requests per second": "request_throughput",
    "output tokens per second": "output_token_throughput",
    "time to first token, median, s": "time_to_first_token",
}
"""Ours by AIPerf's names."""
CLOSE = 0.05
BLIND = 1.25


def ours(client: httpx.Client, prompts: Sequence[Sequence[str]], tokens: int) -> dict[str, float]:
    """The suite's closed loop: clients that each send their next request when the last one has ended."""

    def one(mine: Sequence[str]) -> list[Streamed]:
        return [stream_completion(client, prompt, tokens) for prompt in mine]

    with ThreadPoolExecutor(len(prompts)) as pool:
        begun = time.perf_counter()
        answers = [answer for mine in pool.map(one, prompts) for answer in mine]
    seconds = max(answer.ended for answer in answers) - begun
    return {
        "requests per second": len(answers) / seconds,
        "output tokens per second": sum(answer.completion_tokens for answer in answers) / seconds,
        "time to first token, median, s": median(answer.outputs[0] - answer.begun for answer in answers),
    }


def theirs(
    url: str, model: Path, served: str, prompts: Sequence[Sequence[str]], tokens: int, out: Path
) -> dict[str, float]:
    """AIPerf with as many requests in flight, until all prompts are answered. Raises RuntimeError with its last words if it fails."""
    out.mkdir(parents=True)
    texts = [prompt for turn in zip(*prompts, strict=True) for prompt in turn]
    (out / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [
        "uv", "run", "--no-project", "--with", AIPERF, "aiperf", "profile", "--model", served, "--url", url,
        "--endpoint-type", "completions",
        "--streaming", "--tokenizer", str(model), "--input-file", str(out / "prompts.jsonl"), "--custom-dataset-type", "single_turn",
        "--dataset-sampling-strategy", "sequential", "--concurrency", str(len(prompts)), "--request-count", str(len(texts)),
        "--use-legacy-max-tokens", "--use-server-token-count", "--extra-inputs", json.dumps({"temperature": 0, "max_tokens": tokens}),
        "--output-artifact-dir", str(out / "artifacts"), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        "--workers-max", "1", "--record-processor-service-count", "1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=out, env=child_environment(), capture_output=True, text=True, check=False)
    (out / "aiperf.log").write_text(done.stdout + done.stderr)
    report = next((out / "artifacts").rglob("profile_export_aiperf.json"), None)
    if done.returncode or report is None:
        words = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise RuntimeError(
            f"aiperf ended with status {done.returncode}: {' / '.join(words)} (all in {out / 'aiperf.log'})"
        )
    found = json.loads(report.read_text())
    if found.get("error_summary") or round(found["request_count"]["avg"]) != len(texts):
        raise RuntimeError(
            f"aiperf counts {found['request_count']['avg']:g} of {len(texts)} requests: {found.get('error_summary')}"
        )
    values = {ours: found[name]["p50" if name == "time_to_first_token" else "avg"] for ours, name in METRICS.items()}
    scale = {"ms": 1e-3, "us": 1e-6, "s": 1.0}[found["time_to_first_token"]["unit"]]
    return {**values, "time to first token, median, s": values["time to first token, median, s"] * scale}


@contextmanager
def server(args: argparse.Namespace) -> Generator[str]:
    if args.server is not None:
        yield args.server.rstrip("/").removesuffix("/v1")
        return
    command = gnomon_command(args.model, "--no-open", *shlex.split(args.flags))
    if args.pace is not None:
        command = paced_command(shallow(args.model.resolve(), args.out / "model"), args.pace, args.clients)
    if args.cores is not None:
        # A child keeps to the cores that its parent had when it was started.
        os.sched_setaffinity(0, {args.cores[0]})
    with running(command) as child:
        if args.cores is not None:
            os.sched_setaffinity(0, {args.cores[1]})
        yield child.url


def paced_command(model: Path, seconds: float, batch: int) -> Callable[[int], list[str]]:
    """Command line of a server of `model` that keeps a pace, by port."""
    program = [sys.executable, str(Path(__file__).with_name("paced.py")), str(model)]
    return lambda port: [*program, "--port", str(port), "--pace", str(seconds), "--batch", str(batch)]


def told(rounds: Sequence[dict[str, dict[str, float]]]) -> tuple[str, bool]:
    """A table, and whether all metrics agree."""
    lines = ["| Metric | Ours: median (range) | AIPerf: median (range) | AIPerf / ours | |", "|---|---|---|---|---|"]
    agree = True
    for metric in METRICS:
        sides = {side: [one[side][metric] for one in rounds] for side in ("ours", "aiperf")}
        ratios = [math.log(b / a) for a, b in zip(sides["ours"], sides["aiperf"], strict=True)]
        found = interval(ratios)
        low, high = math.exp(found.lower), math.exp(found.upper)
        if found.half_width > math.log(BLIND):
            verdict = "too noisy to tell"
        elif low <= 1 <= high or (low > 1 - CLOSE and high < 1 + CLOSE):
            verdict = "agree"
        else:
            verdict = "**differ**"
        agree = agree and verdict == "agree"
        shown = [f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})" for values in sides.values()]
        lines.append(
            f"| {metric} | {shown[0]} | {shown[1]} | {math.exp(found.estimate):.3f} [{low:.3f}, {high:.3f}] | {verdict} |"
        )
    return "\n".join(lines), agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the model's directory")
    parser.add_argument("--server", help="a running server of that model")
    parser.add_argument(
        "--flags", default="", metavar="='--FLAG …'", help="flags of the server that is started otherwise"
    )
    parser.add_argument(
        "--pace", type=float, metavar="SECONDS", help="let the server's forwards begin at least so far apart"
    )
    parser.add_argument(
        "--cores", type=int, nargs=2, metavar=("SERVER", "GENERATOR"), help="a core for the server, one for the rest"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--calls", type=int, default=6, help="requests of each client and round")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--words", type=int, default=0, help="words of a prompt, each about a token; else some 30 tokens"
    )
    parser.add_argument(
        "--out", type=Path, help="keep AIPerf's artifacts and the result here (default: a temporary folder)"
    )
    args = parser.parse_args()
    if args.server is not None and (args.pace is not None or args.cores is not None):
        parser.error("--pace and --cores are for a server that is started here")
    if args.pace is not None and args.flags:
        parser.error("--flags are not for a paced server")
    out = args.out = (args.out or Path(tempfile.mkdtemp(prefix="load_check_"))).resolve()
    cell = Cell.parse(f"stream:{args.clients}x{args.tokens}")
    kept = out / "rounds.json"
    asked = {name: value for name, value in vars(args).items() if name not in ("rounds", "out", "model")}
    before = json.loads(kept.read_text()) if kept.exists() else {"asked": asked, "rounds": []}
    if before["asked"] != asked:
        parser.error(f"--out: {out} holds rounds of other arguments: {before['asked']}")
    rounds: list[dict[str, dict[str, float]]] = before["rounds"]
    if len(rounds) + args.rounds < 2:
        parser.error("one round has no interval: --rounds must be at least 2, or --out hold others")
    out.mkdir(parents=True, exist_ok=True)
    with server(args) as url, httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        served = client.get("/v1/models").json()["data"][0]["id"]

        def prompts(number: int) -> list[list[str]]:
            work = Workload(cell, number, int(time.time()))
            text = partial(work.long_text, args.words) if args.words else work.text
            return [[text(n * args.calls + call) for call in range(args.calls)] for n in range(args.clients)]

        ours(client, [[one[0]] for one in prompts(-1)], args.tokens)
        for number in range(len(rounds), len(rounds) + args.rounds):
            found: dict[str, dict[str, float]] = {}
            for side in ("ours", "aiperf") if number % 2 == 0 else ("aiperf", "ours"):
                texts = prompts(2 * number + (side == "ours"))
                found[side] = (
                    ours(client, texts, args.tokens)
                    if side == "ours"
                    else theirs(url, args.model.resolve(), served, texts, args.tokens, out / f"round{number}")
                )
            rounds.append(found)
            print(f"round {number}: {json.dumps(found)}", flush=True)
            kept.write_text(json.dumps({"asked": asked, "rounds": rounds}, indent=1))
    table, agree = told(rounds)
    print(f"{table}\n{out}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
