"""`gnomon fit`: what fits on this machine, how long a context, and how fast."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli._library import find, runs, size, stdout, store_of
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, EngineConfig, KvConfig, ModelConfig, settings

if TYPE_CHECKING:
    from gnomon.models.fit import Needs
    from gnomon.models.machine import Machine

NAME = "fit"
HELP = "predict memory and decode speed of a model, or of all that are here"
GROUPS = (ModelConfig, KvConfig)
_BUDGET = next(s for s in settings([EngineConfig]) if s.name == "memory_budget")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ctx", type=int, default=8192, metavar="N", help="context in tokens (default: 8192)")
    parser.add_argument("--skus", action="store_true", help="also on every Apple chip, at 32768 tokens")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(_BUDGET.flag, metavar="GB", help=f"{_BUDGET.option.help} [{_BUDGET.env}]")


def run(args: argparse.Namespace) -> int:
    from gnomon.models.fit import usable
    from gnomon.models.machine import this_machine

    config: Config = args.config
    if args.ctx < 1:
        raise CommandError(f"--ctx {args.ctx} is out of range: >= 1 tokens", 2)
    given: str | None = args.memory_budget
    budget = config.engine.memory_budget if given is None else _BUDGET.parse(_BUDGET.flag, given)
    models = _models(config)
    machine = this_machine(config.paths.cache)
    room = usable(machine.ram, budget)
    report = [_row(id, needs, args.ctx, room, machine.gbps) for id, needs in models]
    matrix = [row for id, needs in models for row in _matrix(id, needs)] if args.skus else []
    result: dict[str, Any] = {
        "machine": {
            "name": machine.name,
            "device": machine.device,
            "memory_bytes": machine.ram,
            "usable_bytes": int(room),
            "bandwidth_gbps": machine.gbps,
            "bandwidth_origin": machine.origin,
        },
        "context_tokens": args.ctx,
        "typical_context_tokens": min(8192, args.ctx),
        "report": report,
        "matrix": matrix,
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _show(machine, room, args.ctx, report, matrix)
    return 0


def _models(config: Config) -> list[tuple[str, Needs]]:
    from gnomon.hub.registry import scan
    from gnomon.models.fit import measure_needs

    if config.model.wanted is not None:
        found = find(config)
        try:
            return [(found.id, measure_needs(found.path, config.kv.scheme))]
        except (OSError, ValueError) as error:
            raise CommandError(f"{found.id}: {error}") from error
    here: list[tuple[str, Path]] = [(m.id, m.path) for m in scan(store_of(config)).servable() if runs(m)]
    if not here:
        raise CommandError("no models are here: gnomon get OWNER/NAME, or gnomon serve for the starter")
    return [(id, measure_needs(path, config.kv.scheme)) for id, path in here]


def _row(id: str, needs: Needs, context: int, room: float, gbps: float) -> dict[str, Any]:
    return {
        "model": id,
        "weights_bytes": needs.weights,
        "kv_bytes": int(needs.kv(context)),
        "total_bytes": int(needs.total(context)),
        "fits": needs.fits(context, room),
        "max_context_tokens": needs.max_context(room),
        "decode_tps": round(needs.decode(context, gbps), 1),
        "typical_tps": round(needs.decode(min(8192, context), gbps), 1),
    }


def _matrix(id: str, needs: Needs) -> list[dict[str, Any]]:
    from gnomon.models.fit import MATRIX_CONTEXT, SKUS, usable

    context = min(MATRIX_CONTEXT, needs.max_positions or MATRIX_CONTEXT)
    return [
        {"chip": row.name, "memory_gib": memory} | _row(id, needs, context, usable(memory << 30, None), row.gbps)
        for row in SKUS
        for memory in row.memory
    ]


def _show(
    machine: Machine, room: float, context: int, report: list[dict[str, Any]], matrix: list[dict[str, Any]]
) -> None:
    from rich.table import Table

    console = stdout()
    console.print(
        f"{machine.name}: {size(machine.ram)} of memory, {size(room)} usable, "
        f"{machine.gbps:.0f} GB/s ({machine.origin}). Estimates; advice only unless --memory-budget is set.",
        markup=False,
        soft_wrap=True,
    )
    for rows, chips in ((report, False), (matrix, True)):
        if not rows:
            continue
        lead = ("chip", "memory") if chips else ()
        at = "up to 32768 tokens" if chips else f"{context} tokens"
        table = Table(
            *lead, "model", f"at {at}", "of it KV", "fits", "longest context", "tokens/s", box=None, pad_edge=False
        )
        for row in rows:
            first = (row["chip"], f"{row['memory_gib']} GiB") if chips else ()
            table.add_row(
                *first,
                row["model"].rpartition("/")[2],
                size(row["total_bytes"]),
                size(row["kv_bytes"]),
                "yes" if row["fits"] else "no",
                str(row["max_context_tokens"]),
                f"{row['decode_tps']:.1f}",
            )
        console.print(table)
