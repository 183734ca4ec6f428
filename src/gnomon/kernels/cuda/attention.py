"""Head norms, rotation, append and attention of one new token per row, in one launch.

Contract
    qkv          [B, (q heads + 2 kv heads) * D] bf16 or f32, D 64, 128 or 256
    keys, values [rows, kv heads, slots, D] of this type, rows at least B, whole along D; slot `lengths[b]` of row b is written in place
    lengths      int32 [B]: tokens per row before this one
    result       [B, q heads * D] of that type

Arithmetic: float32; a row's keys are cut into stretches by its own length alone and added up in order, so a row doesn't depend, to the bit,
on others or on the buffers' size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from gnomon.kernels.cuda.sources import Kernel, make

HEAD_SIZES = frozenset({64, 128, 256})
TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float32: "float"}
MOST_STRETCHES, STRETCH, BLOCK = 32, 128, 128


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


@cache
def _kernel(form: Form, dtype: mx.Dtype) -> Kernel:
    t = TYPES[dtype]
    norms = "q_norm, k_norm" if form.normed else "nullptr, nullptr"
    body = f"""
  const gnomon::Cache<{t}> cache{{const_cast<{t}*>(keys), const_cast<{t}*>(values),
      keys_strides[0], keys_strides[1], keys_strides[2], values_strides[0], values_strides[1], values_strides[2]}};
  gnomon::attend<{form.size}, {form.heads_per_block}, {"true" if form.normed else "false"}, {t}>(
      qkv, cache, lengths, inverse, {norms}, {form.eps!r}f, {form.q_heads}, {form.kv_heads}, {form.scale!r}f,
      {"true" if form.traditional else "false"}, const_cast<int*>(counters), out, parts);
"""
    names = ["qkv", "keys", "values", "lengths", "inverse", "counters", *(["q_norm", "k_norm"] if form.normed else [])]
    return make("attend", "attention.cuh", names, ["out", "parts"], body, block=BLOCK, any_strides=True, waits=True)


def attend(
    form: Form,
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    lengths: mx.array,
    inverse: mx.array,
    counters: mx.array,
    norms: tuple[mx.array, mx.array] | None,
) -> mx.array:
    """Append and attend. `inverse` float32 [D / 2] are the rotation's frequencies; `counters` int32, zero, one per block of a row at least.

    Whoever holds `keys` and `values` must not let anything else write or copy on write there; see `FullLayer.in_place`.
    """
    rows, blocks, heads = qkv.shape[0], form.blocks_per_row, form.heads_per_block
    stretches = min(MOST_STRETCHES, -(-keys.shape[2] // STRETCH))
    return _kernel(form, qkv.dtype)(
        inputs=[qkv, keys, values, lengths, inverse, counters, *(norms or ())],
        output_shapes=[(rows, form.q_heads * form.size), (rows * blocks, MOST_STRETCHES, heads, form.size + 2)],
        output_dtypes=[qkv.dtype, mx.float32],
        grid=(stretches * BLOCK, blocks, rows),
        threadgroup=(BLOCK, 1, 1),
    )[0]
