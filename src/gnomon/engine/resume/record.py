"""What is kept of a generation, as bytes.

magic (8) | version (uint32, little-endian) | SHA-256 of the body (32) | body: JSON, UTF-8
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnomon.engine.sampling import Score

MAGIC = b"GNOMONGC"
VERSION = 1
_HEAD = struct.Struct("<8sI32s")


class Unreadable(ValueError):
    """Bytes that are no record. `foreign` ones are whole, but of another version."""

    def __init__(self, message: str, *, foreign: bool = False) -> None:
        super().__init__(message)
        self.foreign = foreign


@dataclass(frozen=True, slots=True)
class Record:
    """A generation as far as it was delivered: all that a row needs beside its request to go on.

    `prompt` are the ids that were processed, `tokens` those that followed, the last of them not fed yet. `scores` has one of each token's,
    or is empty if the request asked for none.
    """

    key: str
    seed: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    scores: tuple[Score, ...] = ()

    def encode(self) -> bytes:
        body = json.dumps(
            {
                "key": self.key,
                "seed": self.seed,
                "prompt": _packed(self.prompt),
                "tokens": _packed(self.tokens),
                "scores": [(score.logprob, score.top) for score in self.scores],
            },
            separators=(",", ":"),
        ).encode()
        return _HEAD.pack(MAGIC, VERSION, hashlib.sha256(body).digest()) + body

    @staticmethod
    def decode(data: bytes) -> Record:
        """Raises `Unreadable`."""
        if len(data) < _HEAD.size:
            raise Unreadable(f"{len(data)} bytes are less than a head")
        magic, version, digest = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if magic != MAGIC:
            raise Unreadable("the first bytes are not those of a checkpoint")
        if version != VERSION:
            raise Unreadable(f"version {version} is not {VERSION}", foreign=True)
        if hashlib.sha256(body).digest() != digest:
            raise Unreadable("the checksum is wrong")
        try:
            fields: dict[str, Any] = json.loads(body)
            scores = tuple(
                Score(float(logprob), tuple((int(i), float(value)) for i, value in top))
                for logprob, top in fields["scores"]
            )
            prompt, tokens = _unpacked(fields["prompt"]), _unpacked(fields["tokens"])
            record = Record(str(fields["key"]), int(fields["seed"]), prompt, tokens, scores)
        except (ValueError, TypeError, KeyError) as error:
            raise Unreadable(f"the body is malformed: {error}") from error
        if not record.prompt or not record.tokens or len(record.scores) not in (0, len(record.tokens)):
            raise Unreadable(f"{len(prompt)} prompt tokens, {len(tokens)} tokens and {len(scores)} scores don't fit")
        return record


def _packed(ids: Sequence[int]) -> str:
    # Ids one by one would hold the interpreter's lock for long: a prompt may have a hundred thousand.
    return base64.b64encode(np.asarray(ids, dtype="<i4").tobytes()).decode()


def _unpacked(text: str) -> tuple[int, ...]:
    return tuple(np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4").tolist())
