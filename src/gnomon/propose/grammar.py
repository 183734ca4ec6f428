"""Text that a row's grammar forces: keys, brackets and whatever else a schema leaves no choice about.

    written      {"name": "Ada",
    forced                       (a blank or none: a choice)  age":          (a blank or none)
    proposed                      "  age  ":  ␣

Forced text says which bytes come, not which tokens: other tokens may spell the same, and the row's own sampler decides. Between two
forced pieces often lies a choice that is none for a given model, as of a blank behind a comma. Such joints are bridged with what the
row, or else ordinary JSON, has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np

from gnomon.grammar import GrammarFailed, Vocabulary, Words
from gnomon.propose.proposer import Proposer

NARROW = 128
"""Most ids a joint may leave to choose from; free text leaves thousands."""
REMEMBERED = 4


class Walk(Protocol):
    """A row's constraint, of which a copy goes ahead."""

    vocabulary: Vocabulary

    def fork(self) -> Self: ...
    @property
    def finished(self) -> bool: ...
    def forced(self) -> Sequence[int]: ...
    def allowed(self) -> Words: ...
    def allows(self, token: int) -> bool: ...
    def advance(self, token: int) -> None: ...


Place = tuple[int, int]
"""A joint: the id before it, and how many ids may follow."""


class Grammar(Proposer):
    """Proposes what the grammar of one row forces, at most `most` tokens. `grade` 1 tells that the first of them bridges a joint."""

    source = "grammar"
    prior = 0.8
    begins = True

    def __init__(self, walk: Walk, most: int) -> None:
        self._walk = walk
        self._most = most
        self._seen = 0
        self._followers: dict[int, list[int]] = {}
        """Punctuation that the row has written behind an id, latest last."""
        self._known: dict[Place, int | None] = {}
        """What came at joints that were bridged; None if it was no punctuation."""
        self._bridged: list[tuple[int, Place]] = []
        """Bridged joints of the last draft, by their position in it."""
        self._draft: list[int] = []
        self._begin = 0

    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:  # noqa: ARG002
        self._learn(generated)
        before = generated[-1] if generated else -1
        self._draft, self._begin = self._ahead(before, min(limit, self._most)), len(generated)
        self.grade = int(bool(self._bridged) and self._bridged[0][0] == 0)
        return self._draft

    def _ahead(self, before: int, most: int) -> list[int]:
        scout, draft = self._walk.fork(), list[int]()
        self._bridged = []
        try:
            while len(draft) < most and not scout.finished:
                piece = scout.forced() or self._joint(scout, before, len(draft))
                if not piece:
                    break
                for token in piece[: most - len(draft)]:
                    if not scout.allows(token):
                        return draft
                    scout.advance(token)
                    draft.append(token)
                before = draft[-1]
        except GrammarFailed:
            # The row itself has not come so far.
            pass
        return draft

    def _joint(self, scout: Walk, before: int, at: int) -> Sequence[int]:
        candidates = [*reversed(self._followers.get(before, ())), *scout.vocabulary.joints.get(before, ())]
        if not candidates:
            return ()
        size = int(np.bitwise_count(scout.allowed()).sum())
        if size > NARROW:
            return ()
        place = before, size
        if place in self._known:
            known = self._known[place]
            candidates = [] if known is None else [known]
        for token in candidates:
            if scout.allows(token):
                self._bridged.append((at, place))
                return (token,)
        return ()

    def _learn(self, generated: Sequence[int]) -> None:
        punctuation = self._walk.vocabulary.is_punctuation
        for at, place in self._bridged:
            here = self._begin + at
            if here >= len(generated) or list(generated[self._begin : here]) != self._draft[:at]:
                break
            self._known[place] = generated[here] if punctuation(generated[here]) else None
        for at in range(max(1, self._seen), len(generated)):
            if punctuation(generated[at]):
                followers = self._followers.setdefault(generated[at - 1], [])
                if generated[at] in followers:
                    followers.remove(generated[at])
                followers.append(generated[at])
                del followers[:-REMEMBERED]
        self._seen = len(generated)
