"""Compare products of 33 rows and more with quantised weights with float64, and rows with themselves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from gnomon.kernels.cuda.products import Weights
from gnomon.kernels.cuda.verify_experts import equal, poison
from gnomon.kernels.cuda.wide import splits_of, wide
from gnomon.kernels.quantized_matmul import reference_rows
from gnomon.kernels.verify import Check, _name, _random, _share, _wide  # pyright: ignore[reportPrivateUsage]

ISA = "cuda"


def _wide_products(dtype: mx.Dtype, bits: int, group: int) -> Iterator[Check]:
    for n, k in ((80, 640), (272, 2048), (34000, 256)):
        w = _random(n, k, seed=bits + group, dtype=dtype)
        packed, scales, biases = mx.quantize(w, group, bits)
        bias = _random(n, seed=3, dtype=dtype) if k == 640 else None
        weights = Weights(packed, scales, biases, bias, bits, group)
        dense = _wide(reference_rows(packed, scales, biases, group, bits).astype(dtype))
        x = _random(130, k, seed=k, dtype=dtype)
        alone = mx.concatenate([wide(x[i : i + 1], weights) for i in (0, 32, 63, 129)])
        for rows in (33, 64, 130):
            poison()
            y = wide(x[:rows], weights)
            exact = _wide(x[:rows])
            expected, size = exact @ dense.T, np.abs(exact) @ np.abs(dense).T
            if bias is not None:
                expected, size = expected + _wide(bias), size + np.abs(_wide(bias))
            picked = [i for i in (0, 32, 63, 129) if i < rows]
            same = equal(y[mx.array(picked)], alone[: len(picked)])
            case = f"{rows} x {k} by {n}, {splits_of(n, k)} splits, {bits} bits in groups of {group}, {_name(dtype)}"
            yield Check("wide product", case, ISA, _share(y, expected, size, k), same)


def parts() -> list[Callable[[], Iterator[Check]]]:
    """All checks in parts that several processes may share. Weights are rounded to the type first, as the contract says."""
    kinds = [(mx.bfloat16, bits, group) for bits in (4, 8) for group in (32, 64, 128)]
    return [partial(_wide_products, *kind) for kind in (*kinds, (mx.float16, 4, 64), (mx.float16, 8, 64))]
