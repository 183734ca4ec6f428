"""One row through the whole engine under 4 and 8 bits is mlx-lm's generate_step with `kv_bits` to the bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step

import tiny_models
from engine_fixtures import VOCAB_SIZE, Rig, tiny_loaded
from gnomon.config import EngineConfig, KvScheme
from gnomon.engine.api import Delta, Request, SamplingParams

STEPS = 8
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2, "num_key_value_heads": 4},
    "qwen3_5": {"full_attention_interval": 2},
    "qwen3_moe": {"num_hidden_layers": 2},
}


@cache
def model_of(model_type: str, dtype: str) -> nn.Module:
    return tiny_models.make(model_type, dtype, head_dim=64, **SHAPES[model_type])


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(2, VOCAB_SIZE, length).tolist())


@pytest.mark.parametrize("start", [0, 70])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("qwen3", "bfloat16"),
        ("qwen3_5", "float32"),
        ("qwen3_moe", "float32"),
    ],
)
def test_a_lone_row_equals_mlx_lm_to_the_bit(model_type: str, dtype: str, bits: int, start: int) -> None:
    """Chunks of 64: prompts end before, on and behind their borders; past token 70 a delayed row is coded in prefill or decode."""
    model = model_of(model_type, dtype)
    scheme = KvScheme("affine", bits=bits, start=start)
    rig = Rig(tiny_loaded(model_type, model=model), EngineConfig(prefill_chunk=64, prompt_cache=0), kv=scheme)
    for length in (1, 66, 150):
        prompt = prompt_of(length)
        theirs = list(
            generate_step(
                mx.array(prompt), model, max_tokens=STEPS, prefill_step_size=64, kv_bits=bits, quantized_kv_start=start
            )
        )
        request = Request(str(length), prompt, SamplingParams(logprobs=5), max_tokens=STEPS, ignore_eos=True)
        rig.submit(request)
        rig.finish()
        assert rig.ids(request.id) == [int(token) for token, _ in theirs]
        scores = [score for e in rig.events[request.id] if isinstance(e, Delta) for score in e.logprobs]
        for score, (token, logprobs) in zip(scores, theirs, strict=True):
            assert score.logprob == float(logprobs[int(token)].item())
            best = np.sort(np.array(logprobs.astype(mx.float32)))[::-1][:5]
            assert [top.logprob for top in score.top] == best.tolist()


def test_coded_rows_are_not_plain_ones() -> None:
    """The test above would pass if both sides forgot to quantise."""
    model, prompt = model_of("llama", "float32"), prompt_of(150)
    plain, coded = (
        [lp for _, lp in generate_step(mx.array(prompt), model, max_tokens=2, prefill_step_size=64, **settings)][1]
        for settings in ({}, {"kv_bits": 4, "quantized_kv_start": 0})
    )
    assert float(mx.abs(plain - coded).max().item()) > 1e-3
