"""Cache content made up instead of computed, so that decoding at any depth can be timed without prefilling to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

FILL_CHUNK = 4096


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        parts = getattr(cache, "caches", None)
        if parts is None:
            yield cache
        else:
            yield from _leaves(parts)


def _noise(like: mx.array, length: int, key: mx.array) -> mx.array:
    """Normal noise of `like`'s heads, width and dtype, `length` positions long, with a small scale as keys and values have."""
    shape = (like.shape[0], like.shape[1], length, like.shape[3])
    return (mx.random.normal(shape, key=key) * 0.1).astype(like.dtype)


def fill(
    caches: Sequence[Any],
    probe: Sequence[Any],
    depth: int,
    seed: int,
    begin: Callable[[int], object] | None = None,
    commit: Callable[[], object] | None = None,
) -> None:
    """Put `depth` made-up tokens into `caches` (mlx-lm's protocol, one row).

    `probe` are caches of the same kinds through which a token went: they tell shapes and dtypes. Attention caches get noise through their
    own `update_and_fetch`, in chunks, so that windows wrap as they would; recurrent ones get noise of their state's shape. `begin(width)`
    and `commit()` enclose each chunk where the caches want that. Raises `ValueError` for a cache that shows neither.
    """
    for start in range(0, depth, FILL_CHUNK):
        length = min(FILL_CHUNK, depth - start)
        if begin is not None:
            begin(length)
        for number, (cache, sample) in enumerate(zip(_leaves(caches), _leaves(probe), strict=True)):
            first, second = mx.random.split(mx.random.key((seed * 1009 + number) * 4099 + start))
            keys, values = getattr(sample, "keys", None), getattr(sample, "values", None)
            if isinstance(keys, mx.array) and isinstance(values, mx.array):
                mx.eval(cache.update_and_fetch(_noise(keys, length, first), _noise(values, length, second)))
            elif isinstance(getattr(sample, "cache", None), list):
                for slot, array in enumerate(sample.cache):
                    if array is not None:
                        made = mx.random.normal(array.shape, key=mx.random.split(first, slot + 1)[-1]) * 0.1
                        cache[slot] = made.astype(array.dtype)
                        mx.eval(cache[slot])
            else:
                raise ValueError(f"a synthetic state can't be made for {type(sample).__name__}")
        if commit is not None:
            commit()


def probed(model: Callable[..., mx.array], caches: Sequence[Any]) -> Sequence[Any]:
    """`caches` after one token."""
    mx.eval(model(mx.array([[0]], dtype=mx.int32), cache=caches))
    return caches
