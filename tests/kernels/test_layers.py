"""Whole models on native kernels: fused layers against unfused ones to the bit, both against stock within a bound."""

import importlib
import io
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from gnomon.kernels import dispatch, layers
from kernels.oracle import bits_of, rounded, wide
from tiny_models import VOCAB_SIZE, make

FUSED = ("llama", "qwen3", "gemma3")
MODELS = (*FUSED, "qwen3_5", "gemma2", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma4")
TOKENS = mx.array(np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, 57)))


def quantise(made: nn.Module, bits: int) -> nn.Module:
    nn.quantize(
        made, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
    )
    mx.eval(made.parameters())
    return made


def forward(model: nn.Module, tokens: mx.array, cuts: tuple[int, ...] = (), step: bool = True) -> mx.array:
    """Logits of the tokens, given in the parts that end at `cuts`."""
    state: list[Any] = make_prompt_cache(model)
    parts, start = [], 0
    for end in (*cuts, tokens.shape[1]):
        if step:
            with dispatch.step():
                parts.append(model(tokens[:, start:end], cache=state))
        else:
            parts.append(model(tokens[:, start:end], cache=state))
        mx.eval(parts[-1])
        start = end
    return mx.concatenate(parts, axis=1)


def of_rounded(product: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A product with packed weights whose activations have 16 bits."""

    def rounding(x: mx.array, *others: Any, group_size: int, **options: Any) -> mx.array:
        seen = mx.array(rounded(wide(x), group_size, 32512).astype(np.float32))
        return product(seen.astype(x.dtype), *others, group_size=group_size, **options)

    return rounding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", FUSED)
def test_fused_layers_have_the_bits_of_the_unfused(
    native: ModuleType, model_type: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfused, fused = quantise(make(model_type, dtype), 4), quantise(make(model_type, dtype), 4)
    swapped = layers.swap(fused, native)
    assert {"NativeAttention", "NativeMLP", "NativeTransformerBlock"} <= set(swapped)
    assert layers.swap(fused, native) == {}
    for module in unfused.modules():
        if type(module) is nn.QuantizedEmbedding:
            layers.swap(module, native)
    cuts = (20, 21, 22, 40)
    # Outside steps a swapped model is what it was.
    assert (
        bits_of(forward(unfused, TOKENS, cuts, step=False)) == bits_of(forward(fused, TOKENS, cuts, step=False))
    ).all()
    if model_type == "gemma3":
        if dtype != "float32":
            pytest.skip("MLX rounds between gelu and its product")
        monkeypatch.setattr(nn, "gelu_approx", lambda g: native.gated(g, mx.ones_like(g), layers.GELU_TANH))
    else:
        module = importlib.import_module(f"mlx_lm.models.{model_type}")
        monkeypatch.setattr(module, "swiglu", lambda g, u: native.gated(g, u, layers.SILU))
    assert (bits_of(forward(unfused, TOKENS, cuts)) == bits_of(forward(fused, TOKENS, cuts))).all()


@pytest.mark.parametrize("model_type", FUSED)
def test_fused_dense_layers(native: ModuleType, model_type: str) -> None:
    made = make(model_type, "float32")
    stock = wide(forward(made, TOKENS, (30,), step=False))
    assert "NativeTransformerBlock" in layers.swap(made, native)
    assert np.abs(wide(forward(made, TOKENS, (30,))) - stock).max() <= 1e-4 * np.abs(stock).max()


@pytest.mark.parametrize("model_type", MODELS)
def test_every_model_stays_within_the_bound_of_stock(
    native: ModuleType, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32's bound, and what stock operations lose themselves when their products get activations of 16 bits.

    Which way an activation is rounded depends on its last bits, so both are draws of one distribution: means differ little, maxima by 2.
    """
    made = quantise(make(model_type, "float32"), 8)
    stock = wide(forward(made, TOKENS, (30,), step=False))
    with monkeypatch.context() as patched:
        for name in ("quantized_matmul", "gather_qmm"):
            patched.setattr(mx, name, of_rounded(getattr(mx, name)))
        lost = np.abs(wide(forward(made, TOKENS, (30,), step=False)) - stock)
    layers.swap(made, native)
    error = np.abs(wide(forward(made, TOKENS, (30,))) - stock)
    assert error.max() <= 2e-4 * np.abs(stock).max() + 2 * lost.max()
    assert error.mean() <= 1.5 * lost.mean()


@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_is_as_near_to_float32_as_stock_is(native: ModuleType, model_type: str) -> None:
    made = quantise(make(model_type, "bfloat16"), 8)
    stock = wide(forward(made, TOKENS, (30,), step=False))
    layers.swap(made, native)
    got = wide(forward(made, TOKENS, (30,)))
    made.update(tree_map(lambda a: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a, made.parameters()))
    exact = wide(forward(made, TOKENS, (30,), step=False))
    assert np.abs(got - exact).mean() <= 1.25 * np.abs(stock - exact).mean()


@pytest.mark.parametrize("model_type", [*FUSED, "qwen3_5"])
def test_chunks_do_not_change_a_bit(native: ModuleType, model_type: str) -> None:
    made = make(model_type, "float32")
    quantise(made, 4)
    layers.swap(made, native)
    whole = bits_of(forward(made, TOKENS[:, :38]))  # Gemma's window is 40: a longer prompt in parts is stored rotated
    for cuts in ((1,), (37,), (5, 6, 7, 20), tuple(range(1, 38))):
        assert (bits_of(forward(made, TOKENS[:, :38], cuts)) == whole).all()


def test_rows_of_a_batch_do_not_change_a_bit(native: ModuleType) -> None:
    made = quantise(make("llama", "float32"), 4)
    rows = mx.concatenate([TOKENS, TOKENS[:, ::-1], TOKENS * 0 + 5])
    together = forward(made, rows, (50,))
    for i in range(3):
        assert (bits_of(forward(made, rows[i : i + 1], (50,))) == bits_of(together[i : i + 1])).all()


def test_replaced_submodules_are_seen(native: ModuleType) -> None:
    made = make("llama", "float32")
    nn.quantize(made, 32, 4)
    layers.swap(made, native)
    before = forward(made, TOKENS)
    layer: Any = made.layers[1]
    layer.mlp.up_proj = nn.QuantizedLinear.from_linear(nn.Linear(64, 96, bias=False), 32, 4)
    layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight[::-1]
    stock, got = wide(forward(made, TOKENS, step=False)), wide(forward(made, TOKENS))
    assert np.abs(got - stock).max() <= 1e-4 * np.abs(stock).max()
    assert np.abs(got - wide(before)).max() > 1e-2


def test_activations_of_another_type_take_the_own_forward(native: ModuleType) -> None:
    made = make("llama", "bfloat16")
    nn.quantize(made, 32, 4)
    layers.swap(made, native)
    made.update(tree_map(lambda a: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a, made.parameters()))
    got, stock = wide(forward(made, TOKENS)), wide(forward(made, TOKENS, step=False))
    assert np.abs(got - stock).max() <= 1e-3 * np.abs(stock).max()


def test_a_fused_linear_with_bias_and_norm_after(kernels: ModuleType) -> None:
    x, residual = mx.random.normal((2, 3, 64), key=mx.random.key(0)), mx.random.normal((2, 3, 40), key=mx.random.key(1))
    w, bias, after = (mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate([(40, 64), (40,), (40,)], 2))
    y = kernels.project(x, kernels.Projection(w, None, None, bias, 0, 0), after, 1e-5, residual)
    plain = wide(x) @ wide(w).T + wide(bias)
    expected = plain / np.sqrt((plain**2).mean(-1, keepdims=True) + 1e-5) * wide(after) + wide(residual)
    assert np.abs(wide(y) - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("model_type", "classes"),
    [
        ("gemma2", {"NativeMLP"}),
        ("gemma4", {"NativeMLP"}),
        ("qwen3_moe", {"NativeAttention", "NativeQwen3MoeSparseMoeBlock"}),
        ("mixtral", {"NativeSwiGLU"}),
    ],
)
def test_gates_of_experts_and_gemmas_are_swapped(native: ModuleType, model_type: str, classes: set[str]) -> None:
    model = make(model_type, "float32")
    before = forward(model, TOKENS, (40,), step=False)
    layers.swap(model, native)
    # Gates may be shared with a model that was swapped before.
    assert classes <= {type(module).__name__ for module in model.modules()}
    # Outside steps nothing changed.
    assert (bits_of(forward(model, TOKENS, (40,), step=False)) == bits_of(before)).all()
    kinds = {"GLU": "GnomonGated", "MLP": "GnomonGatedMlp", "MoeBlock": "GnomonExperts"}
    expected = {primitive for end, primitive in kinds.items() if any(name.endswith(end) for name in classes)}
    assert expected <= primitives(lambda: model(TOKENS[:, :3]))


def test_a_gate_of_gemma_experts_computes_what_it_did(native: ModuleType) -> None:
    holder = nn.Module()
    holder.gate = importlib.import_module("mlx_lm.models.gemma4_text").GeGLU()
    up, gate = (mx.random.normal((3, 2, 1, 40), key=mx.random.key(k)) for k in (1, 2))
    expected = wide(holder.gate(up, gate))
    assert layers.swap(holder, native) == {"NativeGeGLU": 1}
    with dispatch.step():
        assert np.allclose(wide(holder.gate(up, gate)), expected, rtol=1e-5, atol=1e-6)
    assert "GnomonGated" in primitives(lambda: holder.gate(up, gate))


def primitives(outputs: Callable[[], mx.array]) -> set[str]:
    """Names of the primitives in the graph that a step builds."""
    text = io.StringIO()
    with dispatch.step():
        mx.export_to_dot(text, outputs())
    return set(re.findall(r'label ?= ?"([A-Za-z]\w*)"[^\n]*shape ?= ?rectangle', text.getvalue()))
