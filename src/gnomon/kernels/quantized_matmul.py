"""Products with affine-quantised weights: plain, per expert, and rows of an embedding; and the values of codes.

Contract of the native versions
    w            [N, K * bits / 32] uint32 as `mx.quantize` packs it ([E, N, ..] for experts); copied per call if not contiguous
    scales       [N, K / group], f32, f16 or bf16; biases alike
    bits, group  2, 3, 4, 5, 6, 8; 32, 64, 128; mode "affine", transposed
    x            [..., K] f32, f16 or bf16, any strides, broadcast or not
    result       MLX's result type of x and scales; of dequantize, the type of scales, [..., K] for w and scales of any strides

Arithmetic, 2, 3, 5 and 6 bits: a weight is fma(code, scale, bias) in float32, x is widened, an output is 16 float32 partial sums over K in
a fixed order by fused multiply-add, added by a fixed tree, rounded once to the result's type. 4 and 8 bits: in whole numbers, as `integer`
says, with activations of 16 bits, or of 8 with `--kernels int8`. Either way an output depends, to the bit, on its row of x and its row of w
alone; not on the number of rows, their order, chunks, threads, and not on the instruction set (AVX-512, AVX2 and NEON agree; the portable
one, which has no fused multiply-add, does not).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.dispatch import Operation, thread, uncovered

BITS = frozenset({2, 3, 4, 5, 6, 8})
GROUPS = frozenset({32, 64, 128})
FLOATS = frozenset({mx.float32, mx.float16, mx.bfloat16})


def reference(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int) -> mx.array:
    """The product in plain MLX operations: `x @ (codes * scales + biases).T` in float32, as MLX's result type."""
    dense = reference_rows(w, scales, biases, group, bits)
    return (x.astype(mx.float32) @ dense.T).astype(mx.result_type(x, scales))


def reference_rows(w: mx.array, scales: mx.array, biases: mx.array, group: int, bits: int) -> mx.array:
    """The weights as float32 [N, K]."""
    bit = mx.arange(32, dtype=mx.uint32)
    stream = ((w[..., None] >> bit) & 1).reshape(w.shape[0], -1, bits)
    codes = (stream << mx.arange(bits, dtype=mx.uint32)).sum(-1).astype(mx.float32)
    wide = codes.reshape(w.shape[0], -1, group)
    s, b = scales.astype(mx.float32)[..., None], biases.astype(mx.float32)[..., None]
    return (wide * s + b).reshape(w.shape[0], -1)


def why_not(
    w: mx.array, scales: mx.array, biases: mx.array | None, group: int | None, bits: int | None, mode: str, ndim: int
) -> str | None:
    """What keeps weights from the native versions, or None. `ndim` is 2, or 3 for experts."""
    if mode != "affine" or biases is None:
        return f"mode {mode}"
    if bits not in BITS or group not in GROUPS:
        return f"{bits} bits in groups of {group}"
    if w.ndim != ndim or scales.ndim != ndim:
        return f"{w.ndim} dimensions of weights"
    if scales.dtype not in FLOATS or biases.dtype != scales.dtype:
        return f"scales of {scales.dtype}, biases of {biases.dtype}"
    if scales.shape[-1] * group * bits != w.shape[-1] * 32 or biases.shape != scales.shape:
        return f"weights {w.shape} with scales {scales.shape}"
    return None


def _make(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.quantized_matmul

    def quantized_matmul(
        x: mx.array,
        w: mx.array,
        /,
        scales: mx.array,
        biases: mx.array | None = None,
        transpose: bool = True,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        *,
        stream: Any = None,
    ) -> mx.array:
        if thread.active:
            group, width = group_size or 64, bits or 4
            why = why_not(w, scales, biases, group, width, mode, 2) if transpose else "weights that aren't transposed"
            if why is None and x.ndim and x.dtype in FLOATS and x.shape[-1] == scales.shape[-1] * group:
                return native(x, w, scales, biases, group, width, thread.integer, stream=stream)
            uncovered("quantized_matmul", why or f"activations {x.shape} of {x.dtype}")
        return stock(x, w, scales, biases, transpose, group_size, bits, mode, stream=stream)

    return quantized_matmul


def _make_gather(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.gather_qmm

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
            group, width = group_size or 64, bits or 4
            why = why_not(w, scales, biases, group, width, mode, 3) if transpose else "weights that aren't transposed"
            if (
                why is None
                and rhs_indices is not None
                and x.ndim >= 2
                and x.dtype in FLOATS
                and x.shape[-1] == scales.shape[-1] * group
            ):
                return native(
                    x, w, scales, biases, lhs_indices, rhs_indices, group, width, thread.integer, stream=stream
                )
            uncovered("gather_qmm", why or f"activations {x.shape} of {x.dtype}")
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


def _make_dequantize(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.dequantise

    def dequantize(
        w: mx.array,
        /,
        scales: mx.array,
        biases: mx.array | None = None,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        global_scale: mx.array | None = None,
        dtype: mx.Dtype | None = None,
        *,
        stream: Any = None,
    ) -> mx.array:
        if thread.active and dtype in (None, scales.dtype) and scales.ndim:
            group, width = group_size or 64, bits or 4
            why = why_not(w, scales, biases, group, width, mode, scales.ndim)
            if why is None and w.shape[:-1] == scales.shape[:-1]:
                return native(w, scales, biases, group, width, stream)
            uncovered("dequantize", why or f"codes {w.shape} with scales {scales.shape}")
        return stock(w, scales, biases, group_size, bits, mode, global_scale, dtype, stream=stream)

    return dequantize


OPERATIONS = (
    Operation("dequantize", mx, "dequantize", _make_dequantize, "the same codes, of any shape and strides"),
    Operation(
        "quantized_matmul",
        mx,
        "quantized_matmul",
        _make,
        "affine, bits 2 3 4 5 6 8 (4 and 8 in whole numbers), groups 32 64 128, any rows",
    ),
    Operation("gather_qmm", mx, "gather_qmm", _make_gather, "the same per expert"),
)
