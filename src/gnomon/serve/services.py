"""What the routes work with: one object per application, made once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Protocol, cast

from fastapi import Request

from gnomon.chat.spans import SpanCache
from gnomon.chat.template import ChatTemplate
from gnomon.config import HTTPConfig, SamplingDefaults
from gnomon.engine.api import Engine, Supervised
from gnomon.fetch import Fetcher
from gnomon.isolate import ModelPool
from gnomon.serve.history import History
from gnomon.serve.keys import KeyRing
from gnomon.serve.metrics import Metrics
from gnomon.serve.preparation import PreparationPool
from gnomon.serve.response_store import ResponseStore
from gnomon.trace import OFF, Tracer

VERSION = version("gnomon")
FINGERPRINT = f"gnomon-{VERSION}"


class Vocabulary(Protocol):
    """What raw prompts need of `gnomon.chat.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, special: bool = ...) -> list[int]:
        """Token ids of `text`, with the tokens that the tokenizer itself adds when `special`."""
        ...

    def decode(self, ids: Iterable[int], *, hide: bool = ...) -> str:
        """Text of ids; with `hide` false special tokens are written out."""
        ...

    @property
    def longest_token(self) -> int | None:
        """The most bytes of a text that one id can stand for, if that is known."""
        ...

    def token_id(self, piece: str) -> int | None: ...

    def split(self, text: str) -> Sequence[str | int]:
        """Runs of plain text, and the ids of special tokens written between them."""
        ...

    def piece(self, token: int) -> str:
        """The vocabulary's own spelling of a token."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Waits of the HTTP side, in seconds."""

    keep_alive: float = 10.0
    """Silence in a stream after which a comment is sent."""
    write: float = 60.0
    """How long a client may take no data before it is dropped."""
    read: float = 60.0
    """How long a request body may pause."""
    pace: float = 1024.0
    """Bytes per second that a request body must come to, from `read` seconds after its head."""
    head: float = 20.0
    """How long a request's head may take."""


@dataclass(frozen=True, slots=True)
class Voice:
    """What a model is spoken to with."""

    engine: Engine
    vocabulary: Vocabulary
    template: ChatTemplate
    sampling: SamplingDefaults


@dataclass(slots=True)
class Services:
    """Held in `app.state.services`; `gnomon.serve.choose` gives those of the model that a request is for."""

    engine: Engine
    vocabulary: Vocabulary
    template: ChatTemplate
    sampling: SamplingDefaults
    http: HTTPConfig
    timing: Timing
    keys: KeyRing
    metrics: Metrics
    preparation: PreparationPool
    owner: str
    chat_history: History
    """Of rendered conversations."""
    text_history: History
    """Of raw prompts, which the tokenizer may have put a token of its own before."""
    endpoints: tuple[str, ...]
    """Method and path of every route."""
    pool: ModelPool[Voice] | None = None
    """Where the server has several models."""
    models: dict[str, Services] = field(default_factory=dict[str, "Services"])
    """With what is a model's own, by id, of the pool's models that were asked for."""
    tracer: Tracer = OFF
    fetcher: Fetcher | None = None
    """Reads documents by URL, where the server does."""
    spans: SpanCache = field(default_factory=SpanCache)
    """What is settled of calls of the tools that were offered lately."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    started_at: float = field(default_factory=time.time)

    @property
    def whole(self) -> Supervised:
        """What the server runs: its engine, or the pool of several."""
        return self.engine if self.pool is None else self.pool


def services_of(request: Request) -> Services:
    return cast("Services", request.app.state.services)
