"""Text of tool calls that tools and template settle: asserted, not verified. Off unless asked for, since it decides for the model.

A span is asserted only where the whole answer so far, behind a complete block of reasoning, is nothing but complete calls and the exact
beginning of one more. Any other text ends it for the row: quoted calls, code and prose never trigger anything.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from gnomon.chat.spans import ToolSpans
from gnomon.chat.tokenizer import Tokenizer
from gnomon.propose.proposer import Proposer

LEAST = 2
MOST_TOKENS = 65_536
"""Longer answers are not looked at any more."""


class Strict(Proposer):
    """Asserts the spans of one row, at most `most` tokens each."""

    source = "strict"
    certain = True
    asserted = True

    def __init__(self, spans: ToolSpans, tokenizer: Tokenizer, eos_ids: Collection[int], most: int) -> None:
        self._spans = spans
        self._stream = tokenizer.stream(hide=False)
        self._eos_ids = frozenset(eos_ids)
        self._most = most
        self._text = ""
        self._seen = 0
        self._queue: tuple[int, ...] = ()
        """What of the span under way is left."""
        self._calls = 0
        """Length of the text that is known to be complete calls."""
        self.waits = True
        """Whether the answer may still hold a span."""
        self.failed_parse = False
        """Complete calls could not be read."""

    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:  # noqa: ARG002
        if self.waits:
            self._follow(generated)
        if not self.waits:
            return ()
        if not self._queue and not self._stream.pending:
            self._queue = self._found()
        # All of it: what a window can't hold must not be drawn in between.
        return self._queue

    def _follow(self, generated: Sequence[int]) -> None:
        for token in generated[self._seen :]:
            self._text += self._stream.push(token)
            self._queue = self._queue[1:] if self._queue[:1] == (token,) else ()
        self._seen = len(generated)
        if self._seen > MOST_TOKENS:
            self.waits = False

    def _found(self) -> tuple[int, ...]:
        """The span that follows here, if one does."""
        current = self._current()
        if not self.waits or not current:
            return ()
        for span in self._spans.spans:
            if current == span.trigger:
                return self._cut(span.ids)
        for ending in self._spans.endings:
            if current.startswith(ending.head):
                rest = _behind_value(current[len(ending.head) :])
                if rest and ending.tail.startswith(rest):
                    return self._cut(ending.rests.get(ending.tail[len(rest) :], ()))
        return ()

    def _current(self) -> str:
        """The call under way, as far as it is written; empty where there is none. Disarms where the answer is something else."""
        text = self._answer()
        if text is None:
            return ""
        opener, close = self._spans.opener, self._spans.close
        at = text.rfind(close)
        end = at + len(close) if at >= 0 else 0
        if end > self._calls:
            if not self._spans.are_calls(text[:end]):
                self.waits, self.failed_parse = False, True
                return ""
            self._calls = end
        current = text[self._calls :].lstrip()
        if not current.startswith(opener) and not opener.startswith(current):
            self.waits = False
        return current

    def _answer(self) -> str | None:
        """The text behind the reasoning; None while that goes on. Disarms where it holds code that wasn't closed."""
        text, tags = self._text, self._spans.thinking
        if tags is None:
            return text.lstrip()
        opened = self._spans.starts_thinking or text.lstrip().startswith(tags.open)
        if not opened:
            return None if tags.open.startswith(text.lstrip()) else text.lstrip()
        thought, closed, answer = text.partition(tags.close)
        if not closed:
            return None
        if thought.count("`") % 2:
            self.waits = False
        return answer.lstrip()

    def _cut(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        end = next((n for n, token in enumerate(ids) if token in self._eos_ids), len(ids))
        span = ids[: min(end, self._most)]
        return span if len(span) >= LEAST else ()


def _behind_value(text: str) -> str:
    """What stands behind a JSON value that a text begins with; empty if none is complete."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return ""
    return text[end:]
