"""A model's tokens as grammars see them: bytes, ends, and specials that no text can spell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from numpy.typing import NDArray

JOINTS = ('"key": "a", "key": "a"', '"a": {"b": [1, 2]}, "a": [{"b": true}, {"c": []}]', '"a": 1, "b": ["c", "d"]}')
"""JSON as it is usually written."""


class GrammarTokenizer(Protocol):
    """What grammars need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_ids(self) -> Collection[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def token_bytes(self, token: int) -> bytes: ...
    def is_special(self, token: int) -> bool: ...


class Vocabulary:
    """The tokens of one model, with the ids that end an answer. Building the index takes up to a second, on first use."""

    def __init__(self, tokenizer: GrammarTokenizer, eos_ids: Collection[int]) -> None:
        """`eos_ids` may be empty: grammars then end only where nothing can follow."""
        self.tokenizer = tokenizer
        self.eos_ids = tuple(sorted(eos_ids))
        self._past: dict[str, tuple[int, ...]] = {}

    @cached_property
    def index(self) -> LLTokenizer:
        """The tokens as llguidance's trie."""
        return LLTokenizer(TokenizerWrapper(_Tokens(self)), eos_token=list(self.eos_ids))

    @cached_property
    def spellings(self) -> Sequence[bytes]:
        """The bytes of every id."""
        size = max(self.tokenizer.vocab_size, self.eos_ids[-1] + 1)
        return [self.tokenizer.token_bytes(token) for token in range(size)]

    @cached_property
    def everything(self) -> NDArray[np.uint32]:
        """A bit for every id."""
        size = len(self.spellings)
        words = np.full(-(-size // 32), 0xFFFFFFFF, dtype=np.uint32)
        if size % 32:
            words[-1] = (1 << size % 32) - 1
        return words

    @cached_property
    def joints(self) -> Mapping[int, Sequence[int]]:
        """The tokens of punctuation that follow a token in ordinary JSON."""
        found: dict[int, list[int]] = {}
        for text in JOINTS:
            ids = self.tokenizer.encode(text)
            for before, after in pairwise(ids):
                followers = found.setdefault(before, [])
                if self.is_punctuation(after) and after not in followers:
                    followers.append(after)
        return found

    def is_punctuation(self, token: int) -> bool:
        """Whether an id writes something, and neither letters, digits nor bytes outside ASCII."""
        text = self.spellings[token] if token < len(self.spellings) else b""
        return bool(text) and text.isascii() and not any(chr(byte).isalnum() for byte in text)

    def running_past(self, ending: str) -> tuple[int, ...]:
        """Ids that write `ending` and then more than newlines."""
        known = self._past.get(ending)
        if known is None:
            head = ending.encode()
            known = self._past[ending] = tuple(
                token
                for token, spelling in enumerate(self.spellings)
                if head in spelling and spelling.partition(head)[2].strip(b"\n")
            )
        return known


class _Tokens:
    """The shape of a tokenizer that llguidance takes."""

    bos_token_id = None
    unk_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = vocabulary.tokenizer
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens = vocabulary.spellings
        special = {*vocabulary.eos_ids, *tokenizer.hidden_ids}
        special.update(token for token in range(len(self.tokens)) if tokenizer.is_special(token))
        self.special_token_ids = sorted(special)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())
