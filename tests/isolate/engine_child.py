"""A child program over a real engine and a tiny model. It is told where its cache and its saved answers are."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import tiny_models
from engine_fixtures import tiny_loaded, tiny_tokenizer
from gnomon.config import CacheConfig, EngineConfig, SpeculationConfig
from gnomon.engine.engine import Engine
from gnomon.engine.resume import Store
from gnomon.engine.settings import Host, Settings
from gnomon.isolate import run

CHUNK = 32
EVERY = 4


def loaded(directory: Path):
    return replace(tiny_loaded("qwen3"), path=directory / "model")


def draft():
    return tiny_loaded("llama", model=tiny_models.make("llama", seed=1, num_hidden_layers=1))


def make(what: Any) -> Engine:
    directory = Path(what)
    settings = Settings(
        EngineConfig(prefill_chunk=CHUNK),
        cache=CacheConfig(ssd_cache=directory / "ssd", ssd_cache_min_free=0),
        speculation=SpeculationConfig(draft_kind="ngram", draft_model="tiny", num_draft_tokens=3),
        model_id="tiny",
    )
    host = Host(saves=Store(directory / "saves", EVERY))
    engine = Engine(lambda: loaded(directory), tiny_tokenizer(), settings, host, load_draft=draft)
    engine.wait(300)
    return engine


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[-1]), make))
