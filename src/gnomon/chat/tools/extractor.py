"""Finds the tool calls in a model's text, as it streams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gnomon.chat.tools.calls import Calls, TurnOver
from gnomon.chat.tools.code import Code
from gnomon.chat.tools.events import CallArguments, CallEnd, CallStart, Content, Event, Malformed
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.schema import Tools

_TICKS = {"`": re.compile("`+"), "~": re.compile("~+")}
_SPACE = " \t\r\n"


class Extractor:
    """Takes a model's text piece by piece and tells what is content and what is a call.

    Any pieces of a text give the same calls and the same content. A marker counts outside Markdown code only, and only where a call
    of an offered tool follows; all else is content, to the last character, but for white space that sets calls apart. No text raises.
    """

    def __init__(self, format: ToolFormat, tools: Tools | Iterable[Mapping[str, Any]], *, single: bool = False) -> None:
        """`tools` are those offered, in OpenAI's shape. `single` ends the turn with the first call: what follows is dropped."""
        self._format = format
        self._reader = Reader()
        self._calls = Calls(
            tools if isinstance(tools, Tools) else Tools(tools), self._told, format.make_id, single=single
        )
        self._calls.marked = self._reader.mark
        self._events: list[Event] = []
        self._code = Code()
        self._space = ""
        """White space that may turn out to set a call apart."""
        self._before = ""
        """What was so before the call under way."""
        self._gap = ""
        self._after = False
        """Nothing but calls since the last one."""
        self._said = False
        starts = "".join({re.escape(one[0]) for one in (*format.openers, *format.leading)})
        self._plain = re.compile(rf"[^\s`~{starts}]+")
        self.over = False
        """The one call that was wanted is complete."""
        self._steps: Steps[None] | None = self._run()

    @property
    def complete(self) -> int:
        """How many calls are complete."""
        return self._calls.complete

    def push(self, text: str) -> list[Event]:
        """What more text tells. What might be a call is held back until that is decided."""
        if self._steps is not None:
            self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The text has ended: what was held back. A call it broke off is content."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
            except TurnOver:
                self._steps, self.over = None, True
        events, self._events = self._events, []
        return joined(events)

    def _run(self) -> Steps[None]:
        r = self._reader
        while (yield from self._prose()):
            r.mark()
            try:
                yield from self._format.parse(r, self._calls)
            except Unparseable as reason:
                self._refuse(reason)
            else:
                self._code.newline()
        if self._space and not self._after:
            self._events.append(Content(self._space))

    def _prose(self) -> Steps[bool]:
        """Deliver text; True where a call may begin, False at the end."""
        r, openers = self._reader, self._format.openers
        while True:
            r.mark()
            if plain := r.run(self._plain):
                self._say(plain)
            char = yield from r.peek()
            if not char:
                return False
            if char in _TICKS:
                run = yield from r.whole(_TICKS[char])
                self._tell(Content(self._spaced(run)))
                self._code.ticks(run)
                continue
            if char.isspace():
                r.at += 1
                if char in _SPACE:
                    self._space += char
                else:
                    self._say(char)
                if char == "\n":
                    self._code.newline()
                continue
            if not self._code.inside:
                fresh = self._after or not self._said
                if (yield from r.first_of((*openers, *(self._format.leading if fresh else ())))):
                    return True
            # Not to be taken for a marker again.
            char = yield from r.peek()
            r.at += 1
            self._say(char)

    def _say(self, text: str) -> None:
        self._tell(Content(self._spaced(text)))
        self._code.text()

    def _tell(self, event: Event) -> None:
        self._said = True
        self._events.append(event)

    def _spaced(self, text: str) -> str:
        """The text with the white space before it, unless that only set a call apart."""
        space, self._space = self._space, ""
        if self._after:
            space = (self._gap or space) if self._said else ""
            self._after = False
        return space + text

    def _told(self, event: Event) -> None:
        if isinstance(event, CallStart):
            self._before, self._space = self._space, ""
        elif isinstance(event, CallEnd) and not self._after:
            self._after, self._gap = True, self._before
        self._events.append(event)

    def _refuse(self, reason: Unparseable) -> None:
        index, text = self._calls.void(), self._reader.give_up()
        if index is not None:
            self._space = self._before
        if "\n" in text:
            self._code.newline()
        if not text:
            return
        if reason.literal and index is None:
            self._say(text)
        else:
            self._tell(Malformed(self._spaced(text), reason.reason, index))
            self._code.text()


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours joined that say more of the same."""
    made: list[Event] = []
    for (kind, index), run in groupby(events, _likeness):
        alike = list(run)
        if kind == "content":
            made.append(Content("".join(event.text for event in alike if isinstance(event, Content))))
        elif kind == "arguments":
            text = "".join(event.fragment for event in alike if isinstance(event, CallArguments))
            made.append(CallArguments(index, text))
        else:
            made += alike
    return made


def _likeness(event: Event) -> tuple[str, int]:
    if isinstance(event, Content):
        return "content", 0
    return ("arguments", event.index) if isinstance(event, CallArguments) else ("other", 0)


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


def parse(
    format: ToolFormat, text: str, tools: Tools | Sequence[Mapping[str, Any]], *, single: bool = False
) -> tuple[str, list[Call]]:
    """Content and calls of a whole text."""
    extractor = Extractor(format, tools, single=single)
    return collected([*extractor.push(text), *extractor.finish()])


def collected(events: Iterable[Event]) -> tuple[str, list[Call]]:
    """Content and complete calls of a text's events."""
    content: list[str] = []
    starts: dict[int, CallStart] = {}
    fragments: dict[int, list[str]] = {}
    calls: list[Call] = []
    for event in events:
        match event:
            case Content() | Malformed():
                content.append(event.text)
            case CallStart():
                starts[event.index] = event
                fragments[event.index] = []
            case CallArguments():
                fragments[event.index].append(event.fragment)
            case CallEnd():
                start = starts[event.index]
                calls.append(Call(start.id, start.name, "".join(fragments[event.index])))
    return "".join(content), calls
