"""Cells of a benchmark in a folder, a file each: what is there isn't measured again, and several processes may share the work.

A cell is taken by whoever locks it first, so that any number of processes with the same arguments divide the cells among them; `--cells`
leaves some out, `--minutes` begins none after that time, `--list` names them in the order in which they are taken: most telling first.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """A measurement and its name, which is unique in its folder."""

    name: str
    measure: Callable[[], Result]

    @property
    def file(self) -> str:
        return "".join(c if c.isalnum() or c in "-._" else "_" for c in self.name)


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--out", type=Path, default=Path(out), help=f"folder of the results (default: {out})")
    parser.add_argument(
        "--cells", nargs="+", default=["*"], metavar="PATTERN", help="only cells of such names, such as 'quality*'"
    )
    parser.add_argument("--minutes", type=float, help="begin no cell after this time")
    parser.add_argument("--list", action="store_true", help="name the cells and end")


def run(cells: Sequence[Cell], args: argparse.Namespace) -> None:
    """Measure the cells that match, aren't there and nobody else is at; tells of each how long it took."""
    wanted = [cell for cell in cells if any(fnmatchcase(cell.name, pattern) for pattern in args.cells)]
    if not wanted:
        raise SystemExit(f"no cell matches {' '.join(args.cells)}: --list names them")
    if args.list:
        for cell in wanted:
            print(cell.name, "(there)" if (args.out / f"{cell.file}.json").is_file() else "")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    for cell in wanted:
        if args.minutes is not None and time.monotonic() - begun > 60 * args.minutes:
            print(f"{args.minutes:g} minutes are over")
            return
        lock = FileLock(args.out / f"{cell.file}.lock")
        try:
            with lock.acquire(timeout=0):
                _measure(cell, args.out / f"{cell.file}.json")
        except Timeout:
            continue


def _measure(cell: Cell, file: Path) -> None:
    if file.is_file():
        return
    begun = time.perf_counter()
    try:
        found = cell.measure()
    except (ValueError, RuntimeError) as error:
        # What can't run is a result as well; it isn't tried again until somebody removes the file.
        found = {"error": str(error)}
    seconds = time.perf_counter() - begun
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"cell": cell.name, "cell_seconds": seconds, **found}) + "\n", encoding="utf-8")
    partial.replace(file)
    print(f"{cell.name}: {seconds:.1f} s  {json.dumps(found)[:400]}", flush=True)


def results(out: Path) -> list[Result]:
    """All that a folder holds, by name."""
    return [json.loads(file.read_text("utf-8")) for file in sorted(out.glob("*.json"))]
