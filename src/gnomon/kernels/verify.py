"""Compare every native operation of this machine with float64, and every row with itself alone: `gnomon kernels verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from gnomon.kernels import integer
from gnomon.kernels.attention import CAUSAL

Array = NDArray[np.float64]
STEP = {mx.float32: 2.0**-149, mx.float16: 2.0**-24, mx.bfloat16: 2.0**-133}
"""Distance of subnormal numbers."""
EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
TYPES = (mx.float32, mx.bfloat16, mx.float16)


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. `error` is the largest difference to float64 as a share of its bound; `invariant`: rows alone had the same bits."""

    operation: str
    case: str
    isa: str
    error: float
    invariant: bool

    @property
    def passed(self) -> bool:
        return self.error <= 1.0 and self.invariant


def _wide(a: mx.array) -> Array:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def _random(*shape: int, seed: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _share(result: mx.array, expected: Array, magnitude: Array, terms: int, beyond: Array | float = 0.0) -> float:
    """The largest error over its bound: one rounding to the result's type, float32's growth over what was added up, and `beyond`."""
    bound = (
        beyond + EPSILON[result.dtype] * np.abs(expected) + 8 * 2.0**-23 * terms**0.5 * magnitude + STEP[result.dtype]
    )
    return float((np.abs(_wide(result) - expected) / bound).max())


def _same_alone(operation: Callable[[mx.array], mx.array], x: mx.array, whole: mx.array) -> bool:
    """Whether every row of `x` gives the bits it gives among the others."""
    alone = mx.concatenate([operation(x[i : i + 1]) for i in range(x.shape[0])])
    return bool(mx.array_equal(mx.view(alone, mx.uint8), mx.view(mx.contiguous(whole), mx.uint8)).item())


def _multiply(
    e: ModuleType, weights: tuple[mx.array, mx.array, mx.array], group: int, bits: int, *whole: bool
) -> Callable[[mx.array], mx.array]:
    """The product with packed weights, as a function of activations."""
    return lambda a: e.quantized_matmul(a, *weights, group, bits, *whole)


def _products(e: ModuleType) -> Iterator[tuple[str, str, float, bool]]:
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            for dtype in TYPES:
                w, s, b = mx.quantize(_random(37, 256, seed=bits, dtype=dtype), group, bits)
                x = _random(13, 256, seed=group, dtype=dtype)
                stream = np.unpackbits(np.array(w).view(np.uint8), axis=-1, bitorder="little").reshape(37, 256, bits)
                codes = stream.astype(np.float64) @ (1 << np.arange(bits))
                dense = codes * np.repeat(_wide(s), group, 1) + np.repeat(_wide(b), group, 1)
                case = f"{bits} bits, groups of {group}, {_name(dtype)}"
                sizes = codes * np.abs(np.repeat(_wide(s), group, 1)) + np.abs(np.repeat(_wide(b), group, 1))
                for name, activation in (("quantized_matmul", 16), ("int8", 8)):
                    product = _multiply(e, (w, s, b), group, bits, name == "int8")
                    y, rows = product(x), _wide(x)
                    if bits in integer.BITS:
                        seen, lost = (_wide(f(x, activation, group)) for f in (integer.rounded, integer.error))
                        error = _share(y, seen @ dense.T, np.abs(seen) @ sizes.T, 256)
                        beyond = lost @ np.abs(dense).T
                        error = max(error, _share(y, rows @ dense.T, np.abs(seen) @ sizes.T, 256, beyond))
                    elif name == "int8":
                        continue
                    else:
                        error = _share(y, rows @ dense.T, np.abs(rows) @ np.abs(dense).T, 256)
                    yield name, case, error, _same_alone(product, x, y)
    for dtype in TYPES:
        x, w = _random(13, 100, seed=1, dtype=dtype), _random(19, 100, seed=2, dtype=dtype)
        y, rows, dense = e.dense_matmul(x, w), _wide(x), _wide(w)
        error = _share(y, rows @ dense.T, np.abs(rows) @ np.abs(dense).T, 100)
        yield "matmul", _name(dtype), error, _same_alone(lambda a, w=w: e.dense_matmul(a, w), x, y)


def _rows(e: ModuleType) -> Iterator[tuple[str, str, float, bool]]:
    for dtype in TYPES:
        x, w = _random(5, 83, seed=3, dtype=dtype), _random(83, seed=4, dtype=dtype)
        rows = _wide(x)
        y = e.rms_norm(x, w, 1e-5)
        expected = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * _wide(w)
        error = _share(y, expected, np.abs(expected), 83)
        yield "rms_norm", _name(dtype), error, _same_alone(lambda a, w=w: e.rms_norm(a, w, 1e-5), x, y)
        y = e.layer_norm(x, w, None, 1e-5)
        unit = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
        error = _share(y, unit * _wide(w), (np.abs(unit) + 1) * np.abs(_wide(w)), 83)
        yield "layer_norm", _name(dtype), error, _same_alone(lambda a, w=w: e.layer_norm(a, w, None, 1e-5), x, y)
        y = e.gated(x, x, 0)
        expected = rows / (1 + np.exp(-rows)) * rows
        yield (
            "swiglu",
            _name(dtype),
            _share(y, expected, np.abs(expected), 1),
            _same_alone(lambda a: e.gated(a, a, 0), x, y),
        )
        y = e.logsumexp(x, True)
        expected = np.log(np.exp(rows).sum(-1, keepdims=True))
        error = _share(y, expected, np.abs(expected) + 1, 83)
        yield "logsumexp", _name(dtype), error, _same_alone(lambda a: e.logsumexp(a, True), x, y)


def _attention(e: ModuleType) -> Iterator[tuple[str, str, float, bool]]:
    for dtype in TYPES:
        for d, length, keys in ((64, 5, 70), (80, 1, 33), (20, 9, 9)):
            q = _random(3, 4, length, d, seed=5, dtype=dtype)
            k, v = (_random(3, 2, keys, d, seed=s, dtype=dtype) for s in (6, 7))
            wide_k, wide_v = (np.repeat(_wide(a), 2, 1) for a in (k, v))
            hidden = np.arange(keys)[None] > np.arange(keys - length, keys)[:, None]
            scores = np.where(hidden, -np.inf, _wide(q) @ wide_k.swapaxes(-1, -2) * d**-0.5)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            y = e.attention(q, k, v, d**-0.5, CAUSAL, None, None, 0, None)
            error = _share(y, p @ wide_v, (p @ np.abs(wide_v)) * 8, keys)
            # The last query alone, over the same keys.
            last = e.attention(q[:, :, -1:], k, v, d**-0.5, CAUSAL, None, None, 0, None)
            same = mx.array_equal(mx.contiguous(last).view(mx.uint8), mx.contiguous(y[:, :, -1:]).view(mx.uint8))
            yield "attention", f"causal, {length} of {keys}, heads of {d}, {_name(dtype)}", error, bool(same.item())


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def verify(extension: ModuleType) -> Iterator[Check]:
    """Check every operation on every instruction set of the build that this CPU has."""
    before = extension.isa()
    try:
        for isa in extension.isas():
            extension.set_isa(isa)
            for part in (_products, _rows, _attention):
                for operation, case, error, invariant in part(extension):
                    yield Check(operation, case, isa, error, invariant)
    finally:
        extension.set_isa(before)
