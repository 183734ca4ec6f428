"""Products with dense weights.

Contract of the native versions
    linear layers   x [..., K] @ weight [N, K].T (+ bias), all of one type (f32, f16, bf16): swapped classes, since the
                    operator `@` can't be dispatched
    gather_mm       x [..., M, K], b [E, K, N] with `rhs_indices`, any strides; fast where b is a transposed view, as expert layers have it
    result          MLX's result type

Arithmetic: as in `gnomon.kernels.quantized_matmul`, with weights widened to float32: rows of the result don't depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.dispatch import Operation, thread, uncovered
from gnomon.kernels.quantized_matmul import FLOATS


def reference(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight.T in float32, as MLX's result type."""
    return (x.astype(mx.float32) @ weight.astype(mx.float32).T).astype(mx.result_type(x, weight))


def _make_gather(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.gather_mm

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
            if (
                rhs_indices is not None
                and a.ndim >= 2
                and b.ndim == 3
                and a.shape[-1] == b.shape[1]
                and a.dtype in FLOATS
                and b.dtype in FLOATS
            ):
                return native(a, b, lhs_indices, rhs_indices, stream)
            uncovered("gather_mm", f"{a.shape} of {a.dtype} by {b.shape} of {b.dtype}")
        return stock(a, b, lhs_indices, rhs_indices, sorted_indices=sorted_indices, stream=stream)

    return gather_mm


OPERATIONS = (Operation("gather_mm", mx, "gather_mm", _make_gather, "dense experts of any float type"),)
