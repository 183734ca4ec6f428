"""What a pool finds to serve, what it reckons for it, and how it starts."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from stub_child import __file__ as STUB
from tiny_directory import CONTEXT, make

from gnomon.cli import _pooled
from gnomon.cli._catalogue import catalogue
from gnomon.cli._verbs import CommandError
from gnomon.config import Config, EngineConfig, ModelConfig, Paths, PoolConfig


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    for name, id in (("alpha", "org/alpha"), ("beta", "org/beta")):
        made = make(root / "models" / name)
        (made / "gnomon.json").write_text(json.dumps({"format": 1, "id": id}))
    broken = root / "models" / "gamma"
    shutil.copytree(root / "models" / "alpha", broken)
    (broken / "gnomon.json").write_text(json.dumps({"format": 1, "id": "org/gamma"}))
    (broken / "model.safetensors").write_bytes(b"no header")
    make(root / "elsewhere")
    return root


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def of(cache: Path, model: str, **pool: object) -> Config:
    return Config(
        model=ModelConfig(model=model),
        paths=Paths(cache),
        pool=PoolConfig(model_pool=2, **pool),  # pyright: ignore[reportArgumentType]
    )


def test_every_model_that_runs_here_the_first_one_first(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = catalogue(of(cache, "beta", pins=("alpha",)))
    assert [one["id"] for one in said["entries"]] == ["org/beta", "org/alpha"]
    assert said["pins"] == ["org/alpha"]
    assert "org/gamma is left out" in caplog.text
    entry = said["entries"][1]
    assert (entry["path"], entry["model_type"], entry["context"]) == (str(cache / "models/alpha"), "llama", CONTEXT)
    # Two layers with keys and values of two heads of eight float32, for 8,192 tokens, and one prefill step.
    weights = entry["need"] - 2 * 2 * 2 * 8 * 4 * 8192 - 2048 * 550_000
    assert 0 < weights <= entry["size_bytes"] < weights + 4096


def test_only_those_named_and_a_longer_context_needs_more(cache: Path) -> None:
    config = of(cache, str(cache / "elsewhere"), models=("alpha", str(cache / "elsewhere")))
    said = catalogue(config)
    assert [one["id"] for one in said["entries"]] == ["elsewhere", "org/alpha"]
    limited = replace(config, engine=EngineConfig(context_limit=16384, memory_budget=10**9))
    again = catalogue(limited)
    assert again["room"] == 10**9
    assert again["entries"][0]["need"] - said["entries"][0]["need"] == 2 * 2 * 2 * 8 * 4 * 8192
    assert again["entries"][0]["context"] == 16384


def test_a_name_that_means_nothing_and_a_first_one_that_is_broken(cache: Path) -> None:
    with pytest.raises(CommandError, match="no downloaded model matches 'omega'"):
        catalogue(of(cache, "beta", models=("omega",)))
    with pytest.raises(CommandError, match="org/gamma can't be measured"):
        catalogue(of(cache, "gamma"))


def test_each_model_has_its_share_and_its_own_settings(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_pooled, "CHILD", (sys.executable, STUB))
    monkeypatch.setattr(_pooled, "_look", catalogue)
    config = of(cache, "alpha", pins=("beta",))
    budget = 27 * 10**8
    config = replace(config, engine=EngineConfig(memory_budget=budget, prompt_cache=10**9, kv_budget=10**8))
    (cache / "models" / "beta" / "generation_config.json").write_text('{"temperature": 0.3}')
    pool, voice = _pooled.start_pool(config)
    try:
        # Each needs 1.13 GB: too much for a third, so that each has half.
        assert voice.engine.model.path == f"{cache / 'models/alpha'} {(budget // 2, 10**9 // 2)}"
        assert (voice.sampling.temperature, voice.sampling.top_k) == (0.9, 40)
        other = pool.acquire("org/beta").result(300)
        assert (other.parts.sampling.temperature, other.parts.sampling.top_k) == (0.3, None)
        other.release()
        rows = {entry.id: row for entry, row in pool.entries()}
        assert [(rows[id]["pinned"], rows[id]["loads"]) for id in ("org/alpha", "org/beta")] == [(False, 1), (True, 1)]
        assert "--kv-budget holds for each model by itself" in caplog.text
    finally:
        pool.stop()


def test_a_first_model_that_cannot_be_loaded_ends_the_start(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pooled, "CHILD", (sys.executable, "-c", "raise SystemExit(4)"))
    monkeypatch.setattr(_pooled, "_look", catalogue)
    with pytest.raises(
        CommandError, match="org/alpha can't be loaded: the engine's process ended with code 4, 2 times"
    ):
        _pooled.start_pool(of(cache, "alpha"))
