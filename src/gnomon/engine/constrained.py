"""What one row may write next: whatever it likes while it thinks, then what its grammar allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np

from gnomon.chat.reasoning import Stage, Thinking
from gnomon.chat.tokenizer import Tokenizer
from gnomon.grammar import GrammarFailed, Matcher, Words


class RowConstraint:
    """Follows a row's tokens through its reasoning, by the same automaton that later splits the text, and then through its grammar.

    While the row thinks it can't end its turn, nor write on behind the closing tag within one token: what follows is the grammar's.
    """

    def __init__(self, matcher: Matcher, tokenizer: Tokenizer, thinking: Thinking | None = None) -> None:
        self._matcher = matcher
        self.vocabulary = matcher.vocabulary
        self._stage: Stage = "content"
        self._openers: dict[int, list[int]] = {}
        """First id of each marker that may come now, with the ids it goes on with."""
        self._forced: deque[int] = deque()
        if thinking is not None:
            self._splitter, self._stream = thinking.splitter(), tokenizer.stream()
            self._format = thinking.format
            self._stage = self._splitter.stage
            if self._stage == "undecided" and not thinking.may_open and self._format.direct:
                self._stage = "content"
            for marker in self._format.openers:
                first, *rest = tokenizer.encode(marker)
                # A first piece that also begins an answer doesn't tell which is meant.
                if not rest or not matcher.allows(first):
                    self._openers[first] = rest

    def fork(self) -> RowConstraint:
        """An independent copy at the same place."""
        made = copy(self)
        made._matcher = self._matcher.fork()
        made._forced = deque(self._forced)
        if self._stage != "content":
            made._splitter, made._stream = copy(self._splitter), copy(self._stream)
        return made

    def num_legal(self, draft: Sequence[int]) -> int:
        """How many leading ids of a draft may come, one after another, each with something left to write behind it.

        The one that ends the answer is not worth a place in a window: nothing is drawn behind it.
        """
        scout = self.fork()
        for n, token in enumerate(draft):
            if token in self.vocabulary.eos_ids or not scout.allows(token):
                return n
            try:
                scout.advance(token)
            except GrammarFailed:
                return n
            if scout.finished:
                return n
        return len(draft)

    def along(self, draft: Sequence[int]) -> list[Words]:
        """What may come next, and what behind each id of a legal draft: 1 + len(draft) masks.

        Fewer when the grammar gives up on the way. Raises GrammarFailed when it does so at once.
        """
        masks = [self.allowed()]
        if draft:
            scout = self.fork()
            try:
                for token in draft:
                    scout.advance(token)
                    masks.append(scout.allowed())
            except GrammarFailed:
                # The row itself has not come so far, and may never.
                return masks
        return masks

    @property
    def finished(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._stage == "content" and self._matcher.finished

    def allowed(self) -> Words:
        """The ids that may come next, a bit each (uint32 words, least significant bit first). Raises GrammarFailed."""
        if self._stage == "content":
            return self._matcher.allowed()
        if self._forced:
            return self._words([self._forced[0]])
        if self._stage == "undecided":
            opening = self._words(self._openers)
            return opening | self._matcher.allowed() if self._format.direct else opening
        barred = set(self.vocabulary.eos_ids)
        if ending := self._splitter.ending:
            barred.update(self.vocabulary.running_past(ending))
        return ~self._words(barred) & self._all

    def allows(self, token: int) -> bool:
        """Whether an id may come next."""
        if self._stage == "content":
            return self._matcher.allows(token)
        words = self.allowed()
        return token < 32 * len(words) and bool(words[token // 32] >> np.uint32(token % 32) & 1)

    def forced(self) -> Sequence[int]:
        """Ids that spell what must come next; other ids may spell the same. Empty where there is a choice. Raises GrammarFailed."""
        if self._stage == "content":
            return self._matcher.forced()
        return list(self._forced)

    def advance(self, token: int) -> None:
        """Take the token that was drawn. Raises GrammarFailed when it isn't one that was allowed."""
        if self._stage == "undecided" and not self._forced:
            rest = self._openers.get(token)
            if rest is None:
                self._stage = "content"
            else:
                self._forced.extend([token, *rest])
        if self._stage == "content":
            self._matcher.advance(token)
            return
        if self._forced:
            self._forced.popleft()
        self._splitter.feed(self._stream.push(token))
        self._stage = self._splitter.stage

    @property
    def _all(self) -> Words:
        return self.vocabulary.everything

    def _words(self, ids: Iterable[int]) -> Words:
        words = np.zeros_like(self._all)
        for token in ids:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words
