"""Log-probabilities of drawn tokens and of their strongest rivals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of one drawn token, in nats, and the most likely (id, logprob) pairs.

    They come likeliest first, and lowest id first among equals.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Logprobs:
    """What the rows that asked for it got: lazy arrays until `score` reads them back."""

    def __init__(self, logprobs: mx.array, tokens: mx.array, slots: dict[int, int], wanted: dict[int, int]) -> None:
        """`logprobs` [n, L, V] and `tokens` [n, L] hold only the asking rows: row b at slots[b], wanting wanted[b] rivals."""
        self._slots = slots
        self._wanted = wanted
        count = min(logprobs.shape[-1], max(wanted.values()))
        self.chosen = mx.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0].astype(mx.float32)
        self.top_ids: mx.array | None = None
        self.top: mx.array | None = None
        if count:
            ids = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[..., :count]
            self.top_ids = ids.astype(mx.int32)
            self.top = mx.take_along_axis(logprobs, ids, axis=-1).astype(mx.float32)

    def arrays(self) -> list[mx.array]:
        """What to evaluate with the tokens."""
        return [array for array in (self.chosen, self.top_ids, self.top) if array is not None]

    @cached_property
    def _read(self) -> tuple[NDArray[np.float32], NDArray[np.int32] | None, NDArray[np.float32] | None]:
        return (
            np.array(self.chosen),
            None if self.top_ids is None else np.array(self.top_ids),
            None if self.top is None else np.array(self.top),
        )

    def score(self, row: int, position: int = 0) -> Score | None:
        """The score of a row's token at a window position; None if the row asked for none. Reads the arrays back on first use."""
        if row not in self._slots:
            return None
        chosen, top_ids, top = self._read
        slot, wanted = self._slots[row], self._wanted[row]
        logprob = float(chosen[slot, position])
        if not wanted or top_ids is None or top is None:
            return Score(logprob)
        # A row that may draw only a few tokens has no further rivals.
        found = zip(top_ids[slot, position].tolist(), top[slot, position].tolist(), strict=True)
        pairs = [pair for pair in found if pair[1] > -math.inf]
        return Score(logprob, tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:wanted]))
