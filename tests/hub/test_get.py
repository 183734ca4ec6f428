"""Downloads against a stand-in hub that breaks, lies and refuses."""

from __future__ import annotations

import json
import logging
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, snapshot_download
from standin import Faults, Repo, StandIn, oid, standing_in

from gnomon.hub.errors import HubError
from gnomon.hub.get import Hub

REPO = "owner/model-4bit"
OLD, NEW = "a" * 40, "b" * 40
WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"not wanted",
    "sub/notes.txt": b"wanted too",
}


@pytest.fixture
def server() -> Iterator[StandIn]:
    repos = {
        REPO: Repo({OLD: {"config.json": b"{}", "model.safetensors": b"old"}, NEW: FILES}, {"main": NEW, "v1": OLD}),
        "owner/gated": Repo({NEW: FILES}, {"main": NEW}, gated=True),
    }
    with standing_in(repos) as hub:
        yield hub


@pytest.fixture
def hub(server: StandIn, tmp_path: Path) -> Hub:
    made = Hub(tmp_path / "hub", server.endpoint, token=False)
    made.pause = 0.0
    return made


def blobs(hub: Hub) -> set[str]:
    return {path.name for path in (hub.cache / "models--owner--model-4bit" / "blobs").iterdir()}


def test_a_snapshot_is_laid_out_as_the_hub_client_does(hub: Hub, server: StandIn) -> None:
    seen: dict[str, tuple[int, int]] = {}
    path = hub.get(REPO, progress=lambda name, done, total: seen.update({name: (done, total)}))
    names = {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert names == {name: data for name, data in FILES.items() if name != "pytorch_model.bin"}
    assert seen["model.safetensors"] == (len(WEIGHTS), len(WEIGHTS))
    # The official client, offline, finds the same snapshot and nothing amiss.
    assert snapshot_download(REPO, cache_dir=hub.cache, local_files_only=True, allow_patterns="*.json") == str(path)
    report = scan_cache_dir(hub.cache)
    assert not report.warnings
    (repo,) = report.repos
    assert {revision.commit_hash: set(revision.refs) for revision in repo.revisions} == {NEW: {"main"}}


def test_what_is_there_is_not_fetched_again(hub: Hub, server: StandIn) -> None:
    first = hub.get(REPO)
    sent = server.sent
    assert hub.get(REPO) == first
    assert server.sent == sent


def test_a_broken_connection_is_continued(hub: Hub, server: StandIn) -> None:
    server.faults = Faults(cut=100_000, cuts=2)
    path = hub.get(REPO)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert server.ranges == ["bytes=100000-", "bytes=200000-"]
    assert server.sent == len(WEIGHTS)


def test_the_next_run_continues_where_the_last_one_gave_up(hub: Hub, server: StandIn, tmp_path: Path) -> None:
    server.faults = Faults(cut=0, cuts=100)
    partial = hub.cache / "models--owner--model-4bit" / "blobs" / f"{oid('x.safetensors', WEIGHTS)}.gnomon.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS[:123_456])
    with pytest.raises(HubError, match=r"broke off at 123456 of 300000 bytes .* run the command again"):
        hub.get(REPO)
    assert partial.stat().st_size == 123_456
    server.faults = Faults()
    again = Hub(hub.cache, server.endpoint, token=False)
    assert (again.get(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert server.sent == len(WEIGHTS) - 123_456
    assert not partial.exists()


def test_two_downloads_at_once_fetch_each_file_once(hub: Hub, server: StandIn) -> None:
    others = [Hub(hub.cache, server.endpoint, token=False) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda each: each.get(REPO), others))
    assert len(paths) == 1
    assert server.sent == len(WEIGHTS)


def test_a_server_that_ignores_ranges_starts_over(hub: Hub, server: StandIn) -> None:
    server.faults = Faults(cut=100_000, cuts=1, ignore_range=True)
    assert (hub.get(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert server.sent == 100_000 + len(WEIGHTS)


def test_corrupt_bytes_are_fetched_again(hub: Hub, server: StandIn) -> None:
    server.faults = Faults(corrupt=1)
    assert (hub.get(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert server.sent == 2 * len(WEIGHTS)


def test_bytes_that_stay_corrupt_are_refused_and_not_kept(hub: Hub, server: StandIn) -> None:
    server.faults = Faults(corrupt=100)
    with pytest.raises(HubError, match=r"model.safetensors arrived with hash \w+, expected \w+, twice"):
        hub.get(REPO)
    assert not any(oid("x.safetensors", WEIGHTS) in name for name in blobs(hub))
    assert not (hub.cache / "models--owner--model-4bit" / "snapshots").exists()


def test_a_blob_of_the_wrong_size_is_replaced(hub: Hub, server: StandIn) -> None:
    blob = hub.cache / "models--owner--model-4bit" / "blobs" / oid("x.safetensors", WEIGHTS)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"short")
    assert (hub.get(REPO) / "model.safetensors").read_bytes() == WEIGHTS


def test_revisions(hub: Hub) -> None:
    assert (hub.get(REPO, "v1") / "model.safetensors").read_bytes() == b"old"
    assert hub.get(REPO, NEW).name == NEW
    with pytest.raises(HubError, match="owner/model-4bit has no revision 'v9'"):
        hub.get(REPO, "v9")


@pytest.mark.parametrize(
    ("repo", "message"),
    [
        ("owner/gated", "owner/gated is gated: accept its terms on the hub, then log in"),
        ("owner/nothing", "the hub has no owner/nothing, or it is private"),
        ("no/such/id", "'no/such/id' is no repository id"),
    ],
)
def test_refusals_say_what_to_do(hub: Hub, repo: str, message: str) -> None:
    with pytest.raises(HubError, match=message):
        hub.get(repo)


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(HubError, match="the hub can't be reached for owner/model-4bit"):
        Hub(tmp_path, f"http://127.0.0.1:{port}", token=False).get(REPO)


def test_no_space(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(HubError, match=r"needs 0.0 GB and .* free"):
        hub.get(REPO)


def test_a_repository_without_model_files(hub: Hub, server: StandIn) -> None:
    server.repos["owner/empty"] = Repo({NEW: {"weights.bin": b"1"}}, {"main": NEW})
    with pytest.raises(HubError, match="owner/empty has none of the files a model needs"):
        hub.get("owner/empty")


def test_the_client_does_not_write_beside_the_log() -> None:
    assert logging.getLogger("huggingface_hub").handlers == []
