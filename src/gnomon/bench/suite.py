"""`gnomon bench serve`: which servers, which legs, and one run of the store for each leg."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from gnomon.bench.legs import LegContender, Parity
from gnomon.bench.overview import row
from gnomon.bench.preflight import awake, preflight, require_quiet
from gnomon.bench.provenance import HashCache, provenance, source_sha256
from gnomon.bench.report import table
from gnomon.bench.runner import Interrupted, Plan, Runner
from gnomon.bench.schema import Arm, Provenance, Run
from gnomon.bench.session import Pairing, Session, pairings
from gnomon.bench.store import Store
from gnomon.bench.workload import Cell

log = logging.getLogger(__name__)

Size = Literal["small", "standard", "large"]
_OURS = "gnomon serve {model} --port {port}"
BUILT_IN: Mapping[str, str] = {
    "gnomon": _OURS,
    "serial": f"{_OURS} --batch 1",
    "mlx_lm.server": "mlx_lm.server --model {model} --port {port}",
}
"""Arms that need no command; a command that begins with `gnomon` or `mlx_lm.server` is run by this interpreter."""
_ENTRY = {"gnomon": "gnomon.cli.main", "mlx_lm.server": "mlx_lm.server"}
LEGS: Mapping[str, Mapping[Size, str]] = {
    "readiness": {"small": "start:2", "standard": "start:2", "large": "start:2"},
    "parity": {"small": "parity:8", "standard": "parity:64", "large": "parity:64"},
    "decode": {"small": "stream:1x6", "standard": "stream:1x64", "large": "stream:1x192"},
    "first-token": {"small": "ttft:24", "standard": "ttft:700", "large": "ttft:1000"},
    "prefill": {"small": "prefill:24", "standard": "prefill:1000", "large": "prefill:1000"},
    "long-prefill": {"small": "prefill:48", "standard": "prefill:2000", "large": "prefill:16000"},
    "depth": {"small": "depth:6@48", "standard": "depth:32@2000", "large": "depth:64@16000"},
    "restart": {"small": "restart:24", "standard": "restart:700", "large": "restart:4000"},
    "concurrency": {"small": "loop:2x2x4", "standard": "loop:4x2x32", "large": "loop:8x4x128"},
    "poisson": {"small": "poisson:3x4@4:5:1", "standard": "poisson:16x24@4:1:0.1", "large": "poisson:40x64@1:2:0.1"},
    "constant": {"small": "constant:3x4@4:5:1", "standard": "constant:16x24@4:1:0.1", "large": "constant:40x64@1:2:0.1"},
    "cancellation": {"small": "cancel:64", "standard": "cancel:512", "large": "cancel:1024"},
    "conversations": {"small": "turns:2x2@12", "standard": "turns:3x3@150", "large": "turns:8x6@500"},
    "memory": {"small": "memory:4@24", "standard": "memory:16@1000", "large": "memory:64@8000"},
}  # fmt: skip
"""Legs by name, with their cells by size."""


@dataclass(frozen=True, slots=True)
class Side:
    """A server arm before it runs: its name, its command line with `{model}`, `{port}` and `{state}`, and the file that it loads where that
    isn't the model directory."""

    name: str
    command: str
    weights: Path | None = None


def side(text: str, weights: Mapping[str, Path]) -> Side:
    """The arm that `NAME=COMMAND` or the name of a built-in one describes. Raises `ValueError` if it is neither or lacks `{port}`."""
    name, equals, command = text.partition("=")
    if not equals:
        if text not in BUILT_IN:
            raise ValueError(f"arm {text!r} is none of {', '.join(BUILT_IN)}, nor NAME=COMMAND")
        command = BUILT_IN[text]
    if not name or "{port}" not in command:
        raise ValueError(f"arm {text!r} must be NAME=COMMAND, with {{port}} in the command")
    shlex.split(command)
    return Side(name, command, weights.get(name))


def sides(texts: Sequence[str], weights: Sequence[str]) -> list[Side]:
    """All arms; `weights` are `NAME=FILE`. Raises `ValueError` for fewer than one arm, a name used twice, or weights of no arm."""
    files: dict[str, Path] = {}
    for text in weights:
        name, equals, file = text.partition("=")
        if not equals or not Path(file).exists():
            raise ValueError(f"weights {text!r} must be NAME=FILE with a file that exists")
        files[name] = Path(file)
    found = [side(text, files) for text in texts]
    names = [one.name for one in found]
    if not found or len(set(names)) != len(names):
        raise ValueError(f"arms need distinct names, not {', '.join(names) or 'none'}")
    if strange := sorted(set(files) - set(names)):
        raise ValueError(f"weights are given for {strange[0]!r}, and there is no such arm")
    return found


def legs(text: str, size: Size) -> list[tuple[str, Cell]]:
    """Legs named in `text`, separated by commas, each a name or `NAME=CELL`; `all` are all. Raises `ValueError` for an unknown one."""
    found: list[tuple[str, Cell]] = []
    for part in LEGS if text == "all" else [part.strip() for part in text.split(",")]:
        name, equals, cell = part.partition("=")
        if name not in LEGS:
            raise ValueError(f"leg {name!r} is none of {', '.join(LEGS)}")
        found.append((name, Cell.parse(cell if equals else LEGS[name][size])))
    return found


def command_line(one: Side, model: Path, port: int, state: Path) -> list[str]:
    """The arm's command line. `{state}` is a directory of its own that outlives restarts."""
    values = {"{model}": str(model.resolve()), "{port}": str(port), "{state}": str(state)}
    words = shlex.split(one.command)
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    return [sys.executable, "-m", _ENTRY[words[0]], *words[1:]] if words[0] in _ENTRY else words


def model_of(one: Side, model: Path, sha256: str | None, cache: HashCache | None) -> str | None:
    """Digest of the content that an arm serves: the model directory's, if its command names it or its weights are the file that the
    directory was converted from; else the file's own. None if neither is known: then there will be no ratios."""
    if one.weights is None:
        return sha256 if "{model}" in one.command else None
    own = (cache or HashCache(None)).sha256(one.weights)
    return sha256 if own == source_sha256(model) else own


@contextmanager
def contenders(
    sides: Sequence[Side], model: Path, origin: Provenance, cache: HashCache | None
) -> Generator[list[LegContender]]:
    """Servers ready to be started, with a directory each for what outlives a restart; all of it goes at the end."""
    root = Path(tempfile.mkdtemp(prefix="gnomon-bench-"))
    parity = Parity()

    def one(number: int, which: Side) -> LegContender:
        state = root / str(number)
        state.mkdir()
        settings: dict[str, JsonValue] = {"command": which.command}
        if which.weights is not None:
            settings["weights"] = which.weights.name
        known = which.name in BUILT_IN or which.command.split()[0] in _ENTRY
        arm = Arm(name=which.name, kind="server" if known else "command", settings=settings)
        sha = model_of(which, model, origin.model_sha256, cache)
        return LegContender(arm, lambda port: command_line(which, model, port, state), sha, parity=parity)

    made = [one(number, which) for number, which in enumerate(sides)]
    try:
        yield made
    finally:
        for contender in made:
            contender.stop()
        shutil.rmtree(root, ignore_errors=True)


def title(leg: str, cell: Cell, sides: Sequence[Side], plan: Plan) -> str:
    """The name of a leg's run: what makes a saved one the same."""
    return f"serve, {leg}, {cell}, {' / '.join(one.name for one in sides)}, {plan.blocks} blocks, seed {plan.seed}"


def plan_of(cell: Cell, plan: Plan) -> Plan:
    """Parity is one look in the order of the arms; where a start or a restart is measured, nothing is warm."""
    if cell.task == "parity":
        return Plan(1, plan.seed, 0)
    fresh = cell.task in ("start", "restart", "memory")
    return Plan(
        plan.blocks, plan.seed, 0 if fresh else plan.warmups, plan.exclusive or cell.task in ("start", "memory")
    )


def finished(
    store: Store, name: str, sides: Sequence[Side], origin: Provenance, *, diagnostic: bool
) -> tuple[Run, Path] | None:
    """The latest complete run in the store of the same leg, arms, model and revision; a diagnostic one only where that is wanted."""
    wanted = [(one.name, one.command) for one in sides]
    fixed = ("model_sha256", "revision", "diff_sha256", "machine")
    for path, run in reversed(store.runs()[0]):
        same = run.name == name and [(arm.name, arm.settings.get("command")) for arm in run.arms] == wanted
        same &= all(getattr(run.provenance, field) == getattr(origin, field) for field in fixed)
        if same and run.complete and (diagnostic or not run.diagnostic):
            return run, path
    return None


def measure(
    store: Store,
    model: Path,
    sides: Sequence[Side],
    chosen: Sequence[tuple[str, Cell]],
    plan: Plan,
    *,
    resume: bool = False,
    busy: Literal["label", "refuse"] = "label",
    diagnostic: bool = False,
    hash_cache: Path | None = None,
    argv: Sequence[str] = (),
) -> Iterator[tuple[Run, Path]]:
    """A run for every leg. The first arm is the candidate; every other one is a baseline of it. With `resume`, a leg that is complete in
    the store is taken from there. Stops after an interrupted run. Raises `BusyMachine` if `busy` refuses the machine."""
    origin = provenance(model, hash_cache)
    cache = HashCache(hash_cache)
    for leg, cell in chosen:
        own = plan_of(cell, plan)
        name = title(leg, cell, sides, own)
        done = finished(store, name, sides, origin, diagnostic=diagnostic) if resume else None
        if done is not None:
            log.info("%s is in the store", name)
            yield done
            continue
        state = preflight()
        if busy == "refuse":
            require_quiet(state)
        session = Session(
            store,
            "serve",
            name,
            origin=origin,
            state=state,
            argv=argv,
            planned_blocks=own.blocks,
            diagnostic=diagnostic,
        )
        interruption: str | None = None
        with contenders(sides, model, origin, cache) as arms:
            with awake():
                try:
                    Runner(arms, session.record, own).run([cell])
                except Interrupted as error:
                    interruption = str(error)
            path = session.close(arms, _pairings(cell, sides, session.run), interruption)
        yield session.run, path
        if interruption is not None:
            return


def _pairings(cell: Cell, sides: Sequence[Side], run: Run) -> list[Pairing]:
    """The first arm against each other one. Parity isn't a race."""
    if cell.task == "parity":
        return []
    return [pairing for other in sides[1:] for pairing in pairings([cell], other.name, sides[0].name, run.samples)]


def summary(runs: Sequence[Run]) -> str:
    """One table over all legs: what was declared to decide, every arm's median, the ratios, and what stands in the way of one."""
    names = list(dict.fromkeys(arm.name for run in runs for arm in run.arms))
    rows = [one for one in (row(run, names) for run in runs) if one is not None]
    return table(
        ("leg", "metric", *names, "ratio (above 1 is better)", "remarks"),
        (
            [f"{one.leg} `{one.cell}`", one.metric, *one.values, "; ".join(one.ratios) or "—", "; ".join(one.remarks)]
            for one in rows
        ),
    )
