"""Decode steps of known models as a few kernels per layer, compiled into one graph.

    embed                                                     1
    product      norm, q, k, v                                per layer
    attend       head norms, rotation, append, attention
    add          output projection, residual
    gated        norm, gate, up, activation
    add          down, residual
    product      norm, head                                   1

A window of several tokens per row, as when guesses are verified, is as many rows to all of them but attention, in front of which one more
kernel writes its keys and values: each token gets the bits that it would have got alone.

Of a layer with experts the last two are four: product (norm, router), route, gated (norm, gate, up, activation of those chosen),
blend_and_add (their sum, residual). In stock operations a layer has about 15, with experts 25. Every one costs the host about 5 us, and as
much again where Python builds it; the graph is built once per shape (`mx.compile`).

Taken: one new token for each of 1 to 32 rows, or windows of up to 128 tokens of such rows (64 where weights are dense; a launch for
every 32), over states of full attention, plain or coded. Anything else is the model's own forward.
"""

from __future__ import annotations

import importlib
import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from gnomon.kernels.build import BuildError
from gnomon.kernels.cuda import attention, coded_attention, experts, graphs
from gnomon.kernels.cuda.graphs import Graphs
from gnomon.kernels.cuda.mixtures import Mixture
from gnomon.kernels.cuda.products import DENSE, MOST_ROWS, Normed, Weights, add, embed, gated, most_rows, product
from gnomon.kernels.cuda.record import roomy
from gnomon.kernels.dispatch import thread, uncovered

log = logging.getLogger(__name__)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Modules of mlx-lm whose models are norm, attention, residual, norm, gated SiLU MLP or experts, residual."""

graph_failures: list[str] = []
"""Why decoders of this process gave up making graphs."""

MOST_GRAPHS = 32
"""Compiled graphs to keep: one per number of rows and size of buffers, and per size of windows."""

WINDOWS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Tokens of windows for which there are graphs. Others are filled up with their last token, which writes and computes the same again."""

MOST_LAUNCHES, MOST_DENSE_LAUNCHES = 4, 2
"""Of a window. With more, weights are read so often that the model's own forward is as fast; codes it has to unpack."""


@dataclass(frozen=True, slots=True)
class MLP:
    """A gated MLP."""

    gate: Weights
    up: Weights
    down: Weights

    def add(self, x: Normed, h: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, Normed]:
        """Its result for x plus h, and the same before the next norm."""
        return add(gated(x, self.gate, self.up), self.down, h, norm, eps)


@dataclass(frozen=True, slots=True)
class RoutedMLP:
    """A router, and experts of which it chooses `top`."""

    router: Weights
    experts: Mixture
    top: int
    among_chosen: bool

    def add(self, x: Normed, h: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, Normed]:
        """See `MLP.add`."""
        chosen, shares = experts.route(product(x, self.router), self.top, self.among_chosen)
        y = experts.gated(x, chosen, self.experts.gate, self.experts.up)
        return experts.blend_and_add(y, chosen, shares, self.experts.down, h, norm, eps)


@dataclass(frozen=True, slots=True)
class Layer:
    """What one block's kernels take."""

    q: Weights
    k: Weights
    v: Weights
    o: Weights
    mlp: MLP | RoutedMLP
    attention_norm: mx.array
    mlp_norm: mx.array
    head_norms: tuple[mx.array, mx.array] | None
    form: attention.Form
    inverse: mx.array


class Decoder:
    """The compiled decode step of one model. Raises nothing for models it doesn't know: `Decoder.of` returns None and why."""

    graphs: Graphs | None = None
    """Who makes one launch of a step; without, kernels go through `mx.compile` one by one."""

    def __init__(
        self, table: Weights, layers: Sequence[Layer], norm: mx.array, head: Weights, eps: float, watched: Sequence[Any]
    ) -> None:
        self.table = table
        self.dtype = table.dtype
        self.layers = layers
        self.norm = norm
        self.head = head
        self.eps = eps
        self._owners, self._names, self._parts = zip(*watched, strict=True) if watched else ((), (), ())
        self._shapes: set[tuple[int, ...]] = set()
        self._made: dict[tuple[Codings, tuple[tuple[tuple[int, ...], mx.Dtype], ...]], Any] = {}
        self._last: dict[tuple[int, ...], Any] = {}
        """The graph last run for tokens of a shape."""
        self._codes: Codings = (None,) * len(layers)
        self._was_current = True
        self._counters = mx.zeros(MOST_ROWS * max(layer.form.blocks_per_row for layer in layers), dtype=mx.int32)
        mx.eval(self._counters, [layer.inverse for layer in layers])
        self._compiled = mx.compile(self._forward)

    def _forward(self, tokens: mx.array, lengths: mx.array, *buffers: mx.array) -> mx.array:
        """Logits [B, 1, V] for tokens [B, 1], or [N] of windows, of which `lengths` are the spots; `buffers` are keys and values of all
        layers by turns."""
        in_window = tokens.ndim == 1
        return self._logits(in_window, tokens.reshape(-1).astype(mx.int32), lengths, *buffers)[:, None]

    def chain(self, lengths: mx.array, tokens: mx.array, *buffers: mx.array) -> mx.array:
        """The same as a chain of kernels alone: logits [B, V]; `lengths` come from the host."""
        return self._logits(tokens.ndim == 1, *graphs.take(tokens, lengths), *buffers)

    def _logits(self, in_window: bool, tokens: mx.array, lengths: mx.array, *buffers: mx.array) -> mx.array:
        eps = self.eps
        h, x = embed(tokens, self.table, self.layers[0].attention_norm, eps)
        after = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        for i, (layer, next_norm) in enumerate(zip(self.layers, after, strict=True)):
            qkv = product(x, layer.q, layer.k, layer.v)
            y = self._attend(i, qkv, buffers[2 * i], buffers[2 * i + 1], lengths, in_window)
            h, x = add(y, layer.o, h, layer.mlp_norm, eps)
            h, x = layer.mlp.add(x, h, next_norm, eps)
        return product(x, self.head)

    def _attend(
        self, i: int, qkv: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, in_window: bool
    ) -> mx.array:
        layer, codes = self.layers[i], self._codes[i]
        more = lengths, layer.inverse, self._counters, layer.head_norms, in_window
        if codes is None:
            return attention.attend(layer.form, qkv, keys, values, *more)
        return coded_attention.append_and_attend(layer.form, codes, qkv, keys, values, *more)

    def is_current(self) -> bool:
        """Whether the model still has the weights this was made from."""
        return all(map(operator.is_, map(dict[str, Any].get, self._owners, self._names), self._parts))

    def step(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array | None:
        """The forward of tokens [B, M], or of a flat window's [N, 1], over layer states, which keep the new keys and values; None if it
        can't be taken here."""
        if tokens.size > self.most_tokens or len(caches) != len(self.layers):
            return None
        self._was_current = self.is_current()
        if not self._was_current:
            return None
        held = [_in_place(cache, layer.form, self.dtype) for cache, layer in zip(caches, self.layers, strict=True)]
        found = [one for one in held if one is not None]
        if len(found) < len(held):
            return None
        buffers = [buffer for keys, values, _ in found for buffer in (keys, values)]
        codes = tuple(one[2] for one in found)
        if codes != self._codes:
            self._codes = codes
            self._shapes.clear()
            self._compiled = mx.compile(self._forward)
            self._last.clear()
        rows = caches[0].rows
        if rows.is_flat or rows.width > 1:
            logits = self._window(tokens, rows, buffers)
        elif rows.num_rows > most_rows():
            logits = None
        else:
            logits = self._launched(tokens, rows.lengths, buffers)
            if logits is None:
                logits = self._one_by_one(tokens, rows.offsets, buffers)
        if logits is not None:
            for cache in caches:
                cache.appends(logits)
        return logits

    @property
    def most_tokens(self) -> int:
        """Tokens that a window may have."""
        is_dense = self.layers[0].q.bits == DENSE
        return most_rows() * (MOST_DENSE_LAUNCHES if is_dense else MOST_LAUNCHES)

    def takes_flat(self, caches: Sequence[Any]) -> int:
        """How many tokens a flat window over these states may have; 0 if they take none. Coded ones do after a step over them."""
        if not thread.native or len(caches) != len(self.layers) or not self._was_current:
            return 0
        for cache, codes in zip(caches, self._codes, strict=True):
            # What steps have taken before.
            held = getattr(cache, "flat_type", None)
            if held is None or held != (self.dtype if codes is None else mx.uint32) or cache.codes != codes:
                return 0
        return self.most_tokens if _has_room(caches[0].rows) else 0

    def _window(self, tokens: mx.array, rows: Any, buffers: list[mx.array]) -> mx.array | None:
        """Logits [B, M, V] of a window, or [N, 1, V] of a flat one; None for more rows or positions than a spot can name."""
        if not _has_room(rows):
            return None
        if rows.is_flat:
            places = list(zip(rows.homes, rows.flat_positions, strict=True))
        else:
            places = [(row, start + i) for row, start in enumerate(rows.lengths) for i in range(tokens.shape[1])]
        most, found = most_rows(), list[mx.array]()
        for begin in range(0, len(places), most):
            part = places[begin : begin + most]
            size = next(size for size in WINDOWS if size >= len(part))
            spots = attention.spots(part, size)
            fed = tokens.reshape(-1) if size == len(places) else mx.take(tokens, _indices(begin, len(part), size))
            if found:  # whose keys and values later tokens of a row see
                fed = mx.depends(fed, found[-1])
            logits = self._launched(fed, spots, buffers)
            if logits is None:
                logits = self._one_by_one(fed, mx.array(spots, dtype=mx.int32), buffers)
            found.append(logits if size == len(part) else logits[: len(part)])
        whole = found[0] if len(found) == 1 else mx.concatenate(found)
        return whole.reshape(*tokens.shape, -1)

    def _one_by_one(self, tokens: mx.array, lengths: mx.array, buffers: Sequence[mx.array]) -> mx.array:
        shape = (*tokens.shape, *buffers[0].shape)
        if shape not in self._shapes:
            if len(self._shapes) == MOST_GRAPHS:
                self._shapes.clear()
                self._compiled = mx.compile(self._forward)
            self._shapes.add(shape)
        return self._compiled(tokens, lengths, *buffers)

    def _launched(self, tokens: mx.array, lengths: list[int], buffers: list[mx.array]) -> mx.array | None:
        """The step as one graph of kernels; None if there can't be one."""
        if self.graphs is None:
            return None
        inputs, last = [tokens, *buffers], self._last.get(tuple(tokens.shape))
        logits = last.run(inputs, lengths) if last is not None else None
        if logits is None:
            key = self._codes, tuple((roomy(array.shape), array.dtype) for array in inputs)
            graph = self._made.pop(key, None)
            try:
                rows = tokens.shape[0]
                graph = graph or self.graphs.make(inputs, rows, self.chain, [rows, 1, self.head.outputs])
            except (BuildError, ValueError, RuntimeError) as e:
                log.warning(
                    "decode steps are launched kernel by kernel, which costs the host a few times as much: %s", e
                )
                graph_failures.append(str(e))
                self.graphs = None
                return None
            if len(self._made) == MOST_GRAPHS:
                gone = self._made.pop(next(iter(self._made)))
                self._last = {shape: one for shape, one in self._last.items() if one is not gone}
            self._last[tuple(tokens.shape)] = self._made[key] = graph
            logits = graph.run(inputs, lengths)
        return logits

    @staticmethod
    def of(model: nn.Module) -> Decoder | str:
        """The decoder of a model of a known family, or what keeps it from having one."""
        try:
            return _made(model)
        except _Unknown as why:
            return str(why)


Codings = tuple[coded_attention.Pair | None, ...]
"""Which codes each layer's buffers hold, if any."""


@lru_cache(maxsize=128)
def _indices(begin: int, count: int, size: int) -> mx.array:
    """`count` numbers from `begin` on, the last of them until there are `size`."""
    made = mx.array([begin + min(i, count - 1) for i in range(size)], dtype=mx.int32)
    mx.eval(made)
    return made


def _has_room(rows: Any) -> bool:
    """Whether a window's `spot`s can name all of a batch's rows and positions."""
    return rows.num_rows <= MOST_ROWS and rows.end <= attention.MOST_POSITIONS


def _in_place(
    cache: Any, form: attention.Form, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, coded_attention.Pair | None] | None:
    """Keys and values of these heads and `dtype` in buffers with room for the open window, and the codes they are held in; None if
    there are none that the kernels take."""
    found = _found(cache, form, dtype)
    if found is None and hasattr(cache, "make_room") and cache.make_room(form.kv_heads, form.size, dtype):
        found = _found(cache, form, dtype)
    return found


def _found(
    cache: Any, form: attention.Form, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, coded_attention.Pair | None] | None:
    if hasattr(cache, "codes_in_place"):
        found: tuple[mx.array, mx.array, coded_attention.Pair | None] | None = cache.codes_in_place(form.size, dtype)
        if found is not None and found[2] is not None:
            return found if coded_attention.why_not(found[2]) is None else None
    else:
        # Whoever is given the arrays waits for the step that appends; the next step's tokens do so by themselves.
        pair: tuple[mx.array, mx.array] | None = None
        if hasattr(cache, "in_place"):
            pair = cache.in_place("causal", settled=False)
        found = None if pair is None else (*pair, None)
    return None if found is None or found[0].dtype != dtype else found


class _Unknown(Exception):
    pass


def _weights(owner: Any, name: str, watched: list[Any], dtype: mx.Dtype | None = None) -> Weights:
    """Weights of `dtype`, or of any that a step has."""
    layer = owner.get(name)
    found = Weights.of(layer) if layer is not None else None
    if found is None or found.dtype not in ((dtype,) if dtype else attention.TYPES):
        kept = None if layer is None else layer.get("scales", layer.get("weight"))
        raise _Unknown(f"{name} is {type(layer).__name__} of {None if kept is None else kept.dtype}")
    watched += [(owner, name, layer), (layer, "weight", found.weight)]
    return found


def _norm(owner: Any, name: str, watched: list[Any], dtype: mx.Dtype) -> mx.array:
    layer = owner.get(name)
    if type(layer) is not nn.RMSNorm or layer["weight"].dtype != dtype:
        raise _Unknown(f"{name} is {type(layer).__name__} of {getattr(layer, 'weight', mx.zeros(0)).dtype}")
    watched += [(owner, name, layer), (layer, "weight", layer["weight"])]
    return layer["weight"]


def _rotation(rope: Any, size: int) -> tuple[mx.array, bool]:
    """Frequencies of a rope module over whole heads, and whether it turns neighbours."""
    if type(rope) is nn.RoPE and rope.dims == size:
        step = math.log(rope.base) / (size // 2)
        return mx.exp(-mx.arange(size // 2, dtype=mx.float32) * step) * rope.scale, bool(rope.traditional)
    if type(rope) is rope_utils.Llama3RoPE and rope.dims == size:
        freqs = rope._freqs  # pyright: ignore[reportPrivateUsage]
        return 1 / freqs.astype(mx.float32), bool(rope.traditional)
    raise _Unknown(f"rope is {type(rope).__name__}")


def _layer(block: Any, eps: float, watched: list[Any], dtype: mx.Dtype) -> Layer:
    own = block.self_attn
    if getattr(block, "use_sliding", False):
        raise _Unknown("a layer has a sliding window")
    q, k, v, o = (_weights(own, name, watched, dtype) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    mlp = _routed(block.mlp, watched, dtype) if "switch_mlp" in block.mlp else _mlp(block.mlp, watched, dtype)
    size = q.outputs // own.n_heads
    normed = "q_norm" in own
    head_norms = (_norm(own, "q_norm", watched, dtype), _norm(own, "k_norm", watched, dtype)) if normed else None
    head_eps = float(own.q_norm.eps) if normed else eps
    inverse, traditional = _rotation(own.rope, size)
    form = attention.Form(own.n_heads, own.n_kv_heads, size, float(own.scale), traditional, normed, head_eps)
    if size not in attention.HEAD_SIZES:
        raise _Unknown(f"heads of {size}")
    if len({(w.bits, w.group) for w in (q, k, v)}) > 1:
        raise _Unknown("projections of different bits")
    if any(w.outputs % 16 for w in (q, k, v, o)):
        raise _Unknown("widths that are no multiples of 16")
    norms = [_norm(block, name, watched, dtype) for name in ("input_layernorm", "post_attention_layernorm")]
    if {float(block.input_layernorm.eps), float(block.post_attention_layernorm.eps)} != {eps}:
        raise _Unknown("norms with different eps")
    return Layer(q, k, v, o, mlp, norms[0], norms[1], head_norms, form, inverse)


def _mlp(mlp: Any, watched: list[Any], dtype: mx.Dtype) -> MLP:
    gate, up, down = (_weights(mlp, name, watched, dtype) for name in ("gate_proj", "up_proj", "down_proj"))
    if gate.kind != up.kind:
        raise _Unknown("projections of different bits")
    if gate.outputs % 16 or down.outputs % 16:
        raise _Unknown("widths that are no multiples of 16")
    return MLP(gate, up, down)


def _routed(block: Any, watched: list[Any], dtype: mx.Dtype) -> RoutedMLP:
    switch, router = block.switch_mlp, _weights(block, "gate", watched, dtype)
    made = Mixture.of(switch)
    if isinstance(made, str) or made.gate.dtype != dtype:
        raise _Unknown(made if isinstance(made, str) else f"experts of {made.gate.dtype}")
    if router.outputs > experts.MOST_EXPERTS or router.bias is not None or block.sharding_group is not None:
        raise _Unknown(f"a router of {router.outputs}")
    if made.down.outputs % 16 or MOST_ROWS * block.top_k > experts.MOST_PAIRS:
        raise _Unknown(f"{block.top_k} experts of {made.down.outputs}")
    watched.append((block, "switch_mlp", switch))
    for name, part in (("gate_proj", made.gate), ("up_proj", made.up), ("down_proj", made.down)):
        watched += [(switch, name, switch[name]), (switch[name], "weight", part.weight)]
    return RoutedMLP(router, made, block.top_k, block.norm_topk_prob)


def _made(model: Any) -> Decoder:
    if not any(type(model) is importlib.import_module(f"mlx_lm.models.{name}").Model for name in FAMILIES):
        raise _Unknown(f"models of {type(model).__module__} are not known")
    watched: list[Any] = []
    inner = model.model
    eps = float(inner.norm.eps)
    table = _weights(inner, "embed_tokens", watched)
    dtype = table.dtype
    norm = _norm(inner, "norm", watched, dtype)
    head = table if model.args.tie_word_embeddings else _weights(model, "lm_head", watched, dtype)
    if table.inputs > 16 * 1024:
        raise _Unknown(f"rows of {table.inputs}")
    layers = [_layer(block, eps, watched, dtype) for block in inner.layers]
    return Decoder(table, layers, norm, head, eps, watched)


def _forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        if thread.active and cache is not None and input_embeddings is None:
            logits = self.decoder.step(inputs, cache)
            if logits is not None:
                return logits
            if inputs.shape[1] == 1:
                uncovered("decode", f"{inputs.shape[0]} rows over {type(cache[0]).__name__}")
        return own(self, inputs, cache, input_embeddings)

    return __call__


_classes: dict[type, type] = {}


def swap(model: nn.Module, graphs: Graphs | None = None) -> dict[str, int]:
    """Give a known model's class the compiled decode step, in place, in one launch if there is somebody to make `graphs`.

    Returns how many layers take it, by class; raises nothing.
    """
    if type(model) in _classes.values():
        return {}
    decoder = Decoder.of(model)
    if isinstance(decoder, str):
        uncovered("decode", decoder)
        return {}
    decoder.graphs = graphs and graphs.another()
    own = type(model)
    native = _classes.get(own)
    if native is None:
        native = type(f"Cuda{own.__name__}", (own,), {"__call__": _forward(own.__call__), "__module__": own.__module__})
        _classes[own] = native
    model.__class__ = native
    object.__setattr__(model, "decoder", decoder)
    return {own.__name__: 1, "layers": len(decoder.layers)}
