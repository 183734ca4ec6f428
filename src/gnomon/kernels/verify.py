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
from gnomon.kernels.codes import AFFINE, ROTATED, SHIFTED, Codes

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


DIM = 64
LEVELS = {bits: np.linspace(-2.4, 2.4, 2**bits) for bits in (3, 4)}
"""For ROTATED: any will do."""
SIGNS = (1.0, -1.0, -1.0, 1.0) * (DIM // 4)
PAIRS = (
    ((AFFINE, 8, 64), (AFFINE, 8, 64)),
    ((AFFINE, 4, 32), (AFFINE, 4, 64)),
    ((SHIFTED, 8, 32), (ROTATED, 3, 32)),
    ((SHIFTED, 4, 32), (ROTATED, 4, 32)),
)
"""Coding, bits and group of keys and of values."""


def _codes_of(coding: int, bits: int, group: int, dtype: mx.Dtype) -> Codes:
    if coding != ROTATED:
        return Codes(coding, bits, group, DIM, dtype if coding == AFFINE else mx.float16)
    levels = LEVELS[bits]
    bounds = (levels[1:] + levels[:-1]) / 2
    return Codes(coding, bits, group, DIM, mx.float16, tuple(levels.tolist()), tuple(bounds.tolist()), SIGNS)


def _hadamard() -> Array:
    """The orthogonal transform of ROTATED, in natural order."""
    places = np.arange(DIM)
    ones = np.array([[(i & j).bit_count() for j in places.tolist()] for i in places.tolist()])
    return (1.0 - 2.0 * (ones % 2)) / DIM**0.5


def _held(words: mx.array, codes: Codes) -> tuple[Array, Array]:
    """The numbers that words stand for (ROTATED: before they are turned back), and the scale of each element."""
    rows, size = np.array(words).view(np.uint8), DIM * codes.bits // 8
    stream = np.unpackbits(rows[..., :size], axis=-1, bitorder="little").reshape(*rows.shape[:-1], DIM, codes.bits)
    found = stream.astype(np.float64) @ (1 << np.arange(codes.bits))
    raw = np.ascontiguousarray(rows[..., size:])
    if codes.dtype == mx.bfloat16:
        numbers = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = raw.view(np.float32 if codes.dtype == mx.float32 else np.float16)
    numbers = np.repeat(numbers.astype(np.float64), codes.group, -1)
    scale, other = numbers[..., :DIM], numbers[..., DIM:]
    if codes.coding == AFFINE:
        return found * scale + other, scale
    if codes.coding == ROTATED:
        return np.array(codes.levels)[found.astype(int)] * scale, scale
    if codes.bits == 8:
        found = np.where(found > 127, found - 256, found)
    return (found + other) * scale, scale


def _coding_error(x: mx.array, words: mx.array, codes: Codes) -> float:
    """How far coded vectors are from the nearest codes, over its bound; of AFFINE infinity if the bits aren't those of `mx.quantize`."""
    if codes.coding == AFFINE:
        parts = mx.quantize(x, group_size=codes.group, bits=codes.bits)
        expected = mx.concatenate([mx.view(part, mx.uint8) for part in parts], axis=-1)
        return 0.0 if mx.array_equal(mx.view(words, mx.uint8), expected).item() else float("inf")
    held, scale = _held(words, codes)
    wide = _wide(x)
    if codes.coding == ROTATED:
        wide = wide * np.array(SIGNS) @ _hadamard()
        nearest = np.abs(wide[..., None] - scale[..., None] * np.array(codes.levels)).min(-1)
        bound = nearest + 2.0**-9 * np.abs(wide) + 1e-6
    else:
        bound = 0.52 * scale + 2.0**-9 * (np.abs(wide) + np.abs(held))
    return float((np.abs(held - wide) / bound).max())


def _coded(e: ModuleType) -> Iterator[tuple[str, str, float, bool]]:
    for pair in PAIRS:
        for dtype in TYPES:
            keys_of, values_of = (_codes_of(*one, dtype) for one in pair)
            x = [_random(2, 2, 70, DIM, seed=seed, dtype=dtype) for seed in (8, 9)]
            forms, words, held = list[object](), list[mx.array](), list[Array]()
            for codes, one in zip((keys_of, values_of), x, strict=True):
                tables = list(codes.levels), list(codes.bounds), list(codes.signs)
                form = e.CodesForm(
                    codes.coding,
                    codes.bits,
                    codes.group,
                    DIM,
                    {mx.float32: 0, mx.float16: 1}.get(codes.dtype, 2),
                    *tables,
                )
                forms.append(form)
                words.append(e.encode(one, form))
                held.append(_held(words[-1], codes)[0])
                case = f"{('affine', 'shifted', 'rotated')[codes.coding]}, {codes.bits} bits, {_name(dtype)}"
                error = _coding_error(one, words[-1], codes)
                yield "encode", case, error, _same_alone(lambda a, form=form: e.encode(a, form), one, words[-1])
            if values_of.coding == ROTATED:
                held[1] = held[1] @ _hadamard() * np.array(SIGNS)
            length, keys = 5, 70
            q = _random(2, 4, length, DIM, seed=7, dtype=dtype)
            wide_k, wide_v = (np.repeat(a, 2, 1) for a in held)
            hidden = np.arange(keys)[None] > np.arange(keys - length, keys)[:, None]
            scores = np.where(hidden, -np.inf, _wide(q) @ wide_k.swapaxes(-1, -2) * DIM**-0.5)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            # The last query alone goes through a kernel for few queries.
            y, last = (
                e.coded_attention(a, *words, *forms, keys, DIM**-0.5, CAUSAL, None, None, 0, None)
                for a in (q, q[:, :, -1:])
            )
            size = np.broadcast_to((p @ np.abs(wide_v)).max(-1, keepdims=True), y.shape)
            error = _share(y, p @ wide_v, size * 8, keys)
            same = mx.array_equal(mx.contiguous(last).view(mx.uint8), mx.contiguous(y[:, :, -1:]).view(mx.uint8))
            case = f"keys in {keys_of.bits} bits, values in {values_of.bits}, {_name(dtype)}"
            yield "coded_attention", case, error, bool(same.item())


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def verify(extension: ModuleType) -> Iterator[Check]:
    """Check every operation on every instruction set of the build that this CPU has."""
    before = extension.isa()
    try:
        for isa in extension.isas():
            extension.set_isa(isa)
            for part in (_products, _rows, _attention, _coded):
                for operation, case, error, invariant in part(extension):
                    yield Check(operation, case, isa, error, invariant)
    finally:
        extension.set_isa(before)
