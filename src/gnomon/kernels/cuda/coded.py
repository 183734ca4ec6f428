"""Keys and values in fewer bits on NVIDIA GPUs: the operations of `gnomon.kernels.codes`.

New tokens are coded by one kernel, but not in place: only the compiled decode step does that (`coded_attention.append_and_attend`), whose
kernel both writes and reads. What orders kernels in MLX's graphs are the arrays they are declared to write, and a kernel made from source
can't declare that it writes to an input.

Windows of more queries than the attention kernel takes, masks that hide more than later slots, and sinks: one kernel turns a layer's words
to the queries' type, and stock attention reads those.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels import codes as contract
from gnomon.kernels.coded import Mask
from gnomon.kernels.codes import ROTATED, Codes
from gnomon.kernels.cuda import coded_attention, codes
from gnomon.kernels.cuda.coded_attention import MOST_WIDTH
from gnomon.kernels.cuda.products import TYPES
from gnomon.kernels.dispatch import Operation, thread, uncovered
from gnomon.kernels.rope import offset_array

Pair = tuple[Codes, Codes]


def why_not(q: mx.array, keys: mx.array, pair: Pair, order: mx.array | None) -> str | None:
    """What keeps these arguments from both ways, or None."""
    if q.ndim != 4 or q.dtype not in TYPES or not q.size or q.shape[1] % keys.shape[1] or q.shape[3] != pair[0].dim:
        return f"q {q.shape} of {q.dtype} for {keys.shape[1]} heads of {pair[0].dim}"
    if order is not None:
        return "slots that don't lie in order"
    return codes.why_not(pair[0]) or codes.why_not(pair[1])


def first_seen(q: mx.array, pair: Pair, length: int, mask: Mask, starts: mx.array | None) -> mx.array | None:
    """The last slot that each row's first query sees, int32 `[B]` or `[1]`, where every query sees those up to its own and the attention
    kernel takes them; else None."""
    width = q.shape[2]
    if width > MOST_WIDTH or coded_attention.why_not(pair) is not None:
        return None
    if starts is not None:
        return starts
    is_causal = (mask is None and width == 1) or (isinstance(mask, str) and mask == "causal")
    return offset_array(length - width) if is_causal and length >= width else None


def _make_attention(stock: Callable[..., mx.array | None], extension: ModuleType) -> Callable[..., mx.array | None]:  # noqa: ARG001
    def attention(
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        pair: Pair,
        length: int,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        starts: mx.array | None = None,
        order: mx.array | None = None,
    ) -> mx.array | None:
        if not thread.active:
            return stock(q, keys, values, pair, length, scale=scale, mask=mask)
        why = why_not(q, keys, pair, order)
        if why is not None:
            uncovered("coded_attention", why)
            return stock(q, keys, values, pair, length, scale=scale, mask=mask)
        first = first_seen(q, pair, length, mask, starts) if sinks is None else None
        if first is not None:
            return coded_attention.attend_over_codes(q, keys, values, pair, first, scale)
        rows = q.shape[0]
        whole = [
            codes.decode(words[:rows, :, :length], code, q.dtype)
            for words, code in zip((keys, values), pair, strict=True)
        ]
        out = mx.fast.scaled_dot_product_attention(q, *whole, scale=scale, mask=mask, sinks=sinks)
        return codes.unrotate(out, pair[1]) if pair[1].coding == ROTATED else out

    return attention


def _make_encode(stock: Callable[..., mx.array | None], extension: ModuleType) -> Callable[..., mx.array | None]:  # noqa: ARG001
    def encode(x: mx.array, code: Codes) -> mx.array | None:
        if not thread.active:
            return stock(x, code)
        why = codes.why_not(code)
        if why is None and (x.ndim != 4 or x.dtype not in TYPES):
            why = f"vectors {x.shape} of {x.dtype}"
        if why is not None:
            uncovered("encode", why)
            return stock(x, code)
        return codes.encode(x, code)

    return encode


_OWNER: Any = contract
OPERATIONS = (
    Operation(
        "coded_attention",
        _OWNER,
        "attention",
        _make_attention,
        "affine 4 8 and turbo codes; windows of 1 to 16 over heads of 64 and 128 read them, others unpack them first",
    ),
    Operation("encode", _OWNER, "encode", _make_encode, "affine 4 8 and turbo codes of keys and values"),
)
