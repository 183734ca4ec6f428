"""Per-layer bits and tiled attention against mlx-optiq's own classes, in processes that have it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from gnomon.kernels import coded
from gnomon.models.bindings import bind
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs import Affine, Coding, Fetched
from tiny_models import VOCAB_SIZE, make

rotating = pytest.importorskip("optiq.runtime.kv.rotating", reason="mlx-optiq is not installed")
fused = pytest.importorskip("optiq.runtime.fused_quant_sdpa", reason="mlx-optiq is not installed")

BITS = {"llama": {0: 8, 2: 4}, "gemma3": {0: 4, 1: 8, 2: 4}}
"""Layer 1 of llama stays plain; gemma3 has two sliding layers and one full one."""


def converted(caches: list[Any], bits: dict[int, int]) -> None:
    """As mlx-optiq's patched `maybe_quantize_kv_cache` does after each call of the model."""
    for layer, width in bits.items():
        cache = caches[layer]
        if type(cache) is RotatingKVCache:
            caches[layer] = rotating._replay_into_quantized(cache, 64, width)
        elif hasattr(cache, "to_quantized"):
            caches[layer] = cache.to_quantized(group_size=64, bits=width)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", BITS)
def test_layers_of_different_bits_are_mlx_optiqs_to_the_bit(model_type: str, dtype: str) -> None:
    """Windows of 40 wrap in a prompt of 90 and again while decoding."""
    coded.install()
    model: nn.Module = make(model_type, dtype, head_dim=64, num_hidden_layers=3)
    binding, bits = bind(model), BITS[model_type]
    caches, text = make_prompt_cache(model), np.random.default_rng(5).integers(3, VOCAB_SIZE, 140).tolist()
    codecs = tuple(Affine(bits[i]) if i in bits else None for i in range(len(caches)))
    state = BatchState(model, binding.make_caches(), pad_safe=binding.pad_safe, coding=Coding(codecs))
    at = 0
    for width in (50, 39, *[1] * 50):
        window = mx.array([text[at : at + width]])
        want = model(window, cache=caches)
        converted(caches, bits)
        state.begin(width)
        got = model(window, cache=state.caches)
        state.commit()
        mx.eval(want, got, state.arrays())
        assert bool(mx.array_equal(got, want)), f"at {at}"
        at += width


@pytest.mark.parametrize("end", [100, 512, 1300])
@pytest.mark.parametrize("bits", [4, 8])
def test_tiled_attention_is_mlx_optiqs_to_the_bit(bits: int, end: int) -> None:
    rng, codec = np.random.default_rng(bits), Affine(bits, fused=True)
    keys, values = (mx.array(rng.standard_normal((1, 2, end, 64))).astype(mx.bfloat16) for _ in range(2))
    queries = mx.array(rng.standard_normal((1, 6, 37, 64))).astype(mx.bfloat16)
    held = Fetched(codec.encode_keys(keys), codec.encode_values(values), 64, 64, mx.bfloat16)
    got = codec.attend(queries, held, 0.125, "causal", None)
    want = fused.fused_quantized_scaled_dot_product_attention(
        queries,
        mx.quantize(keys, group_size=64, bits=bits),
        mx.quantize(values, group_size=64, bits=bits),
        scale=0.125,
        mask="causal",
        group_size=64,
        bits=bits,
    )
    assert bool(mx.array_equal(got, want))
