"""What on disk is of no use any more, and its removal: first a plan, then, when told so, the deed.

Kept: every revision a ref names, the newest complete one of a repository without refs, and any revision that holds a file no kept
revision has (its removal would lose that file; `force` overrides). Nothing outside the two caches is ever touched, nor a file another
process has locked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from filelock import FileLock, Timeout

from gnomon.hub.errors import HubError
from gnomon.hub.headers import missing_files
from gnomon.hub.registry import hub_cache, read_refs, repo_id_of
from gnomon.hub.store import FORMAT, Store, format_of

Why = Literal["unfinished download", "unfinished conversion", "unreferenced", "superseded revision", "unknown format"]
_TREE: Final = "trees"


@dataclass(frozen=True, slots=True)
class Item:
    """One file or directory to remove, why, how many bytes that frees, and the lock to hold meanwhile."""

    path: Path
    why: Why
    nbytes: int
    label: str
    lock: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to remove; what is kept only because a file would be lost (`tripped`); and which files must still be there afterwards."""

    items: tuple[Item, ...]
    tripped: tuple[str, ...]
    kept: tuple[tuple[Path, int], ...]
    roots: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was removed, and what was left because another process had its lock."""

    removed: tuple[Item, ...]
    busy: tuple[Item, ...]


def plan(store: Store, hub: Path | None = None, force: bool = False) -> Plan:
    """Decide what to remove; touches nothing."""
    folder = hub_cache() if hub is None else hub
    items = list(_store_items(store))
    tripped: list[str] = []
    kept: list[tuple[Path, int]] = []
    if folder.is_dir():
        for repo in sorted(folder.iterdir()):
            if repo.name.startswith("models--") and repo.is_dir() and not repo.is_symlink():
                _repo_items(folder, repo, force, items, tripped, kept)
    return Plan(tuple(items), tuple(tripped), tuple(kept), (store.cache.absolute(), folder.absolute()))


def carry_out(plan: Plan) -> Outcome:
    """Remove a plan's items. Raises `HubError` before touching a path outside the caches, and when a kept file is gone afterwards."""
    for item in plan.items:
        _check_inside(item.path, plan.roots)
    removed: list[Item] = []
    busy: list[Item] = []
    for item in plan.items:
        (removed if _remove(item) else busy).append(item)
    lost = [str(path) for path, size in plan.kept if not path.is_file() or path.stat().st_size != size]
    if lost:
        raise HubError(f"{len(lost)} files that were to be kept are gone or changed: {', '.join(lost[:5])}")
    return Outcome(tuple(removed), tuple(busy))


def _store_items(store: Store) -> Iterator[Item]:
    for path in sorted(store.models.iterdir()) if store.models.is_dir() else ():
        if not path.is_dir() or path.is_symlink():
            continue
        if path.name.startswith(".") and path.name.endswith(".partial"):
            name = path.name[1:].removesuffix(".partial")
            yield Item(path, "unfinished conversion", _size(path), name, store.cache / "locks" / f"{name}.lock")
        elif not path.name.startswith(".") and format_of(path) != FORMAT:
            yield Item(path, "unknown format", _size(path), path.name, store.cache / "locks" / f"{path.name}.lock")
    for path in sorted(store.downloads.iterdir()) if store.downloads.is_dir() else ():
        # Any conversion may be using what lies here: whoever holds a model's lock owns it, and the newest hour is left alone.
        if _age(path) > 3600:
            yield Item(path, "unfinished download", _size(path), path.name)


def _age(path: Path) -> float:
    import time

    return time.time() - path.lstat().st_mtime


def _repo_items(
    hub: Path, repo: Path, force: bool, items: list[Item], tripped: list[str], kept: list[tuple[Path, int]]
) -> None:
    name = repo_id_of(repo.name)
    snapshots = {
        path.name: path for path in sorted((repo / "snapshots").glob("*")) if path.is_dir() and not path.is_symlink()
    }
    refs = read_refs(repo)
    keep = [commit for commit in snapshots if commit in refs]
    if not keep and snapshots:
        keep = [
            max(snapshots, key=lambda commit: (not missing_files(snapshots[commit]), snapshots[commit].stat().st_mtime))
        ]
    have = {file for commit in keep for file in _files(snapshots[commit])}
    gone: list[str] = []
    for commit, path in snapshots.items():
        if commit in keep:
            continue
        lost = sorted(str(file) for file in _files(path) - have)
        if lost and not force:
            tripped.append(f"{name}@{commit[:12]}: only it has {', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''}")
            keep.append(commit)
        else:
            gone.append(commit)
    used = {target for commit in keep for file in snapshots[commit].rglob("*") if (target := _target(file)) is not None}
    kept.extend((path, path.stat().st_size) for path in sorted(used) if path.is_file())
    for commit in gone:
        own = sum(
            file.lstat().st_size for file in snapshots[commit].rglob("*") if file.is_file() and not file.is_symlink()
        )
        items.append(Item(snapshots[commit], "superseded revision", own, f"{name}@{commit[:12]}"))
        tree = repo / _TREE / f"{commit}.json"
        if tree.is_file():
            items.append(Item(tree, "superseded revision", tree.stat().st_size, f"{name}@{commit[:12]} listing"))
    for blob in sorted((repo / "blobs").glob("*")):
        if blob.is_dir():
            continue
        digest = blob.name.partition(".")[0]
        lock = hub / ".locks" / repo.name / f"{digest}.lock"
        if blob.name.endswith(".incomplete"):
            items.append(Item(blob, "unfinished download", blob.lstat().st_size, f"{name} {digest[:12]}", lock))
        elif blob.absolute() not in used:
            items.append(Item(blob, "unreferenced", blob.lstat().st_size, f"{name} {digest[:12]}", lock))


def _files(snapshot: Path) -> set[Path]:
    """Names of the files of a snapshot whose bytes are there."""
    return {file.relative_to(snapshot) for file in snapshot.rglob("*") if file.is_file()}


def _target(file: Path) -> Path | None:
    """The blob a snapshot's entry names, one link on; itself where the cache copies; None for a directory."""
    if file.is_symlink():
        return Path(os.path.abspath(file.parent / os.readlink(file)))
    return file.absolute() if file.is_file() else None


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    return path.lstat().st_size


def _check_inside(path: Path, roots: Sequence[Path]) -> None:
    parent = path.parent.resolve()
    if not any(parent != root and parent.is_relative_to(root) for root in (root.resolve() for root in roots)):
        raise HubError(f"{path} is outside the caches: nothing was removed")


def _remove(item: Item) -> bool:
    """Whether it is gone now; False when another process has the lock."""
    if item.lock is None:
        _unlink(item.path)
        return True
    item.lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(item.lock, timeout=0):
            _unlink(item.path)
    except Timeout:
        return False
    return True


def _unlink(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # A link inside is removed, never followed.
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
