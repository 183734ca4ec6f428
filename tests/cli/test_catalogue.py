"""What a pool finds to serve, and what it reckons for it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_directory import CONTEXT, make

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
