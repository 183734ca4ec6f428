"""The verbs get, ls, scan, gc and fit, and which model a command finds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from caches import config as model_config
from caches import converted, hub_revision, safetensors, tree
from ggufs import architecture, write_gguf
from standin import Repo, standing_in

from gnomon.cli import _library
from gnomon.cli._verbs import CommandError
from gnomon.cli.main import main
from gnomon.config import ModelConfig, Paths
from gnomon.hub import starter
from gnomon.hub.get import Hub
from gnomon.models import machine

Run = Callable[..., tuple[int, str, str]]
COMMIT = "c" * 40


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "gnomon"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def gnomon(cache: Path, hub: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: its status, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main(list(words), {"GNOMON_CACHE": str(cache), "GNOMON_LOG_LEVEL": "error"})
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-random.gguf"
    write_gguf(path, "llama", *architecture("llama"))
    return path


def test_a_gguf_file_becomes_a_model_that_is_listed(gnomon: Run, gguf: Path, cache: Path) -> None:
    status, out, _ = gnomon("get", str(gguf))
    assert status == 0
    directory = cache / "models" / "tiny-random"
    assert Path(out.strip()) == directory
    (row,) = json.loads(gnomon("ls", "--json")[1])
    assert (row["id"], row["source"], row["path"]) == ("tiny-random", "gnomon", str(directory))
    assert "tiny-random" in gnomon("ls")[1]
    status, _, err = gnomon("get", str(gguf))
    assert status == 1
    assert "exists already: choose another --name" in err
    assert gnomon("get", str(gguf), "--name", "another")[0] == 0
    assert gnomon("get", str(gguf), "--name", "../evil")[0] == 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("get", "nothing.gguf"), 1, "there is no file nothing.gguf"),
        (("get", "a/b@v1", "--revision", "v2"), 2, "two revisions are named: 'v1' and 'v2'"),
        (("get", "not a repo"), 1, "'not a repo' is no repository id"),
        (("fit", "--ctx", "0"), 2, "--ctx 0 is out of range: >= 1 tokens"),
        (("fit", "--memory-budget", "much"), 2, "--memory-budget: 'much' is not a number of GB"),
        (("fit",), 1, "no models are here"),
        (("fit", "nope"), 1, "no downloaded model matches 'nope'"),
    ],
)
def test_mistakes_are_explained(gnomon: Run, words: tuple[str, ...], status: int, message: str) -> None:
    got, _, err = gnomon(*words)
    assert (got, message in err) == (status, True), err


def test_a_broken_file_leaves_nothing(gnomon: Run, gguf: Path, cache: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-5000])
    status, _, err = gnomon("get", str(gguf))
    assert status == 1
    assert "tiny-random.gguf can't be converted: tiny-random.gguf is not a whole GGUF file" in err
    assert list((cache / "models").iterdir()) == []


@pytest.fixture
def online(hub: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    weights = safetensors(5000)
    repos = {
        "owner/model": Repo({COMMIT: {"config.json": model_config(), "model.safetensors": weights}}, {"main": COMMIT}),
        "owner/model-GGUF": Repo({COMMIT: {"m-Q8.gguf": gguf.read_bytes(), "README.md": b""}}, {"main": COMMIT}),
        "owner/torch": Repo({COMMIT: {"config.json": b"{}", "pytorch_model.bin": b"1"}}, {"main": COMMIT}),
        "owner/shards": Repo(
            {COMMIT: {"config.json": model_config(), "adapters.safetensors": random.Random(1).randbytes(10)}},
            {"main": COMMIT},
        ),
    }
    with standing_in(repos) as server:
        monkeypatch.setattr("gnomon.hub.get.Hub", partial(Hub, endpoint=server.endpoint, token=False))
        yield


@pytest.mark.usefixtures("online")
def test_get_from_the_hub(gnomon: Run, hub: Path) -> None:
    status, out, err = gnomon("get", "owner/model@main")
    assert status == 0
    assert Path(out.strip()) == hub / "models--owner--model" / "snapshots" / COMMIT
    assert "model.safetensors (5.1 kB)" in err
    (row,) = json.loads(gnomon("ls", "--json")[1])
    assert (row["id"], row["revision"], row["refs"]) == ("owner/model", COMMIT, ["main"])


@pytest.mark.usefixtures("online")
def test_get_a_gguf_file_from_the_hub(gnomon: Run, cache: Path) -> None:
    status, _, err = gnomon("get", "owner/model-GGUF")
    assert status == 1
    assert "owner/model-GGUF has no safetensors weights; pick one of its GGUF files with --file: m-Q8.gguf" in err
    status, _, err = gnomon("get", "owner/model-GGUF", "--file", "other.gguf")
    assert (status, "has no other.gguf; its GGUF files: m-Q8.gguf" in err) == (1, True)
    status, out, _ = gnomon("get", "owner/model-GGUF", "--file", "m-Q8.gguf", "--name", "mine")
    assert (status, out.strip()) == (0, str(cache / "models" / "mine"))
    assert json.loads((cache / "models" / "mine" / "gnomon.json").read_text())["repo"] == "owner/model-GGUF"


@pytest.mark.usefixtures("online")
def test_get_what_is_no_model(gnomon: Run) -> None:
    status, _, err = gnomon("get", "owner/torch")
    assert (status, "owner/torch has no safetensors weights" in err) == (1, True)
    status, _, err = gnomon("get", "owner/shards")
    assert (status, "lacks model.safetensors" in err) == (1, True)


def test_ls_filters(gnomon: Run, hub: Path) -> None:
    def model(nbytes: int, **more: Any) -> dict[str, bytes]:
        return {"config.json": model_config(**more), "model.safetensors": safetensors(nbytes, str(more))}

    hub_revision(hub, "o/small", "a" * 40, model(1000), ("main",))
    hub_revision(hub, "o/small", "b" * 40, model(900, x=1), ("old",))
    hub_revision(hub, "o/eyes", "a" * 40, model(9000, vision_config={}), ("main",))
    hub_revision(hub, "o/bert", "a" * 40, model(10, model_type="bert"), ("main",))
    hub_revision(hub, "o/half", "a" * 40, {"config.json": model_config()}, ("main",))

    def ids(*flags: str) -> list[str]:
        return [row["id"] for row in json.loads(gnomon("ls", "--json", *flags)[1])]

    assert ids() == ["o/eyes", "o/small"]
    assert ids("--vision") == ["o/eyes"]
    assert ids("--max-size", "0.000005") == ["o/small"]
    assert ids("--all-revisions") == ["o/eyes", "o/small", "o/small"]
    states = {row["id"]: row["state"] for row in json.loads(gnomon("scan", "--json")[1])["models"]}
    assert states["o/half"] == "lacks model.safetensors"
    assert states["o/bert"] == "model type bert is not supported"
    assert states["o/small"] == "ready"


def test_gc_asks_first(gnomon: Run, cache: Path, hub: Path) -> None:
    hub.mkdir()
    converted(cache, "good")
    converted(cache, "future", format=9)
    before = tree(cache, hub)
    for words in (("gc",), ("gc", "--dry-run"), ("gc", "--yes", "--dry-run")):
        status, out, _ = gnomon(*words)
        assert status == 0
        assert "nothing was touched. To remove: gnomon gc --yes" in out
        assert tree(cache, hub) == before
    assert "1 directories of another format are ignored; only gc removes them" in gnomon("scan")[1]
    status, out, _ = gnomon("gc", "--yes")
    assert (status, "removed 1 items" in out) == (0, True)
    assert [path.name for path in (cache / "models").iterdir()] == ["good"]
    assert "nothing to remove" in gnomon("gc", "--yes")[1]


def test_fit_reports(gnomon: Run, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = machine.Machine("Test chip", "cpu", 1_000_000_000, 50.0, "measured")
    monkeypatch.setattr(machine, "this_machine", lambda cache: this)
    gnomon("get", str(gguf))
    report = json.loads(gnomon("fit", "--json", "--ctx", "400", "--skus")[1])
    assert report["machine"]["usable_bytes"] == 750_000_000
    assert (report["context_tokens"], report["typical_context_tokens"]) == (400, 400)
    (row,) = report["report"]
    # 3 layers, 2 KV heads of 32, float32.
    assert row["kv_bytes"] == 2 * 3 * 2 * 32 * 4 * 400
    assert row["total_bytes"] == row["weights_bytes"] + row["kv_bytes"] + int(400 * 0.55e6)
    assert row["fits"]
    assert row["max_context_tokens"] == 512
    assert len(report["matrix"]) == 42
    assert not json.loads(gnomon("fit", "--json", "--memory-budget", "0.1")[1])["report"][0]["fits"]
    assert "Test chip" in gnomon("fit", "tiny", "--skus")[1]


def test_the_model_a_command_finds(gnomon: Run, gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnomon.config import Config

    def find(wanted: str | None) -> Any:
        return _library.find(Config(model=ModelConfig(model=wanted), paths=Paths(cache)))

    fetched: list[Path] = []

    def ensure(store: Any, convert: Any, notify: Any) -> Path:
        fetched.append(store.cache)
        return store.models / starter.NAME

    monkeypatch.setattr(starter, "ensure", ensure)
    assert find(None).id == starter.REPO
    assert fetched == [cache]
    gnomon("get", str(gguf))
    assert find(None).id == find("TINY").id == "tiny-random"
    assert find(str(cache / "models" / "tiny-random")).path == cache / "models" / "tiny-random"
    assert len(fetched) == 1
    assert find("starter").path == cache / "models" / starter.NAME
    with pytest.raises(CommandError, match="no downloaded model matches 'qwen'"):
        find("qwen")
