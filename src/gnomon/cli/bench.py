"""`gnomon bench`: paired measurements, model inventories, and the index of results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli import _bench_serve
from gnomon.cli._verbs import CommandError
from gnomon.config import Config

if TYPE_CHECKING:
    from gnomon.bench.workload import Cell, Contender

NAME = "bench"
HELP = "measure: serve (servers over HTTP), native (against mlx-lm), ab (two arms), model (inventory), list and report (results)"

ARMS = """an arm is one of
  set:KEY=VALUE,...   Gnomon's engine with these settings (fields of the engine's configuration and of kernels; `set:` alone: as it is)
  mlx-lm[:KEY=VALUE,...]   unmodified mlx-lm with these settings
  rev:REVISION[:KEY=VALUE,...]   Gnomon's engine as of a git revision of this checkout
  cmd:COMMAND LINE   any command; {seed}, {block} and {nonce} are replaced; timed, or as its last line of JSON reports
with --run, rev: arms run that command in their checkout instead of the engine"""
CELLS = "cells: prompt:TOKENS, decode:TOKENS@DEPTH, batch:ROWSxTOKENS; several, separated by commas"
NATIVE_CELLS = "prompt:257,decode:32@0,decode:32@1024,batch:4x16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    under = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    native = under.add_parser("native", help="the engine in process against mlx-lm, on frozen token ids")
    native.add_argument("path", type=Path, metavar="MODEL", help="an MLX model directory")
    native.add_argument("--ours", default="", metavar="KEY=VALUE,...", help="settings of Gnomon's engine")
    native.add_argument("--theirs", default="", metavar="KEY=VALUE,...", help="settings of mlx-lm")
    _paired(native, NATIVE_CELLS)
    ab = under.add_parser(
        "ab", help="two arms in paired blocks", epilog=ARMS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ab.add_argument("a", metavar="A", help="the baseline")
    ab.add_argument("b", metavar="B", help="the candidate")
    ab.add_argument("--on", type=Path, metavar="MODEL", help="the MLX model directory of set:, mlx-lm and rev: arms")
    ab.add_argument("--run", metavar="COMMAND", help="command that rev: arms run")
    _paired(ab, "decode:32@0")
    model = under.add_parser("model", help="tensors, bytes and bits of a model, and what this machine could do with it")
    model.add_argument("path", type=Path, metavar="MODEL", help="an MLX model directory")
    model.add_argument("--depth", type=int, default=1024, help="tokens in the cache while decoding")
    model.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt to prefill")
    model.add_argument(
        "--result", type=Path, help="a result of native or ab on this model: tell the share of the limit reached"
    )
    model.add_argument("--remeasure", action="store_true", help="measure the machine anew")
    served = under.add_parser(
        "serve",
        help="servers over HTTP, leg by leg",
        epilog=_bench_serve.ARMS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _bench_serve.add_arguments(served)
    listing = under.add_parser("list", help="rebuild the index from the results and list them")
    report = under.add_parser("report", help="write all results into one HTML file that needs nothing else")
    report.add_argument("--html", type=Path, help="the file to write (default: report.html beside the results)")
    for one in (native, ab, model, served, listing, report):
        one.add_argument("--out", type=Path, help="directory of the results")


def _paired(parser: argparse.ArgumentParser, cells: str) -> None:
    parser.add_argument("--cells", default=cells, help=f"{CELLS} (default: {cells})")
    parser.add_argument("--blocks", type=int, default=6, help="paired blocks; at least 5 decide (default: 6)")
    parser.add_argument("--seed", type=int, default=1, help="workload seed of the first block (default: 1)")
    parser.add_argument("--warmups", type=int, default=1, help="uncounted samples of each arm and cell (default: 1)")
    parser.add_argument("--busy", choices=("label", "refuse"), default="label", help="what to do on a busy machine")
    parser.add_argument("--exclusive", action="store_true", help="keep one arm alive at a time, where both don't fit")
    parser.add_argument("--json", action="store_true", help="print the result file's path only")


def run(args: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace, Config], int]] = {
        "native": _native,
        "ab": _ab,
        "model": _model,
        "serve": lambda args, config: _bench_serve.run(args, config, _results(args, config)),
        "list": _list,
        "report": _report,
    }
    try:
        return actions[args.what](args, args.config)
    except (ValueError, FileNotFoundError) as error:
        raise CommandError(str(error)) from error


def parse_settings(text: str) -> dict[str, Any]:
    """`KEY=VALUE,...` with values read as JSON where they are JSON, else as text. Raises `ValueError` naming what has no `=`."""
    import json

    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ValueError(f"{item!r} is not KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def parse_cells(text: str) -> list[Cell]:
    """Cells separated by commas."""
    from gnomon.bench.workload import Cell

    return [Cell.parse(part.strip()) for part in text.split(",")]


def _results(args: argparse.Namespace, config: Config) -> Path:
    return args.out or config.paths.cache / "bench"


def _measure(
    args: argparse.Namespace, config: Config, kind: Any, name: str, arms: list[Contender], model: Path | None
) -> int:
    from gnomon.bench.preflight import BusyMachine
    from gnomon.bench.report import markdown
    from gnomon.bench.runner import Plan
    from gnomon.bench.session import paired_run
    from gnomon.bench.store import Store

    if args.blocks < 1:
        raise ValueError(f"--blocks is {args.blocks}, at least 1 is needed")
    plan = Plan(args.blocks, args.seed, args.warmups, args.exclusive)
    try:
        result, path = paired_run(
            Store(_results(args, config)),
            kind,
            name,
            arms,
            parse_cells(args.cells),
            plan,
            model=model,
            hash_cache=config.paths.cache / "hashes.json",
            busy=args.busy,
            argv=sys.argv,
        )
    except BusyMachine as error:
        raise CommandError(f"blocked: {error}", 75) from error
    print(path if args.json else f"{markdown(result)}\n{path}")
    return 130 if result.interruption else 0


def _settings_with_hash(settings: Mapping[str, Any], model: Path, config: Config) -> dict[str, Any]:
    from gnomon.bench.provenance import HashCache, model_content

    sha, _ = model_content(model, HashCache(config.paths.cache / "hashes.json"))
    return {**settings, "model_sha256": sha}


def _native(args: argparse.Namespace, config: Config) -> int:
    ours, theirs = parse_settings(args.ours), parse_settings(args.theirs)
    arms = [
        _worker("mlx-lm", "mlx-lm", theirs, args.path, config),
        _worker("gnomon", "gnomon", ours, args.path, config),
    ]
    return _measure(args, config, "native", f"native, {args.path.name}", arms, args.path)


def _worker(
    name: str, side: str, settings: dict[str, Any], model: Path, config: Config, *, tree: Path | None = None, **arm: Any
) -> Contender:
    from gnomon.bench.contenders import WorkerContender, worker_command
    from gnomon.bench.schema import Arm

    command = tuple(worker_command(side, model.resolve(), _settings_with_hash(settings, model, config)))
    kind = arm.pop("kind", "reference" if side == "mlx-lm" else "engine")
    environment = {"PYTHONPATH": str(tree / "src")} if tree is not None else None
    return WorkerContender(
        Arm(name=name, kind=kind, settings=settings, command=command, **arm), cwd=tree, environment=environment
    )


def _ab(args: argparse.Namespace, config: Config) -> int:
    with ExitStack() as stack:
        arms = [_arm(letter, text, args, config, stack) for letter, text in (("A", args.a), ("B", args.b))]
        commands = {arm.arm.kind == "command" or (arm.arm.kind == "revision" and args.run is not None) for arm in arms}
        if len(commands) > 1:
            raise ValueError("a command and an engine do no common work: both arms must be commands, or none")
        if commands == {True}:
            args.cells = "command"
        return _measure(args, config, "ab", f"ab, {args.a} against {args.b}", arms, args.on)


def _arm(letter: str, text: str, args: argparse.Namespace, config: Config, stack: ExitStack) -> Contender:
    """The contender an arm's text describes. Raises `ValueError` for an unknown form."""
    from gnomon.bench.contenders import CommandContender, checkout, split_command
    from gnomon.bench.schema import Arm

    form, _, rest = text.partition(":")
    name = f"{letter} {text}"
    if form == "cmd":
        return CommandContender(Arm(name=name, kind="command", command=split_command(rest)))
    if form == "rev":
        revision, _, settings = rest.partition(":")
        tree, commit = stack.enter_context(checkout(Path.cwd(), revision))
        if args.run is not None:
            arm = Arm(name=name, kind="revision", command=split_command(args.run), revision=commit)
            return CommandContender(arm, cwd=tree, environment={"PYTHONPATH": str(tree / "src")})
        found = parse_settings(settings)
        return _worker(
            name, "gnomon", found, _needed(args.on, text), config, tree=tree, kind="revision", revision=commit
        )
    if form in ("set", "mlx-lm"):
        side = "gnomon" if form == "set" else "mlx-lm"
        return _worker(name, side, parse_settings(rest), _needed(args.on, text), config)
    raise ValueError(f"arm {text!r} is unknown; {ARMS}")


def _needed(model: Path | None, arm: str) -> Path:
    if model is None:
        raise ValueError(f"arm {arm!r} needs a model: --on MODEL")
    return model


def _model(args: argparse.Namespace, config: Config) -> int:
    from gnomon.bench.model import describe

    print(
        describe(args.path, config.paths.cache / "roofline.json", args.depth, args.prompt, args.result, args.remeasure)
    )
    return 0


def _list(args: argparse.Namespace, config: Config) -> int:
    from gnomon.bench.report import listing
    from gnomon.bench.store import Store

    store = Store(_results(args, config))
    rebuilt = store.rebuild()
    runs, _ = store.runs()
    print(listing(runs))
    for bad in rebuilt.unreadable:
        print(f"unreadable: {bad.reason}", file=sys.stderr)
    return 0


def _report(args: argparse.Namespace, config: Config) -> int:
    from gnomon.bench.page import render
    from gnomon.bench.store import Store

    store = Store(_results(args, config))
    runs, unreadable = store.runs()
    if not runs and not unreadable:
        raise CommandError(f"no results in {store.directory}")
    target: Path = args.html or store.directory / "report.html"
    if not target.parent.is_dir():
        raise CommandError(f"--html is {target}, and there is no directory {target.parent}")
    target.write_text(render(runs, unreadable, target.parent), encoding="utf-8")
    print(target)
    return 0
