"""Text copied from the session: what followed where the last eight tokens occurred before, as far as all such places agree.

Unlike prompt lookup, which guesses from a few tokens and often, this one waits for a long match and then knows how far it reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gnomon.propose.proposer import Proposer

INDEX_AT_ONCE = 16_384
"""Tokens indexed per call, so that a long prompt doesn't hold up the rows beside it; until it is indexed nothing is proposed."""
LEAST = 2
"""A shorter span is not worth a window."""


class Echo(Proposer):
    """Finds the nearest `candidates` earlier occurrences of the last `k` tokens of prompt and output, and proposes what follows while they
    all agree: up to a fork, a line's end, or `most` tokens. `grade` 1 tells of several occurrences.

    Hashes only find places: the tokens there are compared. The index holds `capacity` tokens and then stays as it is.
    """

    source = "echo"
    prior = 0.7

    def __init__(
        self,
        k: int = 8,
        candidates: int = 24,
        most: int = 32,
        capacity: int = 131_072,
        ends_line: Callable[[int], bool] | None = None,
    ) -> None:
        """`ends_line` tells the ids that write a line's end."""
        self.k = k
        self.candidates = candidates
        self.most = most
        self.capacity = capacity
        self.truncated = False
        """The text is longer than the index."""
        self.branch_stops = 0
        """Spans that ended because occurrences went on differently."""
        self._ends_line = ends_line
        self._history: list[int] = []
        self._places: dict[int, list[int]] = {}
        """By hash, the positions behind k-grams, in order."""

    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        if not self._extend(prompt, generated):
            return ()
        total, k = len(prompt) + len(generated), self.k
        if total < k:
            return ()
        written = list(generated[-k:])
        tail = list(prompt[len(prompt) - (k - len(written)) :]) + written if len(written) < k else written
        history, live = self._history, list[int]()
        for place in reversed(self._places.get(hash(tuple(tail)), ())):
            if place < total and history[place - k : place] == tail:
                live.append(place)
                if len(live) == self.candidates:
                    break
        span = self._agreed(live, min(limit, self.most))
        self.grade = int(len(live) > 1)
        return span if len(span) >= LEAST else ()

    def _agreed(self, live: Sequence[int], most: int) -> list[int]:
        """What all places go on with. One that has come to the text's end has nothing to say."""
        history, span = self._history, list[int]()
        while len(span) < most:
            following = {history[place + len(span)] for place in live if place + len(span) < len(history)}
            if len(following) != 1:
                self.branch_stops += len(following) > 1
                break
            (token,) = following
            span.append(token)
            if len(span) >= LEAST and self._ends_line is not None and self._ends_line(token):
                break
        return span

    def _extend(self, prompt: Sequence[int], generated: Sequence[int]) -> bool:
        """Index what is new. False if more of the prompt is left."""
        history, k = self._history, self.k
        begin = len(history)
        room = self.capacity - begin
        if begin < len(prompt):
            history.extend(prompt[begin : begin + min(INDEX_AT_ONCE, room)])
        done = len(history)
        if done >= len(prompt):
            start = done - len(prompt)
            history.extend(generated[start : start + self.capacity - done])
        for end in range(max(begin + 1, k), len(history) + 1):
            self._places.setdefault(hash(tuple(history[end - k : end])), []).append(end)
        whole = len(history) == len(prompt) + len(generated)
        self.truncated = self.truncated or (not whole and len(history) == self.capacity)
        return whole or self.truncated
