"""`gnomon bench report`: one HTML file from saved results, for a browser without network, server or model.

The page holds its style and its script; its content security policy allows those two by their hashes and nothing else. All text of
results passes through Jinja2's escaping.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import combinations, permutations
from pathlib import Path
from statistics import median
from urllib.parse import quote

import jinja2

from gnomon.bench.compare import compare, difference
from gnomon.bench.overview import model_name, overviews
from gnomon.bench.plots import Rows, Scatter, Value, differences, distributions, scatter
from gnomon.bench.report import number, ratio
from gnomon.bench.schema import METRICS, Comparison, Run, Sample, Work
from gnomon.bench.store import Unreadable, now
from gnomon.bench.suite import LEGS

MEMORY = ("peak_resident_bytes", "peak_active_bytes", "resident_bytes", "active_bytes")
QUALITY = ("perplexity", "kl_divergence", "accuracy")


@dataclass(frozen=True, slots=True)
class Difference:
    """A comparison as it is shown."""

    metric: str
    primary: bool
    candidate: str
    baseline: str
    ratio: str
    blocks: int
    outcome: str
    why: str
    excluded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Against:
    """All that one arm is compared with in a cell; `declared` if it is the baseline named before the run."""

    baseline: str
    declared: bool
    rows: tuple[Difference, ...]
    plots: tuple[tuple[str, Rows], ...]


@dataclass(frozen=True, slots=True)
class Absolute:
    """A metric's medians, ranges and counts, one text per arm."""

    metric: str
    better: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell of a run."""

    name: str
    arms: tuple[str, ...]
    absolute: tuple[Absolute, ...]
    spread: Rows | None
    against: tuple[Against, ...]
    refused: tuple[str, ...]
    memory: Scatter | None
    left_out: tuple[str, ...]
    unmeasured: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, with what the filters look at."""

    run: Run
    href: str
    file: str
    model: str
    state: str
    doubts: tuple[str, ...]
    arms: str
    baselines: tuple[str, ...]
    declared: str | None
    cells: tuple[CellView, ...]
    odd: tuple[Sample, ...]


def render(runs: Sequence[tuple[Path, Run]], unreadable: Sequence[Unreadable], beside: Path) -> str:
    """The report as HTML. Links to raw results are relative to the directory `beside`."""
    views = [_run(path, run, beside) for path, run in runs]
    page = resources.files("gnomon.bench") / "report_page"
    style, script, text = ((page / f"report.{kind}").read_text() for kind in ("css", "js", "html"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text).render(
        views=views,
        unreadable=[(bad, _link(bad.path, beside)) for bad in unreadable],
        serving=overviews([run for _, run in runs], list(LEGS)),
        quality=_quality(runs),
        filters=_filters(views),
        made=now(),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _link(path: Path, beside: Path) -> str:
    """A relative URL; on another drive there is none, and the path itself stands for it."""
    try:
        relative = os.path.relpath(path.resolve(), beside.resolve())
    except ValueError:
        return path.resolve().as_uri()
    # A first segment with a colon would be taken for a scheme.
    return "./" + quote(Path(relative).as_posix())


def _filters(views: Sequence[RunView]) -> list[tuple[str, str, list[str]]]:
    def values(name: str, found: Iterable[str]) -> tuple[str, str, list[str]]:
        return name.lower().replace(" ", "-"), name, sorted(set(found))

    return [
        values("Machine", (v.run.provenance.machine for v in views)),
        values("Model", (v.model for v in views)),
        values("Backend", (v.run.provenance.device for v in views)),
        values("Kind", (v.run.kind for v in views)),
        values("Arm", (arm.name for v in views for arm in v.run.arms)),
        values("State", (v.state for v in views)),
    ]


def _run(path: Path, run: Run, beside: Path) -> RunView:
    doubts: list[str] = []
    if run.diagnostic:
        doubts.append(f"Diagnostic only, not for quoting: {'; '.join(run.preflight.problems) or 'asked for'}.")
    if not run.complete:
        doubts.append(f"Cut short: {run.interruption or 'no end was written'}.")
    names = list(dict.fromkeys([*(s.cell for s in run.samples), *(c.cell for c in run.comparisons)]))
    cells = tuple(_cell(run, name) for name in names)
    if not cells:
        doubts.append("Nothing was measured.")
    offered = dict.fromkeys(a.baseline for cell in cells for a in cell.against)
    declared = next((a.baseline for cell in cells for a in cell.against if a.declared), next(iter(offered), None))
    return RunView(
        run=run,
        href=_link(path, beside),
        file=path.name,
        model=model_name(run),
        state="diagnostic" if run.diagnostic else "complete" if run.complete else "cut short",
        doubts=tuple(doubts),
        arms=json.dumps([arm.name for arm in run.arms]),
        baselines=tuple(offered),
        declared=declared,
        cells=cells,
        odd=tuple(s for s in run.samples if s.status != "ok"),
    )


def _usable(run: Run, cell: str) -> dict[str, list[Sample]]:
    """The samples of a cell that count, by arm, in the order of the arms."""
    found: dict[str, list[Sample]] = {arm.name: [] for arm in run.arms}
    for sample in run.samples:
        if sample.cell == cell and sample.status == "ok" and sample.block >= 0:
            found.setdefault(sample.arm, []).append(sample)
    return found


def _values(samples: Iterable[Sample], metric: str) -> list[float]:
    return [s.metrics[metric] for s in samples if metric in s.metrics]


def _cell(run: Run, name: str) -> CellView:
    usable = _usable(run, name)
    arms = list(usable)
    present = {metric for own in usable.values() for s in own for metric in s.metrics}
    metrics = [metric for metric in METRICS if metric in present]
    primary = next((c.metric for c in run.comparisons if c.cell == name and c.primary), None)
    first = primary if primary in metrics else next(iter(metrics), None)
    declared = {(c.baseline, c.candidate) for c in run.comparisons if c.cell == name}
    every = {pair: _compared(run, name, pair, metrics, primary) for pair in permutations(arms, 2)}
    refused = [
        f"{b} against {a}: {every[a, b][0].reason}"
        for a, b in combinations(arms, 2)
        if every[a, b] and every[a, b][0].outcome in ("inapplicable", "blocked")
    ]
    memory, left_out = _memory(run, name, usable, first)
    return CellView(
        name=name,
        arms=tuple(arms),
        absolute=tuple(_absolute(metric, usable) for metric in metrics),
        spread=None if first is None else distributions(first, {a: _values(own, first) for a, own in usable.items()}),
        against=tuple(filter(None, (_against(base, every, declared) for base in arms))),
        refused=tuple(refused),
        memory=memory,
        left_out=left_out,
        unmeasured=tuple(
            arm for arm in arms if not any(s.cell == name and s.arm == arm and s.block >= 0 for s in run.samples)
        ),
    )


def _compared(
    run: Run, cell: str, pair: tuple[str, str], metrics: Sequence[str], primary: str | None
) -> list[Comparison]:
    """The comparisons of a pair of arms: the saved ones, else the same rule applied to the saved samples."""
    baseline, candidate = pair
    saved = [c for c in run.comparisons if (c.cell, c.baseline, c.candidate) == (cell, baseline, candidate)]
    one = partial(compare, run.samples, cell, baseline, candidate)
    found = saved or [one(metric, primary=metric == primary) for metric in metrics]
    return sorted(found, key=lambda c: not c.primary)


def _against(
    baseline: str, every: dict[tuple[str, str], list[Comparison]], declared: set[tuple[str, str]]
) -> Against | None:
    rows: list[Difference] = []
    plots: list[tuple[str, Rows]] = []
    for (base, candidate), comparisons in every.items():
        fit = [c for c in comparisons if c.outcome not in ("inapplicable", "blocked")]
        if base != baseline or not fit:
            continue
        rows += map(_difference, fit)
        plot = differences(fit)
        if plot is not None:
            plots.append((candidate, plot))
    if not rows:
        return None
    return Against(baseline, any(base == baseline for base, _ in declared), tuple(rows), tuple(plots))


def _difference(c: Comparison) -> Difference:
    why = c.reason + (f"; next: {c.next}" if c.next else "")
    return Difference(
        c.metric,
        c.primary,
        c.candidate,
        c.baseline,
        ratio(c),
        len(c.pairs),
        c.outcome,
        why,
        tuple(f"block {x.block}: {x.reason}" for x in c.excluded),
    )


def _absolute(metric: str, usable: dict[str, list[Sample]]) -> Absolute:
    unit, better = METRICS[metric]
    shown: list[str] = []
    for own in usable.values():
        values = _values(own, metric)
        text = "—"
        if values:
            text = f"{number(median(values), unit)} ({number(min(values), unit)} to {number(max(values), unit)}, n={len(values)})"
        shown.append(text)
    return Absolute(metric, better, tuple(shown))


def _memory(
    run: Run, cell: str, usable: dict[str, list[Sample]], speed: str | None
) -> tuple[Scatter | None, tuple[str, ...]]:
    """Memory against the cell's speed for arms that did the same work as the first, and the others with the reason."""
    memory = next((m for m in MEMORY if any(_values(own, m) for own in usable.values())), None)
    if memory is None or speed is None or METRICS[speed].unit == "byte":
        return None, ()
    works: dict[int, Work] = {}
    values: list[Value] = []
    left_out: list[str] = []
    for arm, own in usable.items():
        x, y = _values(own, memory), _values(own, speed)
        if not x or not y:
            continue
        odd = next(filter(None, (difference(works.setdefault(s.block, s.work), s.work) for s in own if s.work)), None)
        if odd is not None:
            left_out.append(f"{arm}: {odd}")
        else:
            values.append(Value(arm, median(x), median(y), run.id))
    return scatter(f"Memory against speed, {cell}", memory, speed, values), tuple(left_out)


def _quality(runs: Sequence[tuple[Path, Run]]) -> list[Scatter]:
    """Quality against size of weights, a plot for each task and text: models differ there, the questions must not."""
    groups: dict[tuple[str, str], list[Value]] = {}
    for _, run in runs:
        for cell in dict.fromkeys(s.cell for s in run.samples):
            for arm, own in _usable(run, cell).items():
                for metric in QUALITY:
                    _collect(groups, run, arm, metric, own)
    plots = (
        scatter(f"{metric} against size of weights, {task}", "weight_bytes", metric, values)
        for (metric, task), values in groups.items()
    )
    return [plot for plot in plots if plot is not None]


def _collect(
    groups: dict[tuple[str, str], list[Value]], run: Run, arm: str, metric: str, samples: Sequence[Sample]
) -> None:
    tasks: dict[str, list[Sample]] = {}
    for s in samples:
        if s.work is not None and {metric, "weight_bytes"} <= s.metrics.keys():
            tasks.setdefault(f"{s.work.task} ({(s.work.prompt or 'no digest')[:8]})", []).append(s)
    for task, own in tasks.items():
        x, y = median(_values(own, "weight_bytes")), median(_values(own, metric))
        groups.setdefault((metric, task), []).append(Value(f"{model_name(run)}, {arm}", x, y, run.id))
