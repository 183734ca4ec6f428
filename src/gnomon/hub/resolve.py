"""From what a user wrote to a model directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.hub import starter
from gnomon.hub.errors import HubError
from gnomon.hub.registry import Model, Registry, repo_id_of

Judge = Callable[[Model], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """A model directory. `id` is what the API calls it."""

    path: Path
    id: str


STARTER = Found(Path(), starter.REPO)
"""Stands for the starter before it is here: fetch it, then serve it."""


def resolve(wanted: str | None, registry: Registry, *, fits: Judge, runs: Judge, ram: int) -> Found:
    """The directory `wanted` means, or `STARTER` where that has to be fetched.

    A directory with config.json is taken as it is; one inside the hub's cache gets its repository's id back. Anything else is a
    repository id, `id@revision`, a model's name, or part of one, looked up among the downloaded models. Without `wanted`: the largest
    model that `runs` and whose weights are under 0.6 of `ram` (bytes), else the largest that `fits`, else the starter. Only the starter
    is ever fetched. Raises `HubError` that lists the candidates when several match, and says how to get one when none does.
    """
    if not wanted:
        return _pick(registry, fits, runs, ram)
    path = Path(wanted).expanduser()
    if (path / "config.json").is_file():
        return Found(path, id_of(path))
    if path.is_dir() and ("/" in wanted or wanted.startswith((".", "~"))):
        raise HubError(f"{path} has no config.json: it is not a model directory")
    if not path.exists() and (wanted.startswith((".", "~")) or path.is_absolute()):
        raise HubError(f"there is no directory {path}")
    if path.is_file():
        hint = f"; convert it once with: gnomon get {wanted}" if path.suffix == ".gguf" else ""
        raise HubError(f"{wanted} is a file, not a model directory{hint}")
    return _search(wanted, registry)


def id_of(path: Path) -> str:
    """The repository id of a snapshot in the hub's cache layout, else the directory's name."""
    absolute = path.absolute()
    repo = absolute.parent.parent
    if absolute.parent.name == "snapshots" and repo.name.startswith("models--"):
        return repo_id_of(repo.name)
    return absolute.resolve().name


def _search(wanted: str, registry: Registry) -> Found:
    query, _, revision = wanted.partition("@")
    if revision:
        matches = [
            m for m in (*registry.models, *registry.older) if m.id.lower() == query.lower() and _is_at(m, revision)
        ]
    else:
        matches = _matches(query.lower(), registry.models)
    if len(matches) > 1:
        raise HubError(f"{wanted!r} matches {len(matches)} models; say more:\n" + _listing(matches))
    if matches:
        return _whole(matches[0])
    if query.lower() in (starter.REPO.lower(), starter.NAME.lower(), "starter"):
        return STARTER
    here = _listing(registry.models) if registry.models else "  (none)"
    raise HubError(
        f"no downloaded model matches {wanted!r}. To download one: gnomon get OWNER/NAME. Downloaded are:\n{here}"
    )


def _matches(query: str, models: Sequence[Model]) -> list[Model]:
    """The models one query means: exact ids before exact names before parts of ids."""
    for test in (lambda m: m.id.lower() == query, lambda m: m.name.lower() == query, lambda m: query in m.id.lower()):
        found = [model for model in models if test(model)]
        if found:
            return found
    return []


def _is_at(model: Model, revision: str) -> bool:
    return revision in model.refs or (len(revision) >= 7 and model.revision.startswith(revision))


def _whole(model: Model) -> Found:
    if not model.complete:
        raise HubError(f"{model.id} lacks {', '.join(model.missing)}; to finish its download: gnomon get {model.id}")
    return Found(model.path, model.id)


def _listing(models: Sequence[Model]) -> str:
    return "\n".join(f"  {m.id}" + ("" if m.complete else "  (incomplete)") for m in models)


def _pick(registry: Registry, fits: Judge, runs: Judge, ram: int) -> Found:
    candidates = [model for model in registry.servable() if runs(model)]
    for judge in (lambda m: m.weight_bytes < 0.6 * ram and fits(m), fits):
        for model in candidates:
            if judge(model):
                return Found(model.path, model.id)
    return STARTER
