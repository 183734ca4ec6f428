"""Products of a few rows with dense or affine-quantised weights, and what is fused around them.

Contract
    x          [M, K] bf16, f16 or f32, M from 1 to 32, K a multiple of 64
    weights    of x's type, dense [N, K] (bf16 and f16) or 4 and 8 bits in groups of 32, 64 or 128 with scales and biases of x's type
    result     x's type

Arithmetic: products in the tensor cores with float32 sums over codes, which are exact; scales and biases in float32 per group; eight
warps take K by turns and their sums are added in one order; one rounding to the result's type. x of f32 is three numbers of bf16 that add
up to it, so nothing of it is lost. An output depends, to the bit, on its row of x and its row of the weights alone, for every M.

A norm before a product is folded into it: who makes x also makes x times the norm's weight (rounded once) and its sums of squares, and the
product is divided by the root of their mean at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from gnomon.kernels.cuda.sources import Kernel, capability, make

DENSE = 16
"""Number of bits that stands for dense weights."""
BITS = frozenset({4, 8, DENSE})
GROUPS = frozenset({32, 64, 128})
TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}
SCALED = {**TYPES, mx.float32: "float"}
"""Types of x where weights are quantised."""
MOST_ROWS = 32
WARPS = 8
"""Per block; they share K, so this number is part of the arithmetic."""
BLOCK = 32 * WARPS
PROCESSORS = 132
"""Of an H100 or H200; with another number only the balance is worse."""
SHARED_MEMORY = {80: 163, 87: 163, 90: 227, 100: 227, 101: 227, 103: 227, 110: 227}
"""Most KB that a block can have, by compute capability times ten; others have `LITTLE`."""
LITTLE = 99
ROWS_IN_LITTLE = 8


def shared_memory() -> int:
    """Most bytes that a block can have on this GPU."""
    return SHARED_MEMORY.get(capability(), LITTLE) * 1024


def most_rows() -> int:
    """Rows that kernels take on this GPU."""
    return MOST_ROWS if shared_memory() > LITTLE * 1024 else ROWS_IN_LITTLE


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one product. Dense ones have no scales; `bias` is added to the result."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    bits: int = DENSE
    group: int = 64

    @property
    def dtype(self) -> mx.Dtype:
        return self.weight.dtype if self.scales is None else self.scales.dtype

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1] if self.scales is None else self.weight.shape[1] * 32 // self.bits

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What kernels are made for: bits, group, whether there is a bias."""
        return self.bits, self.group, self.bias is not None

    def arrays(self) -> list[mx.array]:
        """As the kernels take them."""
        parts = (self.weight, self.scales, self.biases, self.bias)
        return [part for part in parts if part is not None]

    @staticmethod
    def of(layer: Any) -> Weights | None:
        """The weights of a linear layer or an embedding, or None if kernels don't take them."""
        bias = layer.get("bias")
        if type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            if layer.mode != "affine" or layer.get("biases") is None:
                return None
            made = Weights(layer["weight"], layer["scales"], layer["biases"], bias, layer.bits, layer.group_size)
        elif type(layer) in (nn.Linear, nn.Embedding):
            made = Weights(layer["weight"], bias=bias)
        else:
            return None
        return None if made.why_not() else made

    def why_not(self) -> str | None:
        """What keeps these weights from the kernels, or None."""
        if self.bits not in BITS or self.group not in GROUPS:
            return f"{self.bits} bits in groups of {self.group}"
        if self.dtype not in (TYPES if self.bits == DENSE else SCALED):
            return f"weights of {self.dtype}"
        if self.weight.ndim != 2 or self.inputs % 64 or self.inputs % self.group:
            return f"weights {self.weight.shape}"
        if self.scales is not None and (
            self.biases is None
            or self.biases.dtype != self.dtype
            or self.scales.shape != (self.outputs, self.inputs // self.group)
            or self.biases.shape != self.scales.shape
        ):
            return f"scales {self.scales.shape} of {self.scales.dtype}"
        if self.bias is not None and self.bias.dtype != self.dtype:
            return f"a bias of {self.bias.dtype}"
        return None


@dataclass(frozen=True, slots=True)
class Normed:
    """Rows times the weight of the norm before a product, and what the norm divides by: float32 sums of squares [M, stretches]."""

    rows: mx.array
    squares: mx.array
    eps: float


@dataclass(frozen=True, slots=True)
class Cut:
    """How a kernel cuts a product (`gnomon::Cut`). None of it changes a result's bits."""

    rows: int
    """Rows of x at most: 1, 8, 16 or 32."""
    tiles: int
    """Tiles of 16 rows of weights that a block takes at a time."""
    depth: int
    """Stages of 128 bytes per row of weights that a warp has under way."""
    stays: bool
    """Whether x is kept in shared memory or read where it is for every tile."""
    residents: int
    """Blocks per multiprocessor, so many that registers suffice."""

    def type(self) -> str:
        return f"gnomon::Cut<{self.rows}, {self.tiles}, {self.depth}, {'true' if self.stays else 'false'}>"

    def stage(self, bits: int, group: int, size: int = 2) -> int:
        """Bytes of weights that a warp takes at once (`gnomon::Stage::BYTES`); `size` is a scale's."""
        scales = 0 if bits == DENSE else max(4, size * (1024 // bits // group))
        return self.tiles * (2048 + 32 * scales)

    def shared_memory(self, bits: int, group: int, inputs: int, size: int = 2) -> int:
        """Bytes per block for rows of `inputs` weights whose scales take `size`."""
        values = 1024 // bits
        stages = -(-inputs // values)
        x = 2 * values * (1 + (WARPS * -(-stages // WARPS) * self.rows if self.stays else 0))
        sums = self.tiles * (16 if self.rows == 1 else 128 * (self.rows // 8)) * 4
        return WARPS * (self.depth * self.stage(bits, group, size) + 2 * sums) + x

    def blocks(self, sets: int) -> int:
        """Blocks for so many sets of tiles."""
        return min(sets, PROCESSORS * self.residents)

    @staticmethod
    def of(rows: int, weights: Weights, *, paired: bool = False, narrow: bool = False) -> Cut:
        """For that many rows of x. `paired` weights are two of which a block needs the same rows; `narrow` ones have few rows.

        The numbers were the fastest of those measured on an H200. Raises ValueError for more than 32 rows.
        """
        if not 1 <= rows <= MOST_ROWS:
            raise ValueError(f"rows must lie in 1..{MOST_ROWS}, got {rows}")
        bits = weights.bits
        if weights.dtype == mx.float32:  # x's three parts take registers
            return Cut(
                next(m for m in (1, 8, 16, 32) if rows <= m), 1 if narrow else 2, 2, False, 2 if rows <= 8 else 1
            )
        if rows == 1:
            if bits == DENSE:
                tiles, depth, residents = (2, 3, 2) if paired else (1, 4, 3)
            elif narrow:
                tiles, depth, residents = (1, 4, 2) if bits == 4 else (1, 3, 3)
            else:
                tiles, depth, residents = 2, 2 if bits == 4 else 3, 2
            cut = Cut(1, tiles, depth, True, residents)
            most = shared_memory() - 1024
            for other in (cut, replace(cut, stays=False)):
                if other.shared_memory(bits, weights.group, weights.inputs) <= most:
                    return other
            return replace(cut, stays=False, depth=2)
        if rows <= 8:
            return Cut(8, 2, 2, False, 2)
        if rows <= 16:
            wide = Cut(16, 4, 2, False, 1)
            fits = wide.shared_memory(bits, weights.group, weights.inputs) <= shared_memory()
            return wide if bits != DENSE and fits else Cut(16, 2, 2, False, 2)
        return Cut(32, 2, 2, False, 1)


def weight_names(i: int, kind: tuple[int, int, bool]) -> list[str]:
    """Names of a kernel's parameters for its weights number i, as `Weights.arrays` come."""
    bits, _, biased = kind
    return [f"w{i}", *([] if bits == DENSE else [f"s{i}", f"b{i}"]), *([f"c{i}"] if biased else [])]


def weight_part(i: int, kind: tuple[int, int, bool], dtype: str) -> str:
    """Those parameters as a `gnomon::Weights`."""
    bits, _, biased = kind
    scales = "nullptr, nullptr" if bits == DENSE else f"s{i}, b{i}"
    return f"gnomon::Weights<{dtype}>{{w{i}, {scales}, {f'c{i}' if biased else 'nullptr'}, w{i}_shape[0]}}"


def _make(
    name: str,
    inputs: list[str],
    outputs: list[str],
    body: str,
    kind: tuple[int, int, bool],
    dtype: mx.Dtype,
    cut: Cut,
    width: int,
) -> Kernel:
    bits, group, _ = kind
    body = f"""
  using Cut = {cut.type()};
  static_assert(gnomon::Stage<{bits}, {group}, Cut, {SCALED[dtype]}>::BYTES == {cut.stage(bits, group, dtype.size)});
{body}"""
    shared = cut.shared_memory(bits, group, width, dtype.size)
    return make(
        name,
        "linear.cuh",
        inputs,
        outputs,
        body,
        block=BLOCK,
        blocks_per_processor=cut.residents,
        shared_memory=shared,
        waits=True,
    )


@cache
def _plain(
    kinds: tuple[tuple[int, int, bool], ...], dtype: mx.Dtype, cut: Cut, width: int, eps: float | None
) -> Kernel:
    t, (bits, group, _) = SCALED[dtype], kinds[0]
    squares = "nullptr, 0, 0.0f" if eps is None else f"squares, squares_shape[1], {eps!r}f"
    body = f"""
  const gnomon::Weights<{t}> parts[] = {{{", ".join(weight_part(i, kind, t) for i, kind in enumerate(kinds))}}};
  gnomon::plain<{t}, {bits}, {group}, Cut, {len(kinds)}>(parts, x, x_shape[0], x_shape[1], {squares}, out);
"""
    names = [
        "x",
        *([] if eps is None else ["squares"]),
        *(n for i, kind in enumerate(kinds) for n in weight_names(i, kind)),
    ]
    return _make("plain", names, ["out"], body, kinds[0], dtype, cut, width)


def product(x: mx.array | Normed, *weights: Weights) -> mx.array:
    """x @ w.T (+ bias) for several weights of one kind, side by side: [M, all outputs]."""
    rows = x.rows if isinstance(x, Normed) else x
    first = weights[0]
    cut = Cut.of(rows.shape[0], first)
    eps = x.eps if isinstance(x, Normed) else None
    kernel = _plain(tuple(w.kind for w in weights), first.dtype, cut, first.inputs, eps)
    blocks = cut.blocks(sum(-(-w.outputs // (16 * cut.tiles)) for w in weights))
    return kernel(
        inputs=[rows, *([x.squares] if isinstance(x, Normed) else []), *(a for w in weights for a in w.arrays())],
        output_shapes=[(rows.shape[0], sum(w.outputs for w in weights))],
        output_dtypes=[first.dtype],
        grid=(blocks * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]


@cache
def _gated(kind: tuple[int, int, bool], dtype: mx.Dtype, cut: Cut, width: int, eps: float) -> Kernel:
    t, (bits, group, _) = SCALED[dtype], kind
    body = f"""
  gnomon::gated<{t}, {bits}, {group}, Cut>(
      {weight_part(0, kind, t)}, {weight_part(1, kind, t)}, x, x_shape[0], x_shape[1], squares, squares_shape[1], {eps!r}f, out);
"""
    return _make(
        "gated",
        ["x", "squares", *weight_names(0, kind), *weight_names(1, kind)],
        ["out"],
        body,
        kind,
        dtype,
        cut,
        width,
    )


def gated(x: Normed, gate: Weights, up: Weights) -> mx.array:
    """silu(x @ gate.T) * (x @ up.T)."""
    cut = Cut.of(x.rows.shape[0], gate, paired=True)
    return _gated(gate.kind, gate.dtype, cut, gate.inputs, x.eps)(
        inputs=[x.rows, x.squares, *gate.arrays(), *up.arrays()],
        output_shapes=[(x.rows.shape[0], gate.outputs)],
        output_dtypes=[gate.dtype],
        grid=(cut.blocks(-(-gate.outputs // (8 * cut.tiles))) * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]


@cache
def _add(kind: tuple[int, int, bool], dtype: mx.Dtype, cut: Cut, width: int) -> Kernel:
    t, (bits, group, _) = SCALED[dtype], kind
    body = f"""
  gnomon::add<{t}, {bits}, {group}, Cut>(
      {weight_part(0, kind, t)}, x, x_shape[0], x_shape[1], residual, norm, h, hw, squares);
"""
    names = ["x", "residual", "norm", *weight_names(0, kind)]
    return _make("add", names, ["h", "hw", "squares"], body, kind, dtype, cut, width)


def add(x: mx.array, weights: Weights, residual: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, Normed]:
    """residual + x @ w.T, and the same before the next product, whose norm has the weight `norm` [N]. N is a multiple of 16."""
    rows, outputs = x.shape[0], weights.outputs
    cut = Cut.of(rows, weights, narrow=True)
    h, hw, squares = _add(weights.kind, weights.dtype, cut, weights.inputs)(
        inputs=[x, residual, norm, *weights.arrays()],
        output_shapes=[(rows, outputs), (rows, outputs), (rows, outputs // 16)],
        output_dtypes=[weights.dtype, weights.dtype, mx.float32],
        grid=(cut.blocks(-(-outputs // (16 * cut.tiles))) * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )
    return h, Normed(hw, squares, eps)


@cache
def _embed(kind: tuple[int, int, bool], dtype: mx.Dtype, inputs: int) -> Kernel:
    t, (bits, group, _) = SCALED[dtype], kind
    body = f"""
  gnomon::embed<{t}, {bits}, {group}>(tokens, {weight_part(0, kind, t)}, norm_shape[0], norm, h, hw, squares);
"""
    return make(
        "embed",
        "linear.cuh",
        ["tokens", "norm", *weight_names(0, kind)],
        ["h", "hw", "squares"],
        body,
        block=inputs // 16,
    )


def embed(tokens: mx.array, table: Weights, norm: mx.array, eps: float) -> tuple[mx.array, Normed]:
    """Rows of an embedding table for int32 tokens [M], and the same before the first product."""
    rows, width = tokens.shape[0], table.inputs
    h, hw, squares = _embed(table.kind, table.dtype, width)(
        inputs=[tokens, norm, *table.arrays()],
        output_shapes=[(rows, width), (rows, width), (rows, width // 16)],
        output_dtypes=[table.dtype, table.dtype, mx.float32],
        grid=(rows * (width // 16), 1, 1),
        threadgroup=(width // 16, 1, 1),
    )
    return h, Normed(hw, squares, eps)


@cache
def _unpack(kind: tuple[int, int, bool], dtype: mx.Dtype) -> Kernel:
    t, (bits, group, _) = SCALED[dtype], kind
    body = f"""
  gnomon::unpack<{t}, {bits}, {group}>({weight_part(0, kind, t)}, (long long)w0_shape[0] * w0_shape[1], out);
"""
    return make("unpack", "linear.cuh", weight_names(0, kind), ["out"], body, block=BLOCK)


def unpack(weights: Weights) -> mx.array:
    """Quantised weights as [N, K] of their type, rounded once."""
    return _unpack((weights.bits, weights.group, False), weights.dtype)(
        inputs=weights.arrays()[:3],
        output_shapes=[(weights.outputs, weights.inputs)],
        output_dtypes=[weights.dtype],
        grid=(-(-weights.weight.size // BLOCK) * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]
