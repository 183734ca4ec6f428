"""Operations of `mlx.core` that have a version for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.cuda import coded, experts, prompts, recurrent, windows
from gnomon.kernels.cuda.products import SCALED, TYPES, Weights, most_rows, product, unpack
from gnomon.kernels.cuda.wide import ROWS, wide
from gnomon.kernels.dispatch import Operation, thread, uncovered


def quantized_matmul(x: mx.array, weights: Weights, *, stream: Any = None) -> mx.array:
    """x [..., K] @ weights.T: up to 64 rows by our own kernels; more by matrix products. Above 32, weights are rounded to x's type."""
    rows = x.size // x.shape[-1]
    if rows <= most_rows():
        return product(x.reshape(rows, -1), weights).reshape(*x.shape[:-1], weights.outputs)
    if rows <= ROWS and weights.dtype in TYPES:
        return wide(x.reshape(rows, -1), weights).reshape(*x.shape[:-1], weights.outputs)
    return mx.matmul(x, unpack(weights).T, stream=stream)


def _make(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:  # noqa: ARG001  (no extension)
    def dispatch(
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
            if not transpose or mode != "affine" or biases is None:
                why = f"mode {mode}" if transpose else "weights that aren't transposed"
            elif x.dtype != scales.dtype or x.dtype not in SCALED or not x.size:
                why = f"activations {x.shape} of {x.dtype} with scales of {scales.dtype}"
            else:
                weights = Weights(w, scales, biases, None, bits or 4, group_size or 64)
                why = weights.why_not()
                if why is None and x.shape[-1] != weights.inputs:
                    why = f"activations {x.shape} for weights of {weights.inputs}"
                if why is None:
                    return quantized_matmul(x, weights, stream=stream)
            uncovered("quantized_matmul", why)
        return stock(x, w, scales, biases, transpose, group_size, bits, mode, stream=stream)

    return dispatch


ALL: tuple[Operation, ...] = (
    Operation(
        "quantized_matmul", mx, "quantized_matmul", _make, "affine, bits 4 8, groups 32 64 128, bf16 f16 f32, any rows"
    ),
    *windows.OPERATIONS,
    *coded.OPERATIONS,
    *prompts.OPERATIONS,
    *experts.OPERATIONS,
    *recurrent.OPERATIONS,
)
