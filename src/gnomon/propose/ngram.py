"""Prompt lookup: what followed the last few tokens where they first occurred (Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.config.speculation import NGRAM_TOKENS
from gnomon.propose.proposer import Proposer

INDEX_AT_ONCE = 16_384
"""Tokens indexed per call, so that a long prompt doesn't hold up the rows beside it; until it is indexed nothing is proposed."""

PRIORS = {1: 0.15, 2: 0.35, 3: 0.5}


class NGram(Proposer):
    """Looks for the last `longest` to `shortest` tokens, longest first, in all of prompt and output, and proposes what followed their first
    occurrence. `grade` is the length that matched. The index grows by each token once: a look-up costs the same in any text."""

    source = "ngram"

    def __init__(self, longest: int, shortest: int, most: int = NGRAM_TOKENS) -> None:
        """Raises ValueError unless 1 <= shortest <= longest."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams must have 1 <= shortest <= longest tokens, got {shortest} and {longest}")
        self.sizes = range(longest, shortest - 1, -1)
        self.most = most
        self.history: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """Where the first occurrence of a sequence ends."""

    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        if not self._extend(prompt, generated):
            return ()
        history, end = self.history, len(self.history)
        here = tuple(history[-self.sizes[0] :])
        for size in self.sizes:
            if size >= end:
                continue
            found = self._ends[here[-size:]]
            if found < end:
                self.grade, self.prior = size, PRIORS[min(size, 3)]
                return history[found : found + min(limit, self.most)]
        return ()

    def _extend(self, prompt: Sequence[int], generated: Sequence[int]) -> bool:
        """Index what is new. False if more is left."""
        history, ends, sizes = self.history, self._ends, self.sizes
        begin, longest = len(history), sizes[0]
        if begin < len(prompt):
            history.extend(prompt[begin : begin + INDEX_AT_ONCE])
        if len(history) >= len(prompt):
            history.extend(generated[len(history) - len(prompt) :])
        last, size = len(history), len(prompt) + len(generated)
        for end in range(begin + 1, last + 1):
            here = tuple(history[max(0, end - longest) : end])
            for own in sizes:
                if own <= end:
                    ends.setdefault(here[-own:], end)
        return last == size
