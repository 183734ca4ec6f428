"""States that outlive the engine: restarts, the same bits, and a disk that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from engine_fixtures import Rig, tiny_loaded, tiny_model
from gnomon.config import CacheConfig, EngineConfig
from gnomon.engine.api import Finished, Request, Usage
from prefix_walk import bits, record, tokens_of

CHUNK = 64


@contextmanager
def rig_on(disk: Path, model_type: str = "llama", cache: dict[str, Any] | None = None, **config: Any) -> Iterator[Rig]:
    """A rig whose cache is also in `disk`; the model's files are beside it. What waits is written at the end."""
    model = disk.parent / f"model-{model_type}"
    if not model.exists():
        model.mkdir()
        (model / "model.safetensors").write_bytes(model_type.encode())
    loaded = replace(tiny_loaded(model_type), path=model)
    settings = CacheConfig(**{"ssd_cache": disk, "ssd_cache_min_free": 0, **(cache or {})})
    rig = Rig(loaded, EngineConfig(**{"prefill_chunk": CHUNK, **config}), cache=settings)
    try:
        yield rig
    finally:
        rig.core.close()
        rig.core.reuse.close()


def ask(rig: Rig, name: str, prompt: tuple[int, ...], tokens: int = 4, **how: Any) -> list[int]:
    rig.submit(Request(name, prompt, max_tokens=tokens, ignore_eos=True, **how))
    rig.finish()
    return rig.ids(name)


def usage(rig: Rig, name: str) -> Usage:
    end = rig.end(name)
    assert isinstance(end, Finished)
    return end.usage


TYPES = ("llama", "qwen3_moe", "deepseek_v3", "qwen3_5", "gemma3", "gemma4", "gpt_oss", "mamba2", "falcon_h1")


@pytest.mark.parametrize("model_type", TYPES)
def test_after_a_restart_the_next_turn_goes_on_as_if_nothing_had_happened(model_type: str, tmp_path: Path) -> None:
    """mlx-lm runs the same windows and steps without a break; every logit of the second turn has the same bits."""
    model, first, more = tiny_model(model_type, "float32"), tokens_of(511), tokens_of(70, seed=1)
    with rig_on(tmp_path / "disk", model_type) as rig:
        answer = ask(rig, "first", first)
    second = (*first, *answer[:-1], *more)

    caches = make_prompt_cache(model)
    feeds = [first[i : min(i + CHUNK, len(first) - 1)] for i in range(0, len(first) - 1, CHUNK)]
    feeds += [(first[-1],), *((token,) for token in answer[:-1])]
    for feed in feeds:
        mx.eval(model(mx.array([list(feed)]), cache=caches))
    theirs = [model(mx.array([list(feed)]), cache=caches) for feed in (more[:CHUNK], more[CHUNK:-1], more[-1:])]

    with rig_on(tmp_path / "disk", model_type) as rig:
        seen, stop = record(model)
        assert ask(rig, "second", second, tokens=1) == [int(mx.argmax(theirs[-1][0, -1]).item())]
        stop()
        used = usage(rig, "second")
        assert (used.cached_tokens, used.cache_tier, used.cache_miss) == (514, "ssd", None)
        assert [x.shape for x in seen] == [x.shape for x in theirs]
        assert all(np.array_equal(bits(x), bits(y)) for x, y in zip(seen, theirs, strict=True))
        ask(rig, "third", second, tokens=1)
        assert usage(rig, "third").cache_tier == "ram"
        assert rig.core.reuse.sections()["ssd_cache"]["restores"] == 1
        rig.core.check_integrity()
