"""A request's events put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gnomon.engine.api import (
    ChoiceFinished,
    Delta,
    EngineError,
    Event,
    Failed,
    Finished,
    FinishReason,
    Replayed,
    TokenLogprob,
    Usage,
)


@dataclass(slots=True)
class Choice:
    """One continuation. `ids` are the tokens of its text: an end-of-sequence token is not among them."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: FinishReason | None = None
    stop: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.ids += delta.ids
        self.logprobs += delta.logprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """All choices of a request."""

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


def collect(events: Iterable[Event], n: int = 1) -> Completion:
    """Put the events of a request with `n` choices together. Raises `EngineError` with the message of a `Failed`."""
    choices = tuple(Choice() for _ in range(n))
    for event in events:
        match event:
            case Delta():
                choices[event.index].add(event)
            case Replayed(_, index, deltas):
                for delta in deltas:
                    choices[index].add(delta)
            case ChoiceFinished(_, index, reason, stop):
                choices[index].finish_reason, choices[index].stop = reason, stop
            case Finished(_, usage):
                return Completion(choices, usage)
            case Failed(_, message):
                raise EngineError(message)
            case _:
                pass
    raise EngineError("the events ended before the request did")
