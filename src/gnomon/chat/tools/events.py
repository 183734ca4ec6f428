"""What an extractor tells of a model's text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the offered tool `name` begins. Indices count from 0 and are never used again."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the fragments joined are the text of a JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that began like a call and is none: it belongs to the content. With an `index` the call started there is void."""

    text: str
    reason: str
    index: int | None = None


CallEvent = CallStart | CallArguments | CallEnd
Event = Content | CallEvent | Malformed
