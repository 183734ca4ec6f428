"""`gnomon models`: the models that are here, or every model type with its verdict."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from gnomon.cli import ls
from gnomon.cli._library import stdout

NAME = "models"
HELP = "list the models that are here; with --supported, every model type and whether it runs and batches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--supported", action="store_true", help="every model type mlx-lm knows, with Gnomon's verdict")
    ls.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not args.supported:
        return ls.run(args)
    from rich.table import Table

    from gnomon.cli._model import check_backend

    check_backend()
    from gnomon.models.supported import supported_types

    rows = supported_types()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model type", "runs", "batches", "ragged", "note"):
        table.add_column(title, overflow="fold")
    for row in rows:
        note = "; ".join(part for part in (f"as {row.same_as}" if row.same_as else "", row.note) if part)
        table.add_row(row.model_type, _verdict(row.runs), _verdict(row.batches), _verdict(row.ragged), note)
    stdout().print(table)
    return 0


def _verdict(value: bool | None) -> str:
    return "untried" if value is None else "yes" if value else "no"
