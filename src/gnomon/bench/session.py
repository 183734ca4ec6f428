"""One run from preflight to verdict: keeps every sample on disk as it comes, and closes with the comparisons."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gnomon.bench.compare import compare
from gnomon.bench.preflight import awake, preflight, require_quiet
from gnomon.bench.provenance import provenance
from gnomon.bench.runner import Interrupted, Plan, Runner
from gnomon.bench.schema import Preflight, Provenance, Run, Sample
from gnomon.bench.store import Store, new_id, now
from gnomon.bench.workload import Cell, Contender

log = logging.getLogger(__name__)

Kind = Literal["ab", "native", "serve"]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which arms to compare on which metric of which cell; `primary` metrics were declared before the run."""

    cell: str
    baseline: str
    candidate: str
    metric: str
    primary: bool = False


class Session:
    """A run being recorded. The file is rewritten after every sample, so that a crash loses nothing that was measured."""

    def __init__(
        self,
        store: Store,
        kind: Kind,
        name: str,
        *,
        origin: Provenance,
        state: Preflight,
        argv: Sequence[str] = (),
        planned_blocks: int = 0,
        diagnostic: bool = False,
    ) -> None:
        self._store = store
        self._samples: list[Sample] = []
        self.run = Run(
            kind=kind,
            id=new_id(),
            name=name,
            created=now(),
            argv=tuple(argv),
            planned_blocks=planned_blocks,
            diagnostic=diagnostic or state.verdict != "quiet",
            provenance=origin,
            preflight=state,
        )

    def record(self, sample: Sample) -> None:
        """Keep a sample, whatever its status."""
        self._samples.append(sample)
        self._write(samples=tuple(self._samples))
        line = f"{sample.cell} block {sample.block} {sample.arm}: {sample.status} in {sample.seconds:.2f} s"
        log.info("%s%s", line, f" ({sample.reason})" if sample.reason else "")

    def close(self, contenders: Sequence[Contender], pairings: Sequence[Pairing], interruption: str | None) -> Path:
        """Write arms and comparisons; returns the file."""
        arms = tuple(contender.arm for contender in contenders)
        comparisons = tuple(
            compare(self._samples, p.cell, p.baseline, p.candidate, p.metric, primary=p.primary) for p in pairings
        )
        return self._write(
            arms=arms,
            comparisons=comparisons,
            interruption=interruption,
            complete=interruption is None,
            finished=now(),
        )

    def _write(self, **changes: object) -> Path:
        self.run = self.run.model_copy(update=changes)
        return self._store.save(self.run)


def pairings(cells: Sequence[Cell], baseline: str, candidate: str, samples: Sequence[Sample]) -> list[Pairing]:
    """The primary comparison of every cell, then one for each further metric that both arms reported."""
    found: list[Pairing] = []
    for cell in cells:
        pair = (baseline, candidate)
        mine = [s for s in samples if s.cell == str(cell) and s.arm in pair and s.status == "ok" and s.block >= 0]
        reported = [set(s.metrics) for s in mine]
        common = set.intersection(*reported) if reported else set[str]()
        # A command may report rates or sizes of its own; what it declares first is then what decides.
        own = cell.task == "command" and mine and cell.primary not in common
        primary = next(iter(mine[0].metrics)) if own else cell.primary
        found.append(Pairing(str(cell), baseline, candidate, primary, primary=True))
        # A size or time of zero has no ratio; the samples keep it.
        positive = {m for m in common - {primary} if all(s.metrics[m] > 0 for s in mine)}
        found += [Pairing(str(cell), baseline, candidate, metric) for metric in sorted(positive)]
    return found


def paired_run(
    store: Store,
    kind: Kind,
    name: str,
    contenders: Sequence[Contender],
    cells: Sequence[Cell],
    plan: Plan,
    *,
    model: Path | None = None,
    hash_cache: Path | None = None,
    busy: Literal["label", "refuse"] = "label",
    argv: Sequence[str] = (),
    diagnostic: bool = False,
) -> tuple[Run, Path]:
    """Preflight, measure the first contender (baseline) against each further one, compare, store. Raises `BusyMachine` if refused."""
    state = preflight()
    if busy == "refuse":
        require_quiet(state)
    elif state.problems:
        log.warning("the machine is busy, so this run is diagnostic only: %s", "; ".join(state.problems))
    origin = provenance(model, hash_cache)
    session = Session(
        store,
        kind,
        name,
        origin=origin,
        state=state,
        argv=argv,
        planned_blocks=plan.blocks,
        diagnostic=diagnostic,
    )
    interruption: str | None = None
    with awake():
        try:
            Runner(contenders, session.record, plan).run(cells)
        except Interrupted as error:
            interruption = str(error)
    baseline = contenders[0].arm.name
    wanted = [
        pairing
        for contender in contenders[1:]
        for pairing in pairings(cells, baseline, contender.arm.name, session.run.samples)
    ]
    path = session.close(contenders, wanted, interruption)
    return session.run, path
