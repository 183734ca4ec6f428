"""The index on disk: an SQLite file that says what files there are. It can always be made again from them."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from array import array
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.state.ssd.format import Entry

log = logging.getLogger(__name__)

NAME = "index.sqlite"
BUSY_SECONDS = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, identity TEXT NOT NULL, namespace TEXT NOT NULL,
    kind TEXT NOT NULL, parent BLOB NOT NULL, key BLOB NOT NULL, start INTEGER NOT NULL, tokens BLOB NOT NULL,
    layers TEXT NOT NULL, count INTEGER NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL);
CREATE INDEX IF NOT EXISTS entries_by_parent ON entries(parent, kind);
CREATE INDEX IF NOT EXISTS entries_by_use ON entries(used);
CREATE INDEX IF NOT EXISTS entries_by_size ON entries(size);
"""
_COLUMNS = "name, identity, namespace, kind, parent, key, start, tokens, layers, count, size, used"
_OLDEST = """
SELECT {columns} FROM entries e WHERE
    NOT EXISTS (SELECT 1 FROM entries c WHERE c.parent = e.key AND e.kind = 'block') AND
    NOT EXISTS (SELECT 1 FROM entries c WHERE c.parent = e.parent AND c.kind = 'checkpoint' AND e.kind = 'block')
ORDER BY used, start DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry with its file's size in bytes and when it was last used, in seconds since the epoch."""

    entry: Entry
    size: int
    used: float


class Manifest:
    """Rows of entries. A manifest belongs to the thread that opened it; several processes may have the same one open."""

    def __init__(self, directory: Path | None) -> None:
        """Open the index in `directory`; one that is no SQLite file is made anew, empty. None keeps it in memory.

        Raises sqlite3.Error and OSError.
        """
        self.path = directory / NAME if directory is not None else ":memory:"
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("%s is damaged and is made again from the files: %s", self.path, error)
            for ending in ("", "-wal", "-shm"):
                Path(f"{self.path}{ending}").unlink(missing_ok=True)
            self._db = self._open()
        self._seen = 0

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.executescript(_SCHEMA)
            db.execute("SELECT count(*) FROM entries").fetchone()
        except sqlite3.Error:
            db.close()
            raise
        return db

    def put(self, listed: Iterable[Listed]) -> None:
        """Add entries, or replace those of the same name."""
        rows = [
            (
                one.entry.name,
                one.entry.identity,
                one.entry.namespace,
                one.entry.kind,
                one.entry.parent,
                one.entry.key,
                one.entry.start,
                array("q", one.entry.tokens).tobytes(),
                json.dumps(one.entry.layers),
                one.entry.count,
                one.size,
                one.used,
            )
            for one in listed
        ]
        self._many(f"INSERT OR REPLACE INTO entries({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", rows)

    def drop(self, names: Iterable[str]) -> None:
        self._many("DELETE FROM entries WHERE name = ?", [(name,) for name in names])

    def touch(self, names: Iterable[str], used: float) -> None:
        self._many("UPDATE entries SET used = ? WHERE name = ?", [(used, name) for name in names])

    def all(self) -> list[Listed]:
        """Every entry, those nearest to the beginning first."""
        self._seen = self._newest()
        return [_listed(row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY start, kind")]

    def added(self) -> list[Listed]:
        """Entries that came since this or `all` was last called, also those of other processes."""
        seen, self._seen = self._seen, self._newest()
        if seen == self._seen:
            return []
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM entries WHERE seq > ? ORDER BY start, kind", (seen,))
        return [_listed(row) for row in rows]

    def oldest(self) -> Listed | None:
        """The entry used longest ago, of those that no other stands on."""
        row = self._db.execute(_OLDEST.format(columns=_COLUMNS)).fetchone()
        return _listed(row) if row is not None else None

    def total(self) -> tuple[int, int]:
        """How many entries, and their bytes."""
        count, size = self._db.execute("SELECT count(*), coalesce(sum(size), 0) FROM entries").fetchone()
        return count, size

    def close(self) -> None:
        self._db.close()

    def _newest(self) -> int:
        return self._db.execute("SELECT coalesce(max(seq), 0) FROM entries").fetchone()[0]

    def _many(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        if rows:
            with self._transaction():
                self._db.executemany(statement, rows)

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _listed(row: tuple[object, ...]) -> Listed:
    _, identity, namespace, kind, parent, _, start, tokens, layers, count, size, used = row
    ids = array("q")
    ids.frombytes(tokens)  # pyright: ignore[reportArgumentType]
    entry = Entry(identity, namespace, kind, parent, start, tuple(ids), tuple(json.loads(layers)), count)  # pyright: ignore[reportArgumentType]
    return Listed(entry, size, used)  # pyright: ignore[reportArgumentType]
