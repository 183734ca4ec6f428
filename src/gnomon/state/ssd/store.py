"""The directory: files written whole or not at all, read with their sums checked, and found again."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gnomon.state.ssd.format import FORMAT, SUFFIX, BadFile, Entry, Packed, encode, read, read_header
from gnomon.state.ssd.manifest import Listed, Manifest

log = logging.getLogger(__name__)

STALE_SECONDS = 3600.0
"""Age at which an unfinished file is abandoned even if its process seems to live."""
IDENTITY = "identity.json"


@dataclass(slots=True)
class Found:
    """What a look through the directory found; `added` files were not in the index, `lost` rows had no file."""

    listed: list[Listed] = field(default_factory=list[Listed])
    added: int = 0
    lost: int = 0
    removed: list[str] = field(default_factory=list[str])
    """Why files were removed, one line each."""
    unreadable: int = 0
    unfinished: int = 0


class Store:
    """Files of blocks and checkpoints under `directory`, in one folder per identity. Only that folder's files are ever touched.

    Without state of its own, so any thread may use it. All methods raise OSError.
    """

    def __init__(self, directory: Path) -> None:
        self.home = directory / FORMAT

    def create(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)

    def path(self, entry: Entry) -> Path:
        return self.home / entry.identity / (entry.name + SUFFIX)

    def describe(self, identity: str, about: Mapping[str, Any]) -> None:
        """Write what an identity stands for beside its files, for people and `gnomon cache`."""
        folder = self.home / identity
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / IDENTITY).exists():
            _replace(folder / IDENTITY, [json.dumps(about, indent=1).encode()])

    def described(self, identity: str) -> dict[str, Any]:
        """What `describe` wrote; empty where it can't be read."""
        try:
            said = json.loads((self.home / identity / IDENTITY).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    def write(self, packed: Packed) -> int:
        """Write a file, complete and durable when this returns; its size in bytes."""
        path = self.path(packed.entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _replace(path, encode(packed))

    def read(self, entry: Entry, *, verify: bool) -> Packed:
        """Read an entry's file. Raises `BadFile` if it isn't whole, or is of other tokens."""
        packed = read(self.path(entry), verify=verify)
        if packed.entry != entry:
            raise BadFile(f"{self.path(entry)} is of other tokens than its name says")
        return packed

    def remove(self, entry: Entry) -> bool:
        """Remove an entry's file; False if there was none."""
        try:
            self.path(entry).unlink()
        except FileNotFoundError:
            return False
        return True

    def touch(self, entry: Entry, used: float) -> None:
        os.utime(self.path(entry), (used, used))

    def free_bytes(self) -> int:
        """Free bytes of the file system."""
        return shutil.disk_usage(self.home).free

    def reconcile(self, manifest: Manifest, *, remove: bool = True) -> Found:
        """Bring the index in line with the files. With `remove`, files that aren't whole or aren't ours go, and unfinished ones whose
        process is gone."""
        found = Found()
        rows = {one.entry.name: one for one in manifest.all()}
        present: dict[str, Listed] = {}
        fresh: list[Listed] = []
        for file in self.files():
            try:
                stat = file.stat()
                row = rows.get(file.name.removesuffix(SUFFIX))
                if row is not None and row.size == stat.st_size and row.entry.identity == file.parent.name:
                    present[row.entry.name] = Listed(row.entry, row.size, stat.st_mtime)
                    continue
                header = read_header(file)
            except BadFile as error:
                found.removed.append(str(error))
                if remove:
                    file.unlink(missing_ok=True)
                continue
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s can't be read and is left out: %s", file, error)
                found.unreadable += 1
                continue
            fresh.append(Listed(header.entry, stat.st_size, stat.st_mtime))
            present[header.entry.name] = fresh[-1]
        gone = rows.keys() - present.keys()
        manifest.drop(gone)
        manifest.put(fresh)
        found.added, found.lost = len(fresh), len(gone)
        found.listed = sorted(present.values(), key=lambda one: (one.entry.start, one.entry.kind))
        if remove:
            found.unfinished = self.reap()
        return found

    def reap(self) -> int:
        """Remove unfinished files whose writer is gone."""
        count = 0
        for file in self.home.glob("*/.*.tmp"):
            parts = file.name.split(".")
            pid = int(parts[2]) if len(parts) > 3 and parts[2].isdecimal() else 0
            try:
                age = time.time() - file.stat().st_mtime
                if age > STALE_SECONDS or not pid or not psutil.pid_exists(pid):
                    file.unlink()
                    count += 1
            except FileNotFoundError:
                continue
        return count

    def files(self) -> Iterator[Path]:
        """Every file that is, or should be, of a state."""
        for folder in sorted(self.home.iterdir()):
            if folder.is_dir():
                for file in sorted(folder.iterdir()):
                    if file.name != IDENTITY and not file.name.startswith("."):
                        yield file


def _replace(path: Path, pieces: Collection[bytes] | Iterator[bytes | memoryview]) -> int:
    """Write a file beside `path` and put it there once it is on the disk."""
    temporary = path.with_name(f".{path.name.partition('.')[0]}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    size = 0
    try:
        with temporary.open("wb") as stream:
            for piece in pieces:
                size += stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)
    return size


def _sync(directory: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
