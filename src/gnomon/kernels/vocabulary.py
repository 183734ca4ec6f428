"""Softmax, logsumexp and argmax over long last axes, as samplers ask for them over a vocabulary.

Contract of the native versions
    x        [..., N], N >= 1024, f32, f16 or bf16, any strides; the last axis alone is reduced
    result   x's type; uint32 for argmax (the first of equal maxima; the first NaN if there is one)

Arithmetic: float32; exponentials of differences to the maximum, 16 partial sums, a fixed tree, one rounding to x's type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels.dispatch import Operation, thread
from gnomon.kernels.quantized_matmul import FLOATS

LEAST = 1024
"""Shorter axes stay stock: there is nothing to win."""


def reference_softmax(x: mx.array) -> mx.array:
    wide = x.astype(mx.float32)
    e = mx.exp(wide - wide.max(axis=-1, keepdims=True))
    return (e / e.sum(axis=-1, keepdims=True)).astype(x.dtype)


def reference_logsumexp(x: mx.array) -> mx.array:
    wide = x.astype(mx.float32)
    m = wide.max(axis=-1, keepdims=True)
    return (mx.log(mx.exp(wide - m).sum(axis=-1, keepdims=True)) + m).astype(x.dtype)


Axis = int | Sequence[int] | None


def _last(x: mx.array, axis: Axis) -> bool:
    """Whether `axis` is exactly the last of a long enough array that a kernel takes."""
    if not isinstance(axis, int):
        if axis is None or len(axis) != 1:
            return False
        axis = axis[0]
    return x.ndim > 0 and axis in (-1, x.ndim - 1) and x.shape[-1] >= LEAST and x.dtype in FLOATS


def _others_are_one(x: mx.array, axis: Axis) -> bool:
    """Whether the last axis is reduced together with others, none of which has more than one entry."""
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    places = {place % x.ndim for place in axes} if x.ndim else set()
    return x.ndim - 1 in places and all(x.shape[place] == 1 for place in places if place != x.ndim - 1)


def _make_softmax(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.softmax

    def softmax(x: mx.array, /, axis: Axis = None, *, precise: bool = False, stream: Any = None) -> mx.array:
        if thread.active and _last(x, axis):
            return native(x, stream)
        return stock(x, axis, precise=precise, stream=stream)

    return softmax


def _make_logsumexp(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.logsumexp

    def logsumexp(x: mx.array, /, axis: Axis = None, keepdims: bool = False, *, stream: Any = None) -> mx.array:
        # mlx-lm reduces a lone row over all of its axes, and the sampler rows of a batch over one of size 1 besides.
        if thread.active and _last(x, -1 if keepdims and _others_are_one(x, axis) else axis):
            return native(x, keepdims, stream)
        return stock(x, axis, keepdims, stream=stream)

    return logsumexp


def _make_argmax(stock: Callable[..., mx.array], extension: ModuleType) -> Callable[..., mx.array]:
    native = extension.argmax

    def argmax(x: mx.array, /, axis: int | None = None, keepdims: bool = False, *, stream: Any = None) -> mx.array:
        if thread.active and axis is not None and _last(x, axis):
            return native(x, keepdims, stream)
        return stock(x, axis, keepdims, stream=stream)

    return argmax


OPERATIONS = (
    Operation("softmax", mx, "softmax", _make_softmax, "over a last axis of 1024 and more"),
    Operation("logsumexp", mx, "logsumexp", _make_logsumexp, "over a last axis of 1024 and more"),
    Operation("argmax", mx, "argmax", _make_argmax, "over a last axis of 1024 and more"),
)
