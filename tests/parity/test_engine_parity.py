"""One row through the whole engine is mlx-lm's generate_step to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step

from engine_fixtures import VOCAB_SIZE, Rig, tiny_loaded, tiny_model
from gnomon.config import EngineConfig
from gnomon.engine.api import Delta, Request, SamplingParams

TYPES = ("llama", "qwen3", "qwen3_5", "gemma3", "gemma4", "qwen3_moe", "deepseek_v3", "gpt_oss", "mamba2")
STEPS = 16


def record(model: nn.Module) -> tuple[list[mx.array], Callable[[], None]]:
    """The logits of every forward of the model from now on, until the returned function is called."""
    seen: list[mx.array] = []
    stock = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        logits = stock.__call__(self, *args, **kwargs)
        seen.append(logits)
        return logits

    model.__class__ = type(stock.__name__, (stock,), {"__call__": call})

    def stop() -> None:
        model.__class__ = stock

    return seen, stop


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x.view(mx.uint32))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([length, seed]).integers(2, VOCAB_SIZE, length).tolist())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_lone_row_equals_mlx_lm_to_the_bit(model_type: str, dtype: str) -> None:
    """Chunks of 64, so that prompts end before, on and behind their borders; windows are 40 wide, so they wrap."""
    model = tiny_model(model_type, dtype)
    rig = Rig(tiny_loaded(model_type, dtype), EngineConfig(prefill_chunk=64))
    for length in (1, 2, 39, 64, 65, 66, 150) if dtype == "float32" else (2, 65, 150):
        prompt = prompt_of(length)
        seen, stop = record(model)
        steps = list(generate_step(mx.array(prompt), model, max_tokens=STEPS, prefill_step_size=64))
        stop()
        theirs = [bits(x) for x in seen][: len(seen) - 1]  # the last forward runs ahead of what is read

        seen, stop = record(model)
        request = Request(str(length), prompt, SamplingParams(logprobs=5), max_tokens=STEPS, ignore_eos=True)
        rig.submit(request)
        rig.finish()
        stop()
        ours = [bits(x) for x in seen]

        assert [x.shape for x in ours] == [x.shape for x in theirs]
        assert all(np.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))
        assert rig.ids(request.id) == [int(token) for token, _ in steps]
        scores = [score for e in rig.events[request.id] if isinstance(e, Delta) for score in e.logprobs]
        assert [s.logprob for s in scores] == [float(logprobs[int(token)].item()) for token, logprobs in steps]
        for score, (_, logprobs) in zip(scores, steps, strict=True):
            best = np.sort(np.array(logprobs.astype(mx.float32)))[::-1][:5]
            assert [top.logprob for top in score.top] == best.tolist()
