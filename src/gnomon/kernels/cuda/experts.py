"""Products with chosen experts' weights for few tokens, one launch each; `mixtures` puts them into models.

Contract
    weights   of x's type, bf16 or f16: dense [E, N, K], or 4 and 8 bits in groups of 32, 64 or 128; K a multiple of 64
    gather    x [rows, K], experts int32 or uint32 [pairs], pairs a multiple of rows: pair p takes row p / (pairs / rows); result [pairs, N]
    gated     the same for silu(x @ gate.T) * (x @ up.T)
              either may have a norm before it folded in, as in `products`
    blend     x [pairs, K], shares float32 [tokens, top]: [tokens, N], the sum of a token's products times their shares; with a residual
              and the next norm's weight as `products.add`
    route     logits [tokens, E], E at most 512: the `top` largest, largest first, equal ones by number, and their softmax over all or
              among themselves, as uint32 and float32 [tokens, top]
    pairs     1 to 512

Arithmetic: as in `products`: float32 sums over exact codes, one rounding to the result's type (`blend`: one for the whole sum, in the
order of the token's experts). A row of the result depends, to the bit, on its row of x and its experts alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import switch_layers

from gnomon.kernels.cuda.products import (
    BITS,
    BLOCK,
    DENSE,
    GROUPS,
    TYPES,
    Normed,
)
from gnomon.kernels.cuda.sources import Kernel, make
from gnomon.kernels.dispatch import Operation, thread, uncovered

MOST_PAIRS = 512
MOST_EXPERTS = 512
MOST_ALONE = 16
"""Up to this many pairs each has blocks of its own; more are put together by expert."""
INDICES = {mx.int32: "int", mx.uint32: "uint32_t"}
DOWN_BLOCK = 512
AHEAD = 4
"""Chunks of weights to load at once."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights [E, N, K] of all experts of a layer. Dense ones have no scales."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = DENSE
    group: int = 64

    @property
    def dtype(self) -> mx.Dtype:
        return self.weight.dtype if self.scales is None else self.scales.dtype

    @property
    def outputs(self) -> int:
        return self.weight.shape[1]

    @property
    def inputs(self) -> int:
        return self.weight.shape[2] * 32 // self.bits if self.scales is not None else self.weight.shape[2]

    @property
    def kind(self) -> tuple[int, int, mx.Dtype]:
        """What kernels are made for."""
        return self.bits, self.group, self.dtype

    def arrays(self) -> list[mx.array]:
        """As the kernels take them."""
        return [part for part in (self.weight, self.scales, self.biases) if part is not None]

    def why_not(self) -> str | None:
        """What keeps these weights from the kernels, or None."""
        if self.bits not in BITS or self.group not in GROUPS:
            return f"{self.bits} bits in groups of {self.group}"
        if self.dtype not in TYPES:
            return f"experts of {self.dtype}"
        if self.weight.ndim != 3 or self.inputs % 64 or self.inputs % self.group:
            return f"experts {self.weight.shape}"
        shape = (*self.weight.shape[:2], self.inputs // self.group)
        if self.scales is not None and (
            self.biases is None
            or self.biases.dtype != self.dtype
            or self.scales.shape != shape
            or self.biases.shape != shape
        ):
            return f"scales {self.scales.shape} of {self.scales.dtype}"
        return None

    @staticmethod
    def of(layer: Any) -> Experts | str:
        """The weights of an expert layer of mlx-lm without a bias, or what keeps kernels from them."""
        if layer.get("bias") is not None:
            return "experts with a bias"
        if type(layer) is switch_layers.QuantizedSwitchLinear:
            if layer.mode != "affine" or layer.get("biases") is None:
                return f"mode {layer.mode}"
            made = Experts(layer["weight"], layer["scales"], layer["biases"], layer.bits, layer.group_size)
        elif type(layer) is switch_layers.SwitchLinear:
            made = Experts(layer["weight"])
        else:
            return f"experts in {type(layer).__name__}"
        return made.why_not() or made


def _names(i: int, kind: tuple[int, int, mx.Dtype]) -> list[str]:
    return [f"w{i}", *([] if kind[0] == DENSE else [f"s{i}", f"b{i}"])]


def _part(i: int, kind: tuple[int, int, mx.Dtype]) -> str:
    scales = "nullptr, nullptr" if kind[0] == DENSE else f"s{i}, b{i}"
    return f"{{w{i}, {scales}, w{i}_shape[1]}}"


@cache
def _choose(kind: tuple[int, int, mx.Dtype], tiles: int, grouped: bool, index: mx.Dtype, eps: float | None) -> Kernel:
    bits, group, dtype = kind
    t, squares = TYPES[dtype], "nullptr, 0, 0.0f" if eps is None else f"squares, squares_shape[1], {eps!r}f"
    body = f"""
  const gnomon::Experts<{t}> experts[] = {{{", ".join(_part(i, kind) for i in range(tiles))}}};
  gnomon::choose<{t}, {bits}, {group}, {tiles}, {"true" if grouped else "false"}, {AHEAD}>(
      experts, x, indices, gridDim.x, gridDim.x / x_shape[0], x_shape[1], {squares}, out);
"""
    names = ["x", *([] if eps is None else ["squares"]), "indices", *(n for i in range(tiles) for n in _names(i, kind))]
    residents = 3 if tiles == 1 else 2
    return make(
        f"choose_{INDICES[index]}", "experts.cuh", names, ["out"], body, block=BLOCK, blocks_per_processor=residents
    )


def _chosen(x: mx.array | Normed, indices: mx.array, weights: tuple[Experts, ...]) -> mx.array:
    first, pairs = weights[0], math.prod(indices.shape)
    rows, squares, eps = (x.rows, [x.squares], x.eps) if isinstance(x, Normed) else (x, [], None)
    return _choose(first.kind, len(weights), pairs > MOST_ALONE, indices.dtype, eps)(
        inputs=[rows, *squares, indices, *(a for w in weights for a in w.arrays())],
        output_shapes=[(pairs, first.outputs)],
        output_dtypes=[first.dtype],
        grid=(pairs * BLOCK, -(-first.outputs // 16), 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]


def gather(x: mx.array, indices: mx.array, experts: Experts) -> mx.array:
    """x [rows, K] times the weights of experts `indices`, of any shape: [pairs, N]."""
    return _chosen(x, indices, (experts,))


def gated(x: mx.array | Normed, indices: mx.array, gate: Experts, up: Experts) -> mx.array:
    """silu(x @ gate.T) * (x @ up.T) of experts `indices`, of any shape: [pairs, N]. Both are of one kind and size."""
    return _chosen(x, indices, (gate, up))


@cache
def _blend(kind: tuple[int, int, mx.Dtype], index: mx.Dtype, adds: bool) -> Kernel:
    bits, group, dtype = kind
    t, results = TYPES[dtype], ["h", "hw", "squares"] if adds else ["out"]
    body = f"""
  const gnomon::Experts<{t}> experts{_part(0, kind)};
  gnomon::{"blend_and_add" if adds else "blend"}<{t}, {bits}, {group}, {AHEAD}>(
      experts, x, indices, shares, shares_shape[1], x_shape[1], {"residual, norm, " if adds else ""}{", ".join(results)});
"""
    names = ["x", "indices", "shares", *(["residual", "norm"] if adds else []), *_names(0, kind)]
    return make(f"blend_{INDICES[index]}", "experts.cuh", names, results, body, block=DOWN_BLOCK)


def blend(x: mx.array, indices: mx.array, shares: mx.array, experts: Experts) -> mx.array:
    """Sum over a token's experts of share * (x @ w.T): x [tokens * top, K], indices and float32 shares [tokens, top]; [tokens, N]."""
    tokens = shares.shape[0]
    return _blend(experts.kind, indices.dtype, False)(
        inputs=[x, indices, shares, *experts.arrays()],
        output_shapes=[(tokens, experts.outputs)],
        output_dtypes=[experts.dtype],
        grid=(tokens * DOWN_BLOCK, -(-experts.outputs // 16), 1),
        threadgroup=(DOWN_BLOCK, 1, 1),
    )[0]


def blend_and_add(
    x: mx.array,
    indices: mx.array,
    shares: mx.array,
    experts: Experts,
    residual: mx.array,
    norm: mx.array,
    eps: float,
) -> tuple[mx.array, Normed]:
    """`blend` plus `residual` [tokens, N], and the same before the next product, as `products.add`. N is a multiple of 16."""
    tokens, outputs = shares.shape[0], experts.outputs
    h, hw, squares = _blend(experts.kind, indices.dtype, True)(
        inputs=[x, indices, shares, residual, norm, *experts.arrays()],
        output_shapes=[(tokens, outputs), (tokens, outputs), (tokens, outputs // 16)],
        output_dtypes=[experts.dtype, experts.dtype, mx.float32],
        grid=(tokens * DOWN_BLOCK, outputs // 16, 1),
        threadgroup=(DOWN_BLOCK, 1, 1),
    )
    return h, Normed(hw, squares, eps)


@cache
def _route(dtype: mx.Dtype, per: int, top: int, among_chosen: bool) -> Kernel:
    body = f"""
  gnomon::route<{TYPES[dtype]}, {per}, {"true" if among_chosen else "false"}>(logits, logits_shape[1], {top}, chosen, shares);
"""
    return make("route", "experts.cuh", ["logits"], ["chosen", "shares"], body, block=32)


def route(logits: mx.array, top: int, among_chosen: bool) -> tuple[mx.array, mx.array]:
    """Numbers and shares [tokens, top] of the experts with the largest of logits [tokens, E]."""
    tokens, experts = logits.shape
    per = next(n for n in (1, 2, 4, 8, 16) if 32 * n >= experts)
    chosen, shares = _route(logits.dtype, per, top, among_chosen)(
        inputs=[logits],
        output_shapes=[(tokens, top)] * 2,
        output_dtypes=[mx.uint32, mx.float32],
        grid=(tokens * 32, 1, 1),
        threadgroup=(32, 1, 1),
    )
    return chosen, shares


def _gathered(x: mx.array, lhs: mx.array | None, rhs: mx.array | None, experts: Experts) -> mx.array | str:
    """What `mx.gather_qmm` and `mx.gather_mm` make of one row for each index, or why kernels don't."""
    why = experts.why_not()
    if why is not None:
        return why
    if rhs is None or lhs is not None or rhs.dtype not in INDICES or not 1 <= rhs.size <= MOST_PAIRS:
        return f"{'no' if rhs is None else rhs.size} indices" if lhs is None else "indices of rows"
    before = x.shape[:-2]
    if x.ndim < 2 or x.shape[-2] != 1 or x.shape[-1] != experts.inputs or x.dtype != experts.dtype:
        return f"activations {x.shape} of {x.dtype} with experts of {experts.dtype}"
    if before != rhs.shape and (not before or before[-1] != 1 or before[:-1] != rhs.shape[:-1]):
        return f"rows {before} for indices {rhs.shape}"
    y = gather(x.reshape(-1, x.shape[-1]), rhs.reshape(-1), experts)
    return y.reshape(*rhs.shape, 1, experts.outputs)


def _make_quantised(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:  # noqa: ARG001  (no extension)
    def gather_qmm(
        x: mx.array,
        w: mx.array,
        /,
        scales: mx.array,
        biases: mx.array | None = None,
        lhs_indices: mx.array | None = None,
        rhs_indices: mx.array | None = None,
        transpose: bool = True,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        global_scale: mx.array | None = None,
        *,
        sorted_indices: bool = False,
        stream: Any = None,
    ) -> mx.array:
        if thread.active:
            if not transpose or mode != "affine" or biases is None:
                y: mx.array | str = f"mode {mode}" if transpose else "weights that aren't transposed"
            else:
                y = _gathered(x, lhs_indices, rhs_indices, Experts(w, scales, biases, bits or 4, group_size or 64))
            if isinstance(y, mx.array):
                return y
            uncovered("gather_qmm", y)
        return stock(
            x,
            w,
            scales,
            biases,
            lhs_indices,
            rhs_indices,
            transpose,
            group_size,
            bits,
            mode,
            global_scale,
            sorted_indices=sorted_indices,
            stream=stream,
        )

    return gather_qmm


def _make_dense(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:  # noqa: ARG001  (no extension)
    def gather_mm(
        a: mx.array,
        b: mx.array,
        /,
        lhs_indices: mx.array | None = None,
        rhs_indices: mx.array | None = None,
        *,
        sorted_indices: bool = False,
        stream: Any = None,
    ) -> mx.array:
        if thread.active:
            # Expert layers pass a transposed view of [E, N, K]; turned back it needs no copy.
            y = _gathered(a, lhs_indices, rhs_indices, Experts(mx.swapaxes(b, -1, -2))) if b.ndim == 3 else f"{b.shape}"
            if isinstance(y, mx.array):
                return y
            uncovered("gather_mm", y)
        return stock(a, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices, stream=stream)

    return gather_mm


OPERATIONS = (
    Operation("gather_qmm", mx, "gather_qmm", _make_quantised, "one row each for up to 512 indices of experts"),
    Operation("gather_mm", mx, "gather_mm", _make_dense, "the same, dense"),
)
