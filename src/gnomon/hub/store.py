"""Gnomon's own model directory: converted models, what they were made from, and the locks over them.

<cache>/models/NAME/          a complete model directory; its gnomon.json says the format and the origin
<cache>/models/.NAME.partial  a conversion that didn't finish
<cache>/downloads/            files on their way; removed once converted
<cache>/locks/                one lock file per model
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from filelock import FileLock, Timeout

from gnomon.hub.errors import HubError

FORMAT: Final = 1
PROVENANCE: Final = "gnomon.json"
Notify = Callable[[str], None]
Convert = Callable[[Path, Path, dict[str, Any]], None]
"""Makes a model directory (second) of a file (first), with its provenance (third), or raises and leaves nothing visible."""


@dataclass(frozen=True, slots=True)
class Store:
    """The directory of converted models under a cache directory."""

    cache: Path

    @property
    def models(self) -> Path:
        return self.cache / "models"

    @property
    def downloads(self) -> Path:
        return self.cache / "downloads"

    def path(self, name: str) -> Path:
        """Where the model `name` lies. Raises `HubError` for a name that isn't a plain file name."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name):
            raise HubError(
                f"model name {name!r}: use up to 128 letters, digits, '.', '_' and '-', not starting with '.' or '-'"
            )
        return self.models / name

    @contextmanager
    def lock(self, name: str, notify: Notify | None = None, timeout: float = -1) -> Generator[None]:
        """Hold the lock of `name` against other processes; `notify` hears when somebody else has it. Raises `HubError` past `timeout` s."""
        folder = self.cache / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if notify is not None:
                notify(f"waiting for another process that is preparing {name}")
            try:
                lock.acquire(timeout=timeout)
            except Timeout as error:
                raise HubError(f"another process has held the lock of {name} for {timeout:.0f} s") from error
        try:
            yield
        finally:
            lock.release()

    def make(self, name: str, source: Path, convert: Convert, origin: dict[str, Any]) -> Path:
        """Convert `source` into the model `name`, under its lock already held. Returns its directory."""
        path = self.path(name)
        self.models.mkdir(parents=True, exist_ok=True)
        convert(source, path, {"format": FORMAT, **origin})
        return path

    def ready(self, name: str) -> Path | None:
        """The directory of `name` when it is complete and of this format."""
        path = self.path(name)
        return path if (path / "config.json").is_file() and format_of(path) == FORMAT else None


def format_of(directory: Path) -> int | None:
    """The format number in a model directory's gnomon.json; None when there is none that can be read."""
    try:
        value: Any = json.loads((directory / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = cast("dict[str, Any]", value).get("format") if isinstance(value, dict) else None
    return found if isinstance(found, int) else None
