"""Keys and values in fewer bits: coding them where they are held, and attention that reads the codes.

A vector of `dim` elements is a row of 32-bit words: its codes as a little-endian stream of bits, then a number or two per group.

    AFFINE    code * scale + bias, both of the model's type; what `mx.quantize` makes, with its bits
    SHIFTED   (code + zero) * scale, both float16; codes of 8 bits are signed
    ROTATED   levels[code] * scale, float16, of the vector times signs under a Walsh-Hadamard transform, divided by sqrt(dim)

Contract of the native versions
    attention  q [B, Hq, L, D] f32, f16 or bf16; words [B or more, Hk, n or more, words], of which the first `length` slots count, or
               those that `order` [B, length] names; masks, sinks and order as in `attention`; or `starts` [B]: query i of row b sees the
               slots up to starts[b] + i
    append     keys and values [B, Hk, L, dim] go to slots starts[b].. of row b of contiguous buffers, in place
    encode     [B, H, n, dim] to words; all bits are those of the codecs' own operations
    dim        a multiple of 16 and of the group, at most 64 groups; ROTATED: a power of 2 up to 512

Arithmetic: attention is to the bit that of `attention` over the float32 numbers that the codes stand for, with all that this promises of
rows; rotated values are added up as they are, and the sum is turned back in float32, by sums and differences, before it is rounded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.attention import ADDITIVE, BOOLEAN, CAUSAL, NONE
from gnomon.kernels.coded import Mask
from gnomon.kernels.dispatch import Operation, installed, order_of, thread, uncovered
from gnomon.kernels.quantized_matmul import FLOATS

AFFINE, SHIFTED, ROTATED = range(3)
MOST_GROUPS = 64
TYPES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
"""Numbers of the types of scales and biases in the extension."""

Pair = tuple[mx.array, mx.array]


@dataclass(slots=True, eq=False)
class Codes:
    """How words are read. `dtype` is that of the numbers behind the codes; `levels`, `bounds` between them and `signs` are for ROTATED."""

    coding: int
    bits: int
    group: int
    dim: int
    dtype: mx.Dtype = mx.float16
    levels: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()
    signs: tuple[float, ...] = ()
    _made: dict[ModuleType, Any] = field(default_factory=dict[ModuleType, Any], repr=False)

    @property
    def is_covered(self) -> bool:
        """Whether the native versions take vectors of this width and type."""
        return (
            self.dtype in FLOATS
            and self.dim % 16 == 0
            and self.dim % self.group == 0
            and self.dim // self.group <= MOST_GROUPS
        )

    def form(self, extension: ModuleType) -> Any:
        """The same for the extension, made once."""
        if extension not in self._made:
            self._made[extension] = extension.CodesForm(
                self.coding,
                self.bits,
                self.group,
                self.dim,
                TYPES[self.dtype],
                list(self.levels),
                list(self.bounds),
                list(self.signs),
            )
        return self._made[extension]


def attention(
    q: mx.array,  # noqa: ARG001  (the native version's)
    keys: mx.array,  # noqa: ARG001
    values: mx.array,  # noqa: ARG001
    codes: tuple[Codes, Codes],  # noqa: ARG001
    length: int,  # noqa: ARG001
    *,
    scale: float,  # noqa: ARG001
    mask: Mask,  # noqa: ARG001
    sinks: mx.array | None = None,  # noqa: ARG001
    starts: mx.array | None = None,  # noqa: ARG001
    order: mx.array | None = None,  # noqa: ARG001
) -> mx.array | None:
    """Native attention over words, `[B, Hq, L, Dv]` of q's type; None where there is none and the codec's own operations serve."""
    return None


def append(
    keys: mx.array,  # noqa: ARG001
    values: mx.array,  # noqa: ARG001
    codes: tuple[Codes, Codes],  # noqa: ARG001
    starts: mx.array,  # noqa: ARG001
    buffers: Pair,  # noqa: ARG001
) -> Pair | None:
    """The buffers once keys and values `[B, heads, L, dim]` are coded into them where they lie; None where there is no native version."""
    return None


def encode(x: mx.array, codes: Codes) -> mx.array | None:  # noqa: ARG001
    """The words of `[B, heads, n, dim]`; None where there is no native version."""
    return None


def why_not(q: mx.array, keys: mx.array, codes: tuple[Codes, Codes], mask: Mask, sinks: mx.array | None) -> str | None:
    """What keeps these arguments from native attention, or None."""
    if q.ndim != 4 or q.dtype not in FLOATS or q.shape[1] % keys.shape[1] or q.shape[3] != codes[0].dim:
        return f"q {q.shape} of {q.dtype} for {keys.shape[1]} heads of {codes[0].dim}"
    if not (codes[0].is_covered and codes[1].is_covered):
        return f"heads of {codes[0].dim} and {codes[1].dim} in groups of {codes[0].group}"
    if isinstance(mask, str):
        if mask != "causal":
            return f"mask {mask!r}"
    elif mask is not None and (mask.ndim > 4 or (mask.dtype != mx.bool_ and mask.dtype not in FLOATS)):
        return f"a mask {mask.shape} of {mask.dtype}"
    if sinks is not None and (sinks.dtype not in FLOATS or sinks.size != q.shape[1]):
        return f"sinks {sinks.shape} of {sinks.dtype}"
    return None


def _make_attention(stock: Callable[..., mx.array | None], extension: ModuleType) -> Callable[..., mx.array | None]:
    native = extension.coded_attention

    def attention(
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        codes: tuple[Codes, Codes],
        length: int,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        starts: mx.array | None = None,
        order: mx.array | None = None,
    ) -> mx.array | None:
        if not thread.active:
            return stock(q, keys, values, codes, length, scale=scale, mask=mask)
        why = why_not(q, keys, codes, mask, sinks)
        if why is not None:
            uncovered("coded_attention", why)
            return stock(q, keys, values, codes, length, scale=scale, mask=mask)
        forms = codes[0].form(extension), codes[1].form(extension)
        order = order_of(keys) if order is None else order
        if starts is not None:
            return native(q, keys, values, *forms, length, scale, CAUSAL, None, starts, 0, sinks, order)
        if mask is None or isinstance(mask, str):
            kind, mask = NONE if mask is None else CAUSAL, None
        else:
            kind = BOOLEAN if mask.dtype == mx.bool_ else ADDITIVE
        return native(q, keys, values, *forms, length, scale, kind, mask, None, 0, sinks, order)

    return attention


def _make_append(stock: Callable[..., Pair | None], extension: ModuleType) -> Callable[..., Pair | None]:
    def append(
        keys: mx.array, values: mx.array, codes: tuple[Codes, Codes], starts: mx.array, buffers: Pair
    ) -> Pair | None:
        if not thread.active or not (codes[0].is_covered and codes[1].is_covered and keys.dtype in FLOATS):
            return stock(keys, values, codes, starts, buffers)
        forms = codes[0].form(extension), codes[1].form(extension)
        made = extension.coded_append(keys, values, *forms, starts, *buffers)
        return made[0], made[1]

    return append


def _make_encode(stock: Callable[..., mx.array | None], extension: ModuleType) -> Callable[..., mx.array | None]:
    def encode(x: mx.array, codes: Codes) -> mx.array | None:
        if not thread.active or not codes.is_covered or x.dtype not in FLOATS:
            return stock(x, codes)
        return extension.encode(x, codes.form(extension))

    return encode


_THIS = sys.modules[__name__]
OPERATIONS = (
    Operation(
        "coded_attention", _THIS, "attention", _make_attention, "affine and turbo codes, masks as attention, any rows"
    ),
    Operation("coded_append", _THIS, "append", _make_append, "codes keys and values into their buffers in place"),
    Operation("encode", _THIS, "encode", _make_encode, "affine and turbo codes of keys and values"),
)


def reads_codes() -> bool:
    """Whether attention of the calling thread's steps reads codes by a kernel, which holds no scores of a window whole."""
    return thread.native and OPERATIONS[0].name in installed()
