"""`gnomon bench serve`: its arguments, and the runs they order."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from gnomon.cli._verbs import CommandError
from gnomon.config import Config

ARMS = """an arm is the name of a built-in one or NAME=COMMAND
  gnomon         this product as it is
  serial         this product with --batch 1
  mlx_lm.server  mlx-lm's server
  NAME=COMMAND   any server with OpenAI's routes; {port}, {model} (the directory) and {state} (a directory of the arm's own that outlives
                 restarts) are replaced; `gnomon` and `mlx_lm.server` as first word mean those of this installation
the first arm is the candidate, every other one a baseline of it

    gnomon bench serve MODEL --arm gnomon --arm serial --arm 'ssd=gnomon serve {model} --port {port} --ssd-cache {state}'
    gnomon bench serve MODEL --arm gnomon --arm 'llama.cpp=llama-server -m FILE.gguf --port {port}' --weights llama.cpp=FILE.gguf"""
DEFAULT_ARMS = ("gnomon", "serial", "mlx_lm.server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="MODEL", help="an MLX model directory")
    parser.add_argument(
        "--arm",
        action="append",
        metavar="ARM",
        help=f"a server, see below; may be repeated (default: {', '.join(DEFAULT_ARMS)})",
    )
    parser.add_argument(
        "--weights",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="the file that an arm loads instead of MODEL; the same weights if MODEL was converted from it, else no ratios",
    )
    parser.add_argument("--legs", default="all", metavar="LEG[=CELL],...", help="what to measure (default: all)")
    parser.add_argument("--size", choices=("small", "standard", "large"), default="standard", help="how long legs are")
    parser.add_argument("--blocks", type=int, default=5, help="paired blocks; at least 5 decide (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="workload seed of the first block (default: 1)")
    parser.add_argument("--warmups", type=int, default=1, help="uncounted samples of each arm and leg (default: 1)")
    parser.add_argument("--busy", choices=("label", "refuse"), default="label", help="what to do on a busy machine")
    parser.add_argument("--exclusive", action="store_true", help="keep one arm alive at a time, where they don't fit")
    parser.add_argument("--diagnostic", action="store_true", help="mark the runs as not to be quoted")
    parser.add_argument("--resume", action="store_true", help="take legs that are complete in the results from there")
    parser.add_argument("--json", action="store_true", help="print the result files' paths only")


def run(args: argparse.Namespace, config: Config, out: Path) -> int:
    """Measure and print. Raises `ValueError` for wrong arguments; 1 if a leg of the first arm never counted, 130 if interrupted."""
    from gnomon.bench.preflight import BusyMachine
    from gnomon.bench.report import markdown
    from gnomon.bench.runner import Plan
    from gnomon.bench.schema import Run
    from gnomon.bench.store import Store
    from gnomon.bench.suite import legs, measure, sides, summary

    if args.blocks < 1:
        raise ValueError(f"--blocks is {args.blocks}, at least 1 is needed")
    arms = sides(args.arm or DEFAULT_ARMS, args.weights)
    chosen = legs(args.legs, args.size)
    plan = Plan(args.blocks, args.seed, args.warmups, args.exclusive)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    found: list[Run] = []
    try:
        for result, path in measure(
            Store(out), args.path, arms, chosen, plan, resume=args.resume, busy=args.busy, diagnostic=args.diagnostic,
            hash_cache=config.paths.cache / "hashes.json", argv=sys.argv,
        ):  # fmt: skip
            found.append(result)
            print(path if args.json else f"{markdown(result)}\n{path}\n", flush=True)
    except BusyMachine as error:
        raise CommandError(f"blocked: {error}", 75) from error
    if not args.json:
        print(summary(found))
    if any(result.interruption for result in found):
        return 130
    counted = [any(s.arm == arms[0].name and s.status == "ok" and s.block >= 0 for s in run.samples) for run in found]
    return 0 if all(counted) else 1
