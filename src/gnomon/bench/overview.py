"""The serving suite at a glance: a row for each leg, with what was declared to decide it and what stands in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.bench.report import medians, number, ratio
from gnomon.bench.schema import METRICS, Comparison, Run
from gnomon.bench.workload import Cell

STABLE = 1.15
"""Largest over smallest of an arm's samples beyond which a leg is called unstable."""


@dataclass(frozen=True, slots=True)
class LegRow:
    """One leg: medians by arm (a dash where nothing counts), ratios of the first arm, and remarks. `run` is the result's id."""

    leg: str
    cell: str
    metric: str
    better: str
    values: tuple[str, ...]
    ratios: tuple[str, ...]
    remarks: tuple[str, ...]
    run: str


@dataclass(frozen=True, slots=True)
class Overview:
    """The latest complete run of every leg of the same arms on the same model and machine; `missing` are legs without one."""

    model: str
    machine: str
    arms: tuple[str, ...]
    rows: tuple[LegRow, ...]
    missing: tuple[str, ...]


def leg_of(run: Run) -> tuple[str, Cell] | None:
    """The leg and cell of a run of the serving suite, by its name; None for any other run."""
    parts = run.name.split(", ")
    if run.kind != "serve" or len(parts) < 3 or parts[0] != "serve":
        return None
    try:
        return parts[1], Cell.parse(parts[2])
    except ValueError:
        return None


def row(run: Run, names: Sequence[str]) -> LegRow | None:
    """The row of a run, with the values of the arms `names`; None if it is none of the suite."""
    found = leg_of(run)
    if found is None:
        return None
    leg, cell = found
    unit, better = METRICS[cell.primary]
    values: list[str] = []
    remarks: list[str] = []
    for name in names:
        value = medians(run, str(cell), name).get(cell.primary)
        values.append("—" if value is None else number(value, unit))
        remarks += _remarks(run, str(cell), name, cell.primary)
    deciding = [c for c in run.comparisons if c.primary]
    remarks += [f"{c.baseline}: {c.reason}" for c in deciding if c.ratio is None and c.outcome != "blocked"]
    if run.diagnostic:
        remarks.append("diagnostic")
    ratios = tuple(_against(c) for c in deciding if c.ratio is not None)
    return LegRow(leg, str(cell), cell.primary, better, tuple(values), ratios, tuple(remarks), run.id)


def _remarks(run: Run, cell: str, arm: str, metric: str) -> list[str]:
    """What is to be said of an arm's samples: those that don't count, and a wide spread of those that do."""
    own = [s for s in run.samples if s.arm == arm and s.cell == cell and s.block >= 0]
    values = [s.metrics[metric] for s in own if s.status == "ok" and metric in s.metrics]
    found: list[str] = []
    if len(values) > 1 and min(values) > 0 and max(values) / min(values) > STABLE:
        found.append(f"{arm} spreads by {max(values) / min(values):.2f}")
    bad = [s for s in own if s.status != "ok"]
    if bad:
        found.append(f"{arm}: {len(bad)} of {len(own)} did not count ({bad[-1].status}: {bad[-1].reason})")
    return found


def _against(comparison: Comparison) -> str:
    return f"{comparison.baseline}: {ratio(comparison)} {comparison.outcome}"


def overviews(runs: Sequence[Run], legs: Sequence[str]) -> list[Overview]:
    """Groups of complete runs that share arms, model and machine, in the order of `legs`; of several runs of a cell the latest."""
    groups: dict[tuple[str, str, tuple[str, ...]], dict[tuple[str, str], LegRow]] = {}
    for run in sorted(runs, key=lambda run: run.created):
        arms = tuple(arm.name for arm in run.arms)
        found = row(run, arms) if run.complete else None
        if found is not None and found.leg in legs:
            key = (model_name(run), run.provenance.machine, arms)
            groups.setdefault(key, {})[found.leg, found.cell] = found
    result: list[Overview] = []
    for (model, machine, arms), rows in groups.items():
        ordered = tuple(sorted(rows.values(), key=lambda one: legs.index(one.leg)))
        missing = tuple(leg for leg in legs if all(one.leg != leg for one in ordered))
        result.append(Overview(model, machine, arms, ordered, missing))
    return result


def model_name(run: Run) -> str:
    """Name and the beginning of the hash of a run's model."""
    path, sha = run.provenance.model_path, run.provenance.model_sha256
    name = path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] if path else "no model"
    return f"{name} ({sha[:8]})" if sha else name
