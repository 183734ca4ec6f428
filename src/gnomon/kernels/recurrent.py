"""The gated delta rule, the short convolution before it, and both as one operation with what is around them in Qwen 3.5's mixer.

Contract of the native versions
    gated_delta        q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk], beta [B, T, Hv], state [B, Hv, Dv, Dk],
                       mask bool [B, T] or None; f32, f16 or bf16, Hv a multiple of Hk; y has q's type, the state keeps its own
    short_convolution  depthwise `mx.conv1d`: x [B, T, C], weight [C, taps, 1], stride 1, no padding or dilation, one group per channel
    delta_mixer        the mixer from its input to what goes into its output projection: four projections, convolution, queries and keys of
                       length 1, gates, rule, RMS norm of each head times silu(z); no bias in the convolution; padded rows by their counts

Arithmetic: float32. A token's products with a row of the state are 16 partial sums over Dk and a fixed tree; tokens follow one another.
With a
float32 state a token's result doesn't depend on chunks, on other rows, or on threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.dispatch import Operation, thread
from gnomon.kernels.linear import Linear
from gnomon.kernels.quantized_matmul import FLOATS

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def reference_gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The recurrence of Gated Delta Networks (Yang, Kautz, Hatamizadeh 2024), a token at a time, in plain MLX operations."""
    repeats = v.shape[2] // q.shape[2]
    wide_q, wide_k = (mx.repeat(a.astype(mx.float32), repeats, axis=2) for a in (q, k))
    s, outputs = state.astype(mx.float32), list[mx.array]()
    for t in range(q.shape[1]):
        gate = g[:, t].astype(mx.float32)
        decayed = s * (gate[..., None, None] if gate.ndim == 2 else gate[..., None, :])
        key = wide_k[:, t, :, None]
        delta = (v[:, t].astype(mx.float32) - (decayed * key).sum(-1)) * beta[:, t, :, None].astype(mx.float32)
        after = decayed + key * delta[..., None]
        y = (after * wide_q[:, t, :, None]).sum(-1)
        if mask is None:
            s = after
        else:
            seen = mask[:, t, None, None, None]
            s, y = mx.where(seen, after, s), mx.where(seen[..., 0], y, 0)
        outputs.append(y)
    return mx.stack(outputs, axis=1).astype(q.dtype), s.astype(state.dtype)


def reference_short_convolution(x: mx.array, weight: mx.array) -> mx.array:
    """y[t, c] = sum over j of x[t + j, c] * weight[c, j]."""
    taps = weight.shape[1]
    length = x.shape[1] - taps + 1
    parts = [x[:, j : j + length].astype(mx.float32) * weight[:, j, 0].astype(mx.float32) for j in range(taps)]
    return sum(parts[1:], parts[0]).astype(mx.result_type(x, weight))


def _make_convolution(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.short_convolution

    def conv1d(
        input: mx.array,
        weight: mx.array,
        /,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        *,
        stream: Any = None,
    ) -> mx.array:
        if (
            thread.active
            and (stride, padding, dilation) == (1, 0, 1)
            and input.ndim == 3
            and groups == input.shape[2] == weight.shape[0]
            and weight.shape[2] == 1
            and input.shape[1] >= weight.shape[1]
            and input.dtype in FLOATS
            and weight.dtype in FLOATS
        ):
            return native(input, weight, False, stream)
        return stock(input, weight, stride, padding, dilation, groups, stream=stream)

    return conv1d


@dataclass(slots=True)
class Mixer:
    """A swapped gated delta mixer. `linears` are those to qkv, z, b and a, or None where the extension can't take one."""

    extension: ModuleType = field(repr=False)
    linears: tuple[Linear, ...] | None

    @staticmethod
    def of(layer: Any, extension: ModuleType, integer: bool) -> Mixer:
        """What a mixer becomes."""
        parts = [layer.get(name) for name in PROJECTIONS]
        if not all(map(Linear.covers, parts)):
            return Mixer(extension, None)
        linears = tuple(Linear(part, extension, integer) for part in parts)
        return Mixer(extension, linears if len({linear.dtype for linear in linears}) == 1 else None)

    def run(self, layer: Any, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        """The mixer's forward: its own parts in one operation, or one by one where they were replaced or the mask is not the state's."""
        lengths = cache.lengths if cache is not None else None
        weights = (layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.norm.weight)
        if (
            self.linears is None
            or x.dtype != self.linears[0].dtype
            or (mask is None) != (lengths is None)
            or not all(weight.dtype in FLOATS for weight in weights)
            or not all(linear.current(layer[name]) for linear, name in zip(self.linears, PROJECTIONS, strict=True))
        ):
            return gated_delta_net(layer, self.extension, x, mask, cache)
        before, state = (cache[0], cache[1]) if cache is not None else (None, None)
        y, before, state = self.extension.delta_mixer(
            x,
            *(linear.projection for linear in self.linears),
            *weights,
            layer.num_k_heads,
            layer.num_v_heads,
            layer.norm.eps,
            before,
            state,
            lengths,
        )
        if cache is not None:
            cache[0], cache[1] = before, state
            cache.advance(x.shape[1])
        return layer.out_proj(y)


def gated_delta_net(layer: Any, extension: ModuleType, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
    """Forward of a Qwen3.5 gated delta mixer over its own submodules, with its convolution, gates and recurrence in native operations.

    `cache` holds the last inputs of the convolution and the state; the mixer updates and advances it.
    """
    from mlx_lm.models.gated_delta import compute_g, normalize_qk

    batch, length, _ = x.shape
    mixed = layer.in_proj_qkv(x)
    z = layer.in_proj_z(x).reshape(batch, length, layer.num_v_heads, layer.head_v_dim)
    beta, g = mx.sigmoid(layer.in_proj_b(x)), compute_g(layer.A_log, layer.in_proj_a(x), layer.dt_bias)
    kept = layer.conv_kernel_size - 1
    before = cache[0] if cache is not None else None
    if before is None:
        before = mx.zeros((batch, kept, layer.conv_dim), dtype=x.dtype)
    if mask is not None:
        mixed = mx.where(mask[..., None], mixed, 0)
    window = mx.concatenate([before, mixed], axis=1)
    if cache is not None:
        if cache.lengths is None:
            cache[0] = mx.contiguous(window[:, -kept:])
        else:
            ends = mx.clip(cache.lengths, 0, length)
            cache[0] = mx.take_along_axis(window, (ends[:, None] + mx.arange(kept))[..., None], axis=1)
    mixed = extension.short_convolution(window, layer.conv1d.weight, True)
    q, k, v = mx.split(mixed, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    heads = (batch, length, layer.num_k_heads, layer.head_k_dim)
    q, k = normalize_qk(q.reshape(heads), k.reshape(heads), inv_scale=layer.head_k_dim**-0.5, eps=1e-6)
    state = cache[1] if cache is not None else None
    if state is None:
        state = mx.zeros((batch, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim), dtype=mx.float32)
    v = v.reshape(batch, length, layer.num_v_heads, layer.head_v_dim)
    y, state = extension.gated_delta(q, k, v, g, beta, state, mask)
    if cache is not None:
        cache[1] = state
        cache.advance(length)
    return layer.out_proj(layer.norm(y, z).reshape(batch, length, -1))


OPERATIONS = (Operation("short_convolution", mx, "conv1d", _make_convolution, "depthwise, stride 1, no padding"),)
