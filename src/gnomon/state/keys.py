"""Keys of blocks: a chain of hashes over an identity and the tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_key(namespace: str) -> bytes:
    """Where the chain of an identity's hashes begins."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest()


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block: a hash over its tokens and, through its parent's key, all before them and the identity."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()
