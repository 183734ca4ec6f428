"""A prompt's chunk over the kernels between its products, of which plain operations take the place: the model's own forward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.cache import make_prompt_cache

from gnomon.kernels import coded, dispatch
from gnomon.kernels.cuda import attention, chunks, decode
from gnomon.kernels.cuda.products import Weights
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs.affine import Affine
from gnomon.state.codecs.coding import Coding
from gnomon.state.paged.pool import PagePool

SMALL: dict[str, Any] = {
    "num_hidden_layers": 5,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
TOKENS = mx.array([[(7 * i * i + 3 * i) % 96 for i in range(130)]], dtype=mx.int32)


def make(kind: str) -> Any:
    """A model whose norms aren't 1 and whose biases aren't 0, of float32 where it is quantised: then little is rounded."""
    mx.random.seed(5)
    more: dict[str, Any] = {"max_position_embeddings": 512, "rope_theta": 1e4}
    if kind.startswith("llama"):
        model: Any = llama.Model(llama.ModelArgs(model_type="llama", head_dim=64, **SMALL))
    elif kind.startswith("qwen2"):
        model = qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **SMALL, **more))
    else:
        model = qwen3.Model(qwen3.ModelArgs(model_type="qwen3", head_dim=64, **SMALL, **more))
    for module in model.modules():
        for name, base in (("weight", 1.0), ("bias", 0.0)):
            held = module.get(name)
            if held is not None:
                module[name] = (base if held.ndim == 1 else 0.0) + 0.15 * mx.random.normal(held.shape)
    if kind.endswith("bits"):
        nn.quantize(model, 64, int(kind.split()[-2]))
    else:
        model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plain operations in place of the kernels; how many tokens `place_heads` was given, by call."""
    seen: list[int] = []
    groups: dict[int, Sequence[chunks.Group]] = {}

    def unpack(self: chunks.Unpacking) -> list[mx.array]:
        found: list[mx.array] = []
        for group in groups[id(self)]:
            codes = [part.arrays()[:3] for part in group]
            found.append(mx.concatenate([mx.dequantize(w, s, b, group[0].group, group[0].bits) for w, s, b in codes]))
        return found

    def remember(self: chunks.Unpacking, given: Sequence[chunks.Group]) -> None:
        groups[id(self)] = given

    def add_and_norm(y: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        h = residual + y
        return h, mx.fast.rms_norm(h, weight, eps)

    def gate_and_multiply(parts: Sequence[mx.array]) -> mx.array:
        gate, up = mx.split(parts[0], 2, axis=1) if len(parts) == 1 else parts
        return nn.silu(gate) * up

    def place_heads(
        form: attention.Form, parts: Any, biases: Any, norms: Any, offsets: mx.array, inverse: mx.array
    ) -> tuple[mx.array, ...]:
        seen.append(parts[0].shape[0])
        q, k = form.q_heads * form.size, (form.q_heads + form.kv_heads) * form.size
        split = mx.split(parts[0], [q, k], axis=1) if len(parts) == 1 else parts
        rows = offsets.shape[0]
        found: list[mx.array] = []
        for i, (x, bias) in enumerate(zip(split, biases, strict=True)):
            x = (x if bias is None else x + bias).reshape(rows, -1, x.shape[1] // form.size, form.size)
            if norms is not None and i < 2:
                x = mx.fast.rms_norm(x, norms[i], form.eps)
            x = x.transpose(0, 2, 1, 3)
            how: dict[str, Any] = {"traditional": form.traditional, "base": None, "scale": 1.0, "freqs": 1 / inverse}
            found.append(mx.fast.rope(x, form.size, offset=offsets, **how) if i < 2 else x)
        return tuple(found)

    monkeypatch.setattr(chunks.Unpacking, "__init__", remember)
    monkeypatch.setattr(chunks.Unpacking, "__call__", unpack)
    for own in (add_and_norm, gate_and_multiply, place_heads):
        monkeypatch.setattr(chunks, own.__name__, own)
    return seen


def chunk(model: Any, state: BatchState, tokens: mx.array, *, native: bool) -> np.ndarray:
    """What one forward hands to the head, in float32."""
    state.begin(tokens.shape[1])
    dispatch.choose(native)
    try:
        with dispatch.step():
            found = model.model(tokens, cache=state.caches).astype(mx.float32)
    finally:
        dispatch.choose(False)
    state.commit()
    return np.array(found)


def swap(model: Any) -> None:
    assert decode.swap(model)
    assert chunks.swap(model) == {type(model.model).__name__.removeprefix("Cuda"): 1}


def near(found: np.ndarray, expected: np.ndarray, share: float) -> None:
    assert np.abs(found - expected).max() <= share * np.abs(expected).max()


CUTS = list(itertools.pairwise((0, 40, 90, 130)))


def in_chunks(model: Any, **held: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a row's three chunks hand to the head, and its keys and values, in float32."""
    state = BatchState(model, make_prompt_cache(model), **held)
    found = [chunk(model, state, TOKENS[:, a:b], native=True) for a, b in CUTS]
    return np.concatenate(found, axis=1), [np.array(array.astype(mx.float32)) for array in state.arrays()]


@pytest.mark.parametrize("kind", ["llama, 4 bits", "qwen2, 8 bits", "qwen3, 4 bits"])
def test_chunks_of_a_lone_row(placed: list[int], kind: str) -> None:
    model = make(kind)
    expected, kept = in_chunks(model)
    assert not placed
    swap(model)
    found, ours = in_chunks(model)
    assert placed == [40] * 5 + [50] * 5 + [40] * 5
    near(found, expected, 1e-4)
    for mine, theirs in zip(ours, kept, strict=True):
        near(mine, theirs, 1e-4)


def test_few_rows_of_codes_are_not_unpacked(placed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen2, 4 bits")
    model.set_dtype(mx.bfloat16)
    whole = make("qwen2, 4 bits")
    exact, stock = in_chunks(whole)[0], in_chunks(model)[0]
    seen: list[int] = []

    def wide(x: mx.array, weights: Weights) -> mx.array:
        seen.append(x.shape[0])
        packed, scales, biases = weights.arrays()[:3]
        y = x @ mx.dequantize(packed, scales, biases, weights.group, weights.bits).T
        return y if weights.bias is None else y + weights.bias

    monkeypatch.setattr(chunks, "wide", wide)
    swap(model)
    found = in_chunks(model)[0]
    assert seen == [40] * 35 + [50] * 35 + [40] * 35
    assert np.square(found - exact).mean() <= 1.5 * np.square(stock - exact).mean()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_dense_weights_of_bf16(placed: list[int], kind: str) -> None:
    model, wide = make(kind), make(kind)
    wide.set_dtype(mx.float32)
    exact, stock = in_chunks(wide)[0], in_chunks(model)[0]
    swap(model)
    found = in_chunks(model)[0]
    assert len(placed) == 15
    assert np.square(found - exact).mean() <= 1.5 * np.square(stock - exact).mean()


def test_rows_of_other_lengths(placed: list[int]) -> None:
    model = make("llama, 4 bits")
    whole = chunk(model, BatchState(model, make_prompt_cache(model)), TOKENS, native=False)
    swap(model)
    states = [BatchState(model, make_prompt_cache(model)) for _ in range(2)]
    for state, before in zip(states, (5, 60), strict=True):
        chunk(model, state, TOKENS[:, :before], native=False)
    assert not placed, "the model's own forward takes stock steps"
    states[0].join(states[1])
    found = chunk(model, states[0], mx.concatenate([TOKENS[:, 5:45], TOKENS[:, 60:100]]), native=True)
    assert placed == [80] * 5
    near(found[0], whole[0, 5:45], 1e-4)
    near(found[1], whole[0, 60:100], 1e-4)


@pytest.mark.parametrize("kind", ["codes", "pages", "codes in pages"])
def test_other_states(placed: list[int], kind: str) -> None:
    model = make("llama, 4 bits")
    coded.install()
    coding = Coding((Affine(8),) * 5) if "codes" in kind else None
    expected, kept = in_chunks(model, coding=coding, pages=PagePool(5) if "pages" in kind else None)
    swap(model)
    found, ours = in_chunks(model, coding=coding, pages=PagePool(5) if "pages" in kind else None)
    assert len(placed) == 15
    # A key whose code is the next one moves scores by 1 part in 255 of its group's range.
    near(found, expected, 2e-2 if coding else 1e-4)
    assert [array.shape for array in ours] == [array.shape for array in kept]


def test_no_more_is_unpacked_ahead_than_there_is_room_for(placed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama, 4 bits")
    layer = 4 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 192)
    monkeypatch.setattr(chunks, "AHEAD", 1)
    monkeypatch.setattr(chunks, "MOST_UNPACKED", 3 * layer)
    swap(model)
    events: list[str] = []
    sent, waited = mx.async_eval, mx.eval

    def send(x: mx.array) -> None:
        events.append("sent")
        sent(x)

    def wait(x: mx.array) -> None:
        events.append("waited")
        waited(x)

    state = BatchState(model, make_prompt_cache(model))
    state.begin(40)
    monkeypatch.setattr(mx, "async_eval", send)
    monkeypatch.setattr(mx, "eval", wait)
    model.model.chunks(model.model.embed_tokens(TOKENS[:, :40]), state.caches)
    assert events == ["sent"] * 4 + ["waited"]
    assert placed == [40] * 5


def test_what_stays_the_models_own_forward(placed: list[int]) -> None:
    model = make("llama, 4 bits")
    swap(model)
    assert not chunks.swap(model), "a second time changes nothing"
    inner = model.model
    caches = make_prompt_cache(model)
    for shape, taken in (((1, 33), True), ((1, 32), False), ((4, 16), False), ((2, 17), True)):
        assert inner.chunks.takes(mx.zeros(shape), caches) == taken, shape
    other = llama.Model(llama.ModelArgs(model_type="llama", head_dim=64, **SMALL)).layers[2].self_attn.o_proj
    model.layers[2].self_attn.o_proj = other
    assert not inner.chunks.takes(mx.zeros((1, 64)), caches), "the weights are others"
    no_decoder = make("llama, 4 bits")
    assert not chunks.swap(no_decoder)
    assert not placed
