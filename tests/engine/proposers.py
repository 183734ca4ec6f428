"""Proposers that know the answer, that never do, and that sometimes do."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gnomon.propose import Proposer


class Oracle(Proposer):
    """Proposes what `answer` says follows; each guess is spoiled with probability `error`, and some steps get no guesses at all."""

    def __init__(self, answer: Sequence[int], vocab_size: int, error: float, seed: int = 0) -> None:
        self.answer = answer
        self.vocab_size = vocab_size
        self.error = error
        self.random = random.Random(seed)

    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        at = len(generated)
        guesses = self.answer[at : at + self.random.randint(0, limit)]
        return [(g + 1) % self.vocab_size if self.random.random() < self.error else g for g in guesses]


ERRORS = {"right": 0.0, "wrong": 1.0, "mixed": 0.3}
