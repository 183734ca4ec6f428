"""Compare the CUDA kernels with float64 on this GPU, and rows with themselves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from gnomon.kernels.cuda import (
    attention,
    products,
    verify_chunks,
    verify_codes,
    verify_experts,
    verify_wide,
    verify_windows,
)
from gnomon.kernels.cuda.products import Normed, Weights
from gnomon.kernels.verify import Array, Check, _name, _random, _share, _wide  # pyright: ignore[reportPrivateUsage]

ISA = "cuda"
ROWS = (1, 3, 8, 11, 16, 32)


def _weights(bits: int, group: int, n: int, k: int, dtype: mx.Dtype, seed: int) -> tuple[Weights, Array]:
    """Weights, and what they are in float64 [N, K]."""
    w = _random(n, k, seed=seed, dtype=dtype)
    if bits == products.DENSE:
        return Weights(w), _wide(w)
    packed, s, b = mx.quantize(w, group, bits)
    stream = np.unpackbits(np.array(packed).view(np.uint8), axis=-1, bitorder="little").reshape(n, k, bits)
    codes = stream.astype(np.float64) @ (1 << np.arange(bits))
    return (
        Weights(packed, s, b, None, bits, group),
        codes * np.repeat(_wide(s), group, 1) + np.repeat(_wide(b), group, 1),
    )


def _bits(x: mx.array) -> NDArray[np.unsignedinteger[Any]]:
    return np.array(mx.contiguous(x).view(mx.uint16 if x.dtype.size == 2 else mx.uint32))


def _products(dtype: mx.Dtype, bits: int, group: int) -> Iterator[Check]:
    for n, k in ((80, 640), (272, 4096)) if dtype != mx.float32 else ((80, 576 if group < 128 else 640), (80, 1536)):
        weights, dense = _weights(bits, group, n, k, dtype, bits + group)
        kind = "dense" if bits == products.DENSE else f"{bits} bits in groups of {group}"
        if bits != products.DENSE:
            error = _share(products.unpack(weights), dense, np.abs(dense), 1)
            yield Check("unpack", f"{k} by {n}, {kind}, {_name(dtype)}", ISA, error, True)
        x = _random(max(ROWS), k, seed=k, dtype=dtype)
        wide = _wide(x)
        alone = np.concatenate([_bits(products.product(x[i : i + 1], weights)) for i in range(max(ROWS))])
        for rows in ROWS:
            y = products.product(x[:rows], weights)
            error = _share(y, wide[:rows] @ dense.T, np.abs(wide[:rows]) @ np.abs(dense).T, k)
            same = bool((_bits(y) == alone[:rows]).all())
            yield Check("product", f"{rows} x {k} by {n}, {kind}, {_name(dtype)}", ISA, error, same)


def _fused(dtype: mx.Dtype, bits: int, group: int) -> Iterator[Check]:
    n, k, eps = 128, 256, 1e-5
    q, dense_q = _weights(bits, group, n, k, dtype, 1)
    v, dense_v = _weights(bits, group, 48, k, dtype, 2)
    down, dense_down = _weights(bits, group, k, n, dtype, 3)
    table, dense_table = _weights(bits, group, 50, k, dtype, 4)
    norm = 1 + 0.1 * _random(k, seed=5, dtype=dtype)
    for rows in (1, 5, 16, 32):
        tokens = (mx.arange(rows, dtype=mx.int32) * 7) % 50
        h, x = products.embed(tokens, table, norm, eps)
        expected = dense_table[np.array(tokens)]
        yield Check("embed", f"{rows} rows, {bits} bits", ISA, _share(h, expected, np.abs(expected), 1), True)
        wide, scaled = _wide(h), _wide(x.rows)
        yield _close("embed, times norm", rows, bits, x.rows, wide * _wide(norm), np.abs(wide * _wide(norm)), 1)
        factor = 1 / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
        y = products.product(x, q, v)
        both = np.concatenate([dense_q, dense_v])
        expected = scaled * factor @ both.T
        yield _close("norm and products", rows, bits, y, expected, np.abs(scaled * factor) @ np.abs(both).T, k)
        a = products.gated(x, q, q)
        gate, size = scaled * factor @ dense_q.T, np.abs(scaled * factor) @ np.abs(dense_q).T
        # A silu's slope is below 1.1, and the product's errors add up.
        expected = gate / (1 + np.exp(-gate)) * gate
        yield _close("gated", rows, bits, a, expected, (1 + np.abs(gate)) * size * 3 + np.abs(expected), k)
        h2, x2 = products.add(a, down, h, norm, eps)
        expected = _wide(h) + _wide(a) @ dense_down.T
        yield _close("add", rows, bits, h2, expected, np.abs(_wide(a)) @ np.abs(dense_down).T + np.abs(wide), n)
        sums = _wide(x2.squares).sum(-1)
        squares = (_wide(h2) ** 2).sum(-1)
        yield Check(
            "add, squares", f"{rows} rows, {bits} bits", ISA, float(np.abs(sums / squares - 1).max() / 1e-5), True
        )
        alone = [products.add(a[i : i + 1], down, h[i : i + 1], norm, eps)[0] for i in range(rows)]
        same = bool((_bits(mx.concatenate(alone)) == _bits(h2)).all())
        alone = [products.product(Normed(x.rows[i : i + 1], x.squares[i : i + 1], eps), q, v) for i in range(rows)]
        same = same and bool((_bits(mx.concatenate(alone)) == _bits(y)).all())
        yield Check("fused, rows alone", f"{rows} rows, {bits} bits", ISA, 0.0, same)


def _close(operation: str, rows: int, bits: int, y: mx.array, expected: Array, magnitude: Array, terms: int) -> Check:
    return Check(operation, f"{rows} rows, {bits} bits", ISA, _share(y, expected, magnitude, terms), True)


def _attention(
    size: int, q_heads: int, kv_heads: int, normed: bool, traditional: bool, dtype: mx.Dtype
) -> Iterator[Check]:
    lengths = [0, 1, 5, 127, 128, 300, 1000, 5000]
    slots, batch = 5120, len(lengths)
    form = attention.Form(q_heads, kv_heads, size, size**-0.5, traditional, normed, 1e-6)
    inverse = mx.exp(-mx.arange(size // 2, dtype=mx.float32) * (9.0 / (size // 2)))
    norms = None
    if normed:
        norms = (
            1 + 0.1 * _random(size, seed=8, dtype=dtype),
            1 + 0.1 * _random(size, seed=9, dtype=dtype),
        )
    qkv = _random(batch, (q_heads + 2 * kv_heads) * size, seed=size, dtype=dtype)
    keys, values = (_random(batch + 1, kv_heads, slots, size, seed=s, dtype=dtype) for s in (6, 7))
    counters = mx.zeros(64 * batch, dtype=mx.int32)
    mx.eval(qkv, keys, values, counters, inverse)
    before_k, before_v = _wide(keys), _wide(values)
    heads = _wide(qkv).reshape(batch, -1, size)
    y = attention.attend(form, qkv, keys, values, mx.array(lengths, dtype=mx.int32), inverse, counters, norms)
    mx.eval(y)
    expected = np.zeros((batch, q_heads, size))
    share = 0.0
    intact = True
    fine = 1.0 if dtype == mx.bfloat16 else 2.0**-9
    for b, length in enumerate(lengths):
        q = _turned(heads[b, :q_heads], norms and norms[0], length, inverse, traditional)
        k = _turned(heads[b, q_heads : q_heads + kv_heads], norms and norms[1], length, inverse, traditional)
        stored = np.array(keys[b, :, length].astype(mx.float32)).astype(np.float64)
        share = max(share, float((np.abs(stored - k) / (fine * (2.0**-7 * np.abs(k) + 2.0**-6))).max()))
        v = heads[b, q_heads + kv_heads :]
        intact = intact and bool((_wide(values[b, :, length]) == v).all())
        intact = intact and bool((_wide(keys[b, :, :length]) == before_k[b, :, :length]).all())
        intact = intact and bool((_wide(values[b, :, length + 1 :]) == before_v[b, :, length + 1 :]).all())
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            all_k = np.concatenate([before_k[b, g, :length], stored[g][None]])
            all_v = np.concatenate([before_v[b, g, :length], v[g][None]])
            scores = all_k @ q[h] * form.scale
            p = np.exp(scores - scores.max())
            expected[b, h] = (p / p.sum()) @ all_v
    case = f"{q_heads} of {kv_heads} heads of {size}{', head norms' if normed else ''}, {_name(dtype)}"
    yield Check("append", case, ISA, share, intact)
    difference = np.abs(_wide(y).reshape(batch, q_heads, size) - expected)
    bound = fine * (2.0**-7 * np.abs(expected) + (2.0**-5 if normed else 2.0**-9))
    alone: list[mx.array] = []
    for b, length in enumerate(lengths):
        alone.append(
            attention.attend(
                form,
                qkv[b : b + 1],
                mx.contiguous(keys[b : b + 1, :, : length // 256 * 256 + 256]),
                mx.contiguous(values[b : b + 1, :, : length // 256 * 256 + 256]),
                mx.array([length], dtype=mx.int32),
                inverse,
                counters,
                norms,
            )
        )
        mx.eval(alone[-1])
    same = bool((_bits(mx.concatenate(alone)) == _bits(y)).all()) and not bool(counters.any().item())
    yield Check("attention", case, ISA, float((difference / bound).max()), same)


def window_places(lengths: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int]]:
    """Rows and positions of a window of so many tokens behind each row."""
    return [
        (row, length + i) for row, (length, width) in enumerate(zip(lengths, widths, strict=True)) for i in range(width)
    ]


def _appended(
    size: int, q_heads: int, kv_heads: int, normed: bool, traditional: bool, dtype: mx.Dtype
) -> Iterator[Check]:
    """Windows have the bits of their tokens one by one, and leave the same buffers."""
    lengths, widths = [0, 1, 126, 300, 4093, 5000], [3, 1, 5, 2, 6, 7]
    slots, places = 5120, window_places(lengths, widths)
    form = attention.Form(q_heads, kv_heads, size, size**-0.5, traditional, normed, 1e-6)
    inverse = mx.exp(-mx.arange(size // 2, dtype=mx.float32) * (9.0 / (size // 2)))
    norms = None
    if normed:
        norms = (1 + 0.1 * _random(size, seed=8, dtype=dtype), 1 + 0.1 * _random(size, seed=9, dtype=dtype))
    qkv = _random(len(places), (q_heads + 2 * kv_heads) * size, seed=size, dtype=dtype)
    counters = mx.zeros(64 * 32, dtype=mx.int32)

    def buffers() -> list[mx.array]:
        ends = mx.array(lengths)[:, None, None, None]
        is_old = mx.arange(slots)[None, None, :, None] < ends
        random = [_random(len(lengths), kv_heads, slots, size, seed=s, dtype=dtype) for s in (6, 7)]
        made = [mx.where(is_old, one, mx.array(float("nan"), dtype=dtype)) for one in random]
        mx.eval(made, qkv, counters, inverse)
        return made

    single, whole = buffers(), buffers()
    alone: list[mx.array] = []
    for i, (row, at) in enumerate(places):
        own = [mx.contiguous(buffer[row : row + 1]) for buffer in single]
        n = mx.array([at], dtype=mx.int32)
        alone.append(attention.attend(form, qkv[i : i + 1], own[0], own[1], n, inverse, counters, norms))
        mx.eval(alone[-1])
        for buffer, one in zip(single, own, strict=True):
            buffer[row, :, at] = one[0, :, at]
        mx.eval(single)
    for size_of in (len(places), 32):
        spots = mx.array(attention.spots(places, size_of), dtype=mx.int32)
        fed = mx.concatenate([qkv, mx.broadcast_to(qkv[-1:], (size_of - len(places), qkv.shape[1]))])
        y = attention.attend(form, fed, whole[0], whole[1], spots, inverse, counters, norms, True)
        mx.eval(y)
        same = bool((_bits(y[: len(places)]) == _bits(mx.concatenate(alone))).all())
        same = same and all((_bits(a) == _bits(b)).all() for a, b in zip(single, whole, strict=True))
        same = same and bool(mx.isfinite(y).all().item()) and not bool(counters.any().item())
        case = f"{size_of} tokens, {q_heads} of {kv_heads} heads of {size}{', head norms' if normed else ''}, {_name(dtype)}"
        yield Check("append and attend windows", case, ISA, 0.0, same)


def _turned(x: Array, norm: mx.array | None, position: int, inverse: mx.array, traditional: bool) -> Array:
    """Head norm, if there is one, and rotation of [heads, D] in float64."""
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * _wide(norm)
    angle = _wide(mx.array(position, dtype=mx.float32) * inverse)
    cosine, sine = np.cos(angle), np.sin(angle)
    half = x.shape[-1] // 2
    y = np.empty_like(x)
    a, b = (slice(0, None, 2), slice(1, None, 2)) if traditional else (slice(0, half), slice(half, None))
    y[:, a], y[:, b] = x[:, a] * cosine - x[:, b] * sine, x[:, a] * sine + x[:, b] * cosine
    return y


def parts() -> list[Callable[[], Iterator[Check]]]:
    """All checks in parts that several processes may share: most of the time goes to compiling kernels."""
    found: list[Callable[[], Iterator[Check]]] = []
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        for bits, group in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (products.DENSE, 64)):
            if not (dtype == mx.float16 and group != 64) and not (dtype == mx.float32 and bits == products.DENSE):
                found.append(partial(_products, dtype, bits, group))
    found += [partial(_fused, mx.bfloat16, bits, 64) for bits in (4, 8, products.DENSE)]
    found += [partial(_fused, mx.float32, bits, 32) for bits in (4, 8)]
    found += [
        partial(check, *form)
        for check in (_attention, _appended)
        for form in (
            (128, 8, 2, False, False, mx.bfloat16),
            (64, 9, 3, False, False, mx.bfloat16),
            (64, 8, 8, False, True, mx.bfloat16),
            (128, 16, 2, True, False, mx.bfloat16),
            (256, 4, 2, False, False, mx.bfloat16),
            (64, 9, 3, False, False, mx.float32),
            (128, 16, 2, True, False, mx.float32),
        )
    ]
    found += [verify_windows.verify, *(partial(verify_codes.verify, [case]) for case in verify_codes.CASES)]
    return [*found, *verify_chunks.parts(), *verify_wide.parts(), *verify_experts.parts()]


def verify() -> Iterator[Check]:
    """Check every kernel over its contract."""
    for part in parts():
        yield from part()
