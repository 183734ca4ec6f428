"""Results as Markdown for people. Everything here comes from a saved run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from gnomon.bench.schema import METRICS, Comparison, Run


def number(value: float, unit: str) -> str:
    """A value with its unit, bytes as MiB and short times as milliseconds; of numbers without a unit four figures."""
    if unit == "byte":
        return f"{value / 2**20:,.1f} MiB"
    if unit == "s" and value < 1:
        return f"{value * 1e3:,.1f} ms"
    if unit == "1":
        return f"{value:.4g}"
    if unit == "nat":
        return f"{value:.4g} nat"
    return f"{value:,.2f} {unit}"


def ratio(comparison: Comparison) -> str:
    """Ratio with its interval, above 1 where the candidate is better; a dash if there is none."""
    if comparison.ratio is None:
        return "—"
    bounds = (comparison.ratio, comparison.lower or 0.0, comparison.upper or 0.0)
    value, lower, upper = (f"{bound:.3f}" if bound < 100 else f"{bound:.3g}" for bound in bounds)
    return f"{value} [{lower}, {upper}]"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; vertical bars in cells are escaped."""
    names = list(head)
    lines = [names, ["---"] * len(names), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def medians(run: Run, cell: str, arm: str) -> dict[str, float]:
    """Median of each metric over the usable measured samples of an arm."""
    values: dict[str, list[float]] = {}
    for sample in run.samples:
        if sample.cell == cell and sample.arm == arm and sample.status == "ok" and sample.block >= 0:
            for name, value in sample.metrics.items():
                values.setdefault(name, []).append(value)
    return {name: median(found) for name, found in values.items()}


def comparison_row(run: Run, comparison: Comparison) -> list[str]:
    """One line of the comparison table: medians, ratio, outcome and why."""
    unit = METRICS[comparison.metric].unit
    shown: list[str] = []
    for arm in (comparison.baseline, comparison.candidate):
        value = medians(run, comparison.cell, arm).get(comparison.metric)
        shown.append("—" if value is None else number(value, unit))
    metric = f"**{comparison.metric}**" if comparison.primary else comparison.metric
    why = comparison.reason + (f"; next: {comparison.next}" if comparison.next else "")
    # Why an undeclared metric stays open would drown what decides; the file has it.
    why = why if comparison.primary or comparison.ratio is None else ""
    names = f"{comparison.candidate} / {comparison.baseline}"
    return [comparison.cell, names, metric, shown[1], shown[0], ratio(comparison), comparison.outcome, why]


def markdown(run: Run) -> str:
    """A whole run: what it was, its comparisons, and every sample that didn't count."""
    p = run.provenance
    parts = [f"# {run.name}", ""]
    parts.append(
        f"{run.kind} run {run.id}, {run.created:%Y-%m-%d %H:%M} UTC, {p.processor}, {p.cores} cores, {p.device}, "
        f"mlx {p.packages.get('mlx', '?')}, mlx-lm {p.packages.get('mlx-lm', '?')}, "
        f"revision {(p.revision or 'unknown')[:12]}{' with changes' if p.dirty else ''}."
    )
    if run.diagnostic:
        why = "; ".join(run.preflight.problems) or "asked for"
        parts += ["", f"Diagnostic only, not for quoting: {why}."]
    if run.interruption:
        parts += ["", f"Interrupted: {run.interruption}."]
    head = ("cell", "arms", "metric", "candidate", "baseline", "ratio (above 1 is better)", "outcome", "why")
    parts += ["", table(head, (comparison_row(run, comparison) for comparison in run.comparisons))]
    odd = [s for s in run.samples if s.status != "ok"]
    if odd:
        rows = ([str(s.index), s.cell, str(s.block), s.arm, s.status, s.reason or ""] for s in odd)
        parts += ["", table(("sample", "cell", "block", "arm", "status", "reason"), rows)]
    return "\n".join(parts) + "\n"


def listing(runs: Iterable[tuple[Path, Run]]) -> str:
    """One line per deciding comparison of every run."""
    rows: list[list[str]] = []
    for path, run in runs:
        state = "complete" if run.complete else f"cut short: {run.interruption or 'no end was written'}"
        rows += [
            [f"{run.created:%Y-%m-%d %H:%M}", run.name, c.cell, ratio(c), c.outcome, state, path.name]
            for c in run.comparisons
            if c.primary
        ] or [[f"{run.created:%Y-%m-%d %H:%M}", run.name, "", "", "", state, path.name]]
    return table(("when", "run", "cell", "ratio", "outcome", "state", "file"), rows)
