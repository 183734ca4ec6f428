"""Attention of single queries over the codes of keys and values, where they lie.

Contract
    attend_over_codes  q [B, Hq, L, D] bf16 or f16, L from 1 to 16; words of keys and values [B or more, Hk, slots, words]; query i of row b
                       sees the slots up to starts[b] + i (starts int32 [B] or [1]); result [B, Hq, L, D] of q's type
    append_and_attend  as `attention.attend`, windows too, over words: the new key and value are coded into slot `lengths[b]` of row b in
                       place
    codes              `codes.why_not` says none; keys AFFINE or SHIFTED, values AFFINE or ROTATED; D 64 or 128

Arithmetic: products of whole codes with queries and weights that are two f16 or bf16 numbers each (22 and 16 bits), float32 sums, numbers
of groups in float32, one rounding to the result's type; rotated values are turned back in float32 before it. A row's keys are cut into
stretches by its own length alone and added up in order: a query doesn't depend, to the bit, on others, on the window it is in, or on the
buffers' size. Slots beyond are not read or count for nothing, whatever lies there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from gnomon.kernels.codes import AFFINE, ROTATED, SHIFTED, Codes
from gnomon.kernels.cuda import codes as coding
from gnomon.kernels.cuda.attention import BLOCK, STRETCH, Form
from gnomon.kernels.cuda.codes import Key, key_of, named, table
from gnomon.kernels.cuda.products import TYPES
from gnomon.kernels.cuda.sources import Kernel, capability, make

HEAD_SIZES = frozenset({64, 128})
MOST_HEADS = 8
"""Query heads of a block: as many as a product has rows, two numbers each."""
MOST_WIDTH = 16
COPIES_FROM = 90
"""Compute capability, times ten, from which memory is copied in bulk."""
FILES = ("attention.cuh", "codes.cuh", "coded_attention.cuh")

Pair = tuple[Codes, Codes]


def why_not(pair: Pair) -> str | None:
    """What keeps keys and values under these codes from attention, or None."""
    keys, values = pair
    why = coding.why_not(keys) or coding.why_not(values)
    if why is not None:
        return why
    if keys.dim != values.dim or keys.dim not in HEAD_SIZES:
        return f"heads of {keys.dim} and {values.dim}"
    if keys.coding not in (AFFINE, SHIFTED) or values.coding not in (AFFINE, ROTATED):
        return f"codings {keys.coding} and {values.coding}"
    if capability() < COPIES_FROM:
        return f"compute capability {capability() / 10}"
    return None


@dataclass(frozen=True, slots=True)
class Cut:
    """How query heads are shared among blocks."""

    q_heads: int
    kv_heads: int

    @property
    def heads(self) -> int:
        """Query heads of a block: the largest part of a group, up to 8, that cuts it evenly."""
        group = self.q_heads // self.kv_heads
        return next(n for n in range(MOST_HEADS, 0, -1) if group % n == 0)

    @property
    def blocks(self) -> int:
        """Blocks of a query and a stretch."""
        return self.q_heads // self.heads

    @property
    def most_stretches(self) -> int:
        """Few heads leave multiprocessors idle; adding up many stretches takes time."""
        return 64 if self.blocks <= 4 else 32

    def stretches(self, slots: int) -> int:
        return min(self.most_stretches, -(-slots // STRETCH))


def _residents(values: Key) -> int:
    """Blocks per multiprocessor to leave registers for."""
    coding, _, _, size, _ = values
    return 5 if size == 64 else 3 if coding == ROTATED else 4


_WORDS = "gnomon::Words{{const_cast<unsigned*>({0}), {0}_strides[0], {0}_strides[1], {0}_strides[2]}}"


@cache
def _over(keys: Key, values: Key, cut: Cut, dtype: mx.Dtype, scale: float) -> Kernel:
    body = f"""
  const gnomon::Place at{{q_strides[0], q_strides[1], q_strides[2], q_strides[3]}};
  gnomon::attend_over_codes<{named(keys)}, {named(values)}, {cut.heads}, {cut.most_stretches}, {TYPES[dtype]}>(
      q, at, q_shape[1], q_shape[2], {_WORDS.format("keys")}, {_WORDS.format("values")}, keys_shape[1],
      starts, starts_shape[0], table, {scale!r}f, const_cast<int*>(counters), out, parts);
"""
    names = ["q", "keys", "values", "starts", "table", "counters"]
    return make(
        "over_codes",
        FILES,
        names,
        ["out", "parts"],
        body,
        block=BLOCK,
        blocks_per_processor=_residents(values),
        any_strides=True,
    )


def attend_over_codes(
    q: mx.array, keys: mx.array, values: mx.array, pair: Pair, starts: mx.array, scale: float
) -> mx.array:
    """Attention of windows of queries, each of which sees the slots up to its own."""
    rows, q_heads, width, size = q.shape
    cut = Cut(q_heads, keys.shape[1])
    stretches = cut.stretches(keys.shape[2])
    count = rows * width * cut.blocks
    kernel = _over(key_of(pair[0]), key_of(pair[1]), cut, q.dtype, float(scale))
    return kernel(
        inputs=[q, keys, values, starts, table(pair[1]), mx.zeros(count, dtype=mx.int32)],
        output_shapes=[q.shape, (count if stretches > 1 else 1, cut.most_stretches, cut.heads, size + 2)],
        output_dtypes=[q.dtype, mx.float32],
        grid=(stretches * BLOCK, cut.blocks, rows * width),
        threadgroup=(BLOCK, 1, 1),
    )[0]


@cache
def _append(form: Form, keys: Key, values: Key) -> Kernel:
    types = (
        f"{named(keys)}, {TYPES[keys[4]]}, {named(values)}, {TYPES[values[4]]}, {'true' if form.normed else 'false'}"
    )
    body = f"""
  gnomon::append_codes<{types}>(
      qkv, {_WORDS.format("keys")}, {_WORDS.format("values")}, spots, inverse, {"k_norm" if form.normed else "nullptr"}, {form.eps!r}f,
      {form.q_heads}, {form.kv_heads}, table, {"true" if form.traditional else "false"});
"""
    names = ["qkv", "keys", "values", "spots", "inverse", "table", *(["k_norm"] if form.normed else [])]
    return make("write_codes", FILES, names, ["appended"], body, block=BLOCK, any_strides=True, waits=True)


def append(
    form: Form,
    pair: Pair,
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    spots: mx.array,
    inverse: mx.array,
    norms: tuple[mx.array, mx.array] | None,
) -> mx.array:
    """`attention.append` over words."""
    return _append(form, key_of(pair[0]), key_of(pair[1]))(
        inputs=[qkv, keys, values, spots, inverse, table(pair[1]), *(norms[1:] if norms else ())],
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
        grid=(form.kv_heads * BLOCK, 1, qkv.shape[0]),
        threadgroup=(BLOCK, 1, 1),
    )[0]


@cache
def _appending(form: Form, keys: Key, values: Key, in_window: bool) -> Kernel:
    cut = Cut(form.q_heads, form.kv_heads)
    norms = "q_norm, k_norm" if form.normed else "nullptr, nullptr"
    types = f"{named(keys)}, {TYPES[keys[4]]}, {named(values)}, {TYPES[values[4]]}"
    flags = f"{'true' if form.normed else 'false'}, {'true' if in_window else 'false'}"
    body = f"""
  gnomon::append_and_attend<{types}, {cut.heads}, {cut.most_stretches}, {flags}>(
      qkv, {_WORDS.format("keys")}, {_WORDS.format("values")}, lengths, inverse, {norms}, {form.eps!r}f,
      {form.q_heads}, {form.kv_heads}, table, {form.scale!r}f, {"true" if form.traditional else "false"},
      const_cast<int*>(counters), out, parts);
"""
    names = ["qkv", "keys", "values", "lengths", "inverse", "table", "counters"]
    names += ["q_norm", "k_norm"] if form.normed else []
    names += ["appended"] if in_window else []
    return make(
        "append_codes",
        FILES,
        names,
        ["out", "parts"],
        body,
        block=BLOCK,
        blocks_per_processor=_residents(values),
        any_strides=True,
        waits=True,
    )


def append_and_attend(
    form: Form,
    pair: Pair,
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    lengths: mx.array,
    inverse: mx.array,
    counters: mx.array,
    norms: tuple[mx.array, mx.array] | None,
    in_window: bool = False,
) -> mx.array:
    """`attention.attend` over words; `counters` are the same."""
    cut = Cut(form.q_heads, form.kv_heads)
    rows, stretches = qkv.shape[0], cut.stretches(keys.shape[2])
    appended = [append(form, pair, qkv, keys, values, lengths, inverse, norms)] if in_window else []
    return _appending(form, key_of(pair[0]), key_of(pair[1]), in_window)(
        inputs=[qkv, keys, values, lengths, inverse, table(pair[1]), counters, *(norms or ()), *appended],
        output_shapes=[
            (rows, form.q_heads * form.size),
            (rows * cut.blocks if stretches > 1 else 1, cut.most_stretches, cut.heads, form.size + 2),
        ],
        output_dtypes=[mx.bfloat16, mx.float32],
        grid=(stretches * BLOCK, cut.blocks, rows),
        threadgroup=(BLOCK, 1, 1),
    )[0]
