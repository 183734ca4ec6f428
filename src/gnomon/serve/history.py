"""Which tokens earlier answers were really made of, so that a conversation that goes on has the same tokens, and not only the same text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

MAX_CHARACTERS = 32_000_000
"""Text remembered at most; the tokens behind it take about as much again."""
JOINT = 16
"""Tokens before a joint that are decoded again to see the text behind it: some tokenizers drop a space where a text begins."""


class Decoder(Protocol):
    """What the history needs of a tokenizer."""

    def encode(self, text: str, *, special: bool = ...) -> list[int]: ...

    def decode(self, ids: Iterable[int], *, hide: bool = ...) -> str:
        """Text of ids; with `hide` false special tokens are written out."""
        ...


class History:
    """Text of prompts with their answers, and the ids behind it, most recently used last. Safe to use from several threads.

    A tokenizer may cut an answer's text into other tokens than those that were generated, and then nothing held of the answer's state
    fits the next turn. A rendered prompt that begins with a remembered text takes the remembered ids, and only what follows is
    tokenised. Text that was edited, trimmed or rendered otherwise doesn't begin like that and is tokenised as usual.
    """

    def __init__(self, tokenizer: Decoder, max_characters: int = MAX_CHARACTERS) -> None:
        self.tokenizer = tokenizer
        self.max_characters = max_characters
        self.num_characters = 0
        self.reuses = 0
        self._ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def record(self, prompt: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Remember an answer's tokens behind its prompt's. An answer that ends inside a character is not remembered."""
        answer = self._text_after(prompt_ids, answer_ids)
        if not answer or answer.endswith("\ufffd"):
            return
        text = prompt + answer
        with self._lock:
            if text not in self._ids:
                self.num_characters += len(text)
            self._ids[text] = (*prompt_ids, *answer_ids)
            self._ids.move_to_end(text)
            while self.num_characters > self.max_characters:
                old, _ = self._ids.popitem(last=False)
                self.num_characters -= len(old)

    def encode(self, text: str) -> tuple[int, ...] | None:
        """The ids of a prompt that begins with a remembered text; None if none does, or if they would not decode to the prompt."""
        with self._lock:
            known = max((one for one in self._ids if text.startswith(one)), key=len, default=None)
            if known is None:
                return None
            self._ids.move_to_end(known)
            ids = self._ids[known]
        rest = text[len(known) :]
        more = self.tokenizer.encode(rest, special=False)
        if self._text_after(ids, more) != rest:
            return None
        self.reuses += 1
        return (*ids, *more)

    def _text_after(self, before: Sequence[int], ids: Sequence[int]) -> str | None:
        """The text that `ids` add behind others; None if they change the text of those."""
        tail = before[-JOINT:]
        start, whole = (self.tokenizer.decode(part, hide=False) for part in (tail, (*tail, *ids)))
        return whole[len(start) :] if whole.startswith(start) else None
