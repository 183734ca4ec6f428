"""One answer against its grammar."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from gnomon.grammar.vocabulary import Vocabulary

Words = NDArray[np.uint32]


class GrammarFailed(RuntimeError):
    """A grammar that gave up (too many ways to read the text), or a token that it doesn't allow."""


class Matcher:
    """Where an answer stands in its grammar. Not to be shared between threads."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self.vocabulary = vocabulary

    def fork(self) -> Matcher:
        """An independent copy at the same place."""
        return Matcher(self._matcher.deep_copy(), self.vocabulary)

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a whole one."""
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> Words:
        """The ids that may come next, a bit each, least significant first; the ends are among them only while `accepting`.

        Raises GrammarFailed.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        self._check()
        # llguidance may give a word too many.
        return words[: len(self.vocabulary.everything)]

    def allows(self, token: int) -> bool:
        """Whether an id may come next."""
        return self._matcher.validate_tokens([token]) == 1

    def forced(self) -> list[int]:
        """Tokens of the text that must come next, as the model's tokenizer spells it, up to where what follows could change the spelling.

        Other spellings may be allowed too. Empty where there is a choice. Raises GrammarFailed.
        """
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    def advance(self, token: int) -> None:
        """Take the next id. Raises GrammarFailed when the grammar doesn't allow it."""
        if not self._matcher.consume_token(token):
            self._check()
            raise GrammarFailed(f"token {token} is not one that the grammar allows")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar gave up: {plain(self._matcher.get_error())}")


def plain(message: str) -> str:
    """One of llguidance's messages on one line, without its place for a parser's state."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
