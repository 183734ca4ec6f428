"""What the CUDA kernels for experts and recurrent mixers take, and models that take them, over stand-ins for the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import switch_layers
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import normalize_qk
from tests import tiny_models

from gnomon.kernels import dispatch
from gnomon.kernels.cuda import experts, recurrent
from gnomon.kernels.cuda.experts import Experts
from gnomon.kernels.recurrent import reference_gated_delta, reference_short_convolution
from gnomon.state.batch_state import BatchState

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

    def gated(x: mx.array, indices: mx.array, gate: Experts, up: Experts) -> mx.array:
        called.append("gated")
        return (nn.silu(each(x, indices, gate)) * each(x, indices, up)).astype(x.dtype)

    def blend(x: mx.array, indices: mx.array, shares: mx.array, w: Experts) -> mx.array:
        called.append("blend")
        y = each(x, indices.reshape(-1), w).reshape(*indices.shape, -1)
        return (y * shares[..., None]).sum(1).astype(x.dtype)

    def route(logits: mx.array, top: int, among_chosen: bool) -> tuple[mx.array, mx.array]:
        called.append("route")
        p = mx.softmax(logits.astype(mx.float32), axis=-1)
        chosen = mx.argsort(-p, axis=-1)[:, :top].astype(mx.uint32)
        shares = mx.take_along_axis(p, chosen, axis=-1)
        return chosen, shares / shares.sum(-1, keepdims=True) if among_chosen else shares

    def mix(form: Any, projected: Any, parts: Any, before: Any, state: Any, mask: Any = None, lengths: Any = None) -> Any:
        called.append("mix")
        mixed, (batch, tokens, _) = projected.mixed, projected.mixed.shape
        z, a, b = projected.others or (None, None, None)
        if z is None:
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
        return mx.concatenate([(x.astype(mx.float32) @ w.weight.astype(mx.float32).T) for w in weights], 1).astype(x.dtype)

    for name, function in (("gather", gather), ("gated", gated), ("blend", blend), ("route", route)):
        monkeypatch.setattr(experts, name, function)
    monkeypatch.setattr(recurrent, "mix", mix)
    monkeypatch.setattr(recurrent, "product", product)
    return called


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    yield
    dispatch.choose(False)
    dispatch.uninstall()
    dispatch.stock_calls.clear()


def logits_of(model: nn.Module, windows: list[tuple[int, list[int]]], native: bool) -> tuple[np.ndarray, BatchState]:
    """Logits of the last windows' real tokens, after windows of (width, real tokens per row)."""
    state = BatchState(model, make_prompt_cache(model), rows=len(windows[0][1])) if False else None
    raise NotImplementedError
