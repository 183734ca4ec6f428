"""Which model, where files are, how terminal verbs reach a server."""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import platformdirs

from gnomon.options import option


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model: `--model`, else the positional argument, else `--query`, else one that is present, else the starter."""

    model: str | None = option(None, "model: a directory, a repository id, or part of the name of a model in the cache")
    query: str | None = option(None, "same as the argument MODEL, which wins", flag="--query", aliases=("-q",))

    @property
    def wanted(self) -> str | None:
        return self.model or self.query


@dataclass(frozen=True, slots=True)
class Paths:
    """Directories. Models downloaded from the hub stay in the hub's own cache."""

    cache: Path = option(
        Path(platformdirs.user_cache_dir("gnomon", appauthor=False)), "converted models and measurements", metavar="DIR"
    )

    @property
    def models(self) -> Path:
        return self.cache / "models"

    @property
    def generations(self) -> Path:
        """Of checkpoints of running answers."""
        return self.cache / "generations"

    def generations_of(self, model: str) -> Path:
        """Of those of one model of several, whose processes would take over each other's."""
        return self.cache / "generations-of" / quote(model, safe="")


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How terminal verbs reach a running server."""

    server: str | None = option(None, "use the server at this URL in place of loading a model", metavar="URL")
    api_keys: tuple[str, ...] = option((), "bearer key sent to the server", flag="--api-key", secret=True)
