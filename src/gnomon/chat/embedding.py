"""Texts as embedding models want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

END = "<|endoftext|>"
"""Whose place the vector is read at."""


class EmbeddingTokenizer(Protocol):
    """What embedding needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def token_id(self, piece: str) -> int | None: ...


def prompt_for(
    tokenizer: EmbeddingTokenizer, text: str | Sequence[int], instruction: str | None = None
) -> tuple[int, ...]:
    """Ids of a text, or given ids, with the end token behind them; an `instruction` wraps a text as Qwen3-Embedding's queries are.

    Empty for an empty text. (Qwen3-Embedding's model card has the form.)
    """
    if isinstance(text, str):
        ids = tokenizer.encode(f"Instruct: {instruction}\nQuery:{text}" if instruction and text else text)
    else:
        ids = list(text)
    end = tokenizer.token_id(END)
    return tuple(ids) if not ids or end is None or ids[-1] == end else (*ids, end)
