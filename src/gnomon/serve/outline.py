"""An answer as a sequence of parts (thinking, text, tool calls), each complete before the next begins.

Messages call them content blocks, Responses output items; both are told as changes while they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from gnomon.chat.tools import CallArguments, CallEnd, CallStart
from gnomon.serve.generation import Piece

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Part:
    """`name` and `call_id` are those of a call, whose text is its arguments."""

    index: int
    kind: Kind
    name: str = ""
    call_id: str = ""
    complete: bool = False
    """Whether it ended by itself: not cut off, and no text that only looked like a call."""
    fragments: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.fragments)


@dataclass(frozen=True, slots=True)
class Opened:
    part: Part


@dataclass(frozen=True, slots=True)
class Grown:
    part: Part
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    part: Part


Change = Opened | Grown | Closed


class Outline:
    """The parts of one choice. An answer without any text has one empty text part."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.finish: str | None = None
        """Why the answer ended, once it has."""
        self.stop: str | None = None
        """The stop string that ended it."""
        self._open: Part | None = None

    @property
    def told(self) -> list[Part]:
        """The parts that stand in the end: a call that came to nothing, whose text followed as text, is none of them."""
        return [part for part in self.parts if part.kind != "call" or part.complete]

    def feed(self, piece: Piece) -> Iterator[Change]:
        """What a piece changes, in order."""
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        if piece.content:
            yield from self._grow("text", piece.content)
        for event in piece.calls:
            match event:
                case CallStart():
                    yield from self._start(Part(len(self.parts), "call", event.name, event.id))
                case CallArguments():
                    yield from self._grow("call", event.fragment)
                case CallEnd():
                    self.parts[-1].complete = True
                    yield from self._close()
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop
            cut = piece.finish == "length"
            yield from self._close(cut=cut)
            if not self.told:
                yield from self._start(Part(len(self.parts), "text"))
                yield from self._close(cut=cut)

    def take(self, piece: Piece) -> None:
        """Add a piece of which nobody wants to hear."""
        for _ in self.feed(piece):
            pass

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(Part(len(self.parts), kind))
        part = self.parts[-1]
        part.fragments.append(text)
        yield Grown(part, text)

    def _start(self, part: Part) -> Iterator[Change]:
        yield from self._close()
        self.parts.append(part)
        self._open = part
        yield Opened(part)

    def _close(self, *, cut: bool = False) -> Iterator[Change]:
        """The open part ends, `cut` off or by itself; a call only does so by its own end."""
        part, self._open = self._open, None
        if part is not None:
            part.complete = part.complete or (part.kind != "call" and not cut)
            yield Closed(part)
