"""Compare what lies between the products of a prompt's chunk with float64, and rows with themselves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from gnomon.kernels.cuda import attention, chunks
from gnomon.kernels.cuda.products import Weights
from gnomon.kernels.cuda.verify_experts import equal, poison
from gnomon.kernels.quantized_matmul import reference_rows
from gnomon.kernels.verify import EPSILON, Check, _name, _random, _share, _wide  # pyright: ignore[reportPrivateUsage]

ISA = "cuda"
EPS = 1e-5


def _unpacked(dtype: mx.Dtype, bits: int, group: int) -> Iterator[Check]:
    for outputs, inputs in (((48, 16, 16), 640), ((80, 80), 2048), ((31, 1, 7), 128), ((4112,), 256)):
        packed = [
            mx.quantize(_random(n, inputs, seed=n + bits + i, dtype=dtype), group, bits) for i, n in enumerate(outputs)
        ]
        parts = [Weights(*one, None, bits, group) for one in packed]
        poison()
        other = Weights(*mx.quantize(_random(24, 384, seed=bits, dtype=dtype), group, bits), None, bits, group)
        made, _, last = chunks.Unpacking([tuple(parts), (other,), tuple(parts[-1:])])()
        mx.eval(made, last)
        expected = np.concatenate([_wide(reference_rows(*one, group, bits)) for one in packed])
        scale = np.concatenate([_wide(mx.repeat(mx.abs(one[1]), group, axis=1)) for one in packed]) * 2**bits
        alone = mx.concatenate([chunks.Unpacking([(part,)])()[0] for part in parts])
        same = equal(made, alone) and equal(last, alone[-outputs[-1] :])
        case = f"{' + '.join(map(str, outputs))} x {inputs}, {bits} bits in groups of {group}, {_name(dtype)}"
        yield Check("unpack", case, ISA, _share(made, expected, scale, 1), same)


def _between(dtype: mx.Dtype) -> Iterator[Check]:
    for rows, width in ((1, 64), (5, 576), (37, 2048), (3, 5000 // 8 * 8)):
        y, residual = (4 * _random(rows, width, seed=seed, dtype=dtype) for seed in (1, 2))
        weight = _random(width, seed=3, dtype=dtype)
        poison()
        h, x = chunks.add_and_norm(y, residual, weight, EPS)
        mx.eval(h, x)
        total, kept = _wide(y) + _wide(residual), _wide(h)
        expected = kept / np.sqrt((kept**2).mean(-1, keepdims=True) + EPS) * _wide(weight)
        error = max(_share(h, total, np.abs(total), 1), _share(x, expected, np.abs(expected), width))
        last = chunks.add_and_norm(y[-1:], residual[-1:], weight, EPS)
        case = f"{rows} x {width}, {_name(dtype)}"
        yield Check("add_and_norm", case, ISA, error, equal(last[0], h[-1:]) and equal(last[1], x[-1:]))
        poison()
        out = chunks.gate_and_multiply([y, residual])
        gate = _wide(y)
        expected = gate / (1.0 + np.exp(-gate)) * _wide(residual)
        error = _share(out, expected, np.abs(expected), 1, 2.0**-17 * np.abs(expected))
        together = chunks.gate_and_multiply([mx.concatenate([y, residual], axis=1)])
        same = equal(together, out) and equal(chunks.gate_and_multiply([y[-1:], residual[-1:]]), out[-1:])
        yield Check("gate_and_multiply", case, ISA, error, same)


def _heads(
    size: int, q_heads: int, kv_heads: int, traditional: bool, normed: bool, biased: bool, dtype: mx.Dtype
) -> Iterator[Check]:
    form = attention.Form(q_heads, kv_heads, size, 1.0, traditional, normed, 1e-6)
    heads, offsets = (q_heads, kv_heads, kv_heads), [0, 1000, 17]
    inverse = mx.exp(-mx.arange(size // 2, dtype=mx.float32) * (np.log(5e5) / (size // 2)))
    norms = (_random(size, seed=1, dtype=dtype), _random(size, seed=2, dtype=dtype)) if normed else None
    for length in (17, 40):
        parts = [_random(3 * length, n * size, seed=7 + i, dtype=dtype) for i, n in enumerate(heads)]
        biases = [_random(n * size, seed=9 + i, dtype=dtype) if biased else None for i, n in enumerate(heads)]
        poison()
        made = chunks.place_heads(form, parts, biases, norms, mx.array(offsets), inverse)
        mx.eval(made)
        error = 0.0
        for i, (x, bias, out) in enumerate(zip(parts, biases, made, strict=True)):
            raw = _wide(x if bias is None else x + bias).reshape(3, length, heads[i], size).transpose(0, 2, 1, 3)
            if norms is not None and i < 2:
                normal = raw / np.sqrt((raw**2).mean(-1, keepdims=True) + 1e-6) * _wide(norms[i])
                raw = _wide(mx.array(normal).astype(dtype))
            expected, magnitude = _turn(raw, offsets, inverse, traditional) if i < 2 else (raw, np.abs(raw))
            beyond = EPSILON[dtype] * magnitude if normed else 2.0**-20 * magnitude
            error = max(error, _share(out, expected, magnitude, 1, beyond))
        whole = mx.concatenate(parts, axis=1)
        one = whole[length : 2 * length]
        alone = chunks.place_heads(form, [one], biases, norms, mx.array(offsets[1:2]), inverse)
        together = chunks.place_heads(form, [whole], biases, norms, mx.array(offsets), inverse)
        same = all(equal(a, m) and equal(b, m[1:2]) for a, b, m in zip(together, alone, made, strict=True))
        more = (
            f"{', head norms' if normed else ''}{', biases' if biased else ''}{', neighbours' if traditional else ''}"
        )
        yield Check(
            "place_heads", f"{length} x {q_heads} + {kv_heads} of {size}{more}, {_name(dtype)}", ISA, error, same
        )


def _turn(x: np.ndarray, offsets: list[int], inverse: mx.array, traditional: bool) -> tuple[np.ndarray, np.ndarray]:
    """[B, heads, L, D] rotated in float64, and how much was added up."""
    positions = mx.array(offsets)[:, None] + mx.arange(x.shape[2])
    angle = _wide(positions.astype(mx.float32)[..., None] * inverse)[:, None]
    cosine, sine = np.cos(angle), np.sin(angle)
    half = x.shape[-1] // 2
    a, b = (slice(0, None, 2), slice(1, None, 2)) if traditional else (slice(0, half), slice(half, None))
    y, magnitude = np.empty_like(x), np.empty_like(x)
    y[..., a], y[..., b] = x[..., a] * cosine - x[..., b] * sine, x[..., a] * sine + x[..., b] * cosine
    magnitude[..., a] = magnitude[..., b] = np.abs(x[..., a]) + np.abs(x[..., b])
    return y, magnitude


def parts() -> list[Callable[[], Iterator[Check]]]:
    """All checks in parts that several processes may share."""
    found: list[Callable[[], Iterator[Check]]] = []
    for dtype in (mx.bfloat16, mx.float32):
        found += [partial(_unpacked, dtype, *kind) for kind in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128))]
        found.append(partial(_between, dtype))
        found += [
            partial(_heads, *form, dtype)
            for form in (
                (64, 9, 3, False, False, False),
                (128, 4, 2, False, True, False),
                (128, 2, 2, True, False, True),
                (256, 4, 1, False, True, True),
            )
        ]
    return found
