"""The one way from a prepared request to the pieces of its answer; every generating route reads from here."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gnomon.chat.reasoning import PlainSplitter, Segment, Splitter
from gnomon.engine.api import ChoiceFinished, Delta, Event, Failed, Finished, Request, TokenLogprob, Usage
from gnomon.serve.bridge import EventStream
from gnomon.serve.errors import APIError, from_failed
from gnomon.serve.metrics import Latency
from gnomon.serve.services import Services

Outcome = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of a choice. With a `finish` reason it is the choice's last."""

    index: int
    content: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


@dataclass(slots=True)
class Choice:
    """One choice under way: its splitter, and log-probabilities whose text is still held back."""

    index: int
    splitter: Splitter
    held: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    reasoning_tokens: int = 0

    def feed(self, event: Delta) -> Piece | None:
        """The piece an event makes, or None when all of it is held back.

        Tokens count as reasoning from the block's opening to its closing marker.
        """
        thought = self.splitter.thinking
        segments = self.splitter.feed(event.text)
        if thought or self.splitter.thinking or any(one.kind == "reasoning" for one in segments):
            self.reasoning_tokens += len(event.ids)
        self.held += event.logprobs
        return self._piece(segments, None) if segments else None

    def finish(self, reason: str) -> Piece:
        return self._piece(self.splitter.finish(), reason)

    def _piece(self, segments: Sequence[Segment], finish: str | None) -> Piece:
        logprobs, self.held = tuple(self.held), []
        return Piece(
            self.index,
            content="".join(one.text for one in segments if one.kind == "content"),
            reasoning="".join(one.text for one in segments if one.kind == "reasoning"),
            logprobs=logprobs,
            finish=finish,
        )


class Assembly:
    """Turns the engine's events into pieces. Choice j of the k-th request has the index k·n + j."""

    def __init__(self, requests: Sequence[Request], splitter: Callable[[], Splitter] = PlainSplitter) -> None:
        self.choices: dict[tuple[str, int], Choice] = {}
        for request in requests:
            for index in range(request.n):
                self.choices[request.id, index] = Choice(len(self.choices), splitter())
        self.usages: list[Usage] = []

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices.values())

    def feed(self, event: Event) -> Piece | None:
        """Raises APIError when the event tells of a failure."""
        match event:
            case Delta():
                return self.choices[event.request_id, event.index].feed(event)
            case ChoiceFinished(reason="stop" | "length"):
                return self.choices[event.request_id, event.index].finish(event.reason)
            case ChoiceFinished(reason="cancelled"):
                raise APIError(503, "the request was cancelled by the server", type="server_error", code="cancelled")
            case Finished():
                self.usages.append(event.usage)
            case Failed():
                raise from_failed(event)
            case _:
                pass
        return None


class Generation:
    """An answer under way. Must be closed; closing cancels what still runs."""

    def __init__(
        self,
        services: Services,
        endpoint: str,
        requests: Sequence[Request],
        prompt_field: str,
        splitter: Callable[[], Splitter] = PlainSplitter,
    ) -> None:
        """Submits the requests. Raises APIError when the engine refuses them; `prompt_field` is what clients call the prompt."""
        self._services = services
        self._endpoint = endpoint
        self._assembly = Assembly(requests, splitter)
        try:
            self._stream = EventStream(services.engine, requests, tracer=services.tracer)
        except APIError as error:
            if error.param == "prompt":
                error.param = prompt_field
            raise
        self._outcome: Outcome = "cancelled"
        self._closed = False
        services.metrics.opened()

    @property
    def choices(self) -> int:
        return len(self._assembly.choices)

    @property
    def usages(self) -> Sequence[Usage]:
        """Complete once the pieces have ended."""
        return self._assembly.usages

    @property
    def reasoning_tokens(self) -> int:
        return self._assembly.reasoning_tokens

    async def pieces(self, silence: float | None = None) -> AsyncGenerator[list[Piece] | None]:
        """The pieces as they come, and None after every `silence` seconds without an event. Raises APIError on failure."""
        while not self._stream.ended:
            try:
                events = await self._stream.next(silence)
                made: list[Piece] = []
                failure: APIError | None = None
                for event in events:
                    try:
                        piece = self._assembly.feed(event)
                    except APIError as error:
                        failure = error
                        break
                    if piece is not None:
                        made.append(piece)
                if made or not events:
                    yield made or None
                if failure is not None:
                    raise failure
            except APIError:
                self._outcome = "failed"
                raise
        self._complete()

    def _complete(self) -> None:
        self._outcome = "completed"
        metrics, now = self._services.metrics, time.perf_counter()
        for usage in self.usages:
            metrics.usage(usage)
        started = self._stream.submitted_at
        first = self._stream.first_token_at or now
        metrics.latency(
            Latency(max((usage.queue_seconds for usage in self.usages), default=0.0), first - started, now - started)
        )

    def close(self) -> None:
        """Cancel what still runs. May be called again."""
        if not self._closed:
            self._closed = True
            self._stream.close()
            self._services.metrics.ended(self._endpoint, self._outcome)
