"""Asking an engine from the same process, without a sink of one's own."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

from gnomon.chat.constraint import Constraint
from gnomon.chat.tokenizer import Tokenizer
from gnomon.engine.api import Event, Failed, Finished, Request, SamplingParams, Sink
from gnomon.engine.completion import Completion, collect


class Generating(ABC):
    """What can be built on submitting and cancelling alone."""

    tokenizer: Tokenizer

    @abstractmethod
    def submit(self, request: Request, sink: Sink) -> None: ...

    @abstractmethod
    def cancel(self, request_id: str, *, answered: bool = False) -> None: ...

    def stream(self, request: Request) -> Iterator[Event]:
        """Submit and yield the events up to `Finished` or `Failed`. Closing the iterator cancels the request."""
        events: SimpleQueue[Event] = SimpleQueue()
        self.submit(request, events.put)
        return self._follow(request.id, events)

    def _follow(self, request_id: str, events: SimpleQueue[Event]) -> Iterator[Event]:
        ended = False
        try:
            while not ended:
                event = events.get()
                ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            if not ended:
                self.cancel(request_id)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        n: int = 1,
        ignore_eos: bool = False,
        constraint: Constraint | None = None,
    ) -> Completion:
        """Continue a prompt and wait for the end.

        Text takes no chat template; what the model wants around a raw prompt (a beginning-of-sequence token) is added, unless it is
        there already.

        Raises an `EngineError` when the request is refused or fails.
        """
        ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        request = Request(
            id=f"generate-{uuid.uuid4().hex}",
            prompt=tuple(ids),
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            stop=tuple(stop),
            ignore_eos=ignore_eos,
            n=n,
            constraint=constraint,
        )
        return collect(self.stream(request), n)

    def _encode(self, text: str) -> list[int]:
        begin = self.tokenizer.special_tokens.get("bos_token")
        return self.tokenizer.encode(text, special=not begin or not text.startswith(begin))
