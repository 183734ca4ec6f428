"""What the CUDA kernels for experts and recurrent mixers take, and models that take them, over stand-ins for the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3_next, switch_layers
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.gated_delta import normalize_qk

import tiny_models
from gnomon.kernels import dispatch
from gnomon.kernels.cuda import decode, experts, mixtures, recurrent
from gnomon.kernels.cuda.experts import Experts
from gnomon.kernels.cuda.products import Normed
from gnomon.kernels.recurrent import reference_gated_delta, reference_short_convolution
from gnomon.state.batch_state import BatchState
from kernels.test_cuda import stand_in

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HYBRID = {**EXPERTS, "shared_expert_intermediate_size": 64, "linear_value_head_dim": 32}


def dense(w: Experts) -> mx.array:
    if w.scales is None:
        return w.weight.astype(mx.float32)
    return mx.dequantize(w.weight, w.scales, w.biases, w.group, w.bits).astype(mx.float32)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plain MLX operations in float32 for the kernels, by their contracts. Gives the names of those that were called."""
    called: list[str] = []

    def each(x: mx.array, indices: mx.array, w: Experts) -> mx.array:
        rows = mx.repeat(x.astype(mx.float32), indices.size // x.shape[0], axis=0)
        return (dense(w)[indices] @ rows[..., None])[..., 0]

    def gather(x: mx.array, indices: mx.array, w: Experts) -> mx.array:
        called.append("gather")
        return each(x, indices, w).astype(x.dtype)

    def gated(x: mx.array | Normed, indices: mx.array, gate: Experts, up: Experts) -> mx.array:
        called.append("gated")
        indices = indices.reshape(-1)
        if isinstance(x, Normed):
            wide = x.rows.astype(mx.float32)
            x = wide * mx.rsqrt(x.squares.sum(-1, keepdims=True) / wide.shape[-1] + x.eps)
        return (nn.silu(each(x, indices, gate)) * each(x, indices, up)).astype(gate.dtype)

    def blend(x: mx.array, indices: mx.array, shares: mx.array, w: Experts) -> mx.array:
        called.append("blend")
        return blended(x, indices, shares, w).astype(x.dtype)

    def blended(x: mx.array, indices: mx.array, shares: mx.array, w: Experts) -> mx.array:
        y = each(x, indices.reshape(-1), w).reshape(*indices.shape, -1)
        return (y * shares[..., None]).sum(1)

    def blend_and_add(
        x: mx.array, indices: mx.array, shares: mx.array, w: Experts, residual: mx.array, norm: mx.array, eps: float
    ) -> tuple[mx.array, Normed]:
        called.append("blend_and_add")
        h = (blended(x, indices, shares, w) + residual.astype(mx.float32)).astype(x.dtype)
        wide = h.astype(mx.float32)
        return h, Normed((wide * norm).astype(x.dtype), (wide**2).reshape(len(h), -1, 16).sum(-1), eps)

    def route(logits: mx.array, top: int, among_chosen: bool) -> tuple[mx.array, mx.array]:
        called.append("route")
        p = mx.softmax(logits.astype(mx.float32), axis=-1)
        chosen = mx.argsort(-p, axis=-1)[:, :top].astype(mx.uint32)
        shares = mx.take_along_axis(p, chosen, axis=-1)
        return chosen, shares / shares.sum(-1, keepdims=True) if among_chosen else shares

    def mix(
        form: Any, projected: Any, parts: Any, before: Any, state: Any, mask: Any = None, lengths: Any = None
    ) -> Any:
        called.append("mix")
        mixed, (batch, tokens, _) = projected.mixed, projected.mixed.shape
        if projected.others is not None:
            z, a, b = projected.others
        else:
            width = form.v_heads * form.v_size
            ends = [form.channels, form.channels + width, form.channels + width + form.v_heads]
            mixed, z, b, a = mx.split(mixed, ends, axis=-1)
        if mask is not None:
            mixed = mx.where(mask[..., None], mixed, 0)
        window, kept = mx.concatenate([before, mixed], axis=1), before.shape[1]
        ends = mx.full(batch, tokens) if lengths is None else lengths
        held = mx.take_along_axis(window, (ends[:, None] + mx.arange(kept))[..., None], axis=1)
        mixed = nn.silu(reference_short_convolution(window, parts.weight))
        keys = form.k_heads * form.k_size
        q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
        q, k = (t.reshape(batch, tokens, form.k_heads, form.k_size) for t in (q, k))
        q, k = normalize_qk(q, k, inv_scale=form.k_size**-0.5, eps=1e-6)
        g = mx.exp(-mx.exp(parts.log.astype(mx.float32)) * nn.softplus(a.astype(mx.float32) + parts.bias))
        v = v.reshape(batch, tokens, form.v_heads, form.v_size)
        y, after = reference_gated_delta(q, k, v, g, mx.sigmoid(b), state, mask)
        x = mx.fast.rms_norm(y, parts.norm, form.eps) * nn.silu(z.reshape(y.shape).astype(mx.float32))
        return x.astype(form.dtype).reshape(batch, tokens, -1), held, after

    def product(x: mx.array, *weights: Any) -> mx.array:
        called.append("product")
        return mx.concatenate([(x.astype(mx.float32) @ w.weight.astype(mx.float32).T) for w in weights], 1).astype(
            x.dtype
        )

    for function in (gather, gated, blend, blend_and_add, route):
        for owner in (experts, mixtures):
            if hasattr(owner, function.__name__):
                monkeypatch.setattr(owner, function.__name__, function)
    monkeypatch.setattr(recurrent, "mix", mix)
    for owner in (recurrent, mixtures):
        monkeypatch.setattr(owner, "product", product)
    monkeypatch.setattr(mx, "compile", lambda f: f)  # on a CPU it would call a C++ compiler
    return called


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    yield
    dispatch.choose(False)
    dispatch.uninstall()
    dispatch.stock_calls.clear()


def forward(model: nn.Module, state: BatchState, tokens: list[list[int]], counts: list[int] | None = None) -> mx.array:
    state.begin(len(tokens[0]), counts)
    logits = model(mx.array(tokens), cache=state.caches)
    state.commit()
    return logits.astype(mx.float32)


def logits_of(model: nn.Module, native: bool) -> np.ndarray:
    """Logits of two rows' prompts, of a ragged window, and of one token after some of the window was taken back."""
    dispatch.choose(native)
    with dispatch.step():
        rows = [BatchState(model, make_prompt_cache(model)) for _ in range(2)]
        found = [forward(model, rows[0], [[7, 9, 11, 4, 250]])[0], forward(model, rows[1], [[3, 4, 5, 6, 7, 8, 99]])[0]]
        rows[0].join(rows[1])
        window = forward(model, rows[0], [[1, 2, 3, 4], [5, 6, 7, 0]], [4, 3])
        found += [window[0], window[1, :3]]
        rows[0].rollback([2, 1])
        found += list(forward(model, rows[0], [[17], [18]]))
        assert rows[0].lengths == [8, 10]
        rows[0].check_integrity()
    return np.array(mx.concatenate(found))


@pytest.mark.parametrize(
    ("family", "swapped", "called"),
    [
        (
            "qwen3_5",
            {"SwitchGLU": 4, "Qwen3NextSparseMoeBlock": 4, "GatedDeltaNet": 3},
            {"gated", "blend", "route", "mix", "product"},
        ),
        ("qwen3_moe", {"SwitchGLU": 3, "Qwen3MoeSparseMoeBlock": 3}, {"gated", "blend", "route", "product"}),
        ("mixtral", {"SwitchGLU": 2}, {"gated", "gather"}),
    ],
)
def test_a_models_forward_over_the_kernels_is_its_own(
    stand_ins: list[str], family: str, swapped: dict[str, int], called: set[str]
) -> None:
    changes = {"intermediate_size": 128} if family == "mixtral" else {}
    model, wide = (tiny_models.make(family, d, **_changes(family), **changes) for d in ("bfloat16", "float32"))
    exact, expected = logits_of(wide, False), logits_of(model, False)
    model = tiny_models.make(family, "bfloat16", **_changes(family), **changes)
    found = {**mixtures.swap(model), **recurrent.swap(model)}
    assert found == swapped
    own = logits_of(model, False)
    assert not stand_ins
    assert (own == expected).all()
    logits = logits_of(model, True)
    assert set(stand_ins) == called
    assert not dispatch.stock_calls
    error, usual = (np.sqrt(((y - exact) ** 2).mean()) for y in (logits, expected))
    assert error < 1.5 * usual < 0.5 * exact.std()


def _changes(family: str) -> dict[str, int]:
    return {"qwen3_5": HYBRID, "qwen3_moe": EXPERTS}.get(family, {})


def test_decode_steps_of_a_model_with_experts_are_compiled(
    stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        wide = {**EXPERTS, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2}
        return tiny_models.make("qwen3_moe", "bfloat16", **wide)

    def prefilled(model: Any) -> BatchState:
        states = [BatchState(model, make_prompt_cache(model)) for _ in range(2)]
        forward(model, states[0], [[7, 9, 11, 4, 250]])
        forward(model, states[1], [[3, 4, 5]])
        states[0].join(states[1])
        return states[0]

    def decoded(model: Any, state: BatchState) -> np.ndarray:
        return np.array(forward(model, state, [[17], [18]]))

    usual, model = make(), make()
    # What stands in for attention's kernel keeps no keys, so prompts come before it.
    expected, state = decoded(usual, prefilled(usual)), prefilled(model)
    stand_in(monkeypatch)
    assert decode.swap(model) == {"Model": 1, "layers": 2}
    dispatch.choose(True)
    with dispatch.step():
        found = decoded(model, state)
    assert stand_ins == ["route", "gated", "blend_and_add"] * 2
    assert dispatch.stock_calls == {}
    assert np.abs(found - expected).mean() < 0.03 * expected.std()
    assert decode.Decoder.of(make()) is not None
    model.model.layers[1].mlp.switch_mlp.down_proj.weight = model.model.layers[1].mlp.switch_mlp.down_proj.weight + 1
    assert not model.decoder.is_current()


@pytest.mark.parametrize("bits", [8, 16])
def test_gathered_products_of_one_row_each_take_the_kernel(stand_ins: list[str], bits: int) -> None:
    mx.random.seed(3)
    layer: Any = switch_layers.SwitchLinear(64, 24, 5, bias=False)
    if bits == 8:
        layer = layer.to_quantized(32, 8)
    x = mx.random.normal((3, 2, 1, 1, 64))
    chosen = mx.random.randint(0, 5, (3, 2, 4)).astype(mx.uint32)
    calls = [
        (x, chosen, False),
        (mx.random.normal((3, 2, 4, 1, 64)), chosen, False),
        (mx.random.normal((9, 1, 64)), mx.sort(mx.random.randint(0, 5, (9,))), True),
    ]
    expected = [layer(*call) for call in calls]  # in float32: no type of the kernels
    layer.set_dtype(mx.float16)
    dispatch.install(experts.OPERATIONS, None)
    dispatch.choose(True)
    with dispatch.step():
        found = [layer(a.astype(mx.float16), *rest) for a, *rest in calls]
    assert stand_ins == ["gather"] * 3
    for y, z in zip(found, expected, strict=True):
        assert y.shape == z.shape
        assert y.dtype == mx.float16
        assert np.abs(np.array(y.astype(mx.float32)) - np.array(z)).max() < 4e-3 * np.abs(np.array(z)).max()
    assert not dispatch.stock_calls


@pytest.mark.parametrize(
    ("change", "operation"),
    [
        ({"x": (3, 1, 2, 64)}, "gather_qmm"),
        ({"x": (2, 1, 64)}, "gather_qmm"),
        ({"indices": 513, "x": (513, 1, 64)}, "gather_qmm"),
        ({"bits": 3}, "gather_qmm"),
        ({"dtype": mx.float32}, "gather_qmm"),
        ({"transpose": False}, "gather_qmm"),
    ],
    ids=str,
)
def test_other_gathered_products_stay_stock_and_are_counted(
    stand_ins: list[str], change: dict[str, Any], operation: str
) -> None:
    dtype, bits = change.get("dtype", mx.float16), change.get("bits", 8)
    w, scales, biases = mx.quantize(mx.random.normal((5, 64, 64)), 32, bits)
    x = mx.random.normal(change.get("x", (3, 1, 64))).astype(dtype)
    indices = mx.zeros(change.get("indices", 3), dtype=mx.uint32)
    asked: list[tuple[Any, ...]] = []

    def stock(*arguments: Any, **named: Any) -> mx.array:
        asked.append((*arguments, named))
        return x

    own = experts.OPERATIONS[0].make(stock, None)
    dispatch.choose(True)
    with dispatch.step():
        y = own(
            x,
            w,
            scales.astype(dtype),
            biases.astype(dtype),
            rhs_indices=indices,
            transpose=change.get("transpose", True),
            group_size=32,
            bits=bits,
            sorted_indices=True,
        )
    assert y is x
    assert not stand_ins
    assert dispatch.stock_calls == {operation: 1}
    [call] = asked
    assert call[5] is indices
    assert call[6:] == (
        change.get("transpose", True),
        32,
        bits,
        "affine",
        None,
        {"sorted_indices": True, "stream": None},
    )


def test_layers_that_kernels_do_not_take_keep_their_class_and_say_why() -> None:
    made: Any = switch_layers.SwitchGLU(64, 64, 4, bias=True)
    odd: Any = switch_layers.SwitchGLU(96, 64, 4)
    whole: Any = switch_layers.SwitchGLU(64, 64, 4)
    for layer in (made, odd):
        layer.set_dtype(mx.bfloat16)
    for layer, why in ((made, "bias"), (odd, r"\(4, 64, 96\)"), (whole, "float32")):
        assert mixtures.swap(layer) == {}
        assert type(layer) is switch_layers.SwitchGLU
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(mixtures.Mixture.of(layer))
    assert dispatch.stock_calls == {"experts": 3}


def test_weights_that_were_replaced_are_not_the_kernels() -> None:
    layer: Any = switch_layers.SwitchGLU(64, 64, 4)
    layer.set_dtype(mx.bfloat16)
    assert mixtures.swap(layer) == {"SwitchGLU": 1}
    assert layer.experts.is_current(layer)
    layer.up_proj.weight = layer.up_proj.weight + 1
    assert not layer.experts.is_current(layer)
    assert not layer.experts.takes(layer, mx.zeros((1, 64), mx.bfloat16), 2)
    assert dispatch.stock_calls == {"experts": 1}


def test_the_mixer_of_qwen3_next(stand_ins: list[str]) -> None:
    class Arguments:
        hidden_size, rms_norm_eps = 64, 1e-6
        linear_num_value_heads, linear_num_key_heads = 4, 2
        linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim = 32, 64, 4

    mx.random.seed(2)
    layer: Any = qwen3_next.Qwen3NextGatedDeltaNet(Arguments())  # pyright: ignore[reportArgumentType]
    layer.set_dtype(mx.bfloat16)
    x = mx.random.normal((2, 5, 64)).astype(mx.bfloat16)

    def run(native: bool) -> list[Any]:
        dispatch.choose(native)
        cache = ArraysCache(2)
        with dispatch.step():
            return [layer(x, None, cache), layer(x[:, :1], None, cache), *cache.cache]

    expected = run(False)
    assert recurrent.swap(layer) == {"Qwen3NextGatedDeltaNet": 1}
    found = run(True)
    assert stand_ins == ["mix", "mix"]
    for y, z in zip(found, expected, strict=True):
        assert y.shape == z.shape
        wide, other = (np.array(a.astype(mx.float32)) for a in (y, z))
        assert np.abs(wide - other).max() < 0.06 * np.abs(other).max()


@pytest.mark.parametrize(
    ("k_size", "v_size", "tokens", "whole"),
    [(128, 128, 16, True), (128, 128, 17, False), (192, 128, 1, True), (256, 256, 1, False)],
)
def test_which_windows_are_one_launch(k_size: int, v_size: int, tokens: int, whole: bool) -> None:
    form = recurrent.Form(2, 4, k_size, v_size, 1e-6, mx.bfloat16)
    assert form.why_not() is None
    assert form.in_one(tokens) is whole


@pytest.mark.parametrize(
    ("k_size", "v_size", "dtype"), [(48, 64, mx.bfloat16), (64, 288, mx.bfloat16), (64, 64, mx.float32)]
)
def test_mixers_that_kernels_do_not_take(k_size: int, v_size: int, dtype: mx.Dtype) -> None:
    assert recurrent.Form(2, 4, k_size, v_size, 1e-6, dtype).why_not() is not None
