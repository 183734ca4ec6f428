"""Compare attention of short windows on this GPU with float64, and queries with themselves alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from gnomon.kernels.cuda import windows
from gnomon.kernels.verify import (
    EPSILON,
    Array,
    Check,
    _name,  # pyright: ignore[reportPrivateUsage]
    _random,  # pyright: ignore[reportPrivateUsage]
    _wide,  # pyright: ignore[reportPrivateUsage]
)

ISA = "cuda"
ROWS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """Heads, queries, keys, and the kind of mask: None, causal, rows (bool, by row), sliding (bool), heads (f32, by head)."""

    q_heads: int
    kv_heads: int
    size: int
    width: int
    slots: int
    mask: str | None
    has_sinks: bool = False
    dtype: mx.Dtype = mx.bfloat16

    @property
    def name(self) -> str:
        sinks = ", sinks" if self.has_sinks else ""
        heads = f"{self.q_heads} of {self.kv_heads} heads of {self.size}"
        return f"{self.width} of {self.slots}, {heads}, mask {self.mask}{sinks}, {_name(self.dtype)}"


CASES = (
    Case(8, 2, 128, 1, 1000, None),
    Case(8, 2, 128, 1, 1, None),
    Case(9, 3, 64, 5, 700, "causal"),
    Case(6, 2, 64, 16, 16, "causal", dtype=mx.float16),
    Case(8, 2, 128, 1, 3000, "rows"),
    Case(8, 2, 128, 4, 257, "rows"),
    Case(4, 1, 256, 3, 600, "sliding"),
    Case(8, 1, 64, 2, 520, "sliding", True),
    Case(4, 4, 128, 2, 300, "heads", True, mx.float16),
)


def _mask(case: Case) -> tuple[str | mx.array | None, Array]:
    """As the operation takes it, and what is added to scores [rows, heads, width, slots]."""
    shape = (ROWS, case.q_heads, case.width, case.slots)
    queries = np.arange(case.slots - case.width, case.slots)[:, None]
    keys = np.arange(case.slots)[None]
    if case.mask is None:
        return None, np.zeros(shape)
    if case.mask == "causal":
        return "causal", np.broadcast_to(np.where(keys <= queries, 0, -np.inf), shape)
    if case.mask == "heads":
        random = np.random.default_rng(3)
        added = np.where(
            random.random((case.q_heads, 1, case.slots)) < 0.3, -np.inf, random.normal(size=(1, 1, case.slots))
        )
        added = added.astype(np.float32)
        return mx.array(added), np.broadcast_to(added[None].astype(np.float64), shape)
    # The first row sees nothing at all.
    starts = np.array([-case.width, case.slots // 2, case.slots - case.width])[:, None, None]
    seen = keys[None] <= starts + np.arange(case.width)[None, :, None]
    if case.mask == "sliding":
        seen = seen & (keys[None] > starts - 50)
    return mx.array(seen.tolist())[:, None], np.broadcast_to(np.where(seen[:, None], 0, -np.inf), shape)


def _check(case: Case) -> Check:
    mask, added = _mask(case)
    q = _random(ROWS, case.width, case.q_heads, case.size, seed=1, dtype=case.dtype).swapaxes(1, 2) * 2
    whole = [_random(ROWS + 1, case.kv_heads, case.slots + 40, case.size, seed=s, dtype=case.dtype) for s in (2, 3)]
    # What no head sees is poisoned.
    group = case.q_heads // case.kv_heads
    unseen: list[Any] = (added == -np.inf).all(2).reshape(ROWS, case.kv_heads, group, case.slots).all(2).tolist()
    poison = mx.pad(mx.array(unseen), [(0, 1), (0, 0), (0, 40)], constant_values=mx.array(True))[..., None]
    whole = [mx.where(poison, mx.array(float("nan"), dtype=case.dtype), x) for x in whole]
    mx.eval(whole)
    k, v = (x[:ROWS, :, : case.slots] for x in whole)
    sinks = _random(case.q_heads, seed=4, dtype=case.dtype) if case.has_sinks else None
    scale = case.size**-0.5
    y = windows.attend(q, k, v, scale=scale, mask=mask, sinks=sinks)

    wide_k, wide_v = (np.repeat(np.nan_to_num(_wide(x)), group, 1) for x in (k, v))
    scores = np.einsum("bhid,bhnd->bhin", _wide(q), wide_k) * scale + added
    best = scores.max(-1, keepdims=True)
    if sinks is not None:
        best = np.maximum(best, _wide(sinks)[None, :, None, None])
    best = np.where(best == -np.inf, 0, best)
    p = np.exp(scores - best)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(_wide(sinks)[None, :, None, None] - best)
    p = p / np.where(total == 0, 1, total)
    expected, size = np.einsum("bhin,bhnd->bhid", p, wide_v), np.einsum("bhin,bhnd->bhid", p, np.abs(wide_v))
    bound = EPSILON[case.dtype] * np.abs(expected) + 2.0**-14 * size + 2.0**-24
    error = float(np.nan_to_num(np.abs(_wide(y) - expected) / bound, nan=np.inf).max())
    return Check("attention", case.name, ISA, error, _same_alone(case, q, k, v, mask, added, sinks, y))


def _same_alone(
    case: Case,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: str | mx.array | None,
    added: Array,
    sinks: mx.array | None,
    y: mx.array,
) -> bool:
    """Whether each row's last query gives the same bits alone, over no more slots than it needs, and under the mask as numbers."""
    same = True
    for b in range(ROWS):
        last = added[b : b + 1, :, -1:]
        end = int(np.nonzero((last > -np.inf).any((0, 1, 2)))[0].max(initial=0)) + 1
        given = mx.array(last[..., :end].astype(np.float32)) if mask is not None else None
        parts = q[b : b + 1, :, -1:], mx.contiguous(k[b : b + 1, :, :end]), v[b : b + 1, :, :end]
        alone = windows.attend(*parts, scale=case.size**-0.5, mask=given, sinks=sinks)
        own, among = (mx.contiguous(x).view(mx.uint16) for x in (alone, y[b : b + 1, :, -1:]))
        same = same and bool(mx.array_equal(own, among).item())
    return same


def verify() -> Iterator[Check]:
    """Check attention of short windows."""
    for case in CASES:
        yield _check(case)
