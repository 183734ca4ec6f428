"""Generated ids to delivered text: characters whole, stop strings never shown, end-of-sequence never content."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gnomon.chat.detokenizer import Detokenizer
from gnomon.engine.api import TokenLogprob, TopLogprob


class TextTokenizer(Protocol):
    """What output needs of a tokenizer."""

    def stream(self) -> Detokenizer: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(slots=True)
class Piece:
    """Text to deliver with the tokens behind it. Falsy if there is nothing to deliver. Never changed, as `Delta`."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.ids)


@dataclass(slots=True)
class _Token:
    id: int
    logprob: TokenLogprob | None
    start: int
    end: int = -1


class TextOutput:
    """The text side of one choice: push ids, deliver pieces, stop when `finished`.

    A stop string ends the text where it begins. Of several in the text the one that begins first counts, of those that begin at
    the same place the shortest; so a match waits while a stop string that began earlier may still come true. Whatever the token
    borders, the pieces joined are the decoded text up to there. A token is delivered with the last character it contributes to;
    one that lies wholly in the stop string, and an end-of-sequence token, never are.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Iterable[str] = (), eos: Collection[int] = ()) -> None:
        self._stream = tokenizer.stream()
        self._stops = tuple(dict.fromkeys(s for s in stop if s))
        self._eos = frozenset(eos)
        self._held = ""
        self._decoded = 0
        self._tokens: deque[_Token] = deque()
        self.finished = False
        """True once nothing more will come."""
        self.ended = False
        """True if the text ended by itself: by a stop string or an end-of-sequence token."""
        self.stop: str | None = None
        """The stop string that matched."""

    def push(self, token: int, logprob: TokenLogprob | None = None) -> Piece:
        """Take the next id and give what can be delivered. Raises RuntimeError once finished."""
        if self.finished:
            raise RuntimeError("a finished output takes no more tokens")
        if token in self._eos:
            self.ended = True
            return self.finish()
        text = self._stream.push(token)
        if not (self._stops or self._tokens or self._stream.pending):
            # Nothing is held back, and nothing has to be: nearly every token.
            self._decoded += len(text)
            return Piece(text, (token,), () if logprob is None else (logprob,))
        self._tokens.append(_Token(token, logprob, self._decoded))
        return self._deliver(text)

    def finish(self) -> Piece:
        """End the text (a limit was reached, or the choice was cancelled) and give what was held back."""
        if self.finished:
            return Piece()
        self.finished = True
        return self._deliver(self._stream.finish())

    def _deliver(self, text: str) -> Piece:
        self._held += text
        self._decoded += len(text)
        if self.finished or not self._stream.pending:
            for token in reversed(self._tokens):
                if token.end >= 0:
                    break
                token.end = self._decoded
        found = min(((at, len(s), s) for s in self._stops if (at := self._held.find(s)) >= 0), default=None)
        live = len(self._held) if self.finished else self._earliest_partial()
        if found is not None and found[0] <= live:
            return self._cut(found[0], found[2])
        return self._release(live)

    def _earliest_partial(self) -> int:
        """Where the longest tail of the held text begins that a stop string begins with."""
        held = self._held
        for at in range(max(0, len(held) - max(map(len, self._stops), default=1) + 1), len(held)):
            if any(len(s) > len(held) - at and s.startswith(held[at:]) for s in self._stops):
                return at
        return len(held)

    def _cut(self, at: int, stop: str) -> Piece:
        self.finished = self.ended = True
        self.stop = stop
        position = self._decoded - len(self._held) + at
        piece = self._piece(self._held[:at], [token for token in self._tokens if token.start < position])
        self._held = ""
        self._tokens.clear()
        return piece

    def _release(self, at: int) -> Piece:
        text, self._held = self._held[:at], self._held[at:]
        position = self._decoded - len(self._held)
        tokens: list[_Token] = []
        while self._tokens and 0 <= self._tokens[0].end <= position:
            tokens.append(self._tokens.popleft())
        return self._piece(text, tokens)

    @staticmethod
    def _piece(text: str, tokens: Sequence[_Token]) -> Piece:
        return Piece(text, tuple(t.id for t in tokens), tuple(t.logprob for t in tokens if t.logprob is not None))


def token_logprob(
    tokenizer: TextTokenizer, token: int, logprob: float, top: Iterable[tuple[int, float]] = ()
) -> TokenLogprob:
    """A drawn token's score as the engine's interface has it: `bytes` as generated, `token` the text they make on their own."""
    rivals = ((i, value, tokenizer.token_bytes(i)) for i, value in top)
    spelling = tokenizer.token_bytes(token)
    return TokenLogprob(
        id=token,
        token=_text(spelling),
        logprob=logprob,
        bytes=spelling,
        top=tuple(TopLogprob(i, _text(data), value, data) for i, value, data in rivals),
    )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
