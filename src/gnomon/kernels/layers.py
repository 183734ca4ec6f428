"""Layers of known models whose forward becomes a few fused kernels.

A swapped layer keeps its parameters, its submodules and, outside native steps, its own forward: only its class changes, to a subclass
made here. Inside a native step the subclass issues

    attention_layer  heads, their append to the state in place, attention, project    instead of about 25 operations
    heads            norm, q, k, v projections, head norms, rotation                  instead of about 14
    project          output projection, norm after it, residual                       instead of 3
    gated_mlp        norm, gate, up, activation, down, norm, residual                 instead of 8
    gated            activation and product between experts' projections              instead of 2
    experts          norm, router, choice, experts, weighted sum, residual            instead of about 20
    delta_mixer      projections, convolution, gates, gated delta rule, gated norm    instead of about 25

with the same bits as the unfused kernels give: every step rounds to the activations' type. Weights that are multiplied in whole numbers are
laid out for that first, layer by layer (`tiles`). A layer whose submodules are not what was
swapped (an adapter took a projection's place, weights were replaced) falls back to its own forward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.base import scaled_dot_product_attention

from gnomon.kernels.dispatch import thread
from gnomon.kernels.experts import Experts
from gnomon.kernels.linear import Linear, NativeQuantizedEmbedding, linear_forward
from gnomon.kernels.quantized_matmul import FLOATS, why_not
from gnomon.kernels.recurrent import Mixer
from gnomon.kernels.rope import offset_array
from gnomon.kernels.tiles import tile

SILU, GELU_TANH, GELU_ERF, SIGMOID = range(4)
"""Numbers of the activations in the extension."""

NormKind = Literal["plain", "plus one"]


@dataclass(frozen=True, slots=True)
class Family:
    """Layers of one module of mlx-lm that compute the same thing."""

    module: str
    attention: str | None = None
    mlp: str | None = None
    block: str | None = None
    mixer: str | None = None
    experts: str | None = None
    rest: str | None = None  # blocks of which the MLP with its norm and residual alone is swapped
    activation: int = SILU
    norm: NormKind = "plain"
    after: bool = False  # norms after attention and MLP, as Gemma has them
    gated: bool = False  # attention's outputs are multiplied by a sigmoid, whose inputs come with the queries


ROLES = ("attention", "mlp", "mixer", "experts", "block", "rest")

FAMILIES = (
    Family("llama", "Attention", "MLP", "TransformerBlock"),
    Family("qwen2", "Attention", "MLP", "TransformerBlock"),
    Family("qwen3", "Attention", "MLP", "TransformerBlock"),
    Family("qwen3_moe", "Attention", "MLP", "Qwen3MoeDecoderLayer", experts="Qwen3MoeSparseMoeBlock"),
    Family("qwen3_next", "Qwen3NextAttention", "Qwen3NextMLP", None, gated=True),
    Family("qwen3_5", mixer="GatedDeltaNet", rest="DecoderLayer"),
    Family("gemma2", mlp="MLP", activation=GELU_TANH),
    Family("gemma4_text", mlp="MLP", activation=GELU_TANH),
    Family("gemma3_text", "Attention", "MLP", "TransformerBlock", activation=GELU_TANH, norm="plus one", after=True),
)


GATES = (("switch_layers", "SwiGLU", SILU), ("gemma4_text", "GeGLU", GELU_TANH))
"""Modules between the projections of experts, called with `(up, gate)`, and their activation."""


class Stale(Exception):
    """A layer's submodules are no longer those that were swapped."""


class Norm:
    """An RMS norm's weight, as it multiplies."""

    def __init__(self, layer: Any, kind: NormKind) -> None:
        self.layer = layer
        self.source: mx.array = layer["weight"]
        self.weight = self.source if kind == "plain" else 1.0 + self.source
        self.eps = float(layer.eps)

    @staticmethod
    def covers(layer: Any, kind: NormKind, owner: ModuleType) -> bool:
        return type(layer) is (nn.RMSNorm if kind == "plain" else owner.RMSNorm) and layer["weight"].dtype in FLOATS

    def current(self, layer: object) -> bool:
        return layer is self.layer and self.layer["weight"] is self.source


@dataclass(slots=True)
class Rotation:
    """What `mx.fast.rope` would be called with."""

    dims: int
    traditional: bool
    base: float
    scale: float
    freqs: mx.array | None

    @staticmethod
    def of(layer: object) -> Rotation | None:
        """The rotation of a rope module, or None for one that does more than turn."""
        if type(layer) is nn.RoPE:
            return Rotation(layer.dims, layer.traditional, float(layer.base), float(layer.scale), None)
        if type(layer) is rope_utils.Llama3RoPE:
            return Rotation(layer.dims, layer.traditional, 1.0, 1.0, layer._freqs)  # pyright: ignore[reportPrivateUsage]
        return None


def _buffers(cache: Any, mask: Any) -> tuple[tuple[mx.array, mx.array] | None, tuple[int, ...]]:
    """A state's buffers to append to and attend to where they lie, if it has them for this mask, and the numbers of their ring or ()."""
    if hasattr(cache, "in_place"):
        return cache.in_place(mask), ()
    ring = cache.ring_in_place(mask) if hasattr(cache, "ring_in_place") else None
    return (None, ()) if ring is None else ((ring.keys, ring.values), ring.numbers)


@dataclass(slots=True)
class Attention:
    """A swapped attention layer. `rotation` None leaves turning to the layer's own rope module."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    rotation: Rotation | None
    form: Any
    extension: ModuleType = field(repr=False)
    dtype: mx.Dtype = mx.float32
    gated: bool = False

    def run(
        self,
        layer: Any,
        x: mx.array,
        mask: Any,
        cache: Any,
        before: Norm | None,
        after: Norm | None,
        residual: mx.array | None,
    ) -> mx.array:
        """after(o(attention(q, k, v))) + residual over before(x); raises Stale before anything is computed."""
        if not (
            self.q.current(layer.q_proj)
            and self.k.current(layer.k_proj)
            and self.v.current(layer.v_proj)
            and self.o.current(layer.o_proj)
            and (self.q_norm is None or self.q_norm.current(layer.q_norm))
            and (self.k_norm is None or self.k_norm.current(layer.k_norm))
        ):
            raise Stale
        e, rotation = self.extension, self.rotation
        buffers, ring = _buffers(cache, mask) if rotation is not None else (None, ())
        if buffers is not None and rotation is not None and buffers[0].dtype == buffers[1].dtype == x.dtype:
            y, keys, values = e.attention_layer(
                x,
                before and before.weight,
                before.eps if before else 0.0,
                self.q.projection,
                self.k.projection,
                self.v.projection,
                self.o.projection,
                self.q_norm and self.q_norm.weight,
                self.k_norm and self.k_norm.weight,
                self.form,
                offset_array(cache.offset),
                rotation.freqs,
                layer.scale,
                *buffers,
                after and after.weight,
                after.eps if after else 0.0,
                residual,
                ring,
            )
            cache.appended(keys, values)
            return y
        if self.gated:
            return self._apart(layer, x, mask, cache)
        offset = cache.offset if cache is not None else 0
        q, k, v = e.heads(
            x,
            before and before.weight,
            before.eps if before else 0.0,
            self.q.projection,
            self.k.projection,
            self.v.projection,
            self.q_norm and self.q_norm.weight,
            self.k_norm and self.k_norm.weight,
            self.form,
            offset_array(offset) if rotation is not None else None,
            rotation.freqs if rotation is not None else None,
        )
        if rotation is None:
            q, k = layer.rope(q, offset=offset), layer.rope(k, offset=offset)
        if cache is not None:
            # What this layer attends with takes views; a model's own code may not.
            append = getattr(cache, "update_and_view", cache.update_and_fetch)
            k, v = append(k, v)
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=layer.scale, mask=mask)
        y = y.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], -1)
        return e.project(y, self.o.projection, after and after.weight, after.eps if after else 0.0, residual)

    def _apart(self, layer: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """A gated layer by its own parts, with the bits that it has where it appends in place."""
        batch, length = x.shape[:2]
        q, gate = mx.split(layer.q_proj(x).reshape(batch, length, layer.num_attention_heads, -1), 2, axis=-1)
        k, v = (a.reshape(batch, length, layer.num_key_value_heads, -1) for a in (layer.k_proj(x), layer.v_proj(x)))
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (layer.q_norm(q), layer.k_norm(k), v))
        offset = cache.offset if cache is not None else 0
        q, k = layer.rope(q, offset=offset), layer.rope(k, offset=offset)
        if cache is not None:
            append = getattr(cache, "update_and_view", cache.update_and_fetch)
            k, v = append(k, v)
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=layer.scale, mask=mask)
        y = y.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        return layer.o_proj(self.extension.gated(gate.reshape(y.shape), y, SIGMOID))


@dataclass(slots=True)
class MLP:
    """A swapped gated MLP."""

    gate: Linear
    up: Linear
    down: Linear
    activation: int
    extension: ModuleType = field(repr=False)
    dtype: mx.Dtype = mx.float32

    def is_current(self, layer: Any) -> bool:
        parts = ((self.gate, layer.gate_proj), (self.up, layer.up_proj), (self.down, layer.down_proj))
        return all(linear.current(part) for linear, part in parts)

    def run(self, layer: Any, x: mx.array, before: Norm | None, after: Norm | None, residual: bool) -> mx.array:
        """after(down(activation(gate) * up)) over before(x), plus x if `residual`; raises Stale before anything is computed."""
        if not self.is_current(layer):
            raise Stale
        return self.extension.gated_mlp(
            x,
            before and before.weight,
            before.eps if before else 0.0,
            self.gate.projection,
            self.up.projection,
            self.down.projection,
            self.activation,
            after and after.weight,
            after.eps if after else 0.0,
            residual,
        )


class SwappedExperts(Experts):
    """A swapped block of experts in a gated MLP's place."""

    def run(self, layer: Any, x: mx.array, before: Norm | None, after: Norm | None, residual: bool) -> mx.array:
        """The same as `MLP.run`, with no norm `after`."""
        if after is not None or not self.is_current(layer):
            raise Stale
        return self.compute(layer, x, before and before.weight, before.eps if before else 0.0, residual)


@dataclass(slots=True)
class Block:
    """A swapped transformer block: attention and MLP with the norms and residuals around them."""

    attention: Attention
    mlp: MLP | SwappedExperts
    norms: tuple[tuple[str, Norm], ...]
    after: bool

    def run(self, layer: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:
        # The attention's run advances its cache, so whether all is current is asked first.
        if not (all(norm.current(layer[name]) for name, norm in self.norms) and self.mlp.is_current(layer.mlp)):
            raise Stale
        norms = [norm for _, norm in self.norms]
        before_attention, before_mlp = norms[0], norms[2 if self.after else 1]
        after_attention, after_mlp = (norms[1], norms[3]) if self.after else (None, None)
        h = self.attention.run(layer.self_attn, x, mask, cache, before_attention, after_attention, x)
        return self.mlp.run(layer.mlp, h, before_mlp, after_mlp, True)


def _attention_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        fused = self.fused
        if thread.active and x.ndim == 3 and x.dtype == fused.dtype:
            try:
                return fused.run(self, x, mask, cache, None, None, None)
            except Stale:
                pass
        return own(self, x, mask, cache)

    return __call__


def _mlp_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, x: mx.array) -> mx.array:
        fused = self.fused
        if thread.active and x.ndim and x.dtype == fused.dtype:
            try:
                return fused.run(self, x, None, None, False)
            except Stale:
                pass
        return own(self, x)

    return __call__


def _block_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        fused = self.fused
        if thread.active and x.ndim == 3 and x.dtype == fused.mlp.dtype:
            try:
                return fused.run(self, x, mask, cache)
            except Stale:
                pass
        return own(self, x, mask, cache)

    return __call__


_classes: dict[type, type] = {}


def _become(
    layer: nn.Module, fused: object, forward: Callable[[Callable[..., mx.array]], Callable[..., mx.array]]
) -> None:
    own = type(layer)
    native = _classes.get(own)
    if native is None:
        native = type(
            f"Native{own.__name__}", (own,), {"__call__": forward(own.__call__), "__module__": own.__module__}
        )
        _classes[own] = native
    layer.__class__ = native
    object.__setattr__(layer, "fused", fused)


def _attention(layer: Any, family: Family, owner: ModuleType, extension: ModuleType, integer: bool) -> Attention | None:
    parts = [layer.get(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    if not all(Linear.covers(part) for part in parts):
        return None
    norms: list[Norm | None] = []
    for name in ("q_norm", "k_norm"):
        norm = layer.get(name)
        if norm is not None and not Norm.covers(norm, family.norm, owner):
            return None
        norms.append(None if norm is None else Norm(norm, family.norm))
    q, k, v, o = (Linear(part, extension, integer) for part in parts)
    types = {p.dtype for p in (q, k, v, o)} | {n.weight.dtype for n in norms if n is not None}
    if len(types) != 1:
        return None
    rotation = Rotation.of(layer.rope)
    if family.gated and rotation is None:
        return None
    eps = next((n.eps for n in norms if n is not None), 0.0)
    turn = (rotation.dims, rotation.traditional, rotation.base, rotation.scale) if rotation else (0, False, 1.0, 1.0)
    heads = (
        (layer.num_attention_heads, layer.num_key_value_heads) if family.gated else (layer.n_heads, layer.n_kv_heads)
    )
    form = extension.HeadForm(*heads, eps, *turn, family.gated)
    return Attention(q, k, v, o, norms[0], norms[1], rotation, form, extension, q.dtype, family.gated)


def _mlp(layer: Any, family: Family, extension: ModuleType, integer: bool) -> MLP | None:
    parts = [layer.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(Linear.covers(part) for part in parts):
        return None
    gate, up, down = (Linear(part, extension, integer) for part in parts)
    if len({p.dtype for p in (gate, up, down)}) != 1 or gate.form != up.form:
        return None
    return MLP(gate, up, down, family.activation, extension, gate.dtype)


def _block(layer: Any, family: Family, owner: ModuleType) -> Block | None:
    own, mlp = getattr(layer.self_attn, "fused", None), getattr(layer.mlp, "fused", None)
    names = ("input_layernorm", "post_attention_layernorm")
    if family.after:
        names = (*names, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    norms = [layer.get(name) for name in names]
    if not isinstance(own, Attention) or not isinstance(mlp, MLP | SwappedExperts) or own.dtype != mlp.dtype:
        return None
    if family.after and own.dtype == mx.float16:  # Gemma clips these sums
        return None
    if not all(Norm.covers(norm, family.norm, owner) for norm in norms):
        return None
    made = tuple((name, Norm(norm, family.norm)) for name, norm in zip(names, norms, strict=True))
    if any(norm.weight.dtype != own.dtype for _, norm in made):
        return None
    return Block(own, mlp, made, family.after)


@dataclass(slots=True)
class Rest:
    """A swapped block from behind its mixer or attention on."""

    norm: Norm
    mlp: MLP | SwappedExperts


def _rest(layer: Any) -> Rest | None:
    mlp, norm = getattr(layer.mlp, "fused", None), layer.get("post_attention_layernorm")
    if not isinstance(mlp, MLP | SwappedExperts) or type(norm) is not nn.RMSNorm or norm["weight"].dtype != mlp.dtype:
        return None
    return Rest(Norm(norm, "plain"), mlp)


def _rest_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        fused = self.fused
        # The mixer advances its cache, so whether all is current is asked first.
        if (
            thread.active
            and x.dtype == fused.mlp.dtype
            and fused.norm.current(self.post_attention_layernorm)
            and fused.mlp.is_current(self.mlp)
        ):
            mixer = self.linear_attn if self.is_linear else self.self_attn
            h = x + mixer(self.input_layernorm(x), mask, cache)
            return fused.mlp.run(self.mlp, h, fused.norm, None, True)
        return own(self, x, mask, cache)

    return __call__


def _mixer_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if (
            thread.active
            and x.ndim == 3
            and x.dtype in FLOATS
            and self.sharding_group is None
            and "bias" not in self.conv1d
        ):
            return self.fused.run(self, x, mask, cache)
        return own(self, x, mask, cache)

    return __call__


def _gate_forward(activation: int) -> Callable[[Callable[..., mx.array]], Callable[..., mx.array]]:
    def forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def __call__(self: Any, x: mx.array, gate: mx.array) -> mx.array:
            if thread.active and x.dtype in FLOATS and x.dtype == gate.dtype and x.shape == gate.shape:
                return self.fused.gated(gate, x, activation)
            return own(self, x, gate)

        return __call__

    return forward


def swap(model: nn.Module, extension: ModuleType, integer: bool = False) -> dict[str, int]:
    """Swap what is known in `model`, in place, and return how many layers of each class were. Swapping again changes nothing.

    Weights of 4 and 8 bits are tiled (see `tiles`); `integer` lets their products round activations to 8 bits instead of 16.
    """
    found: dict[str, int] = {}
    known: dict[type, tuple[str, Family, ModuleType]] = {}
    for family in FAMILIES:
        owner = importlib.import_module(f"mlx_lm.models.{family.module}")
        for role in ROLES:
            name = getattr(family, role)
            if name is not None:
                known[getattr(owner, name)] = (role, family, owner)

    def count(layer: nn.Module) -> None:
        name = type(layer).__name__
        found[name] = found.get(name, 0) + 1

    modules = [module for _, module in model.named_modules()]
    for layer in modules:
        if tile(layer, extension, integer):
            count(layer)
    mx.clear_cache()  # of the arrays that were replaced
    for role in ROLES:
        for layer in modules:
            kind, family, owner = known.get(type(layer), (None, None, None))
            if kind != role or family is None or owner is None:
                continue
            if role == "attention":
                fused, forward = _attention(layer, family, owner, extension, integer), _attention_forward
            elif role == "mixer":
                fused, forward = Mixer.of(layer, extension, integer), _mixer_forward
            elif role == "rest":
                fused, forward = _rest(layer), _rest_forward
            elif role == "experts":
                fused, forward = SwappedExperts.of(layer, extension, integer), _mlp_forward
            elif role == "mlp":
                fused, forward = _mlp(layer, family, extension, integer), _mlp_forward
            else:
                fused, forward = _block(layer, family, owner), _block_forward
            if fused is not None:
                _become(layer, fused, forward)
                count(layer)
    gates = {
        getattr(importlib.import_module(f"mlx_lm.models.{module}"), name): activation
        for module, name, activation in GATES
    }
    for layer in modules:
        if type(layer) in gates:
            _become(layer, extension, _gate_forward(gates[type(layer)]))
            count(layer)
    for layer in modules:
        if type(layer) in (nn.Linear, nn.QuantizedLinear) and Linear.covers(layer):
            _become(layer, Linear(layer, extension, integer), linear_forward)
            count(layer)
        if type(layer) is nn.QuantizedEmbedding:
            why = why_not(
                layer["weight"], layer["scales"], layer.get("biases"), layer.group_size, layer.bits, layer.mode, 2
            )
            if why is None:
                layer.__class__ = NativeQuantizedEmbedding
                object.__setattr__(layer, "fused", extension)
                object.__setattr__(layer, "integer", integer)
                count(layer)
    return found
