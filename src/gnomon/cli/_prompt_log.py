"""Logs prompts and answers, for operators who asked for it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from gnomon.chat.constraint import Constraint
from gnomon.engine.api import (
    ChoiceFinished,
    Delta,
    Engine,
    Event,
    FlushReport,
    Health,
    ModelInfo,
    Replayed,
    Request,
    Sink,
    TokenLogprob,
)

log = logging.getLogger("gnomon.prompts")


class _Decoder(Protocol):
    def decode(self, ids: tuple[int, ...], *, hide: bool = ...) -> str: ...


class PromptLog:
    """An engine that writes what goes in and what comes out to the log, with the request's id."""

    def __init__(self, engine: Engine, tokenizer: _Decoder) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    def submit(self, request: Request, sink: Sink) -> None:
        about = {"request_id": request.id}
        texts: dict[int, list[str]] = defaultdict(list)

        def heard(event: Event) -> None:
            if isinstance(event, Delta):
                texts[event.index].append(event.text)
            elif isinstance(event, Replayed):
                texts[event.index] += [delta.text for delta in event.deltas]
            elif isinstance(event, ChoiceFinished):
                text = "".join(texts.pop(event.index, ()))
                log.info("answer %d (%s): %s", event.index, event.reason, text, extra=about)
            sink(event)

        self._engine.submit(request, heard)
        log.info(
            "prompt of %d tokens: %s",
            len(request.prompt),
            self._tokenizer.decode(request.prompt, hide=False),
            extra=about,
        )

    def embed(self, prompts: Sequence[tuple[int, ...]]) -> Future[list[list[float]]]:
        self._tell(prompts)
        return self._engine.embed(prompts)

    def score(self, prompts: Sequence[tuple[int, ...]], top: int) -> Future[list[tuple[TokenLogprob, ...]]]:
        self._tell(prompts)
        return self._engine.score(prompts, top)

    def _tell(self, texts: Sequence[tuple[int, ...]]) -> None:
        for text in texts:
            log.info("text of %d tokens: %s", len(text), self._tokenizer.decode(text, hide=False))

    def compile(self, constraint: Constraint) -> Sequence[str]:
        return self._engine.compile(constraint)

    def cancel(self, request_id: str, *, answered: bool = False) -> None:
        self._engine.cancel(request_id, answered=answered)

    def health(self) -> Health:
        return self._engine.health()

    def stats(self) -> Mapping[str, Any]:
        return self._engine.stats()

    def flush(self, timeout: float) -> FlushReport:
        return self._engine.flush(timeout)

    def close_session(self, session: str) -> bool:
        return self._engine.close_session(session)

    def drain(self, timeout: float) -> bool:
        return self._engine.drain(timeout)

    def stop(self) -> None:
        self._engine.stop()
