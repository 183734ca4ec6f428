"""The server's table: one request against mlx-lm in process and against mlx_lm.server, eight at once, start to first answer, memory.

Every line is a paired comparison in alternating blocks; the JSON result keeps every sample. On a machine that isn't quiet, and with
--quick, the run says that it is diagnostic.

    uv run python benchmarks/serve_table.py MODEL [--quick] [--blocks 6] [--out DIR] [--flag=--kernels=stock ...]
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from gnomon.bench.contenders import WorkerContender, worker_command
from gnomon.bench.http import ServerContender, gnomon_command, mlx_lm_command
from gnomon.bench.preflight import awake, preflight, require_quiet
from gnomon.bench.provenance import provenance
from gnomon.bench.report import comparison_row, number, table
from gnomon.bench.runner import Interrupted, Plan, Runner
from gnomon.bench.schema import Arm, Comparison, Run
from gnomon.bench.session import Pairing, Session
from gnomon.bench.store import Store
from gnomon.bench.workload import Cell, Contender

OURS, SERVER, LIBRARY = "gnomon", "mlx_lm.server", "mlx_lm.stream_generate"
TITLES = {
    ("one", LIBRARY, "decode_tokens_per_second"): "decode, one request, HTTP against in-process mlx-lm",
    ("one", SERVER, "decode_tokens_per_second"): "decode, one request",
    ("one", SERVER, "first_output_seconds"): "time to first token, one request",
    ("many", SERVER, "aggregate_tokens_per_second"): "output rate, {rows} requests together",
    ("many", SERVER, "first_output_median_seconds"): "time to first token, {rows} requests, median",
    ("many", SERVER, "first_output_max_seconds"): "time to first token, {rows} requests, last",
    ("many", SERVER, "peak_resident_bytes"): "peak resident memory, {rows} requests",
    ("start", SERVER, "first_answer_seconds"): "start of the process to first token",
    ("start", SERVER, "resident_bytes"): "resident memory after the first answer",
}
PRIMARY = {"decode_tokens_per_second", "aggregate_tokens_per_second", "first_answer_seconds"}


def pairings(cells: dict[str, Cell]) -> list[Pairing]:
    """The declared comparisons, Gnomon being the candidate."""
    return [
        Pairing(str(cells[kind]), baseline, OURS, metric, primary=metric in PRIMARY)
        for kind, baseline, metric in TITLES
    ]


def line(run: Run, cells: dict[str, Cell], key: tuple[str, str, str], comparison: Comparison) -> list[str]:
    """One row of the table."""
    _, _, _, ours, theirs, ratio, outcome, why = comparison_row(run, comparison)
    title = TITLES[key].format(rows=cells["many"].rows)
    return [title, ours, theirs, key[1], ratio, outcome if comparison.ratio is not None else f"{outcome}: {why}"]


def render(run: Run, cells: dict[str, Cell]) -> str:
    """The Markdown table of a run."""
    by_key = dict(zip(TITLES, run.comparisons, strict=True))
    p = run.provenance
    head = ("", OURS, "mlx-lm", "against", "ratio (above 1 is better)", "outcome")
    text = table(head, (line(run, cells, key, comparison) for key, comparison in by_key.items()))
    note = (
        f"{p.processor}, {p.cores} cores, {number(p.memory_bytes, 'byte')}, {p.device}; mlx {p.packages.get('mlx')}, "
        f"mlx-lm {p.packages.get('mlx-lm')}; medians of {run.planned_blocks} paired blocks, 95 % intervals."
    )
    if run.diagnostic:
        note += f" Diagnostic only: {'; '.join(run.preflight.problems) or 'quick mode'}."
    bad = sum(s.status != "ok" for s in run.samples)
    if bad:
        note += f" {bad} of {len(run.samples)} samples did not count; their reasons are in the result file."
    return f"{text}\n\n{note}\n"


def contenders(model: Path, sha: str | None, flags: Sequence[str]) -> tuple[Contender, Contender, Contender]:
    """Gnomon's server, mlx-lm's server, and mlx-lm in a process of its own."""
    ours = ServerContender(
        Arm(name=OURS, kind="server", settings={"flags": list(flags)}), gnomon_command(model, *flags), sha
    )
    server = ServerContender(Arm(name=SERVER, kind="server"), mlx_lm_command(model), sha)
    command = worker_command("mlx-lm", model, {"model_sha256": sha})
    library = WorkerContender(Arm(name=LIBRARY, kind="reference", command=tuple(command)))
    return ours, server, library


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; 1 if a comparison could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an MLX model directory")
    parser.add_argument("--blocks", type=int, default=6, help="paired blocks of each comparison (at least 5 decide)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the single request")
    parser.add_argument("--requests", type=int, default=8, help="requests at once")
    parser.add_argument("--each", type=int, default=32, help="tokens of each of them")
    parser.add_argument("--seed", type=int, default=1, help="workload seed of the first block")
    parser.add_argument("--quick", action="store_true", help="5 blocks of short answers; diagnostic")
    parser.add_argument("--refuse-busy", action="store_true", help="do not measure on a busy machine")
    parser.add_argument("--flag", action="append", default=[], help="flag for Gnomon's server; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the results")
    a = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    blocks, tokens, each = (5, 24, 12) if a.quick else (a.blocks, a.tokens, a.each)
    cells = {
        "one": Cell.parse(f"stream:1x{tokens}"),
        "many": Cell.parse(f"stream:{a.requests}x{each}"),
        "start": Cell.parse("start:2"),
    }
    state = preflight()
    if a.refuse_busy:
        require_quiet(state)
    origin = provenance(a.model)
    session = Session(
        Store(a.out),
        "serve",
        f"serve table, {a.model.name}",
        origin=origin,
        state=state,
        argv=sys.argv,
        planned_blocks=blocks,
        diagnostic=a.quick,
    )
    ours, server, library = contenders(a.model, origin.model_sha256, a.flag)
    interruption: str | None = None
    with awake():
        try:
            Runner([library, ours, server], session.record, Plan(blocks, a.seed)).run([cells["one"]])
            Runner([server, ours], session.record, Plan(blocks, a.seed)).run([cells["many"]])
            Runner([server, ours], session.record, Plan(blocks, a.seed, warmups=0, exclusive=True)).run(
                [cells["start"]]
            )
        except Interrupted as error:
            interruption = str(error)
    path = session.close([library, ours, server], pairings(cells), interruption)
    text = render(session.run, cells)
    path.with_suffix(".md").write_text(text)
    print(text)
    print(f"{path}")
    return 0 if all(c.ratio is not None for c in session.run.comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
