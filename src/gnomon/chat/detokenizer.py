"""Token ids to text, one at a time: text is given out as soon as its characters are complete."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, Self

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns the ids of one output into text. The pieces joined are the text of all ids.

    `copy.copy` gives an independent one at the same place.
    """

    @property
    def pending(self) -> bool:
        """Whether ids were taken whose text has not come out yet."""
        ...

    def push(self, token: int) -> str:
        """Take the next id; give the text that is complete now, often the empty string inside a multi-byte character."""
        ...

    def finish(self) -> str:
        """Give what is left. Bytes that never became a character come out as U+FFFD."""
        ...


def _one_for_each(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("gnomon.one_for_each", _one_for_each)


class ByteDetokenizer:
    """For vocabularies whose every token stands for bytes: byte-level BPE, and SentencePiece with byte fallback.

    Invalid bytes become one U+FFFD per maximal subpart, as in `tokenizers`' byte-level decoder, or one per byte (`each`), as in its
    byte-fallback decoder. (That one also gives up the valid characters in the same run of byte tokens; here they stay.)
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, each: bool = False, strip: bool = False) -> None:
        """`strip` drops one space at the very beginning, SentencePiece's dummy prefix."""
        self._token_bytes = token_bytes
        self._errors = "gnomon.one_for_each" if each else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._errors)
        self._strip = strip

    def __copy__(self) -> Self:
        made = type(self)(self._token_bytes, each=self._errors != "replace", strip=self._strip)
        made._decoder.setstate(self._decoder.getstate())
        return made

    @property
    def pending(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token: int) -> str:
        return self._stripped(self._decoder.decode(self._token_bytes(token)))

    def finish(self) -> str:
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For any other decoder: decode a window that starts at the last settled token and give what grew.

    A decoder whose text of a prefix is not a prefix of its text (clean-up of spaces before punctuation) can't take back what was
    given; what it adds from there on still comes.
    """

    context = 4
    """Settled tokens decoded along, since a decoder may treat the first token of a text specially."""

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: Collection[int] = ()) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = []
        self._given = ""
        self._settled = 0

    def __copy__(self) -> Self:
        made = type(self)(self._decode, self._hidden)
        made._ids, made._given, made._settled = [*self._ids], self._given, self._settled
        return made

    @property
    def pending(self) -> bool:
        return self._settled < len(self._ids)

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        return "" if text.endswith(_REPLACEMENT) else self._give(text)

    def finish(self) -> str:
        return self._give(self._decode(self._ids)) if self.pending else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._settled = len(self._ids)
        self._given = text
        if len(self._ids) > 4 * self.context:
            self._ids = self._ids[-self.context :]
            self._settled = len(self._ids)
            self._given = self._decode(self._ids)
        return new
