"""What `gnomon bench model` tells: tensors, bytes and bits; least bytes and operations per token; the share of the limit a run reached."""

from __future__ import annotations

from pathlib import Path

from gnomon.bench.cost import Cost, CostModel
from gnomon.bench.inventory import Inventory, inventory
from gnomon.bench.report import medians, table
from gnomon.bench.roofline import Roofline, roofline
from gnomon.bench.schema import Run
from gnomon.bench.store import load
from gnomon.bench.workload import Cell


def _tensors(found: Inventory) -> str:
    rows = (
        [
            group.role,
            " x ".join(map(str, group.shape)),
            f"{group.bits}" + (f" (groups of {group.group})" if group.group else f" {group.dtype}"),
            str(group.count),
            f"{group.parameters:,}",
            f"{group.size / 2**20:,.2f}",
            f"{group.bpw:.2f}",
        ]
        for group in found.groups()
    )
    return table(("role", "shape", "bits", "count", "parameters", "MiB", "bits per weight"), rows)


def _limits(limits: Roofline, phases: dict[str, Cost]) -> str:
    rows = (
        [
            name,
            f"{cost.weight_bytes / cost.tokens / 2**20:,.2f}",
            f"{cost.state_bytes / cost.tokens / 2**20:,.3f}",
            f"{cost.operations / cost.tokens / 1e9:,.3f}",
            limits.bound(cost),
            f"{cost.tokens / limits.seconds(cost):,.1f}",
        ]
        for name, cost in phases.items()
    )
    head = ("phase", "weights MiB/token", "state MiB/token", "Gop/token", "bound by", "limit token/s")
    return table(head, rows)


def cost_of(costs: CostModel, cell: Cell, prompt_chunk: int = 2048) -> tuple[Cost, str] | None:
    """The least cost of what a cell's rate counts, and that rate's metric; None for cells that no cost describes.

    A decode cell's tokens come at growing depth, so its cost is taken in the middle.
    """
    if cell.task == "decode":
        return costs.decode(cell.depth + cell.output_tokens // 2), "decode_tokens_per_second"
    if cell.task == "prompt":
        return costs.prefill(cell.prompt_tokens, prompt_chunk), "prefill_tokens_per_second"
    return None


def reached(run: Run, costs: CostModel, limits: Roofline) -> str:
    """Share of the limit that each arm of a run reached, by its median rates."""
    rows: list[list[str]] = []
    for text in dict.fromkeys(sample.cell for sample in run.samples):
        found = cost_of(costs, Cell.parse(text))
        if found is None:
            continue
        cost, metric = found
        for arm in run.arms:
            rate = medians(run, text, arm.name).get(metric)
            if rate is not None:
                share = limits.fraction(cost, cost.tokens / rate)
                rows.append(
                    [text, arm.name, f"{rate:,.2f}", f"{cost.tokens / limits.seconds(cost):,.1f}", f"{share:.1%}"]
                )
    return table(("cell", "arm", "token/s", "limit token/s", "share of the limit"), rows)


def describe(path: Path, cache: Path, depth: int, prompt: int, result: Path | None, remeasure: bool) -> str:
    """Markdown about the model at `path` on this machine.

    Raises `ValueError` if the result is of another model or machine: its rates say nothing about these limits.
    """
    found = inventory(path)
    costs, limits = CostModel(found), roofline(cache, remeasure=remeasure)
    phases = {
        f"decode at {depth}": costs.decode(depth),
        f"decode at {depth}, 8 rows": costs.decode(depth, 8),
        f"prefill of {prompt}": costs.prefill(prompt),
    }
    parts = [
        f"# {path.name}",
        f"{found.num_tensors} tensors, {found.parameters:,} parameters, {found.size / 2**20:,.1f} MiB; "
        f"matrices {found.matrix_bpw:.2f} bits per weight; {'tied' if found.tied else 'separate'} head.",
        _tensors(found),
        f"{limits.device}: reads {limits.bytes_per_second / 1e9:,.1f} GB/s, computes {limits.operations_per_second / 1e9:,.0f} "
        f"Gop/s ({limits.dtype}), measured {limits.measured[:16]}{'' if limits.quiet else ' on a busy machine'}.",
        _limits(limits, phases),
    ]
    if result is not None:
        run = load(result)
        if run.provenance.machine != limits.machine:
            raise ValueError(f"{result.name} was measured on another machine")
        if run.provenance.model_sha256 is None or not _same_model(run, path):
            raise ValueError(f"{result.name} was measured with another model")
        parts.append(reached(run, costs, limits))
    return "\n\n".join(parts) + "\n"


def _same_model(run: Run, path: Path) -> bool:
    from gnomon.bench.provenance import model_content

    return model_content(path)[0] == run.provenance.model_sha256
