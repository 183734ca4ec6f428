"""A text that grows, read by parsers that wait for what they need.

A parser is a generator that yields when it can't go on without more text. It sees characters only through a `Reader`, whose answers
depend on the text alone and never on the pieces it came in; so a parser finds the same in any pieces as in the whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from gnomon.chat.reasoning import partial_suffix

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]+")


class Unparseable(Exception):
    """The text at hand is no call. `literal` tells that it never looked like one: a marker that somebody wrote about."""

    def __init__(self, reason: str, *, literal: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.literal = literal


class Reader:
    """The text not yet read, and what was read since the last mark."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._read: list[str] = []
        self._from = 0
        self._pins: list[int] = []

    def feed(self, text: str) -> None:
        cut = min(self._pins) if self._pins else self.at
        self._read.append(self.text[self._from : cut])
        self.text = self.text[cut:] + text
        self.at -= cut
        self._from = 0
        self._pins = [pin - cut for pin in self._pins]

    def mark(self) -> None:
        """Start anew what `give_up` gives."""
        self._read.clear()
        self._from = self.at

    def give_up(self) -> str:
        """What was read since the mark, by a parser that doesn't go on."""
        self._pins.clear()
        return "".join(self._read) + self.text[self._from : self.at]

    def pin(self) -> None:
        """Remember this place, for one `unpin` or `rewind`."""
        self._pins.append(self.at)

    def unpin(self) -> None:
        self._pins.pop()

    def rewind(self) -> None:
        """Back to the place last pinned."""
        self.at = self._pins.pop()

    def peek(self) -> Steps[str]:
        """The next character; empty at the end of the text."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Step over what matches of the text at hand. `pattern` must be a repeated class of characters."""
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found.group()

    def whole(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Step over all that matches, however much comes."""
        parts: list[str] = []
        while True:
            parts.append(self.run(pattern))
            if self.at < len(self.text) or not (yield from self.peek()):
                return "".join(parts)

    def space(self) -> Steps[str]:
        return self.whole(_SPACE)

    def first_of(self, literals: Iterable[str]) -> Steps[str]:
        """Which of the literals stands here, the longest if several do; empty if none. Doesn't step over it."""
        wanted = sorted(literals, key=len, reverse=True)
        while True:
            here = self.text[self.at : self.at + len(wanted[0])] if wanted else ""
            open_ = [one for one in wanted if here.startswith(one) or (not self.ended and one.startswith(here))]
            if not open_:
                return ""
            if here.startswith(open_[0]):
                return open_[0]
            yield

    def stands(self, literal: str) -> Steps[bool]:
        return bool((yield from self.first_of((literal,))))

    def next_of(self, literals: Iterable[str]) -> Steps[str]:
        """As `first_of`, behind white space, which is stepped over if one of the literals follows it."""
        self.pin()
        yield from self.space()
        found = yield from self.first_of(literals)
        if found:
            self.unpin()
        else:
            self.rewind()
        return found

    def took(self, literal: str) -> Steps[bool]:
        """Step over the literal if it stands here."""
        if not (yield from self.stands(literal)):
            return False
        self.at += len(literal)
        return True

    def took_next(self, literal: str) -> Steps[bool]:
        """Step over the literal and white space before it; over neither if it isn't the next thing."""
        if not (yield from self.next_of((literal,))):
            return False
        self.at += len(literal)
        return True

    def expect(self, literal: str, *, bare: bool = False) -> Steps[None]:
        """Step over the literal. Raises Unparseable if something else stands here; `bare` marks that as a literal marker."""
        if not (yield from self.took(literal)):
            raise Unparseable((yield from self.unexpected(f"{literal!r}")), literal=bare)

    def unexpected(self, wanted: str) -> Steps[str]:
        found = yield from self.peek()
        return f"{wanted} expected, found {found!r}" if found else f"the text ended where {wanted} was expected"

    def until(self, literal: str, sink: Sink) -> Steps[None]:
        """Give the text before the literal to `sink`, as it comes, and step over both. Raises Unparseable if the text ends first."""
        while True:
            found = self.text.find(literal, self.at)
            if found >= 0:
                self._give(found, sink)
                self.at += len(literal)
                return
            if self.ended:
                raise Unparseable(f"the text ended before {literal!r}")
            tail = max(self.at, len(self.text) - len(literal))
            self._give(len(self.text) - partial_suffix(self.text[tail:], (literal,)), sink)
            yield

    def _give(self, end: int, sink: Sink) -> None:
        if end > self.at:
            given, self.at = self.text[self.at : end], end
            sink(given)

    def until_before(self, close: str, followers: Iterable[str], sink: Sink) -> Steps[None]:
        """As `until`, but `close` counts only with the end of the text or one of `followers` behind it, white space apart.

        What a tag encloses isn't escaped in most formats, so a text about tags may hold the closing tag itself.
        """
        while True:
            yield from self.until(close, sink)
            self.pin()
            yield from self.space()
            found = (yield from self.first_of(followers)) or not (yield from self.peek())
            self.rewind()
            if found:
                return
            sink(close)

    def word(self, pattern: re.Pattern[str], what: str) -> Steps[str]:
        """All that matches, at least one character. Raises Unparseable if there is none."""
        word = yield from self.whole(pattern)
        if not word:
            raise Unparseable((yield from self.unexpected(what)))
        return word

    def held(self, literal: str) -> Steps[str]:
        """The text before the literal, stepping over both."""
        parts: list[str] = []
        yield from self.until(literal, parts.append)
        return "".join(parts)
