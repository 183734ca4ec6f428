"""Mixtures of experts of mlx-lm's models on the kernels of `experts`: two launches, or with their router four."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_moe, qwen3_next, switch_layers

from gnomon.kernels.cuda.experts import INDICES, MOST_EXPERTS, MOST_PAIRS, Experts, blend, gated, gather, route
from gnomon.kernels.cuda.products import Weights, most_rows, product
from gnomon.kernels.dispatch import thread, uncovered

MOST_GRAPHS = 16
"""Shapes of which a compiled function keeps graphs."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer's gated experts."""

    gate: Experts
    up: Experts
    down: Experts
    owners: tuple[Any, Any, Any]

    @staticmethod
    def of(layer: Any) -> Mixture | str:
        """The experts of a `SwitchGLU` with SiLU, or what keeps kernels from them."""
        if type(layer.activation) is not switch_layers.SwiGLU:
            return f"experts with {type(layer.activation).__name__}"
        owners = layer.gate_proj, layer.up_proj, layer.down_proj
        made: list[Experts] = []
        for owner in owners:
            one = Experts.of(owner)
            if isinstance(one, str):
                return one
            made.append(one)
        gate, up, down = made
        if gate.kind != up.kind or gate.weight.shape != up.weight.shape or down.dtype != gate.dtype:
            return "projections of different kinds"
        return Mixture(gate, up, down, owners)

    def is_current(self, layer: Any) -> bool:
        """Whether `layer` still has the weights this was made from."""
        now, parts = (layer.gate_proj, layer.up_proj, layer.down_proj), (self.gate, self.up, self.down)
        return all(map(is_, now, self.owners)) and all(
            owner["weight"] is part.weight for owner, part in zip(now, parts, strict=True)
        )

    def takes(self, layer: Any, x: mx.array, pairs: int) -> bool:
        """Whether x [..., K] with that many pairs of tokens and experts is one for the kernels; notes it if not."""
        if not 1 <= pairs <= MOST_PAIRS or x.dtype != self.gate.dtype:
            uncovered("experts", f"{pairs} pairs, {x.dtype}")
            return False
        if not self.is_current(layer):
            uncovered("experts", "weights that were replaced")
            return False
        return True

    def products(self, x: mx.array, indices: mx.array) -> mx.array:
        """Each chosen expert's result: x [..., K], indices [..., top]; [..., top, N]."""
        flat = indices.reshape(-1)
        y = gather(gated(x.reshape(-1, x.shape[-1]), flat, self.gate, self.up), flat, self.down)
        return y.reshape(*indices.shape, self.down.outputs)

    def mixed(self, x: mx.array, logits: mx.array, top: int, among_chosen: bool) -> mx.array:
        """The sum of the chosen experts' results by their shares: x [..., K], the router's logits [..., E]; [..., N]."""
        chosen, shares = route(logits.reshape(-1, logits.shape[-1]), top, among_chosen)
        h = gated(x.reshape(-1, x.shape[-1]), chosen.reshape(-1), self.gate, self.up)
        return blend(h, chosen, shares, self.down).reshape(*x.shape[:-1], self.down.outputs)


@dataclass(frozen=True, slots=True)
class Shared:
    """The expert that all tokens share, and the row of weights that its share comes from."""

    gate: Weights
    up: Weights
    down: Weights
    share: Weights

    def run(self, x: mx.array) -> mx.array:
        """Its result by its share: x [rows, K]; [rows, N]."""
        if self.gate.kind == self.up.kind:
            a, b = mx.split(product(x, self.gate, self.up), [self.gate.outputs], axis=-1)
        else:
            a, b = product(x, self.gate), product(x, self.up)
        return mx.sigmoid(product(x, self.share)) * product(nn.silu(a) * b, self.down)


class Routed:
    """A block's router and experts, as one compiled function of up to 32 rows."""

    def __init__(self, block: Any, experts: Mixture) -> None:
        self.experts = experts
        self.top = int(block.top_k)
        self.among_chosen = bool(block.norm_topk_prob)
        self.watched: list[tuple[Any, str, object]] = []
        self.router = self._weights(block, "gate")
        self.shared: Shared | None = None
        self._is_whole = self.router is not None
        if "shared_expert" in block:
            own = block.shared_expert
            parts = [self._weights(own, name) for name in ("gate_proj", "up_proj", "down_proj")]
            found = [part for part in (*parts, self._weights(block, "shared_expert_gate")) if part is not None]
            self.watched.append((block, "shared_expert", own))
            self._is_whole = self._is_whole and len(found) == 4
            self.shared = Shared(*found) if len(found) == 4 else None
        self._shapes: set[tuple[int, ...]] = set()
        self._compiled = mx.compile(self._run)

    def _weights(self, owner: Any, name: str) -> Weights | None:
        layer = owner.get(name)
        found = Weights.of(layer) if layer is not None else None
        if found is None or found.dtype != self.experts.gate.dtype:
            return None
        self.watched += [(owner, name, layer), (layer, "weight", found.weight)]
        return found

    def _run(self, x: mx.array) -> mx.array:
        if self.router is None:
            raise ValueError("a router that is no product of the kernels")
        chosen, shares = route(product(x, self.router), self.top, self.among_chosen)
        y = blend(gated(x, chosen, self.experts.gate, self.experts.up), chosen, shares, self.experts.down)
        return y if self.shared is None else y + self.shared.run(x)

    def run(self, block: Any, x: mx.array) -> mx.array:
        """The block's result for x [..., K], which `experts.takes`."""
        rows = x.size // x.shape[-1]
        if (
            self._is_whole
            and rows <= most_rows()
            and all(owner.get(name) is part for owner, name, part in self.watched)
        ):
            shape = (rows, x.shape[-1])
            if shape not in self._shapes:
                if len(self._shapes) == MOST_GRAPHS:
                    self._shapes.clear()
                    self._compiled = mx.compile(self._run)
                self._shapes.add(shape)
            return self._compiled(x.reshape(shape)).reshape(x.shape)
        y = self.experts.mixed(x, block.gate(x), self.top, self.among_chosen)
        if "shared_expert" not in block:
            return y
        return y + mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)


def _switch_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        experts: Mixture = self.experts
        if thread.active and indices.dtype in INDICES and experts.takes(self, x, indices.size):
            return experts.products(x, indices)
        return own(self, x, indices)

    return __call__


def _block_forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, x: mx.array) -> mx.array:
        routed: Routed = self.routed
        pairs = x.size // x.shape[-1] * routed.top
        if thread.active and self.sharding_group is None and routed.experts.takes(self.switch_mlp, x, pairs):
            return routed.run(self, x)
        return own(self, x)

    return __call__


BLOCKS: tuple[type[nn.Module], ...] = (qwen3_moe.Qwen3MoeSparseMoeBlock, qwen3_next.Qwen3NextSparseMoeBlock)
"""Softmax over all experts, the largest few, perhaps as shares of those, and perhaps an expert that all tokens share."""

_classes: dict[type, type] = {}


def become(
    layer: nn.Module, forward: Callable[[Callable[..., mx.array]], Callable[..., mx.array]], **held: object
) -> str:
    """Give `layer` a subclass of its own class with that forward, and what it holds. Returns the class's name."""
    own = type(layer)
    native = _classes.get(own)
    if native is None:
        body = {"__call__": forward(own.__call__), "__module__": own.__module__}
        native = _classes[own] = type(f"Cuda{own.__name__}", (own,), body)
    layer.__class__ = native
    for name, value in held.items():
        object.__setattr__(layer, name, value)
    return own.__name__


def swap(model: nn.Module) -> dict[str, int]:
    """Let a model's mixtures of experts take the kernels, in place. Returns how many of each class; raises nothing."""
    found: dict[str, int] = {}

    def count(name: str) -> None:
        found[name] = found.get(name, 0) + 1

    modules = [module for _, module in model.named_modules()]
    for layer in modules:
        if type(layer) is switch_layers.SwitchGLU:
            experts = Mixture.of(layer)
            if isinstance(experts, str):
                uncovered("experts", experts)
                continue
            count(become(layer, _switch_forward, experts=experts))
    for layer in modules:
        if type(layer) in BLOCKS:
            inner: Any = layer
            experts = getattr(inner.switch_mlp, "experts", None)
            router = inner.gate
            # A wrapped router (LoRA's) has neither.
            logits = router.get("weight" if type(router) is nn.Linear else "scales")
            if not isinstance(experts, Mixture):
                continue
            if logits is None or logits.dtype != experts.gate.dtype or inner.num_experts > MOST_EXPERTS:
                uncovered("experts", f"a router in {type(router).__name__} over {inner.num_experts}")
                continue
            count(become(layer, _block_forward, routed=Routed(layer, experts)))
    return found
