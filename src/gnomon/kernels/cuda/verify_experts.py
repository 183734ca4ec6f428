"""Compare the kernels for experts and recurrent mixers with float64, and rows and prefixes with themselves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from gnomon.kernels.cuda import experts, recurrent
from gnomon.kernels.cuda.experts import Experts
from gnomon.kernels.cuda.products import DENSE, Normed
from gnomon.kernels.verify import Array, Check, _name, _random, _share, _wide  # pyright: ignore[reportPrivateUsage]

ISA = "cuda"
COUNT = 9
"""Experts to choose from."""


def poison() -> None:
    """Leave memory full of NaN for the results that come next: those not written show."""
    for size in (1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20):
        full = [mx.full(size, float("nan"), dtype=mx.float32) for _ in range(4)]
        mx.eval(full)
        del full


def equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(mx.contiguous(a).view(mx.uint8), mx.contiguous(b).view(mx.uint8)).item())


def _weights(bits: int, group: int, n: int, k: int, dtype: mx.Dtype, seed: int) -> tuple[Experts, Array]:
    """Weights of all experts, and what they are in float64 [E, N, K]."""
    w = _random(COUNT, n, k, seed=seed, dtype=dtype)
    if bits == DENSE:
        return Experts(w), _wide(w)
    packed, s, b = mx.quantize(w, group, bits)
    stream = np.unpackbits(np.array(packed).view(np.uint8), axis=-1, bitorder="little").reshape(COUNT, n, k, bits)
    codes = stream.astype(np.float64) @ (1 << np.arange(bits))
    dense = codes * np.repeat(_wide(s), group, 2) + np.repeat(_wide(b), group, 2)
    return Experts(packed, s, b, bits, group), dense


def _chosen(tokens: int, top: int, seed: int) -> mx.array:
    """Each token's experts, uint32 [tokens, top], all different."""
    order = mx.argsort(mx.random.uniform(shape=(tokens, COUNT), key=mx.random.key(seed)), axis=-1)
    return mx.contiguous(order[:, :top].astype(mx.uint32))


def parts() -> list[Callable[[], Iterator[Check]]]:
    """Products with chosen experts, the router, the gated delta rule, the mixer around it and the short convolution."""
    found: list[Callable[[], Iterator[Check]]] = []
    for dtype in (mx.bfloat16, mx.float16):
        for bits, group in ((4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (DENSE, 64)):
            if dtype == mx.float16 and group != 64:
                continue
            found += [partial(_mixture, bits, group, *sizes, dtype) for sizes in ((80, 640, 3), (272, 2048, 8))]
    for rule in (
        (128, 128, 2, 4, False, mx.bfloat16, mx.float32),
        (128, 48, 2, 2, True, mx.bfloat16, mx.float32),
        (32, 20, 1, 3, False, mx.float32, mx.float32),
        (256, 64, 1, 2, False, mx.float16, mx.float32),
        (64, 64, 2, 2, False, mx.bfloat16, mx.bfloat16),
    ):
        found += [partial(_delta, *rule, tokens) for tokens in (1, 7, 40)]
    for k_size, v_size, dtype in (
        (128, 128, mx.bfloat16),
        (64, 32, mx.float16),
        (32, 256, mx.bfloat16),
        (256, 256, mx.bfloat16),
    ):
        form = recurrent.Form(2, 4, k_size, v_size, 1e-6, dtype)
        found += [partial(_mixer, form, joined) for joined in (True, False)]
    return [*found, _route, _short_convolution]


def _route() -> Iterator[Check]:
    for count, top in ((4, 2), (60, 4), (128, 8), (512, 10)):
        for dtype in (mx.bfloat16, mx.float16):
            logits = 3 * _random(7, count, seed=count, dtype=dtype)
            logits[3] = 1.0
            for among in (True, False):
                poison()
                chosen, shares = experts.route(logits, top, among)
                wide = _wide(logits)
                expected = np.argsort(-wide, axis=-1, kind="stable")[:, :top]
                p = np.exp(wide - wide.max(-1, keepdims=True))
                best = np.take_along_axis(p, expected, -1)
                best = best / (best if among else p).sum(-1, keepdims=True)
                right = bool((np.array(chosen) == expected).all())
                case = f"{top} of {count}, {'among chosen' if among else 'among all'}, {_name(dtype)}"
                yield Check("route", case, ISA, float(np.abs(_wide(shares) / best - 1).max() / 1e-5), right)


def _mixture(bits: int, group: int, n: int, k: int, top: int, dtype: mx.Dtype) -> Iterator[Check]:
    gate, dense_gate = _weights(bits, group, n, k, dtype, bits + group)
    up, dense_up = _weights(bits, group, n, k, dtype, bits + group + 1)
    kind = f"{k} by {n}, {'dense' if bits == DENSE else f'{bits} bits in groups of {group}'}, {_name(dtype)}"
    whole = _random(24, k, seed=k, dtype=dtype)
    numbers = _chosen(24, top, seed=k)
    alone: list[mx.array] = [experts.gated(whole[i : i + 1], numbers[i], gate, up) for i in range(24)]
    single = [experts.gather(whole[i : i + 1], numbers[i], gate) for i in range(24)]
    mx.eval(alone, single)
    for tokens in (1, 2, 5, 24):
        x, chosen = whole[:tokens], numbers[:tokens]
        wide, at = _wide(x)[:, None, :], np.array(chosen)
        flat = mx.contiguous(chosen.reshape(-1))
        poison()
        y = experts.gather(x, flat, gate)
        a = np.einsum("tok,tonk->ton", wide.repeat(top, 1), dense_gate[at])
        a_size = np.einsum("tok,tonk->ton", np.abs(wide).repeat(top, 1), np.abs(dense_gate[at]))
        case = f"{tokens} tokens, {top} experts, {kind}"
        error = _share(y, a.reshape(-1, n), a_size.reshape(-1, n), k)
        yield Check("gather", case, ISA, error, equal(y, mx.concatenate(single[:tokens])))
        order = mx.argsort(flat)
        rows = x[order // top]
        y = experts.gather(rows, flat[order], gate)
        same = equal(y, experts.gather(x, flat, gate)[order])
        yield Check(
            "gather, sorted",
            case,
            ISA,
            _share(y, a.reshape(-1, n)[np.array(order)], a_size.reshape(-1, n)[np.array(order)], k),
            same,
        )
        poison()
        y = experts.gated(x, flat, gate, up)
        b = np.einsum("tok,tonk->ton", wide.repeat(top, 1), dense_up[at])
        b_size = np.einsum("tok,tonk->ton", np.abs(wide).repeat(top, 1), np.abs(dense_up[at]))
        expected = a / (1 + np.exp(-a)) * b
        # A silu's slope is below 1.1, and the products' errors come together.
        size = 1.1 * a_size * np.abs(b) + np.abs(a) * b_size + 4 * np.abs(expected)
        error = _share(y, expected.reshape(-1, n), size.reshape(-1, n), k)
        yield Check("gated experts", case, ISA, error, equal(y, mx.concatenate(alone[:tokens])))
        h = _random(tokens * top, k, seed=tokens, dtype=dtype)
        shares = mx.softmax(_random(tokens, top, seed=tokens + 1, dtype=mx.float32), axis=-1)
        poison()
        y = experts.blend(h, chosen, shares, gate)
        part = _wide(h).reshape(tokens, top, k)
        weight = _wide(shares)[..., None]
        expected = (np.einsum("tok,tonk->ton", part, dense_gate[at]) * weight).sum(1)
        size = (np.einsum("tok,tonk->ton", np.abs(part), np.abs(dense_gate[at])) * weight).sum(1)
        by_token = [
            experts.blend(h[i * top : (i + 1) * top], chosen[i : i + 1], shares[i : i + 1], gate) for i in range(tokens)
        ]
        yield Check("blended experts", case, ISA, _share(y, expected, size, k), equal(y, mx.concatenate(by_token)))
        residual, norm = _random(tokens, n, seed=9, dtype=dtype), 1 + 0.1 * _random(n, seed=10, dtype=dtype)
        poison()
        sums, after = experts.blend_and_add(h, chosen, shares, gate, residual, norm, 1e-6)
        expected, size = expected + _wide(residual), size + np.abs(_wide(residual))
        error = max(
            _share(sums, expected, size, k), _share(after.rows, _wide(sums) * _wide(norm), np.abs(_wide(sums)), 1)
        )
        squares = _wide(sums) ** 2
        error = max(
            error, float(np.abs(_wide(after.squares) / squares.reshape(tokens, -1, 16).sum(-1) - 1).max() / 1e-5)
        )
        one = experts.blend_and_add(h[:top], chosen[:1], shares[:1], gate, residual[:1], norm, 1e-6)
        same = equal(one[0], sums[:1]) and equal(one[1].rows, after.rows[:1])
        yield Check("blended experts, added", case, ISA, error, same and equal(one[1].squares, after.squares[:1]))
        scaled = Normed(x, (_random(tokens, k // 16, seed=8, dtype=mx.float32) ** 2) * 16, 1e-5)
        factor = 1 / np.sqrt(_wide(scaled.squares).sum(-1) / k + 1e-5)
        factor = factor[:, None, None]
        a, a_size, b, b_size = (part * factor for part in (a, a_size, b, b_size))
        expected = a / (1 + np.exp(-a)) * b
        size = 1.1 * a_size * np.abs(b) + np.abs(a) * b_size + 4 * np.abs(expected)
        poison()
        y = experts.gated(scaled, chosen, gate, up)
        first = experts.gated(Normed(x[:1], scaled.squares[:1], 1e-5), chosen[:1], gate, up)
        error = _share(y, expected.reshape(-1, n), size.reshape(-1, n), k)
        yield Check("norm and gated experts", case, ISA, error, equal(first, y[:top]))


def _rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, mask: Array | None
) -> tuple[Array, Array, Array]:
    """Results, the state after each token [B, T, Hv, Dv, Dk], and sizes of what is added up for the results, in float64."""
    repeats = v.shape[2] // q.shape[2]
    q, k = np.repeat(q, repeats, 2), np.repeat(k, repeats, 2)
    s = state
    ys: list[Array] = []
    states: list[Array] = []
    sizes: list[Array] = []
    for t in range(q.shape[1]):
        gate = g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None, :]
        key, b = k[:, t, :, None], beta[:, t, :, None]
        decayed = s * gate
        delta = (v[:, t] - (decayed * key).sum(-1)) * b
        after = decayed + key * delta[..., None]
        seen = np.ones((len(q), 1, 1, 1), bool) if mask is None else mask[:, t, None, None, None].astype(bool)
        s = np.where(seen, after, s)
        ys.append(np.where(seen[..., 0], (after * q[:, t, :, None]).sum(-1), 0))
        sizes.append(np.where(seen[..., 0], (np.abs(after) * np.abs(q[:, t, :, None])).sum(-1), 0))
        states.append(s)
    return np.stack(ys, 1), np.stack(states, 1), np.stack(sizes, 1)


def _short_convolution() -> Iterator[Check]:
    for x_type, w_type in ((mx.bfloat16, mx.bfloat16), (mx.float32, mx.float32), (mx.float16, mx.float32)):
        x, w = _random(3, 11, 70, seed=1, dtype=x_type), _random(70, 4, 1, seed=2, dtype=w_type)
        poison()
        y = recurrent.short_convolution(x, w)
        parts = [_wide(x)[:, j : j + 8] * _wide(w)[:, j, 0] for j in range(4)]
        error = _share(y, sum(parts[1:], parts[0]), sum((np.abs(p) for p in parts[1:]), np.abs(parts[0])), 4)
        same = equal(y[1:2], recurrent.short_convolution(x[1:2], w))
        yield Check("short_convolution", f"{_name(x_type)} by {_name(w_type)}", ISA, error, same)


def _delta(
    size: int, rows: int, k_heads: int, v_heads: int, each: bool, dtype: mx.Dtype, state_type: mx.Dtype, tokens: int
) -> Iterator[Check]:
    batch = 3
    q, k = (_random(batch, tokens, k_heads, size, seed=s, dtype=mx.float32) * size**-0.5 for s in (1, 2))
    q, k = q.astype(dtype), k.astype(dtype)
    v = _random(batch, tokens, v_heads, rows, seed=3, dtype=dtype)
    g = mx.sigmoid(2 + _random(batch, tokens, v_heads, *([size] if each else []), seed=4, dtype=mx.float32))
    beta = mx.sigmoid(_random(batch, tokens, v_heads, seed=5, dtype=dtype))
    state = _random(batch, v_heads, rows, size, seed=6, dtype=state_type)
    for mask in (None, mx.arange(tokens)[None] < mx.array([[tokens], [tokens // 2], [1]])):
        poison()
        y, after = recurrent.gated_delta(q, k, v, g, beta, state, mask)
        seen = None if mask is None else np.array(mask).astype(np.float64)
        expected, states, sizes = _rule(_wide(q), _wide(k), _wide(v), _wide(g), _wide(beta), _wide(state), seen)
        error = _share(y, expected, sizes + (sizes > 0), size * tokens)
        error = max(error, _share(after, states[:, -1], np.abs(states[:, -1]) + 1, size * tokens))
        same = True
        for i in range(batch):
            only = slice(i, i + 1)
            one = recurrent.gated_delta(
                q[only], k[only], v[only], g[only], beta[only], state[only], None if mask is None else mask[only]
            )
            same = same and equal(one[0], y[i : i + 1]) and equal(one[1], after[i : i + 1])
        if tokens > 1 and mask is None and state_type == mx.float32:
            cut = tokens // 3 + 1
            head = recurrent.gated_delta(q[:, :cut], k[:, :cut], v[:, :cut], g[:, :cut], beta[:, :cut], state)
            tail = recurrent.gated_delta(q[:, cut:], k[:, cut:], v[:, cut:], g[:, cut:], beta[:, cut:], head[1])
            same = same and equal(mx.concatenate([head[0], tail[0]], 1), y) and equal(tail[1], after)
        kind = f"{', per column' if each else ''}{'' if mask is None else ', masked'}, {_name(dtype)}"
        case = f"{tokens} tokens, {v_heads} heads of {size} by {rows}{kind}"
        yield Check("gated_delta", case, ISA, error, same)


def _mixer(form: recurrent.Form, joined: bool) -> Iterator[Check]:
    batch, taps, tokens = 3, 4, 23
    channels, width, heads = form.channels, form.v_heads * form.v_size, form.v_heads
    dtype = form.dtype
    every = _random(batch, tokens, channels + width + 2 * heads, seed=11, dtype=dtype)
    parts = recurrent.Parts(
        0.5 * _random(channels, taps, 1, seed=12, dtype=dtype),
        _random(heads, seed=13, dtype=mx.float32),
        _random(heads, seed=14, dtype=dtype),
        1 + 0.1 * _random(form.v_size, seed=15, dtype=dtype),
    )
    before = _random(batch, taps - 1, channels, seed=16, dtype=dtype)
    state = 0.5 * _random(batch, heads, form.v_size, form.k_size, seed=17, dtype=mx.float32)

    def projected(x: mx.array) -> recurrent.Projected:
        if joined:
            return recurrent.Projected(x)
        z, b, a = channels, channels + width, channels + width + heads
        return recurrent.Projected(
            mx.contiguous(x[..., :z]), (x[..., z:b], mx.contiguous(x[..., a:]), mx.contiguous(x[..., b:a]))
        )

    poison()
    out, kept, after = recurrent.mix(form, projected(every), parts, before, state)
    expected, exact_kept, exact_after, slack = _exact_mixer(form, every, parts, before, state)
    error = float((np.abs(_wide(out) - expected) / slack).max())
    error = max(error, float((np.abs(_wide(after) - exact_after) / (2.0**-7 * (1 + np.abs(exact_after)))).max()))
    name = (
        f"{form.v_heads} heads of {form.k_size} by {form.v_size}, {'joined' if joined else 'separate'}, {_name(dtype)}"
    )
    yield Check("mixer", f"{tokens} tokens, {name}", ISA, error, bool((_wide(kept) == exact_kept).all()))
    # The same tokens one by one, as windows, and each row alone: results, inputs to keep and states.
    for steps in ((1,) * tokens, (5, 2, 16), (20, 3)):
        poison()
        pieces: list[mx.array] = []
        now, held, start = before, state, 0
        for step in steps:
            made, now, held = recurrent.mix(form, projected(every[:, start : start + step]), parts, now, held)
            pieces.append(made)
            start += step
        same = equal(mx.concatenate(pieces, 1), out) and equal(now, kept) and equal(held, after)
        case = f"windows of {', '.join(map(str, steps))}" if len(steps) < 9 else "one by one"
        yield Check("mixer, prefixes", f"{case}, {name}", ISA, 0.0, same)
    for window in (9, tokens):
        counts = [window, window // 2, 1]
        lengths = mx.array(counts, dtype=mx.int32)
        mask = mx.arange(window)[None] < lengths[:, None]
        poison()
        made = recurrent.mix(form, projected(every[:, :window]), parts, before, state, mask, lengths)
        same = True
        for i, n in enumerate(counts):
            one = recurrent.mix(form, projected(every[i : i + 1, :n]), parts, before[i : i + 1], state[i : i + 1])
            same = same and all(
                equal(a, b)
                for a, b in zip(one, (made[0][i : i + 1, :n], made[1][i : i + 1], made[2][i : i + 1]), strict=True)
            )
        finite = bool(mx.isfinite(made[0]).all().item())
        yield Check("mixer, rows alone", f"{window} tokens, ragged, {name}", ISA, 0.0, same and finite)


def _exact_mixer(
    form: recurrent.Form, every: mx.array, parts: recurrent.Parts, before: mx.array, state: mx.array
) -> tuple[Array, Array, Array, Array]:
    """The mixer in float64, with q, k and v rounded: results, inputs to keep, the state, and what other roundings may make of results."""

    def narrow(a: Array) -> Array:
        return _wide(mx.array(a.astype(np.float32)).astype(form.dtype))

    channels, width, heads = form.channels, form.v_heads * form.v_size, form.v_heads
    x = _wide(every)
    batch, tokens, _ = x.shape
    window = np.concatenate([_wide(before), x[..., :channels]], 1)
    weight, taps = _wide(parts.weight)[..., 0], parts.weight.shape[1]
    mixed = sum(window[:, j : j + tokens] * weight[:, j] for j in range(taps))
    mixed = narrow(mixed / (1 + np.exp(-mixed)))
    keys = form.k_heads * form.k_size
    q, k = (mixed[..., i * keys : (i + 1) * keys].reshape(batch, tokens, form.k_heads, form.k_size) for i in (0, 1))
    sizes = form.k_size**-0.5, 1.0
    q, k = (narrow(f * a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)) for a, f in zip((q, k), sizes, strict=True))
    v = mixed[..., 2 * keys :].reshape(batch, tokens, heads, form.v_size)
    b, a = x[..., channels + width : channels + width + heads], x[..., channels + width + heads :]
    beta = 1 / (1 + np.exp(-b))
    g = np.exp(-np.exp(_wide(parts.log)) * np.log1p(np.exp(a + _wide(parts.bias))))
    y, states, _ = _rule(q, k, v, g, beta, _wide(state), None)
    norm = y / np.sqrt((y**2).mean(-1, keepdims=True) + form.eps) * _wide(parts.norm)
    z = x[..., channels : channels + width].reshape(norm.shape)
    gate = z / (1 + np.exp(-z))
    # y and the norm's result are rounded, and now and then a q, k or v falls to the other side.
    slack = 2.0**-6 * np.abs(gate) * (np.abs(norm) + np.abs(norm).max(-1, keepdims=True)) + 2.0**-9
    return (
        (norm * gate).reshape(batch, tokens, width),
        window[:, tokens:],
        states[:, -1],
        slack.reshape(batch, tokens, width),
    )
