"""What the scan finds, and what names resolve to."""

from __future__ import annotations

from pathlib import Path

import pytest
from caches import config, converted, hub_revision, safetensors

from gnomon.hub import starter
from gnomon.hub.errors import HubError
from gnomon.hub.registry import Registry, scan
from gnomon.hub.resolve import STARTER, Found, resolve
from gnomon.hub.store import Store

A, B, C = "a" * 40, "b" * 40, "c" * 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "gnomon")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def whole(nbytes: int = 100, **more: object) -> dict[str, bytes]:
    return {"config.json": config(**more), "model.safetensors": safetensors(nbytes, str(more))}


def test_scan(store: Store, hub: Path) -> None:
    hub_revision(hub, "org/Big", A, whole(500, quantization={"bits": 8, "group_size": 64}), ("v1",))
    hub_revision(hub, "org/Big", B, whole(600, quantization={"bits": 4, "group_size": 64}), ("main",))
    hub_revision(hub, "org/eye", A, whole(50, vision_config={}), ("main",))
    hub_revision(hub, "org/shards", A, {"config.json": config(), "model-00001-of-00002.safetensors": safetensors(9),
                 "model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00002.safetensors", '
                 b'"b": "model-00002-of-00002.safetensors"}}'}, ("main",))  # fmt: skip
    broken = hub_revision(hub, "org/dangling", A, whole(), ("main",))
    (broken / "model.safetensors").resolve().unlink()
    (hub / "models--org--nothing").mkdir()
    (hub / "datasets--org--data").mkdir()
    (hub / "version.txt").write_text("1")
    converted(store.cache, "mine", id="somebody/mine")
    converted(store.cache, "future", format=2)
    (store.models / ".half.partial").mkdir()
    registry = scan(store, hub)
    found = {model.id: model for model in registry.models}
    assert list(found) == ["org/Big", "org/dangling", "org/eye", "org/shards", "somebody/mine"]
    assert (found["org/Big"].revision, found["org/Big"].refs, found["org/Big"].bits) == (B, ("main",), 4)
    assert [(m.id, m.revision) for m in registry.older] == [("org/Big", A)]
    assert found["org/Big"].weight_bytes == len(safetensors(600))
    assert found["org/eye"].vision
    assert found["org/shards"].missing == ("model-00002-of-00002.safetensors",)
    assert found["org/dangling"].missing == ("model.safetensors",)
    assert found["somebody/mine"].source == "gnomon"
    assert registry.unknown_formats == 1
    assert [m.id for m in registry.servable()] == ["org/Big", "somebody/mine", "org/eye"]


def test_scan_of_nothing(store: Store, hub: Path) -> None:
    assert scan(store, hub) == Registry(())


def look(wanted: str | None, registry: Registry, fits: object = None, ram: int = 10_000) -> Found:
    judge = fits if callable(fits) else (lambda model: True)
    return resolve(wanted, registry, fits=judge, runs=lambda model: model.model_type == "llama", ram=ram)


@pytest.fixture
def several(store: Store, hub: Path) -> Registry:
    hub_revision(hub, "mlx/Llama-1B-4bit", A, whole(1000), ("main",))
    hub_revision(hub, "mlx/Llama-1B-4bit", B, whole(999), ("old",))
    hub_revision(hub, "mlx/Llama-1B-4bit-tuned", A, whole(2000, b=1), ("main",))
    hub_revision(hub, "mlx/Qwen", A, whole(3000, c=1), ("main",))
    hub_revision(hub, "mlx/Encoder", A, whole(9000, model_type="bert"), ("main",))
    hub_revision(hub, "mlx/Half", A, {"config.json": config()}, ("main",))
    return scan(store, hub)


@pytest.mark.parametrize(
    ("wanted", "id"),
    [
        ("mlx/Llama-1B-4bit", "mlx/Llama-1B-4bit"),
        ("MLX/llama-1b-4BIT", "mlx/Llama-1B-4bit"),
        ("llama-1b-4bit", "mlx/Llama-1B-4bit"),
        ("tuned", "mlx/Llama-1B-4bit-tuned"),
        ("qwen", "mlx/Qwen"),
        ("enc", "mlx/Encoder"),
    ],
)
def test_queries(several: Registry, wanted: str, id: str) -> None:
    found = look(wanted, several)
    assert found.id == id
    assert (found.path / "config.json").is_file()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("llama", r"'llama' matches 2 models; say more:\n  mlx/Llama-1B-4bit\n  mlx/Llama-1B-4bit-tuned"),
        ("gemma", r"no downloaded model matches 'gemma'. To download one: gnomon get OWNER/NAME(?s:.*)mlx/Qwen"),
        ("half", r"mlx/Half lacks model.safetensors; to finish its download: gnomon get mlx/Half"),
        ("/no/such/place", "there is no directory /no/such/place"),
        ("./nor/here", "there is no directory nor/here"),
        ("mlx/Qwen@v7", "no downloaded model matches 'mlx/Qwen@v7'"),
    ],
)
def test_queries_that_fail_say_why(several: Registry, wanted: str, message: str) -> None:
    with pytest.raises(HubError, match=message):
        look(wanted, several)


def test_a_revision_by_ref_or_commit(several: Registry) -> None:
    assert look("mlx/Llama-1B-4bit@old", several).path.name == B
    assert look(f"mlx/Llama-1B-4bit@{A[:8]}", several).path.name == A


def test_paths(several: Registry, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub / "models--mlx--Qwen" / "snapshots" / A
    assert look(str(snapshot), several) == Found(snapshot, "mlx/Qwen")
    plain = tmp_path / "my-model"
    plain.mkdir()
    (plain / "config.json").write_bytes(config())
    assert look(str(plain), Registry(())) == Found(plain, "my-model")
    monkeypatch.chdir(plain)
    assert look(".", Registry(())).id == "my-model"
    (plain / "config.json").unlink()
    with pytest.raises(HubError, match=r"has no config\.json"):
        look(str(plain), several)
    # A bare word that is also some directory's name is still a query.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    assert look("qwen", several).id == "mlx/Qwen"
    file = tmp_path / "x.gguf"
    file.touch()
    with pytest.raises(HubError, match=r"convert it once with: gnomon get .*x.gguf"):
        look(str(file), several)


def test_the_pick_is_the_largest_that_runs_and_leaves_room(several: Registry) -> None:
    assert look(None, several).id == "mlx/Qwen"
    assert look(None, several, ram=4000).id == "mlx/Llama-1B-4bit-tuned"
    # Nothing is under 0.6 of memory: the largest that fits at all.
    assert look(None, several, ram=1000).id == "mlx/Qwen"
    assert look(None, several, fits=lambda model: model.weight_bytes < 2000).id == "mlx/Llama-1B-4bit"
    assert look(None, several, fits=lambda model: False) is STARTER


@pytest.mark.parametrize("wanted", [None, "starter", starter.NAME, starter.REPO.lower()])
def test_the_starter_stands_in_when_nothing_is_here(wanted: str | None) -> None:
    assert look(wanted, Registry(())) is STARTER
