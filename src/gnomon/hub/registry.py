"""What models are on this machine: the hub's cache, and Gnomon's own converted ones. Reads headers and small files only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from gnomon.hub.headers import missing_files, read_json, weight_files
from gnomon.hub.store import FORMAT, PROVENANCE, Store, format_of

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class Model:
    """One revision of one model on disk. Sizes are in bytes; `missing` names files without which it can't load."""

    id: str
    path: Path
    source: Literal["hub", "gnomon"]
    revision: str = ""
    refs: tuple[str, ...] = ()
    model_type: str = ""
    weight_bytes: int = 0
    nbytes: int = 0
    bits: int | None = None
    vision: bool = False
    modified: float = 0.0
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def name(self) -> str:
        """The id without its owner."""
        return self.id.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Registry:
    """All models found, current revisions first, and how many directories of other formats were passed over."""

    models: tuple[Model, ...]
    unknown_formats: int = 0
    older: tuple[Model, ...] = field(default=())

    def servable(self) -> Iterator[Model]:
        """Complete models, largest weights first."""
        yield from sorted((m for m in self.models if m.complete), key=lambda m: (-m.weight_bytes, m.id))


def hub_cache() -> Path:
    """The hub client's own cache directory, as its variables say."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def scan(store: Store, hub: Path | None = None) -> Registry:
    """Look through both places. A directory that can't be read is passed over; one that lacks files is listed with what it lacks."""
    found, unknown = _converted(store)
    current: list[Model] = list(found)
    older: list[Model] = []
    folder = hub_cache() if hub is None else hub
    if folder.is_dir():
        for repo in sorted(folder.iterdir()):
            if repo.name.startswith(_PREFIX) and repo.is_dir():
                revisions = list(_revisions(repo))
                current += revisions[:1]
                older += revisions[1:]
    return Registry(tuple(sorted(current, key=lambda m: m.id.lower())), unknown, tuple(older))


def _converted(store: Store) -> tuple[list[Model], int]:
    models: list[Model] = []
    unknown = 0
    if store.models.is_dir():
        for path in sorted(store.models.iterdir()):
            if path.name.startswith(".") or not path.is_dir():
                continue
            if format_of(path) != FORMAT:
                unknown += 1
                continue
            provenance = read_json(path / PROVENANCE) or {}
            models.append(describe(path, str(provenance.get("id") or path.name), "gnomon"))
    return models, unknown


def repo_id_of(folder: str) -> str:
    """The repository of a hub cache folder: `models--a--b` is `a/b`."""
    return folder.removeprefix(_PREFIX).replace("--", "/")


def read_refs(repo: Path) -> dict[str, tuple[str, ...]]:
    """Names of branches and tags by commit, of one hub cache folder."""
    refs: dict[str, tuple[str, ...]] = {}
    for path in sorted((repo / "refs").rglob("*")):
        if path.is_file():
            commit = path.read_text(encoding="utf-8").strip()
            refs[commit] = (*refs.get(commit, ()), path.relative_to(repo / "refs").as_posix())
    return refs


def _revisions(repo: Path) -> Iterator[Model]:
    """A repository's revisions: the one `main` names first, then by whether any ref names it, completeness and age."""
    refs = read_refs(repo)
    if not (repo / "snapshots").is_dir():
        return
    models = [
        describe(path, repo_id_of(repo.name), "hub", path.name, refs.get(path.name, ()))
        for path in (repo / "snapshots").iterdir()
        if path.is_dir()
    ]
    models.sort(key=lambda m: ("main" not in m.refs, not m.refs, not m.complete, -m.modified))
    yield from models


def describe(
    path: Path, id: str, source: Literal["hub", "gnomon"], revision: str = "", refs: tuple[str, ...] = ()
) -> Model:
    """A model directory's facts, from its file sizes and config.json."""
    config = read_json(path / "config.json") or {}
    files = [file for file in path.rglob("*") if file.is_file()]
    return Model(
        id=id,
        path=path,
        source=source,
        revision=revision,
        refs=refs,
        model_type=str(config.get("model_type") or ""),
        weight_bytes=sum(file.stat().st_size for file in weight_files(path) if file.is_file()),
        nbytes=sum(file.stat().st_size for file in files),
        bits=_bits(config),
        vision="vision_config" in config,
        modified=max((file.stat().st_mtime for file in files), default=0.0),
        missing=tuple(missing_files(path)),
    )


def _bits(config: Mapping[str, Any]) -> int | None:
    for key in ("quantization", "quantization_config"):
        value = config.get(key)
        if isinstance(value, dict):
            bits = cast("dict[str, Any]", value).get("bits")
            if isinstance(bits, int):
                return bits
    return None
