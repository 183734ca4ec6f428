"""All blocks of a model as one operation of a step, over states of keys and values, plain or coded, in buffers, pages or rings.

    embed            1
    run_blocks       for all layers: the attention layer and the MLP of `layers`, with the same bits
    norm, head       2

The operation holds the weights; a step gives it the hidden state, the rows' positions and the buffers of keys and values. So building and
scheduling a step no longer costs two primitives of some twenty inputs for each layer. A step that it can't take (the first tokens of a
state, other states, weights or layers that were replaced) goes layer by layer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from gnomon.kernels.codes import Codes
from gnomon.kernels.dispatch import thread
from gnomon.kernels.layers import MLP, Block, Norm
from gnomon.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class Model:
    """A class of mlx-lm's module that embeds, masks, goes through `layers`, and norms."""

    module: str
    name: str
    window: str | None = None  # where it keeps how far its sliding layers see
    is_scaled: bool = False  # embeddings are multiplied by the root of their size

    def embedded(self, inner: Any, h: mx.array) -> mx.array:
        """What goes into the first layer."""
        if not self.is_scaled:
            return h
        return h * mx.array(inner.args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)


MODELS = (
    Model("llama", "LlamaModel", "sliding_window"),
    Model("qwen2", "Qwen2Model"),
    Model("qwen3", "Qwen3Model"),
    Model("gemma3_text", "Gemma3Model", "window_size", is_scaled=True),
)


class Run:
    """The blocks of one model, prepared once."""

    def __init__(self, layers: Sequence[Any], extension: ModuleType, window: int | None = None) -> None:
        """`layers` are swapped blocks that `covers` took; those whose states are rings see `window` tokens."""
        self.extension = extension
        self.window = window
        self.dtype: mx.Dtype = layers[0].fused.mlp.dtype
        self.blocks = extension.Blocks()
        watched: list[tuple[Any, str, object]] = []
        for layer in layers:
            self._add(layer, watched)
        self.layers = list(layers)
        self._types = [type(layer) for layer in layers]
        self._owners = [owner for owner, _, _ in watched]
        self._names = [name for _, name, _ in watched]
        self._parts = [part for _, _, part in watched]
        self._forms: dict[tuple[Codes, Codes], tuple[Any, Any] | None] = {}

    @staticmethod
    def covers(layers: Sequence[Any]) -> bool:
        """Whether all are swapped blocks of one type whose attention appends in place."""
        found = (getattr(layer, "fused", None) for layer in layers)
        blocks = [
            block
            for block in found
            if isinstance(block, Block) and isinstance(block.mlp, MLP) and block.attention.rotation is not None
        ]
        return 0 < len(blocks) == len(layers) and len({block.mlp.dtype for block in blocks}) == 1

    def _add(self, layer: Any, watched: list[tuple[Any, str, object]]) -> None:
        block: Block = layer.fused
        own, mlp, norms = block.attention, block.mlp, block.norms
        rotation = own.rotation
        if rotation is None or not isinstance(mlp, MLP):
            raise ValueError(
                "an attention without a rotation of its own doesn't append in place, experts aren't one MLP"
            )
        before, before_mlp = norms[0][1], norms[2 if block.after else 1][1]
        after, after_mlp = (norms[1][1], norms[3][1]) if block.after else (None, None)

        def pair(norm: Norm | None) -> tuple[mx.array | None, float]:
            return (None, 0.0) if norm is None else (norm.weight, norm.eps)

        self.blocks.add(
            *pair(before),
            own.q.projection,
            own.k.projection,
            own.v.projection,
            own.o.projection,
            pair(own.q_norm)[0],
            pair(own.k_norm)[0],
            own.form,
            rotation.freqs,
            layer.self_attn.scale,
            *pair(after),
            *pair(before_mlp),
            mlp.gate.projection,
            mlp.up.projection,
            mlp.down.projection,
            mlp.activation,
            *pair(after_mlp),
        )
        watched += [(layer, "self_attn", layer.self_attn), (layer, "mlp", layer.mlp)]
        linears: list[tuple[Any, str, Linear]] = [
            (layer.self_attn, f"{name}_proj", getattr(own, name)) for name in ("q", "k", "v", "o")
        ]
        linears += [(layer.mlp, f"{name}_proj", getattr(mlp, name)) for name in ("gate", "up", "down")]
        normed: list[tuple[Any, str, Norm]] = [(layer, name, norm) for name, norm in norms]
        normed += [
            (layer.self_attn, name, norm)
            for name, norm in (("q_norm", own.q_norm), ("k_norm", own.k_norm))
            if norm is not None
        ]
        for owner, name, linear in linears:
            watched += [(owner, name, linear.layer), (linear.layer, linear.held, linear.weight)]
        for owner, name, norm in normed:
            watched += [(owner, name, norm.layer), (norm.layer, "weight", norm.source)]

    def is_current(self, layers: Sequence[nn.Module]) -> bool:
        """Whether a model's layers, their parts and weights still are what this was made from."""
        return (
            len(layers) == len(self.layers)
            and all(map(is_, layers, self.layers))
            and all(map(is_, map(type, layers), self._types))
            and all(map(is_, map(dict.get, self._owners, self._names), self._parts))
        )

    def run(self, layers: Sequence[nn.Module], h: mx.array, caches: Sequence[Any]) -> mx.array | None:
        """What the layers make of the hidden state `[B, width, K]`, their states having appended the window; None if it can't be taken.

        A flat window is `[tokens, 1, K]`, each token with the row it belongs to. Raises RuntimeError for one that can't be taken.
        """
        y = self._run(layers, h, caches)
        if y is None and any(cache.rows.is_flat for cache in caches if hasattr(cache, "rows")):
            raise RuntimeError("only layers that run as one operation take a flat window")
        return y

    def takes_flat(self, layers: Sequence[nn.Module], caches: Sequence[Any]) -> bool:
        """Whether a model's layers, as they now are, and these states take a flat window."""
        return (
            thread.native
            and len(caches) == len(self.layers)
            and all((own := getattr(cache, "flat_type", None)) is not None and own == self.dtype for cache in caches)
            and self.is_current(layers)
        )

    def _run(self, layers: Sequence[nn.Module], h: mx.array, caches: Sequence[Any]) -> mx.array | None:
        if h.ndim != 3 or h.dtype != self.dtype or len(caches) != len(self.layers):
            return None
        found = self._buffers(caches, settled=False)
        if found is None or not self.is_current(layers):
            return None
        before = caches[0].appending
        if any(cache.appending is not before for cache in caches):
            # Some were copied since: each says for itself what it waits for.
            found, before = self._buffers(caches, settled=True), None
        if found is None:
            return None
        buffers, rings, forms = found
        rows = caches[0].rows
        starts, homes = (rows.flat_positions, rows.homes) if rows.is_flat else (rows.lengths, [])
        pages = None if rings else caches[0].pages
        made = self.extension.run_blocks(
            self.blocks,
            h,
            starts,
            buffers,
            before,
            homes,
            rings,
            forms,
            None if pages is None else self.extension.Pages(*pages),
        )
        if made is None:
            return None
        y, appending = made
        for cache in caches:
            cache.appends(appending)
        return y

    def _buffers(
        self, caches: Sequence[Any], settled: bool
    ) -> tuple[list[mx.array], list[tuple[int, ...]], list[tuple[Any, Any] | None]] | None:
        """Keys and values of all layers by turns; their rings: none if no layer has one, else () for those without; and their codes
        likewise. None if a state has no such buffers, or another window than the model."""
        buffers, rings, forms = list[mx.array](), list[tuple[int, ...]](), list[tuple[Any, Any] | None]()
        is_coded = False
        for cache in caches:
            # What a state of these kinds hides is what the model's masks hide.
            if hasattr(cache, "ring_in_place"):
                ring = cache.ring_in_place(settled=settled) if cache.window == self.window else None
                if ring is None:
                    return None
                buffers += (ring.keys, ring.values)
                rings.append(ring.numbers)
                forms.append(None)
                continue
            pair = cache.open_buffers(settled=settled) if hasattr(cache, "open_buffers") else None
            if pair is None:
                return None
            buffers += pair
            rings.append(())
            form = None
            if cache.codes is not None:
                form, is_coded = self._form(cache.codes), True
                if form is None:
                    return None
            forms.append(form)
        return buffers, rings if any(rings) else [], forms if is_coded else []

    def _form(self, codes: tuple[Codes, Codes]) -> tuple[Any, Any] | None:
        """How the extension reads keys and values of these codes; None if it can't."""
        if codes not in self._forms:
            keys, values = codes
            is_covered = keys.is_covered and values.is_covered
            self._forms[codes] = (keys.form(self.extension), values.form(self.extension)) if is_covered else None
        return self._forms[codes]


def _forward(own: Callable[..., mx.array], kind: Model) -> Callable[..., mx.array]:
    def __call__(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        if thread.active and cache is not None:
            h = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
            y = self.fused.run(self.layers, kind.embedded(self, h), cache)
            if y is not None:
                return self.norm(y)
            return own(self, inputs, cache, h)
        return own(self, inputs, cache, input_embeddings)

    return __call__


_classes: dict[type, type] = {}


def flat_test(model: nn.Module) -> Callable[[Sequence[Any]], int]:
    """What tells, inside the thread that steps a model, how many tokens a flat window over given states may have: 0 if it takes none."""
    decoder = getattr(model, "decoder", None)  # a compiled step, on CUDA
    if decoder is not None:
        return decoder.takes_flat
    found: list[Any] = [
        module for _, module in model.named_modules() if isinstance(getattr(module, "fused", None), Run)
    ]
    if len(found) != 1:
        return lambda caches: 0  # noqa: ARG005  (whatever the states)
    inner = found[0]
    return lambda caches: sys.maxsize if inner.fused.takes_flat(inner.layers, caches) else 0


def swap(model: nn.Module, extension: ModuleType) -> dict[str, int]:
    """Let models within `model` whose layers were all swapped run them as one operation, in place. Returns how many of each class."""
    known = {getattr(importlib.import_module(f"mlx_lm.models.{kind.module}"), kind.name): kind for kind in MODELS}
    found: dict[str, int] = {}
    for inner in [module for _, module in model.named_modules()]:
        own: Any = type(inner)
        kind = known.get(own)
        if kind is None or getattr(inner, "pipeline_size", 1) > 1 or not Run.covers(inner.layers):
            continue
        native = _classes.get(own)
        if native is None:
            body = {"__call__": _forward(own.__call__, kind), "__module__": own.__module__}
            native = _classes[own] = type(f"Native{own.__name__}", (own,), body)
        run = Run(inner.layers, extension, getattr(inner, kind.window) if kind.window else None)
        inner.__class__ = native
        object.__setattr__(inner, "fused", run)
        found[native.__name__] = found.get(native.__name__, 0) + 1
    return found
