"""The one way from a prepared request to the pieces of its answer; every generating route reads from here."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gnomon.chat.reasoning import PlainSplitter, Segment, Splitter
from gnomon.chat.tools import CallEvent, Content, Extractor, Malformed
from gnomon.chat.tools import Event as ToolEvent
from gnomon.engine.api import ChoiceFinished, Delta, Event, Failed, Finished, Replayed, Request, TokenLogprob, Usage
from gnomon.serve import sessions
from gnomon.serve.bridge import EventStream
from gnomon.serve.errors import APIError, from_failed
from gnomon.serve.metrics import Latency
from gnomon.serve.services import Services

logger = logging.getLogger(__name__)
MALFORMED = "a tool call could not be read and is text in content"
Outcome = Literal["completed", "failed", "cancelled"]


@dataclass(slots=True)
class Piece:
    """What is new of a choice; reasoning comes before content and content before calls. With a `finish` reason it is the last.

    Never changed, and not frozen only because that makes it cost five times as much, for every token.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallEvent, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    stop: str | None = None
    """The stop string that ended the choice."""

    @property
    def is_text(self) -> bool:
        """It has text of one kind and nothing else."""
        return not (self.calls or self.logprobs) and self.finish is None and bool(self.content) != bool(self.reasoning)


Part = Segment | CallEvent
"""What a choice's text is made of, in order."""


@dataclass(slots=True)
class Choice:
    """One choice under way: its splitter, its extractor of tool calls, and log-probabilities whose text is still held back."""

    index: int
    splitter: Splitter
    extractor: Extractor | None = None
    held: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    reasoning_tokens: int = 0
    ids: list[int] = field(default_factory=list[int])
    malformed: list[str] = field(default_factory=list[str])
    """Why text that looked like a tool call is none."""
    ended: bool = False
    """The last piece was made."""
    running: bool = True
    """The engine has not told that it ended."""
    all_content: bool = field(init=False)
    """Whatever text comes is content."""

    def __post_init__(self) -> None:
        self.all_content = self.extractor is None and type(self.splitter) is PlainSplitter

    @property
    def calls(self) -> int:
        return 0 if self.extractor is None else self.extractor.complete

    def feed(self, event: Delta) -> list[Piece]:
        """The pieces an event makes; none when all of it is held back, or the choice has ended.

        Tokens count as reasoning from the block's opening to its closing marker.
        """
        if self.ended:
            return []
        if self.all_content and event.text and not (event.logprobs or self.held):
            self.ids += event.ids
            return [Piece(self.index, event.text)]
        thought = self.splitter.thinking
        segments = self.splitter.feed(event.text)
        if thought or self.splitter.thinking or any(one.kind == "reasoning" for one in segments):
            self.reasoning_tokens += len(event.ids)
        self.held += event.logprobs
        self.ids += event.ids
        if len(segments) == 1 and (self.extractor is None or segments[0].kind == "reasoning"):
            logprobs, self.held = tuple(self.held), []
            one = segments[0]
            is_content = one.kind == "content"
            return [
                Piece(self.index, one.text if is_content else "", "" if is_content else one.text, logprobs=logprobs)
            ]
        parts = self._parts(segments)
        if self.extractor is not None and self.extractor.over:
            self.ended = True
            return self._pieces(parts, "tool_calls")
        return self._pieces(parts, None) if parts else []

    def finish(self, reason: str, stop: str | None = None) -> list[Piece]:
        if self.ended:
            return []
        self.ended = True
        parts = self._parts(self.splitter.finish())
        if self.extractor is not None:
            parts += self._told(self.extractor.finish())
        return self._pieces(parts, "tool_calls" if reason == "stop" and self.calls else reason, stop)

    def _parts(self, segments: Sequence[Segment]) -> list[Part]:
        parts: list[Part] = []
        for one in segments:
            if one.kind == "content" and self.extractor is not None:
                parts += self._told(self.extractor.push(one.text))
            else:
                parts.append(one)
        return parts

    def _told(self, events: Sequence[ToolEvent]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            if isinstance(event, Malformed):
                self.malformed.append(event.reason)
            parts.append(Segment("content", event.text) if isinstance(event, Content | Malformed) else event)
        return parts

    def _pieces(self, parts: Sequence[Part], finish: str | None, stop: str | None = None) -> list[Piece]:
        runs: list[list[Part]] = [[]]
        for part in parts:
            if runs[-1] and _rank(part) < _rank(runs[-1][-1]):
                runs.append([])
            runs[-1].append(part)
        logprobs, self.held = tuple(self.held), []
        last = len(runs) - 1
        return [
            Piece(
                self.index,
                content=_text(run, "content"),
                reasoning=_text(run, "reasoning"),
                calls=tuple(part for part in run if not isinstance(part, Segment)),
                logprobs=() if place else logprobs,
                finish=finish if place == last else None,
                stop=stop if place == last else None,
            )
            for place, run in enumerate(runs)
        ]


def _rank(part: Part) -> int:
    return 2 if not isinstance(part, Segment) else 1 if part.kind == "content" else 0


def _text(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if isinstance(part, Segment) and part.kind == kind)


class Assembly:
    """Turns the engine's events into pieces. Choice j of the k-th request has the index k·n + j."""

    def __init__(
        self,
        requests: Sequence[Request],
        splitter: Callable[[], Splitter] = PlainSplitter,
        extractor: Callable[[], Extractor] | None = None,
    ) -> None:
        self.choices: dict[tuple[str, int], Choice] = {}
        for request in requests:
            for index in range(request.n):
                made = None if extractor is None else extractor()
                self.choices[request.id, index] = Choice(len(self.choices), splitter(), made)
        self.usages: list[Usage] = []

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices.values())

    @property
    def calls(self) -> int:
        """Complete tool calls of all choices."""
        return sum(choice.calls for choice in self.choices.values())

    @property
    def malformed(self) -> list[str]:
        """Why texts that looked like tool calls are none."""
        return [reason for choice in self.choices.values() for reason in choice.malformed]

    @property
    def outlived(self) -> bool:
        """Every choice has had its last piece, and the engine still works on one."""
        choices = self.choices.values()
        for choice in choices:
            if not choice.ended:
                return False
        return any(choice.running for choice in choices)

    def feed(self, event: Event) -> list[Piece]:
        """Raises APIError when the event tells of a failure."""
        match event:
            case Delta():
                return self.choices[event.request_id, event.index].feed(event)
            case Replayed(request_id, index, deltas):
                choice = self.choices[request_id, index]
                return [piece for delta in deltas for piece in choice.feed(delta)]
            case ChoiceFinished():
                choice = self.choices[event.request_id, event.index]
                choice.running = False
                if event.reason in ("stop", "length"):
                    return choice.finish(event.reason, event.stop)
                if event.reason == "cancelled" and not choice.ended:
                    raise APIError(
                        503, "the request was cancelled by the server", type="server_error", code="cancelled"
                    )
            case Finished():
                self.usages.append(event.usage)
            case Failed():
                raise from_failed(event)
            case _:
                pass
        return []


class Generation:
    """An answer under way. Must be closed; closing cancels what still runs."""

    def __init__(
        self,
        services: Services,
        endpoint: str,
        requests: Sequence[Request],
        prompt_field: str,
        splitter: Callable[[], Splitter] = PlainSplitter,
        extractor: Callable[[], Extractor] | None = None,
        *,
        remember: Callable[[Request, Sequence[int]], None] | None = None,
    ) -> None:
        """Submits the requests. Raises APIError when the engine refuses them; `prompt_field` is what clients call the prompt.

        `remember` is given the tokens of every choice when the answer has ended, on another thread.
        """
        named = [(one, one.session or sessions.named.get()) for one in requests]
        requests = [one if name is None else replace(one, session=sessions.own(name)) for one, name in named]
        if services.http.prompt_cache_per_key:
            requests = [replace(one, namespace=sessions.namespace(one.namespace)) for one in requests]
        self._requests = requests
        self._remember = remember
        self._services = services
        self._endpoint = endpoint
        self._assembly = Assembly(requests, splitter, extractor)
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

    @property
    def malformed(self) -> Sequence[str]:
        """Why texts that looked like tool calls are content."""
        return self._assembly.malformed

    async def pieces(self, silence: float | None = None) -> AsyncGenerator[list[Piece] | None]:
        """The pieces as they come, and None after every `silence` seconds without an event. Raises APIError on failure."""
        while not self._stream.ended:
            try:
                events = await self._stream.next(silence)
                made: list[Piece] = []
                failure: APIError | None = None
                for event in events:
                    try:
                        made += self._assembly.feed(event)
                    except APIError as error:
                        failure = error
                        break
                if self._assembly.outlived and not self._stream.ended:
                    self._stream.cancel(answered=True)
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
        metrics.tool_calls(self._assembly.calls, len(self.malformed))
        if self.malformed:
            logger.warning("%s: %s", self._requests[0].id, MALFORMED)
        started = self._stream.submitted_at
        first = self._stream.first_token_at or now
        metrics.latency(
            Latency(max((usage.queue_seconds for usage in self.usages), default=0.0), first - started, now - started)
        )

    def cancel(self) -> None:
        """Stop what still runs: the pieces end with an APIError of code `cancelled`."""
        self._stream.cancel()

    def close(self) -> None:
        """Cancel what still runs. May be called again."""
        if not self._closed:
            self._closed = True
            self._stream.close()
            if self._remember is not None:
                self._services.preparation.later(self._remember_all)
            self._services.metrics.ended(self._endpoint, self._outcome)

    def _remember_all(self) -> None:
        requests = {request.id: request for request in self._requests}
        for (request_id, _), choice in self._assembly.choices.items():
            if self._remember is not None and choice.ids:
                self._remember(requests[request_id], choice.ids)
