"""What every codec of keys and values answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from gnomon.kernels import codes
from gnomon.kernels.coded import Mask


@dataclass(frozen=True, slots=True)
class Fetched:
    """Words of keys and values, uint32 `[B, heads, n, words]`, and what they stand for.

    The arrays may be whole buffers, with more rows and slots: `length` is then n. With `starts` int32 `[B]` each query sees the slots up to
    its own, the first of row b being starts[b]; the mask says the same.
    """

    keys: mx.array
    values: mx.array
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    length: int | None = None
    starts: mx.array | None = None
    order: mx.array | None = None

    @property
    def end(self) -> int:
        """How many slots there are: n."""
        return self.keys.shape[2] if self.length is None else self.length

    def exact(self, rows: int) -> Fetched:
        """Arrays of so many rows and n slots."""
        if self.length is None:
            return self
        keys, values = self.keys[:rows, :, : self.length], self.values[:rows, :, : self.length]
        return replace(self, keys=keys, values=values, length=None)


class Codec(ABC):
    """Turns keys and values `[B, heads, n, dim]` into uint32 words `[B, heads, n, words]`, a token's row each, and attends over the words.

    A token's words depend on that token alone, so any storage that moves rows of words about (contiguous, rotating, in blocks) holds any
    codec. Codecs are values: equal ones are one scheme.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What the words mean, for people and as part of a state's identity."""

    @property
    @abstractmethod
    def number(self) -> int:
        """The same as a number, which marks a snapshot."""

    @abstractmethod
    def check(self, dim: int) -> None:
        """Raise ValueError naming the width and what is taken if heads of `dim` can't be coded."""

    @abstractmethod
    def key_codes(self, dim: int, dtype: mx.Dtype) -> codes.Codes:
        """How words of keys of `dim` elements of `dtype` are read."""

    @abstractmethod
    def value_codes(self, dim: int, dtype: mx.Dtype) -> codes.Codes:
        """How words of values of `dim` elements of `dtype` are read."""

    @abstractmethod
    def encode_keys(self, keys: mx.array) -> mx.array:
        """The words of `[B, heads, n, dim]`."""

    @abstractmethod
    def encode_values(self, values: mx.array) -> mx.array:
        """The words of `[B, heads, n, dim]`."""

    def append(self, keys: mx.array, values: mx.array, starts: mx.array, buffers: codes.Pair) -> codes.Pair | None:
        """Code keys and values `[B, heads, L, dim]` into the slots from `starts` `[B]` on of contiguous buffers `[B or more, heads, slots,
        words]` where these lie. Returns the arrays that whoever reads them depends on, or None where no kernel does it."""
        pair = self.key_codes(keys.shape[3], keys.dtype), self.value_codes(values.shape[3], values.dtype)
        return codes.append(keys, values, pair, starts, buffers)

    @abstractmethod
    def decode_keys(self, words: mx.array, dim: int, dtype: mx.Dtype) -> mx.array:
        """`[B, heads, n, dim]` of `dtype` from words."""

    @abstractmethod
    def decode_values(self, words: mx.array, dim: int, dtype: mx.Dtype) -> mx.array:
        """`[B, heads, n, dim]` of `dtype` from words."""

    @abstractmethod
    def attend(self, queries: mx.array, held: Fetched, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
        """Attention of queries `[B, Hq, L, D]` over what is held, `[B, Hq, L, Dv]` of the queries' type. Raises ValueError for sinks that
        the codec's attention can't take."""

    def attend_natively(
        self, queries: mx.array, held: Fetched, scale: float, mask: Mask, sinks: mx.array | None
    ) -> mx.array | None:
        """`attend` by a kernel that reads the words, or None where there is none."""
        pair = self.key_codes(held.key_dim, held.dtype), self.value_codes(held.value_dim, held.dtype)
        return codes.attention(
            queries,
            held.keys,
            held.values,
            pair,
            held.end,
            scale=scale,
            mask=mask,
            sinks=sinks,
            starts=held.starts,
            order=held.order,
        )


def packed(parts: Sequence[mx.array]) -> mx.array:
    """Arrays `[B, heads, n, *]` side by side as uint32 words. Raises ValueError if a row isn't a whole number of words."""
    rows = mx.concatenate([mx.contiguous(part).view(mx.uint8) for part in parts], axis=-1)
    if rows.shape[-1] % 4:
        raise ValueError(f"a token's row takes {rows.shape[-1]} bytes, which are no whole words")
    return rows.view(mx.uint32)


def taken(words: mx.array, start: int, count: int, dtype: mx.Dtype) -> mx.array:
    """`count` elements of `dtype` from byte `start` of every row of words on."""
    size = count * dtype.size
    if not start % 4 and not size % 4:
        part = words[..., start // 4 : (start + size) // 4]
        return part if dtype == mx.uint32 else mx.contiguous(part).view(dtype)
    return mx.contiguous(mx.contiguous(words).view(mx.uint8)[..., start : start + size]).view(dtype)
