"""Chunks of prompts of the models that `decode` knows, with fewer and larger operations than their modules have.

    unpack_parts         all of a layer's weights
    product              4: q with k and v, the output's, gate with up, down
    place_heads          biases, head norms, rotation, heads before tokens
    (state, attention)   as the model's own modules have them
    add_and_norm         2: residual and the norm that follows
    gate_and_multiply    activation

The modules of a layer make about 28 kernels of 50 operations, 7 of them unpack a matrix each, and a chunk of a small model takes the host
longer than the GPU. Here a layer has 9, with the state's and attention's 12 to 14.

Contract
    rows     any number of them; bf16 or f32 as the model's weights
    result   the model's own forward of the chunk, by other roundings: in float32 between products, rounded once
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from gnomon.kernels.cuda import attention
from gnomon.kernels.cuda.decode import MLP, Decoder, Layer
from gnomon.kernels.cuda.products import BLOCK, DENSE, SCALED, TYPES, Weights, most_rows, weight_names, weight_part
from gnomon.kernels.cuda.prompts import FEWEST
from gnomon.kernels.cuda.sources import Kernel, make
from gnomon.kernels.cuda.wide import ROWS, wide
from gnomon.kernels.dispatch import thread

NORM_BLOCK, HEADS_BLOCK = 256, 128
AHEAD = 1
"""Layers from one start of the GPU to the next: it computes while the host goes on. Four are no faster and hold twice the memory."""
MOST_UNPACKED = 2 << 30
"""Bytes of unpacked weights that may wait for the GPU: they are held until it has come to them."""


Group = tuple[Weights, ...]
"""Weights that take the same x and lie one behind the other when unpacked."""
Matrix = mx.array | Weights
"""[outputs, K], as it is or quantised without a bias."""


@cache
def _unpack(kind: tuple[int, int, bool], groups: tuple[int, ...], dtype: mx.Dtype) -> Kernel:
    t, (bits, group, _) = SCALED[dtype], kind
    listed: list[str] = []
    for number, count in enumerate(groups):
        first, out = len(listed), f"out{number}"
        for i in range(first, first + count):
            listed.append(f"{{{weight_part(i, kind, t)}, w{i}_shape[1], {out}}}")
            out += f" + (size_t)w{i}_shape[0] * w{i}_shape[1] * {32 // bits}"
    body = f"""
  const gnomon::Packed<{t}> parts[] = {{
      {f",{chr(10)}      ".join(listed)}}};
  gnomon::unpack_parts<{t}, {bits}, {group}, {BLOCK}>(parts);
"""
    names = [name for i in range(len(listed)) for name in weight_names(i, kind)]
    return make("unpack_parts", "chunks.cuh", names, [f"out{i}" for i in range(len(groups))], body, block=BLOCK)


class Unpacking:
    """Groups of quantised weights of one kind, and the one launch that unpacks them all."""

    def __init__(self, groups: Sequence[Group]) -> None:
        first, parts = groups[0][0], [part for group in groups for part in group]
        blocks = sum(-(-part.weight.size // BLOCK) for part in parts)
        self._kernel = _unpack((first.bits, first.group, False), tuple(map(len, groups)), first.dtype)
        self._how: dict[str, Any] = {
            "inputs": [array for part in parts for array in part.arrays()[:3]],
            "output_shapes": [(sum(part.outputs for part in group), group[0].inputs) for group in groups],
            "output_dtypes": [first.dtype] * len(groups),
            "grid": (blocks * BLOCK, 1, 1),
            "threadgroup": (BLOCK, 1, 1),
        }

    def __call__(self) -> list[mx.array]:
        """Every group as [all outputs, K] of its type, rounded once."""
        return self._kernel(**self._how)


class Matrices:
    """Groups of weights as `product` takes them: dense ones' matrices, and the others' unpacked, those of a kind together, or, for few
    rows, as they are."""

    def __init__(self, *groups: Group) -> None:
        self._packed: list[list[Matrix]] = [
            [part.weight if part.bits == DENSE else replace(part, bias=None) for part in group] for group in groups
        ]
        self._few = ROWS if all(group[0].dtype in TYPES for group in groups) else 0
        kinds: dict[tuple[int, int], list[int]] = {}
        for i, group in enumerate(groups):
            if group[0].bits != DENSE:
                kinds.setdefault((group[0].bits, group[0].group), []).append(i)
        self._launches = [(places, Unpacking([groups[i] for i in places])) for places in kinds.values()]
        packed = [part for group in groups for part in group if part.bits != DENSE]
        self.nbytes = sum(part.outputs * part.inputs * part.dtype.size for part in packed)
        """Of what is unpacked."""

    def __call__(self, rows: int) -> list[list[Matrix]]:
        """For so many rows of x. By group, one matrix [all outputs, K], or one for each of its weights."""
        found = list(self._packed)
        if rows <= self._few:
            return found
        for places, unpacking in self._launches:
            for i, matrix in zip(places, unpacking(), strict=True):
                found[i] = [matrix]
        return found


def product(x: mx.array, matrix: Matrix, bias: mx.array | None) -> mx.array:
    """x [M, K] @ matrix.T (+ bias)."""
    if isinstance(matrix, Weights):
        return wide(x, replace(matrix, bias=bias))
    return mx.matmul(x, matrix.T) if bias is None else mx.addmm(bias, x, matrix.T)


@cache
def _add_and_norm(dtype: mx.Dtype, eps: float) -> Kernel:
    body = f"""
  gnomon::add_and_norm<{SCALED[dtype]}, {NORM_BLOCK}>(y, residual, weight, y_shape[1], {eps!r}f, h, x);
"""
    return make("add_and_norm", "chunks.cuh", ["y", "residual", "weight"], ["h", "x"], body, block=NORM_BLOCK)


def add_and_norm(y: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """residual + y [M, K], and its norm."""
    h, x = _add_and_norm(y.dtype, eps)(
        inputs=[y, residual, weight],
        output_shapes=[y.shape, y.shape],
        output_dtypes=[y.dtype, y.dtype],
        grid=(y.shape[0] * NORM_BLOCK, 1, 1),
        threadgroup=(NORM_BLOCK, 1, 1),
    )
    return h, x


@cache
def _gate_and_multiply(dtype: mx.Dtype, together: bool) -> Kernel:
    width = "gate_shape[1] / 2" if together else "gate_shape[1]"
    up = "gate + n" if together else "up"
    body = f"""
  const int n = {width};
  gnomon::gate_and_multiply<{SCALED[dtype]}>(gate, {up}, gate_shape[1], n, (long long)gate_shape[0] * n, out);
"""
    names = ["gate"] if together else ["gate", "up"]
    return make("gate_and_multiply", "chunks.cuh", names, ["out"], body, block=BLOCK)


def gate_and_multiply(parts: Sequence[mx.array]) -> mx.array:
    """silu(gate) * up of [M, N] each, or of one array [M, 2 N] of both. N is a multiple of 8."""
    rows, width = parts[0].shape
    outputs = width // 2 if len(parts) == 1 else width
    return _gate_and_multiply(parts[0].dtype, len(parts) == 1)(
        inputs=list(parts),
        output_shapes=[(rows, outputs)],
        output_dtypes=[parts[0].dtype],
        grid=(-(-rows * outputs // (8 * BLOCK)) * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]


@cache
def _place_heads(form: attention.Form, dtype: mx.Dtype, together: bool, biased: tuple[bool, ...]) -> Kernel:
    t, d = SCALED[dtype], form.size
    begins = (0, form.q_heads * d, (form.q_heads + form.kv_heads) * d)
    heads = (form.q_heads, form.kv_heads, form.kv_heads)
    norms = ("q_norm", "k_norm", "nullptr") if form.normed else ("nullptr",) * 3
    parts: list[str] = []
    for i, name in enumerate("qkv"):
        x, stride = (f"q + {begins[i]}", "q_shape[1]") if together else (name, f"{name}_shape[1]")
        bias, turned = f"c{i}" if biased[i] else "nullptr", "false" if name == "v" else "true"
        parts.append(
            f"{{{x}, {stride}, {bias}, {norms[i]}, {heads[i]}, {turned}, {'true' if name == 'q' else 'false'}, out_{name}}}"
        )
    body = f"""
  const gnomon::Heads<{t}> parts[] = {{{", ".join(parts)}}};
  gnomon::place_heads<{d}, {t}>(parts, offsets, q_shape[0] / offsets_shape[0], q_shape[0], inverse, {form.eps!r}f,
      {"true" if form.traditional else "false"});
"""
    names = [
        *("q" if together else "qkv"),
        *(f"c{i}" for i in range(3) if biased[i]),
        *(["q_norm", "k_norm"] if form.normed else []),
        "offsets",
        "inverse",
    ]
    return make("place_heads", "chunks.cuh", names, ["out_q", "out_k", "out_v"], body, block=HEADS_BLOCK)


def place_heads(
    form: attention.Form,
    parts: Sequence[mx.array],
    biases: Sequence[mx.array | None],
    norms: tuple[mx.array, mx.array] | None,
    offsets: mx.array,
    inverse: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values [B, heads, L, D] of projections [B * L, ..], one array of all or three.

    Queries lie in memory as [B, L, heads, D]: stock attention gives its result their layout, which is the next product's then.
    `offsets` int32 [B] are the positions of the rows' first tokens, `inverse` float32 [D / 2] the rotation's frequencies.
    """
    tokens, batch = parts[0].shape[0], offsets.shape[0]
    length = tokens // batch
    stored = (batch, form.kv_heads, length, form.size)
    warps = tokens * (form.q_heads + 2 * form.kv_heads)
    kernel = _place_heads(form, parts[0].dtype, len(parts) == 1, tuple(bias is not None for bias in biases))
    q, k, v = kernel(
        inputs=[*parts, *(bias for bias in biases if bias is not None), *(norms or ()), offsets, inverse],
        output_shapes=[(batch, length, form.q_heads, form.size), stored, stored],
        output_dtypes=[parts[0].dtype] * 3,
        grid=(-(-warps * 32 // HEADS_BLOCK) * HEADS_BLOCK, 1, 1),
        threadgroup=(HEADS_BLOCK, 1, 1),
    )
    return q.transpose(0, 2, 1, 3), k, v


@dataclass(frozen=True, slots=True)
class Block:
    """A layer, and its weights by the products that take them."""

    layer: Layer
    mlp: MLP
    matrices: Matrices

    @staticmethod
    def of(layer: Layer) -> Block | None:
        """None for a layer that this can't run."""
        mlp = layer.mlp
        if not isinstance(mlp, MLP) or mlp.gate.bias is not None or mlp.up.bias is not None:
            return None
        return Block(layer, mlp, Matrices((layer.q, layer.k, layer.v), (layer.o,), (mlp.gate, mlp.up), (mlp.down,)))


class Chunks:
    """The forward of a prompt's chunk by the layers of a decoder."""

    def __init__(self, decoder: Decoder, blocks: Sequence[Block]) -> None:
        self._decoder = decoder
        self._blocks = blocks
        most = max(block.matrices.nbytes for block in blocks)
        self._most_sent = max(2, MOST_UNPACKED // (AHEAD * most)) if most else len(blocks)

    def takes(self, h: mx.array, caches: Sequence[Any]) -> bool:
        """Whether tokens [B, L] or their embeddings [B, L, K] over these layer states are a chunk for this."""
        return (
            h.shape[1] >= FEWEST
            and h.shape[0] * h.shape[1] > most_rows()
            and len(caches) == len(self._blocks)
            and self._decoder.is_current()
        )

    def __call__(self, h: mx.array, caches: Sequence[Any]) -> mx.array:
        """The last norm's result [B, L, K] for embeddings h; layer states keep the keys and values."""
        batch, length, width = h.shape
        decoder = self._decoder
        eps = decoder.eps
        mask: Any = base.create_attention_mask(h, caches[0])
        offset = caches[0].offset
        offsets = offset.astype(mx.int32) if isinstance(offset, mx.array) else mx.full(batch, offset, dtype=mx.int32)
        after = [*(block.layer.attention_norm for block in self._blocks[1:]), decoder.norm]
        h = h.reshape(batch * length, width)
        x = mx.fast.rms_norm(h, self._blocks[0].layer.attention_norm, eps)
        sent: deque[mx.array] = deque()
        for i, (block, state, norm) in enumerate(zip(self._blocks, caches, after, strict=True)):
            layer, mlp, form = block.layer, block.mlp, block.layer.form
            qkv, (o,), gate_up, (down,) = block.matrices(batch * length)
            biases = layer.q.bias, layer.k.bias, layer.v.bias
            parts = [product(x, matrix, None) for matrix in qkv]
            q, k, v = place_heads(form, parts, biases, layer.head_norms, offsets, layer.inverse)
            keys, values = state.update_and_fetch(k, v)
            y = base.scaled_dot_product_attention(q, keys, values, cache=state, scale=form.scale, mask=mask)
            y = y.transpose(0, 2, 1, 3).reshape(batch * length, -1)
            h, x = add_and_norm(product(y, o, layer.o.bias), h, layer.mlp_norm, eps)
            y = gate_and_multiply([product(x, matrix, None) for matrix in gate_up])
            h, x = add_and_norm(product(y, down, mlp.down.bias), h, norm, eps)
            # Of the last layer a state needs no more than keys and values.
            if i % AHEAD == 0 and i + 1 < len(self._blocks):
                mx.async_eval(x)
                sent.append(x)
                if len(sent) > self._most_sent:
                    mx.eval(sent.popleft())
        return x.reshape(batch, length, width)


def _forward(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def __call__(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        given = inputs if input_embeddings is None else input_embeddings
        if thread.active and cache is not None and self.chunks.takes(given, cache):
            return self.chunks(self.embed_tokens(inputs) if input_embeddings is None else input_embeddings, cache)
        return own(self, inputs, cache, input_embeddings)

    return __call__


_classes: dict[type, type] = {}


def ran(model: nn.Module) -> bool:
    """Whether chunks of such a model were ever computed on a GPU: those of f32 have run on an emulator of its threads only."""
    decoder: Decoder | None = getattr(model, "decoder", None)
    return decoder is not None and decoder.dtype == mx.bfloat16


def swap(model: nn.Module) -> dict[str, int]:
    """Give the layers of a model with a decoder (`decode.swap`) the forward of chunks, in place.

    Returns how many models take it, by class; raises nothing.
    """
    decoder: Decoder | None = getattr(model, "decoder", None)
    inner: Any = getattr(model, "model", None)
    if decoder is None or type(inner) in _classes.values():
        return {}
    blocks = [block for block in map(Block.of, decoder.layers) if block is not None]
    if len(blocks) < len(decoder.layers):
        return {}
    own = type(inner)
    native = _classes.get(own)
    if native is None:
        native = type(f"Cuda{own.__name__}", (own,), {"__call__": _forward(own.__call__), "__module__": own.__module__})
        _classes[own] = native
    inner.__class__ = native
    object.__setattr__(inner, "chunks", Chunks(decoder, blocks))
    return {own.__name__: 1}
