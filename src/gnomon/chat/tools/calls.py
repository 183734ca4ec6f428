"""The calls a parser finds, checked against the offered tools and told as events."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Callable

from gnomon.chat.tools.events import CallArguments, CallEnd, CallStart, Event
from gnomon.chat.tools.reader import Unparseable
from gnomon.chat.tools.schema import Tools

_SURROGATE = re.compile("[\ud800-\udfff]")
_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    """An id as OpenAI makes them."""
    return f"call_{uuid.uuid4().hex[:24]}"


def nine_characters() -> str:
    """An id as Mistral's templates want them."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class TurnOver(Exception):
    """One call was wanted and is there."""


class Calls:
    """What a parser writes to."""

    def __init__(
        self,
        tools: Tools,
        emit: Callable[[Event], None],
        make_id: Callable[[], str],
        *,
        single: bool = False,
    ) -> None:
        self.tools = tools
        self.made = 0
        """Calls begun so far, void ones included."""
        self.complete = 0
        self.open: str | None = None
        """Name of the call under way."""
        self.marked: Callable[[], None] = lambda: None
        """Told where the text of a further call begins: what stands before it is done with."""
        self._emit = emit
        self._make_id = make_id
        self._single = single

    def check(self, name: str, *, literal: bool = False) -> str:
        """The name of an offered tool. Raises Unparseable for any other."""
        if name not in self.tools:
            raise Unparseable(f"there is no tool {name[:80]!r}", literal=literal)
        return name

    def begin(self, name: str, id: str | None = None) -> None:
        self.open = self.check(name)
        self._emit(CallStart(self.made, id or self._make_id(), name))
        self.made += 1

    def types(self, parameter: str) -> frozenset[str] | None:
        return self.tools.types(self.open or "", parameter)

    def write(self, fragment: str) -> None:
        """More JSON text of the arguments."""
        if fragment:
            if not fragment.isascii():
                # Half a character can be written in JSON only as an escape.
                fragment = _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", fragment)
            self._emit(CallArguments(self.made - 1, fragment))

    def end(self) -> None:
        """The call is complete. Raises TurnOver if no other is wanted."""
        self.open = None
        self.complete += 1
        self._emit(CallEnd(self.made - 1))
        self.marked()
        if self._single:
            raise TurnOver

    def void(self) -> int | None:
        """Give up the call under way; its index if it had begun."""
        if self.open is None:
            return None
        self.open = None
        return self.made - 1
