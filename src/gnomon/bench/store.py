"""Results on disk: a JSON file per run, which is the record, and an SQLite index that can be rebuilt from them at any time."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from gnomon.bench.schema import FORMAT, METRICS, Run

INDEX_FORMAT = 1
_TABLES = """
CREATE TABLE runs (id TEXT PRIMARY KEY, file TEXT, kind TEXT, name TEXT, created TEXT, complete INTEGER, diagnostic INTEGER, machine TEXT,
                   device TEXT, revision TEXT, dirty INTEGER, model_sha256 TEXT);
CREATE TABLE samples (run TEXT, idx INTEGER, cell TEXT, block INTEGER, arm TEXT, seed INTEGER, attempt INTEGER, status TEXT, reason TEXT,
                      PRIMARY KEY (run, idx));
CREATE TABLE metrics (run TEXT, idx INTEGER, metric TEXT, unit TEXT, value REAL);
CREATE TABLE comparisons (run TEXT, cell TEXT, metric TEXT, baseline TEXT, candidate TEXT, is_primary INTEGER, blocks INTEGER, ratio REAL,
                          lower REAL, upper REAL, outcome TEXT, reason TEXT);
"""


class Unreadable(NamedTuple):
    """A file in the store that is no result this version can read."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What rebuilding the index found."""

    runs: int
    unreadable: tuple[Unreadable, ...]


def new_id() -> str:
    """A fresh run id: eight hexadecimal digits."""
    return secrets.token_hex(4)


def now() -> datetime:
    """The present, in UTC."""
    return datetime.now(UTC)


class Store:
    """A directory of results. The index lies beside them as `index.sqlite` and holds nothing that the files don't."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = directory / "index.sqlite"

    def path(self, run: Run) -> Path:
        """Where a run's file lies: its creation time in UTC, kind and id."""
        return self.directory / f"{run.created:%Y%m%dT%H%M%SZ}-{run.kind}-{run.id}.json"

    def save(self, run: Run) -> Path:
        """Write a run's file, whole or not at all, over an earlier state of the same run."""
        path = self.path(run)
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial-{os.getpid()}")
        partial.write_text(run.model_dump_json(indent=1) + "\n")
        partial.replace(path)
        return path

    def files(self) -> Iterator[Path]:
        """All result files, oldest first."""
        yield from sorted(self.directory.glob("*.json"))

    def runs(self) -> tuple[list[tuple[Path, Run]], list[Unreadable]]:
        """All readable runs, oldest first (files tell seconds only), and the files that are none, with reasons."""
        good: list[tuple[Path, Run]] = []
        bad: list[Unreadable] = []
        for path in self.files():
            try:
                good.append((path, load(path)))
            except ValueError as error:
                bad.append(Unreadable(path, str(error).splitlines()[0]))
        return sorted(good, key=lambda found: found[1].created), bad

    def rebuild(self) -> Rebuilt:
        """Make the index anew from the files. Files of other formats are left alone and counted."""
        good, bad = self.runs()
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.index.with_suffix(f".{os.getpid()}")
        partial.unlink(missing_ok=True)
        database = sqlite3.connect(partial)
        try:
            with database:
                database.executescript(_TABLES)
                database.execute(f"PRAGMA user_version = {INDEX_FORMAT}")
                for path, run in good:
                    _insert(database, path, run)
        finally:
            database.close()
        partial.replace(self.index)
        return Rebuilt(len(good), tuple(bad))


def load(path: Path) -> Run:
    """Read a result file. Raises `ValueError` naming the file and the first field that is wrong, or the format it has."""
    text = path.read_text()
    try:
        return Run.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        if place == "format":
            raise ValueError(f"{path.name}: format {first['input']!r}, this version reads {FORMAT}") from error
        raise ValueError(f"{path.name}: {place}: {first['msg']}") from error


def _insert(database: sqlite3.Connection, path: Path, run: Run) -> None:
    p = run.provenance
    head = (run.id, path.name, run.kind, run.name, run.created.isoformat(), run.complete, run.diagnostic)
    database.execute(
        "INSERT OR REPLACE INTO runs VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        (*head, p.machine, p.device, p.revision, p.dirty, p.model_sha256),
    )
    for s in run.samples:
        row = (run.id, s.index, s.cell, s.block, s.arm, s.seed, s.attempt, s.status, s.reason)
        database.execute("INSERT OR REPLACE INTO samples VALUES (?,?,?,?,?,?,?,?,?)", row)
        for name, value in s.metrics.items():
            database.execute(
                "INSERT INTO metrics VALUES (?,?,?,?,?)", (run.id, s.index, name, METRICS[name].unit, value)
            )
    for c in run.comparisons:
        row = (run.id, c.cell, c.metric, c.baseline, c.candidate, c.primary, len(c.pairs), c.ratio, c.lower, c.upper)
        database.execute("INSERT INTO comparisons VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", (*row, c.outcome, c.reason))
