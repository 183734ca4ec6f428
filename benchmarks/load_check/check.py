"""Does an independent load generator measure what our own suite measures? AIPerf and the suite, in turns, on one server.

uv run python benchmarks/load_check/check.py MODEL [--server URL | --timed FIRST GAP] [--flags='--threads 1'] [--cores SERVER GENERATORS]
        [--clients 4] [--arrivals RATE] [--calls 6] [--tokens 48] [--words N] [--poll 500] [--rounds 5] [--out FOLDER]

MODEL is served by a child process unless --server names one that runs already; AIPerf reads its tokenizer. With --timed the server has no
model and streams by the clock, so that what is to be measured is known beforehand. The load is a closed loop of --clients, or with
--arrivals requests that come by a fixed schedule of so many a second. AIPerf comes from the Python registry into an environment of its
own (uv). Prompts, limits and sampling are the same on both sides, no prompt comes twice, and who goes first alternates. Rounds that FOLDER
holds from earlier calls are joined. For each metric the ratio of AIPerf's value over ours has Student's interval over the rounds'
log-ratios: the two agree if it holds 1, or lies within 5 % of 1; an interval wider than a factor of 1.25 either way tells nothing.
Then each one's own times of its requests are put through the other's arithmetic: what differs there is the arithmetic, the rest the load.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from generators import (
    AIPERF,
    FIRST,
    METRICS,
    PACE,
    RATE,
    TOKENS,
    AIPerf,
    Load,
    Order,
    aiperf_metrics,
    loop_metrics,
    ours,
)
from timed import timed_command

from children import running
from gnomon.bench.http import gnomon_command, load_client
from gnomon.bench.schedule import arrival_times
from gnomon.bench.statistics import interval
from gnomon.bench.workload import Cell, Schedule, Workload

CLOSE = 0.05
BLIND = 1.25
Round = dict[str, dict[str, float]]


@contextmanager
def server(args: argparse.Namespace) -> Generator[str]:
    if args.server is not None:
        yield args.server.rstrip("/").removesuffix("/v1")
        return
    command: Callable[[int], Sequence[str]] = gnomon_command(args.model, "--no-open", *shlex.split(args.flags))
    if args.timed is not None:
        command = timed_command(args.timed[0], args.timed[1])
    if args.cores is not None:
        # A child keeps to the cores that its parent had when it was started.
        os.sched_setaffinity(0, args.cores[0])
    with running(command) as child:
        if args.cores is not None:
            os.sched_setaffinity(0, args.cores[1])
        yield child.url


def served_metrics(record: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a timed server did, by its own record."""
    seconds = max(one["ended"] for one in record) - min(one["arrived"] for one in record)
    return {
        RATE: len(record) / seconds,
        TOKENS: sum(one["tokens"] for one in record) / seconds,
        FIRST: median(one["first"] - one["arrived"] for one in record),
        PACE: median((one["ended"] - one["first"]) / (one["tokens"] - 1) for one in record),
    }


def truth(first: float, gap: float, order: Order) -> dict[str, float]:
    """What a timed server's clock allows: every answer takes `first` and a gap for each further token, and nothing lies between."""
    count, one = len(order.texts), first + (order.tokens - 1) * gap
    seconds = len(order.prompts[0]) * one if order.times is None else order.times[-1] + one
    return {RATE: count / seconds, TOKENS: count * order.tokens / seconds, FIRST: first, PACE: gap}


def one_round(load: Load, side: str, record: Sequence[dict[str, Any]] | None) -> Round:
    """A load's numbers: as its generator reports them, by the other's arithmetic, and by the server's record if it keeps one."""
    other = loop_metrics(load.begun, load.answers) if side == "aiperf" else aiperf_metrics(load.answers)
    found = {side: load.reported, f"{side}, crossed": other, f"{side}, cores": {"cores": load.cores}}
    return found if record is None else {**found, f"{side}, served": served_metrics(record)}


def table(rounds: Sequence[Round], pairs: Sequence[tuple[str, str, str]]) -> str:
    """The median over the rounds of the ratio of two sides, and its range, by metric: pairs are (title, side, over side)."""
    lines = ["| Metric | " + " | ".join(title for title, _, _ in pairs) + " |", "|---" * (len(pairs) + 1) + "|"]
    for metric in METRICS:
        cells: list[str] = []
        for _, side, over in pairs:
            ratios = [one[side][metric] / one[over][metric] for one in rounds]
            cells.append(f"{median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")
        lines.append(f"| {metric} | {' | '.join(cells)} |")
    return "\n".join(lines)


def told(rounds: Sequence[Round]) -> tuple[str, bool]:
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
        shown = [f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})" for values in sides.values()]
        lines.append(
            f"| {metric} | {shown[0]} | {shown[1]} | {math.exp(found.estimate):.3f} [{low:.3f}, {high:.3f}] | {verdict} |"
        )
    return "\n".join(lines), agree


def report(rounds: Sequence[Round]) -> tuple[str, bool]:
    """All tables, and whether all metrics agree."""
    first, agree = told(rounds)
    crossed = [(f"{side}: the other's arithmetic / its own", f"{side}, crossed", side) for side in ("ours", "aiperf")]
    parts = [first, table(rounds, crossed)]
    if "truth" in rounds[0]:
        sides = ("ours", "aiperf")
        known = [*((f"{s} / the server's record of it", s, f"{s}, served") for s in sides)]
        known += [(f"{s} / what the clock allows", s, "truth") for s in sides]
        parts.append(table(rounds, known))
    used = {s: [one[f"{s}, cores"]["cores"] for one in rounds] for s in ("ours", "aiperf")}
    parts.append(f"Cores in use, median: {', '.join(f'{side} {median(values):.2f}' for side, values in used.items())}.")
    return "\n\n".join(parts), agree


def core_list(text: str) -> set[int]:
    """Cores written 0 or 0,2 or 0-3. Raises ValueError if it is none of that."""
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the model's directory")
    parser.add_argument("--server", help="a running server of that model")
    parser.add_argument(
        "--timed", type=float, nargs=2, metavar=("FIRST", "GAP"), help="a server without a model, seconds"
    )
    parser.add_argument("--flags", default="", metavar="='--FLAG …'", help="flags of the server that is started")
    parser.add_argument(
        "--cores", type=core_list, nargs=2, metavar=("SERVER", "GENERATORS"), help="cores of each, like 0 1 or 0-7 8-15"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--calls", type=int, default=6, help="requests of each client and round")
    parser.add_argument(
        "--arrivals", type=float, metavar="RATE", help="a Poisson schedule of so many requests a second"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--words", type=int, default=0, help="words of a prompt, each about a token; else some 30 tokens"
    )
    parser.add_argument(
        "--poll", type=int, default=500, help="how often a second AIPerf's closed loop looks; 0: without a pause"
    )
    parser.add_argument("--aiperf", default=AIPERF, metavar="COMMAND", help="how AIPerf is called")
    parser.add_argument("--out", type=Path, help="keep artifacts and the result here (default: a temporary folder)")
    args = parser.parse_args()
    if args.server is not None and (args.timed is not None or args.cores is not None or args.flags):
        parser.error("--timed, --cores and --flags are for a server that is started here")
    if args.timed is not None and args.flags:
        parser.error("--flags are not for a timed server")
    if args.tokens < 2:
        parser.error("--tokens must be at least 2: a time per further token is measured")
    args.out = (args.out or Path(tempfile.mkdtemp(prefix="load_check_"))).resolve()
    args.asked = {n: str(value) for n, value in vars(args).items() if n not in ("rounds", "out", "model", "aiperf")}
    kept = args.out / "rounds.json"
    before = json.loads(kept.read_text()) if kept.exists() else {"asked": args.asked, "rounds": []}
    if before["asked"] != args.asked:
        parser.error(f"--out: {args.out} holds rounds of other arguments: {before['asked']}")
    args.kept, args.before = kept, before["rounds"]
    if len(args.before) + args.rounds < 2:
        parser.error("one round has no interval: --rounds must be at least 2, or --out hold others")
    return args


def main() -> int:
    args = arguments()
    rounds: list[Round] = args.before
    args.out.mkdir(parents=True, exist_ok=True)
    cell = Cell.parse(f"stream:{args.clients}x{args.tokens}")
    with server(args) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as plain:
        served = plain.get("/v1/models").json()["data"][0]["id"]
        client = load_client(url, 600)

        def order(number: int, calls: int = args.calls) -> Order:
            work = Workload(cell, number, int(time.time()))
            text = partial(work.long_text, args.words) if args.words else work.text
            prompts = [[text(n * calls + call) for call in range(calls)] for n in range(args.clients)]
            if args.arrivals is None:
                return Order(prompts, args.tokens)
            times = arrival_times(Schedule("poisson", args.arrivals, 1.0, 1.0), args.clients * calls, number // 2)
            return Order(prompts, args.tokens, [t - times[0] for t in times])

        ours(client, order(-2, 1))
        for number in range(len(rounds), len(rounds) + args.rounds):
            found: Round = {}
            if args.timed is not None:
                found["truth"] = truth(args.timed[0], args.timed[1], order(2 * number))
            for side in ("ours", "aiperf") if number % 2 == 0 else ("aiperf", "ours"):
                asked = order(2 * number + (side == "ours"))
                begun = time.perf_counter()
                if side == "ours":
                    load = ours(client, asked)
                else:
                    before = order(-3 - number, 1).texts
                    other = AIPerf(url, args.model.resolve(), served, args.poll, before, args.aiperf)
                    load = other.run(asked, args.out / f"round{number}")
                record = None
                if args.timed is not None:
                    sent = set(asked.texts)
                    record = [one for one in plain.get("/record").json() if one["prompt"] in sent]
                    if len(record) != len(sent) or min(one["arrived"] for one in record) < begun:
                        raise RuntimeError(f"the server has {len(record)} of {len(sent)} requests on its record")
                found |= one_round(load, side, record)
            rounds.append(found)
            print(f"round {number}: {json.dumps(found)}", flush=True)
            args.kept.write_text(json.dumps({"asked": args.asked, "rounds": rounds}, indent=1))
    text, agree = report(rounds)
    print(f"{text}\n\n{args.out}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
