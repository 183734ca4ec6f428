"""What clean-up removes, and above all what it leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from caches import config, converted, hub_revision, safetensors, tree
from filelock import FileLock
from huggingface_hub import scan_cache_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.hub import gc
from gnomon.hub.errors import HubError
from gnomon.hub.store import Store

A, B, C = "a" * 40, "b" * 40, "c" * 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "gnomon")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def model(seed: str) -> dict[str, bytes]:
    return {"config.json": config(), "model.safetensors": safetensors(100, seed)}


def whys(plan: gc.Plan) -> set[tuple[str, str]]:
    return {(item.why, item.path.name) for item in plan.items}


def test_a_plan_touches_nothing(store: Store, hub: Path) -> None:
    hub_revision(hub, "o/m", A, model("a"))
    hub_revision(hub, "o/m", B, model("b"), ("main",))
    before = tree(hub)
    plan = gc.plan(store, hub)
    assert tree(hub) == before
    assert ("superseded revision", A) in whys(plan)


def test_superseded_revisions_go_and_shared_blobs_stay(store: Store, hub: Path) -> None:
    hub_revision(hub, "o/m", A, model("a"))
    kept = hub_revision(hub, "o/m", B, model("b"), ("main",))
    tagged = hub_revision(hub, "o/m", C, model("c"), ("v1", "refs/pr/1"))
    outcome = gc.carry_out(gc.plan(store, hub))
    assert not (hub / "models--o--m" / "snapshots" / A).exists()
    for snapshot, seed in ((kept, "b"), (tagged, "c")):
        assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == model(seed)
    # The old weights went; the configuration, which all three share, did not.
    assert sum(item.nbytes for item in outcome.removed) == len(model("a")["model.safetensors"])
    report = scan_cache_dir(hub)
    assert not report.warnings
    assert gc.plan(store, hub).items == ()


def test_a_repository_without_refs_keeps_its_newest_whole_revision(store: Store, hub: Path) -> None:
    whole = hub_revision(hub, "o/m", A, model("a"))
    half = hub_revision(hub, "o/m", B, {"config.json": config(x=1)})
    os.utime(half, (2_000_000_000, 2_000_000_000))
    gc.carry_out(gc.plan(store, hub))
    assert whole.is_dir()
    assert not half.exists()


def test_a_revision_with_files_no_other_has_is_kept(store: Store, hub: Path) -> None:
    # `main` moved on, but its weights were never downloaded: removing the old revision would lose the only weights.
    old = hub_revision(hub, "o/m", A, model("a"))
    hub_revision(hub, "o/m", B, {"config.json": config(x=1)}, ("main",))
    plan = gc.plan(store, hub)
    assert plan.items == ()
    assert plan.tripped == (f"o/m@{A[:12]}: only it has model.safetensors",)
    gc.carry_out(plan)
    assert (old / "model.safetensors").is_file()
    forced = gc.plan(store, hub, force=True)
    gc.carry_out(forced)
    assert not old.exists()


def test_unfinished_and_unreferenced_blobs(store: Store, hub: Path) -> None:
    snapshot = hub_revision(hub, "o/m", A, model("a"), ("main",))
    blobs = hub / "models--o--m" / "blobs"
    (blobs / ("1" * 64 + ".gnomon.incomplete")).write_bytes(b"half")
    (blobs / ("2" * 64 + ".abcd1234.incomplete")).write_bytes(b"half")
    (blobs / ("3" * 64)).write_bytes(b"nobody's")
    plan = gc.plan(store, hub)
    assert {(why, name[0]) for why, name in whys(plan)} == {
        ("unfinished download", "1"),
        ("unfinished download", "2"),
        ("unreferenced", "3"),
    }
    gc.carry_out(plan)
    assert sorted(path.name for path in blobs.iterdir()) == sorted(path.resolve().name for path in snapshot.iterdir())


def test_what_another_process_downloads_is_left(store: Store, hub: Path) -> None:
    hub_revision(hub, "o/m", A, model("a"), ("main",))
    partial = hub / "models--o--m" / "blobs" / ("1" * 64 + ".gnomon.incomplete")
    partial.write_bytes(b"half")
    locks = hub / ".locks" / "models--o--m"
    locks.mkdir(parents=True)
    with FileLock(locks / ("1" * 64 + ".lock")):
        outcome = gc.carry_out(gc.plan(store, hub))
    assert partial.exists()
    assert [item.path for item in outcome.busy] == [partial]
    assert [item.path for item in gc.carry_out(gc.plan(store, hub)).removed] == [partial]


def test_the_own_store(store: Store, hub: Path) -> None:
    good = converted(store.cache, "good")
    future = converted(store.cache, "future", format=2)
    unreadable = converted(store.cache, "unreadable")
    (unreadable / "gnomon.json").write_text("{")
    partial = store.models / ".half.partial"
    partial.mkdir()
    store.downloads.mkdir()
    fresh, stale = store.downloads / "fresh.gguf", store.downloads / "stale.gguf"
    for path in (fresh, stale):
        path.write_bytes(b"x")
    os.utime(stale, (1_000_000_000, 1_000_000_000))
    plan = gc.plan(store, hub)
    assert whys(plan) == {
        ("unknown format", "future"),
        ("unknown format", "unreadable"),
        ("unfinished conversion", ".half.partial"),
        ("unfinished download", "stale.gguf"),
    }
    with store.lock("half"):
        assert [item.path for item in gc.carry_out(plan).busy] == [partial]
    assert good.is_dir()
    assert fresh.is_file()
    assert not future.exists()


def test_nothing_outside_the_caches_is_touched(store: Store, hub: Path, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years")
    # Links out of the caches, in every place where clean-up looks.
    store.models.mkdir(parents=True)
    (store.models / "linked").symlink_to(outside)
    (hub / "models--o--linked").symlink_to(outside)
    snapshot = hub_revision(hub, "o/m", A, model("a"))
    hub_revision(hub, "o/m", B, model("b"), ("main",))
    (snapshot / "escape").symlink_to(outside)
    (hub / "models--o--m" / "blobs" / "stray").symlink_to(outside / "thesis.txt")
    gc.carry_out(gc.plan(store, hub, force=True))
    assert (outside / "thesis.txt").read_text() == "years"
    assert (store.models / "linked").is_symlink()
    bad = gc.Plan((gc.Item(outside, "unreferenced", 0, ""),), (), (), (store.cache, hub))
    with pytest.raises(HubError, match="outside the caches"):
        gc.carry_out(bad)
    for root in (store.cache, hub):
        with pytest.raises(HubError, match="outside the caches"):
            gc.carry_out(gc.Plan((gc.Item(root, "unreferenced", 0, ""),), (), (), (store.cache, hub)))
    assert outside.is_dir()


def test_a_lost_file_is_reported(store: Store, hub: Path) -> None:
    snapshot = hub_revision(hub, "o/m", A, model("a"), ("main",))
    blob = (snapshot / "model.safetensors").resolve()
    plan = gc.plan(store, hub)
    blob.unlink()
    with pytest.raises(HubError, match=r"1 files that were to be kept are gone or changed: .*" + blob.name):
        gc.carry_out(plan)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ABCD"), st.dictionaries(st.sampled_from("wxyz"), st.sampled_from("12"), max_size=3), st.booleans()),
        max_size=4,
        unique_by=lambda revision: revision[0],
    )
)  # fmt: skip
def test_no_file_name_is_ever_lost(tmp_path_factory: pytest.TempPathFactory, revisions: list) -> None:
    root = tmp_path_factory.mktemp("gc")
    hub = root / "hub"
    hub.mkdir()
    for letter, files, named in revisions:
        refs = (f"ref-{letter}",) if named else ()
        (hub / "models--o--m" / "snapshots" / letter).mkdir(parents=True, exist_ok=True)
        hub_revision(hub, "o/m", letter, {name: content.encode() for name, content in files.items()}, refs)
    gc.carry_out(gc.plan(Store(root / "gnomon"), hub))
    left = {
        path.name: {file.name: file.read_text() for file in path.iterdir()}
        for path in (hub / "models--o--m" / "snapshots").glob("*")
    }
    names = {name for _, files, _ in revisions for name in files}
    assert {name for files in left.values() for name in files} == names
    for letter, files, named in revisions:
        if letter in left:
            assert left[letter] == files
        else:
            assert not named
