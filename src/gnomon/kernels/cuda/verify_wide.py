"""Compare products of many rows with quantised weights with float64, and rows with themselves alone."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from gnomon.kernels.cuda.products import Weights
from gnomon.kernels.cuda.verify_experts import equal, poison
from gnomon.kernels.cuda.wide import splits_of, wide
from gnomon.kernels.quantized_matmul import reference_rows
from gnomon.kernels.verify import Check, _name, _random, _share, _wide  # pyright: ignore[reportPrivateUsage]

ISA = "cuda"


def verify_wide() -> Iterator[Check]:
    """Products of 1 to 200 rows; weights are rounded to the type first, as the contract says."""
    for dtype in (mx.bfloat16, mx.float16):
        for bits, group in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)):
            if dtype == mx.float16 and group != 64:
                continue
            for n, k in ((80, 640), (272, 2048), (34000, 256)):
                w = _random(n, k, seed=bits + group, dtype=dtype)
                packed, scales, biases = mx.quantize(w, group, bits)
                bias = _random(n, seed=3, dtype=dtype) if k == 640 else None
                weights = Weights(packed, scales, biases, bias, bits, group)
                dense = _wide(reference_rows(packed, scales, biases, group, bits).astype(dtype))
                x = _random(200, k, seed=k, dtype=dtype)
                alone = mx.concatenate([wide(x[i : i + 1], weights) for i in (0, 64, 199)])
                for rows in (1, 65, 200):
                    poison()
                    y = wide(x[:rows], weights)
                    exact = _wide(x[:rows])
                    expected, size = exact @ dense.T, np.abs(exact) @ np.abs(dense).T
                    if bias is not None:
                        expected, size = expected + _wide(bias), size + np.abs(_wide(bias))
                    picked = [i for i in (0, 64, 199) if i < rows]
                    same = equal(y[mx.array(picked)], alone[: len(picked)])
                    case = f"{rows} x {k} by {n}, {splits_of(n, k)} splits, {bits} bits in groups of {group}, {_name(dtype)}"
                    yield Check("wide product", case, ISA, _share(y, expected, size, k), same)
