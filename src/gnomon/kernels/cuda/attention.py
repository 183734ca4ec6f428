"""Head norms, rotation, append and attention of one new token per row, in one launch; of a window of several, in two.

Contract
    qkv          [B, (q heads + 2 kv heads) * D] bf16 or f32, D 64, 128 or 256
    keys, values [rows, kv heads, slots, D] of this type, rows at least B, whole along D; slot `lengths[b]` of row b is written in place
    lengths      int32 [B]: tokens per row before this one
    result       [B, q heads * D] of that type
    window       its tokens are as many rows of qkv, in any number per row of the buffers, and `lengths` are their `spot`s; the new keys and
                 values are written in front of attention, of which each sees those up to its own

Arithmetic: float32; a row's keys are cut into stretches by its own length alone and added up in order, so a row doesn't depend, to the bit,
on others, on the window it is in, or on the buffers' size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from gnomon.kernels.cuda.sources import Kernel, make

HEAD_SIZES = frozenset({64, 128, 256})
TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float32: "float"}
MOST_STRETCHES, STRETCH, BLOCK = 32, 128, 128
HEADS_APPENDED = 4
"""Keys and values of heads that a block writes in front of attention."""
POSITION_BITS, PLACE_BITS = 21, 5
MOST_POSITIONS = 1 << POSITION_BITS
"""Tokens that a row may have after a window."""


def spots(places: Sequence[tuple[int, int]], size: int) -> list[int]:
    """The `spot`s of a window's tokens, each at a position of a row, of a row one behind the other; the last of them until there are
    `size`."""
    firsts: dict[int, int] = {}
    found = [spot(row, at, at - firsts.setdefault(row, at)) for row, at in places]
    return found + found[-1:] * (size - len(found))


def spot(row: int, position: int, place: int) -> int:
    """What a kernel is told of a window's token (`gnomon::spot_of`): its row of the buffers, up to 31, its position, up to
    `MOST_POSITIONS`, and which token of its window it is, up to 31."""
    return row << (POSITION_BITS + PLACE_BITS) | place << POSITION_BITS | position


@dataclass(frozen=True, slots=True)
class Form:
    """Heads of a layer. Norms of heads have the same eps."""

    q_heads: int
    kv_heads: int
    size: int
    scale: float
    traditional: bool
    normed: bool
    eps: float

    @property
    def heads_per_block(self) -> int:
        """The largest part of a group of query heads, up to 4 (2 for heads of 256), that cuts it evenly."""
        group = self.q_heads // self.kv_heads
        return next(n for n in range(2 if self.size > 128 else 4, 0, -1) if group % n == 0)

    @property
    def blocks_per_row(self) -> int:
        return self.q_heads // self.heads_per_block


_CACHE = """
  const gnomon::Cache<{0}> cache{{const_cast<{0}*>(keys), const_cast<{0}*>(values),
      keys_strides[0], keys_strides[1], keys_strides[2], values_strides[0], values_strides[1], values_strides[2]}};"""


@cache
def _kernel(form: Form, dtype: mx.Dtype, in_window: bool) -> Kernel:
    t = TYPES[dtype]
    norms = "q_norm, k_norm" if form.normed else "nullptr, nullptr"
    types = f"{form.size}, {form.heads_per_block}, {'true' if form.normed else 'false'}, {'true' if in_window else 'false'}, {t}"
    body = f"""{_CACHE.format(t)}
  gnomon::attend<{types}>(
      qkv, cache, lengths, inverse, {norms}, {form.eps!r}f, {form.q_heads}, {form.kv_heads}, {form.scale!r}f,
      {"true" if form.traditional else "false"}, const_cast<int*>(counters), out, parts);
"""
    names = ["qkv", "keys", "values", "lengths", "inverse", "counters", *(["q_norm", "k_norm"] if form.normed else [])]
    names += ["appended"] if in_window else []
    return make("attend", "attention.cuh", names, ["out", "parts"], body, block=BLOCK, any_strides=True, waits=True)


@cache
def _appending(form: Form, dtype: mx.Dtype) -> Kernel:
    t = TYPES[dtype]
    body = f"""{_CACHE.format(t)}
  gnomon::append<{form.size}, {"true" if form.normed else "false"}, {t}>(
      qkv, cache, spots, inverse, {"k_norm" if form.normed else "nullptr"}, {form.eps!r}f, {form.q_heads}, {form.kv_heads},
      {"true" if form.traditional else "false"});
"""
    names = ["qkv", "keys", "values", "spots", "inverse", *(["k_norm"] if form.normed else [])]
    return make("append", "attention.cuh", names, ["appended"], body, block=BLOCK, any_strides=True, waits=True)


def append(
    form: Form,
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    spots: mx.array,
    inverse: mx.array,
    norms: tuple[mx.array, mx.array] | None,
) -> mx.array:
    """Write a window's keys and values; the result has no content: it is for `attend`, which must run behind."""
    return _appending(form, qkv.dtype)(
        inputs=[qkv, keys, values, spots, inverse, *(norms[1:] if norms else ())],
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        grid=(-(-form.kv_heads // HEADS_APPENDED) * BLOCK, 1, qkv.shape[0]),
        threadgroup=(BLOCK, 1, 1),
    )[0]


def attend(
    form: Form,
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    lengths: mx.array,
    inverse: mx.array,
    counters: mx.array,
    norms: tuple[mx.array, mx.array] | None,
    in_window: bool = False,
) -> mx.array:
    """Append and attend. `inverse` float32 [D / 2] are the rotation's frequencies; `counters` int32, zero, one per block of a row at least.
    With `in_window`, `lengths` are `spot`s, and rows of qkv may belong to one row of the buffers.

    Whoever holds `keys` and `values` must not let anything else write or copy on write there; see `FullLayer.in_place`.
    """
    rows, blocks, heads = qkv.shape[0], form.blocks_per_row, form.heads_per_block
    stretches = min(MOST_STRETCHES, -(-keys.shape[2] // STRETCH))
    appended = [append(form, qkv, keys, values, lengths, inverse, norms)] if in_window else []
    return _kernel(form, qkv.dtype, in_window)(
        inputs=[qkv, keys, values, lengths, inverse, counters, *(norms or ()), *appended],
        output_shapes=[(rows, form.q_heads * form.size), (rows * blocks, MOST_STRETCHES, heads, form.size + 2)],
        output_dtypes=[qkv.dtype, mx.float32],
        grid=(stretches * BLOCK, blocks, rows),
        threadgroup=(BLOCK, 1, 1),
    )[0]
