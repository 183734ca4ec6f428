"""Randomness keyed by (seed, choice, output step): a row's draws depend on nothing else."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_GOLDEN: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1
_weyl = itertools.count(1)


class Stream(IntEnum):
    """Independent random streams of one output step."""

    TOKEN = 0
    XTC = 1


def fresh_seed() -> int:
    """A seed for a request that named none: the time xor a Weyl counter, so requests of the same instant differ."""
    return (time.time_ns() ^ (next(_weyl) * 0x9E3779B9)) & _WORD


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Keys:
    """Threefry keys for the draws of N cells, made on the host.

    Seed, choice, stream and output step are absorbed in turn, each mixed before the next, so no two can be traded for each other.
    """

    def __init__(self, seeds: Sequence[int], choices: Sequence[int], stream: Stream) -> None:
        state = np.zeros(len(seeds), dtype=np.uint64)
        for words in ([seed & _WORD for seed in seeds], choices, [int(stream)] * len(seeds)):
            state = _absorb(state, words)
        self._state = state

    def at(self, steps: Sequence[int]) -> NDArray[np.uint32]:
        """The keys [N, 2] of these output steps."""
        state = _absorb(self._state, steps)
        return np.stack([state >> np.uint64(32), state & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def _absorb(state: NDArray[np.uint64], words: Sequence[int]) -> NDArray[np.uint64]:
    return _mix((state + np.uint64(_GOLDEN)) ^ np.array(words, dtype=np.uint64))


def gumbel(keys: NDArray[np.uint32], size: int) -> mx.array:
    """Standard Gumbel noise [N, size], float32; row i is what `mx.random.gumbel` gives for keys[i] alone."""

    if len(keys) == 1:
        return mx.random.gumbel((1, size), key=mx.array(keys[0]))

    def draw(key: mx.array) -> mx.array:
        return mx.random.gumbel((size,), key=key)

    return mx.vmap(draw)(mx.array(keys))


def uniform(keys: NDArray[np.uint32]) -> mx.array:
    """One number of [0, 1) per key, float32 [N]."""

    def draw(key: mx.array) -> mx.array:
        return mx.random.uniform(shape=(1,), key=key)

    return mx.vmap(draw)(mx.array(keys)).reshape(-1)
