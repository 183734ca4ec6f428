"""Compare the CUDA kernels over codes of keys and values with float64, and rows with themselves alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from gnomon.kernels.codes import AFFINE, ROTATED, SHIFTED, Codes
from gnomon.kernels.cuda import coded_attention, codes
from gnomon.kernels.cuda.attention import Form
from gnomon.kernels.cuda.attention import spots as spots_of
from gnomon.kernels.verify import (
    EPSILON,
    Array,
    Check,
    _name,  # pyright: ignore[reportPrivateUsage]
    _random,  # pyright: ignore[reportPrivateUsage]
    _share,  # pyright: ignore[reportPrivateUsage]
    _wide,  # pyright: ignore[reportPrivateUsage]
)

ISA = "cuda"
LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 300, 1000, 5000)
SLOTS = 5120
POISON = 0x7FC17FC1
"""NaN in every type of two bytes, and for what is read as codes, something."""


@dataclass(frozen=True, slots=True)
class Case:
    """Codings of keys and values, and heads."""

    keys: tuple[int, int, int]
    """Coding, bits, group."""
    values: tuple[int, int, int]
    dim: int
    q_heads: int
    kv_heads: int
    dtype: mx.Dtype = mx.bfloat16
    normed: bool = False

    def pair(self) -> tuple[Codes, Codes]:
        return made(*self.keys, self.dim, self.dtype), made(*self.values, self.dim, self.dtype)

    @property
    def name(self) -> str:
        parts = ("affine", "shifted", "rotated")
        k, v = (f"{parts[one[0]]} {one[1]}" for one in (self.keys, self.values))
        return f"{k}, {v}, {self.q_heads} of {self.kv_heads} heads of {self.dim}, {_name(self.dtype)}"


def _affine(bits: int, group: int, *more: Any, **names: Any) -> Case:
    return Case((AFFINE, bits, group), (AFFINE, bits, group), *more, **names)


def _turbo(keys: int, values: int, *more: Any, **names: Any) -> Case:
    return Case((SHIFTED, keys, 32), (ROTATED, values, 32), *more, **names)


CASES = (
    _affine(8, 64, 64, 9, 3),
    _affine(4, 64, 128, 16, 2, normed=True),
    _turbo(8, 3, 64, 8, 2),
    _affine(4, 64, 64, 8, 8),
    _affine(8, 64, 128, 28, 4),
    _turbo(8, 3, 128, 8, 1),
    _turbo(4, 4, 128, 12, 4, normed=True),
    _turbo(5, 5, 64, 4, 2),
    _turbo(2, 2, 64, 16, 1),
    _turbo(8, 8, 128, 4, 2),
    _affine(4, 32, 64, 6, 2, dtype=mx.float16),
    _affine(8, 128, 128, 6, 2, dtype=mx.float16),
)


def made(coding: int, bits: int, group: int, dim: int, dtype: mx.Dtype) -> Codes:
    """Codes with some codebook, if there is one."""
    if coding != ROTATED:
        return Codes(coding, bits, group, dim, dtype if coding == AFFINE else mx.float16)
    # Levels as a normal distribution's would lie: closer together in the middle.
    place = (np.arange(1 << bits) + 0.5) / (1 << bits) * 2 - 1
    levels = (np.arctanh(place * 0.97) * 1.2).astype(np.float32)
    bounds = (levels[1:] + levels[:-1]) / np.float32(2)
    signs = np.where(np.random.default_rng(dim).integers(0, 2, dim) == 1, 1.0, -1.0)
    tables = [tuple(float(x) for x in one) for one in (levels, bounds, signs)]
    return Codes(coding, bits, group, dim, mx.float16, tables[0], tables[1], tables[2])


def _numbers(words: mx.array, code: Codes) -> tuple[NDArray[np.int64], Array, Array]:
    """Codes [..., dim], first and second numbers [..., groups] of words."""
    rows = np.array(words).view(np.uint8)
    size, groups = code.dim * code.bits // 8, code.dim // code.group
    stream = np.unpackbits(rows[..., :size], axis=-1, bitorder="little").reshape(*rows.shape[:-1], code.dim, code.bits)
    places = stream.astype(np.int64) @ (1 << np.arange(code.bits))
    if code.coding == SHIFTED and code.bits == 8:
        places = np.where(places > 127, places - 256, places)
    halves = np.ascontiguousarray(rows[..., size:]).view(np.uint16)
    if code.dtype == mx.bfloat16:
        numbers = (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        numbers = halves.view(np.float16).astype(np.float64)
    return places, numbers[..., :groups], numbers[..., groups:]


def decoded(words: mx.array, code: Codes) -> tuple[Array, Array]:
    """What words stand for, in float64, ROTATED still rotated; and the sizes of what is added up for it."""
    places, first, second = _numbers(words, code)
    first = np.repeat(first, code.group, -1)
    if code.coding == ROTATED:
        levels = np.array(code.levels)[places] * first
        return levels, np.abs(levels)
    second = np.repeat(second, code.group, -1) * (1 if code.coding == AFFINE else first)
    return places * first + second, np.abs(places * first) + np.abs(second)


def _hadamard(x: Array) -> Array:
    dim = x.shape[-1]
    half = 1
    while half < dim:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], -2).reshape(x.shape)
        half *= 2
    return x / np.sqrt(dim)


def _packed(parts: Sequence[mx.array]) -> NDArray[np.uint32]:
    rows = [np.ascontiguousarray(np.array(mx.contiguous(part).view(mx.uint8))) for part in parts]
    return np.concatenate(rows, -1).view(np.uint32)


def _encoding(code: Codes, dtype: mx.Dtype, seed: int) -> Iterator[Check]:
    case = f"{('affine', 'shifted', 'rotated')[code.coding]} {code.bits} bits, {code.dim}, {_name(dtype)}"
    x = _random(3, 2, 21, code.dim, seed=seed, dtype=dtype) * 3 + 1
    x = mx.concatenate([x, -mx.abs(x[:, :, :1]), mx.abs(x[:, :, :1]), 1e-3 * x[:, :, :1]], axis=2)
    words = codes.encode(x.swapaxes(1, 2), code)  # not in one piece
    if code.coding == AFFINE:
        expected = _packed(mx.quantize(x.swapaxes(1, 2), code.group, code.bits))
        error = 0.0 if (np.array(words) == expected).all() else 2.0
    elif code.coding == SHIFTED:
        error = 0.0 if (np.array(words) == _shifted(x.swapaxes(1, 2), code)).all() else 2.0
    else:
        error = _rotation_error(_wide(x.swapaxes(1, 2)), words, code)
    alone = mx.concatenate([codes.encode(x[i : i + 1].swapaxes(1, 2), code) for i in range(3)])
    yield Check("encode", case, ISA, error, bool(mx.array_equal(words, alone).item()))
    back = codes.decode(words[:2, :, 1:], code, dtype)
    expected, size = (x[:2, :, 1:] for x in decoded(words, code))
    yield Check("decode", case, ISA, _share(back, expected, size, 1), True)
    if code.coding == ROTATED:
        turned = codes.unrotate(back, code)
        expected = _hadamard(_wide(back)) * np.array(code.signs)
        size = np.abs(_wide(back)).sum(-1, keepdims=True) / np.sqrt(code.dim)
        yield Check("unrotate", case, ISA, _share(turned, expected, size, code.dim), True)


def _shifted(x: mx.array, code: Codes) -> NDArray[np.uint32]:
    """The codec's own operations, one by one in float32."""
    y = np.array(x.astype(mx.float32)).reshape(*x.shape[:-1], -1, code.group)
    high, low = y.max(-1, keepdims=True), y.min(-1, keepdims=True)
    last = np.float32(254 if code.bits == 8 else 2**code.bits - 1)
    scale = (high - low) / last
    zero = np.rint((high + low) / (2 * scale) if code.bits == 8 else low / scale)
    places = np.rint(y / scale - zero)
    places = np.clip(places, -127, 127) if code.bits == 8 else np.clip(places, 0, last)
    flat = places.astype(np.int64).reshape(*x.shape) & 255
    stream = (flat[..., None] >> np.arange(code.bits)) & 1
    packed = np.packbits(stream.astype(np.uint8).reshape(*x.shape[:-1], -1), axis=-1, bitorder="little")
    parts = [packed, *(n.astype(np.float16).reshape(*x.shape[:-1], -1).view(np.uint8) for n in (scale, zero))]
    return np.ascontiguousarray(np.concatenate(parts, -1)).view(np.uint32)


def _rotation_error(x: Array, words: mx.array, code: Codes) -> float:
    """How far scales lie from a group's root mean square, and elements beyond the bounds of their codes: shares of rounding."""
    places, scales, _ = _numbers(words, code)
    y = _hadamard(x * np.array(code.signs)).reshape(*x.shape[:-1], -1, code.group)
    root = np.sqrt((y**2).mean(-1))
    error = float((np.abs(scales - root) / (2.0**-10 * root + 2.0**-24)).max())
    unit = y / (root[..., None] + 1e-8)
    edges = np.concatenate([[-np.inf], np.array(code.bounds), [np.inf]])
    places = places.reshape(y.shape)
    beyond = np.maximum(edges[places] - unit, unit - edges[places + 1])
    return max(error, float((beyond / (1e-5 * (1 + np.abs(unit)))).max()))


def _expected(q: Array, held: Sequence[Array], scale: float, value_codes: Codes) -> tuple[Array, Array]:
    """Attention of q [Hq, D] over decoded keys, values and these' sizes [Hk, n, D], and sums of weights times sizes."""
    keys, values, sizes = held
    group = q.shape[0] // keys.shape[0]
    scores = np.einsum("hd,hnd->hn", q, np.repeat(keys, group, 0)) * scale
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("hn,hnd->hd", p, np.repeat(values, group, 0))
    size = np.einsum("hn,hnd->hd", p, np.repeat(sizes, group, 0))
    if value_codes.coding == ROTATED:
        out = _hadamard(out) * np.array(value_codes.signs)
        size = size.sum(-1, keepdims=True) / np.sqrt(size.shape[-1]) + 0 * size
    return out, size


def _held(keys: mx.array, values: mx.array, pair: tuple[Codes, Codes]) -> tuple[Array, Array, Array]:
    return (decoded(keys, pair[0])[0], *decoded(values, pair[1]))


def _off(y: mx.array, expected: Array, size: Array, share: float = 2.0**-13) -> float:
    """The largest difference as a share of a rounding and of what 16 bits for a weight, and scores of some tens, leave."""
    bound = EPSILON[y.dtype] * np.abs(expected) + share * size + 2.0**-30
    return float(np.nan_to_num(np.abs(_wide(y) - expected) / bound, nan=np.inf).max())


def _bits(x: mx.array) -> NDArray[np.uint16]:
    return np.array(mx.contiguous(x).view(mx.uint16))


def _buffers(case: Case, lengths: Sequence[int]) -> tuple[mx.array, mx.array]:
    """Words [rows + 1, Hk, slots, words] of random keys and values; the slots from a row's length on are poisoned."""
    found: list[mx.array] = []
    for seed, code in enumerate(case.pair()):
        x = _random(len(lengths) + 1, case.kv_heads, SLOTS, case.dim, seed=seed, dtype=case.dtype)
        words = codes.encode(x, code)
        ends = mx.array([*lengths, 0])[:, None, None, None]
        slots = mx.arange(SLOTS)[None, None, :, None]
        found.append(mx.where(slots < ends, words, mx.array(POISON, dtype=mx.uint32)))
    mx.eval(found)
    return found[0], found[1]


def _windows(case: Case) -> Iterator[Check]:
    pair = case.pair()
    keys, values = _buffers(case, LENGTHS)
    held = [_held(keys[row, :, :length], values[row, :, :length], pair) for row, length in enumerate(LENGTHS)]
    scale = case.dim**-0.5
    for width in (1, 5):
        rows = [row for row, length in enumerate(LENGTHS) if length >= width]
        q = 2 * _random(len(rows), width, case.q_heads, case.dim, seed=7, dtype=case.dtype).swapaxes(1, 2)
        own_k, own_v = keys[rows[0] :], values[rows[0] :]
        starts = [LENGTHS[row] - width for row in rows]
        y = coded_attention.attend_over_codes(q, own_k, own_v, pair, mx.array(starts, dtype=mx.int32), scale)
        error, same = 0.0, True
        wide_q = _wide(q)
        for b, row in enumerate(rows):
            slots = -(-LENGTHS[row] // 128) * 128
            for i in range(width):
                seen = [x[:, : starts[b] + i + 1] for x in held[row]]
                expected, size = _expected(wide_q[b, :, i], seen, scale, pair[1])
                error = max(error, _off(y[b, :, i], expected, size))
            alone = coded_attention.attend_over_codes(
                q[b : b + 1, :, -1:],
                mx.contiguous(keys[row : row + 1, :, :slots]),
                values[row : row + 1, :, : LENGTHS[row]],
                pair,
                mx.array([LENGTHS[row] - 1], dtype=mx.int32),
                scale,
            )
            same = same and bool((_bits(alone) == _bits(y[b : b + 1, :, -1:])).all())
        yield Check("attention over codes", f"windows of {width}, {case.name}", ISA, error, same)


def _turned(x: Array, norm: mx.array | None, position: int, inverse: mx.array) -> Array:
    """Head norm, rounded to bf16, if there is one, and rotation of [heads, D] in float64."""
    if norm is not None:
        x = _wide(mx.array(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * _wide(norm)).astype(mx.bfloat16))
    angle = _wide(mx.array(position, dtype=mx.float32) * inverse)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def _appending(case: Case) -> Iterator[Check]:
    pair, dim = case.pair(), case.dim
    lengths = [0, *LENGTHS]
    keys, values = _buffers(case, lengths)
    before = np.array(keys), np.array(values)
    form = Form(case.q_heads, case.kv_heads, dim, dim**-0.5, False, case.normed, 1e-6)
    cut = coded_attention.Cut(case.q_heads, case.kv_heads)
    inverse = mx.exp(-mx.arange(dim // 2, dtype=mx.float32) * (9.0 / (dim // 2)))
    norms = None
    if case.normed:
        norms = 1 + 0.1 * _random(dim, seed=8, dtype=mx.bfloat16), 1 + 0.1 * _random(dim, seed=9, dtype=mx.bfloat16)
    qkv = _random(len(lengths), (case.q_heads + 2 * case.kv_heads) * dim, seed=dim, dtype=mx.bfloat16)
    counters = mx.zeros(cut.blocks * len(lengths), dtype=mx.int32)
    mx.eval(qkv, counters, inverse)

    def attend(rows: slice, keys: mx.array, values: mx.array) -> mx.array:
        y = coded_attention.append_and_attend(
            form, pair, qkv[rows], keys, values, mx.array(lengths[rows], dtype=mx.int32), inverse, counters, norms
        )
        mx.eval(y)
        return y

    # Copies, each with room for the new token alone.
    alone = [
        attend(slice(b, b + 1), *(mx.contiguous(x[b : b + 1, :, : length // 128 * 128 + 128]) for x in (keys, values)))
        for b, length in enumerate(lengths)
    ]
    y = attend(slice(None), keys, values)
    heads = _wide(qkv).reshape(len(lengths), -1, dim)
    new_values = codes.encode(qkv.reshape(len(lengths), -1, 1, dim)[:, case.q_heads + case.kv_heads :], pair[1])
    error, coding, intact = 0.0, 0.0, not bool(counters.any().item())
    for b, length in enumerate(lengths):
        for x, old in ((keys, before[0]), (values, before[1])):
            kept = np.arange(SLOTS) != length
            intact = intact and bool((np.array(x[b])[:, kept] == old[b][:, kept]).all())
        intact = intact and bool(mx.array_equal(values[b, :, length], new_values[b, :, 0]).item())
        q = _turned(heads[b, : case.q_heads], norms and norms[0], length, inverse)
        k = _turned(heads[b, case.q_heads : case.q_heads + case.kv_heads], norms and norms[1], length, inverse)
        grouped = k.reshape(case.kv_heads, -1, pair[0].group)
        step = np.repeat(np.ptp(grouped, -1) / (2 ** pair[0].bits - 2), pair[0].group, -1)
        stored = _held(keys[b, :, : length + 1], values[b, :, : length + 1], pair)
        loss = np.abs(stored[0][:, length] - k) / (0.75 * step + 2.0**-6 * (1 + np.abs(k).max()))
        coding = max(coding, float(loss.max()))
        expected, size = _expected(q, stored, form.scale, pair[1])
        # A head norm rounds, and some elements that lie between two bf16 numbers go the other way in float32.
        error = max(error, _off(y[b].reshape(-1, dim), expected, size, 2.0 ** (-10 if case.normed else -13)))
    yield Check("append codes", case.name, ISA, coding, intact)
    same = bool((_bits(mx.concatenate(alone)) == _bits(y)).all())
    yield Check("append and attend codes", case.name, ISA, error, same)


def _appended(case: Case) -> Iterator[Check]:
    """Windows have the bits of their tokens one by one, and leave the same words."""
    pair, dim = case.pair(), case.dim
    lengths, widths = (1, 15, 126, 300, 4093, 5000), (3, 2, 5, 1, 6, 7)
    places = [(row, n + i) for row, (n, width) in enumerate(zip(lengths, widths, strict=True)) for i in range(width)]
    form = Form(case.q_heads, case.kv_heads, dim, dim**-0.5, False, case.normed, 1e-6)
    inverse = mx.exp(-mx.arange(dim // 2, dtype=mx.float32) * (9.0 / (dim // 2)))
    norms = None
    if case.normed:
        norms = 1 + 0.1 * _random(dim, seed=8, dtype=mx.bfloat16), 1 + 0.1 * _random(dim, seed=9, dtype=mx.bfloat16)
    qkv = _random(len(places), (case.q_heads + 2 * case.kv_heads) * dim, seed=dim, dtype=mx.bfloat16)
    counters = mx.zeros(64 * 32, dtype=mx.int32)
    mx.eval(qkv, counters, inverse)
    single, whole = _buffers(case, lengths), _buffers(case, lengths)
    alone: list[mx.array] = []
    for i, (row, at) in enumerate(places):
        own = [mx.contiguous(words[row : row + 1]) for words in single]
        n = mx.array([at], dtype=mx.int32)
        y = coded_attention.append_and_attend(form, pair, qkv[i : i + 1], own[0], own[1], n, inverse, counters, norms)
        mx.eval(y)
        alone.append(y)
        for words, one in zip(single, own, strict=True):
            words[row, :, at] = one[0, :, at]
        mx.eval(single)
    for size in (len(places), 32):
        spots = mx.array(spots_of(places, size), dtype=mx.int32)
        fed = mx.concatenate([qkv, mx.broadcast_to(qkv[-1:], (size - len(places), qkv.shape[1]))])
        y = coded_attention.append_and_attend(form, pair, fed, *whole, spots, inverse, counters, norms, True)
        mx.eval(y)
        same = bool((_bits(y[: len(places)]) == _bits(mx.concatenate(alone))).all())
        same = same and all(mx.array_equal(a, b).item() for a, b in zip(single, whole, strict=True))
        same = same and bool(mx.isfinite(y).all().item()) and not bool(counters.any().item())
        yield Check("append and attend windows of codes", f"{size} tokens, {case.name}", ISA, 0.0, same)


def verify(cases: Sequence[Case] = CASES) -> Iterator[Check]:
    """Check the kernels over codes."""
    for seed, case in enumerate(cases):
        for code in case.pair():
            yield from _encoding(code, case.dtype, seed)
        yield from _windows(case)
        if case.dtype == mx.bfloat16:
            yield from _appending(case)
            yield from _appended(case)
