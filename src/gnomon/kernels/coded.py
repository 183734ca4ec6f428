"""Attention over keys and values that a codec holds.

A layer state may return views in place of arrays. Models hand them on to `mx.fast.scaled_dot_product_attention` (most through mlx-lm's
function of the same name), over which the dispatcher below stands: it lets the view compute the attention and calls whatever was there
before, stock or native, for arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from gnomon.kernels import dispatch

Mask = mx.array | str | None
Attend = Callable[[mx.array, float, Mask, mx.array | None], mx.array]
"""(queries `[B, Hq, L, D]`, scale, mask, sinks) to `[B, Hq, L, Dv]`."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Stands in for the array of shape `[B, heads, n, dim]` that a codec holds. Keys and values of one fetch share `attend`."""

    attend: Attend
    shape: tuple[int, int, int, int]
    dtype: mx.Dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _make(stock: Callable[..., mx.array], _: object) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        q: mx.array,
        k: mx.array | View,
        v: mx.array | View,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
        **more: Any,
    ) -> mx.array:
        if not isinstance(k, View):
            return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, **more)
        if not isinstance(v, View) or v.attend is not k.attend:
            raise TypeError("coded keys need the values that were fetched with them")
        return k.attend(q, scale, mask, sinks)

    return scaled_dot_product_attention


OPERATION = dispatch.Operation(
    "coded attention", mx.fast, "scaled_dot_product_attention", _make, "views of keys and values, as their codec says"
)


def install() -> None:
    """Let attention take views. Doing so again changes nothing."""
    dispatch.install((OPERATION,), None)
