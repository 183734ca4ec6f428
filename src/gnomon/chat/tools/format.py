"""What a family's way of writing tool calls has to say for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls, call_id
from gnomon.chat.tools.reader import Reader, Steps
from gnomon.chat.tools.rules import Function, Rules


@dataclass(frozen=True, slots=True)
class Section:
    """Calls as a grammar: what stands before them, as text, and an expression for all that follows it.

    `again` is an expression for what may stand before a further section; None where one section holds all calls.
    """

    opener: str
    body: str
    again: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(ABC):
    """A notation of tool calls. Stateless; one serves all texts."""

    name: str
    openers: tuple[str, ...]
    """Markers with which calls begin, wherever they stand outside code."""
    leading: tuple[str, ...] = ()
    """What begins a call only where nothing but calls was written before."""
    ends_thinking: tuple[str, ...] = ()
    """Markers that end a reasoning block which wasn't closed."""
    whole_turn: bool = False
    """Whether the grammar of calls also covers the reasoning before them."""

    def make_id(self) -> str:
        """The id of a call for which the model wrote none."""
        return call_id()

    @abstractmethod
    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        """Read the calls that begin here, at one of the openers, with all that belongs to them.

        Raises Unparseable where what stands here is no call; a call that had begun is void then.
        """

    @abstractmethod
    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        """The grammar of calls of these tools, one or more, or exactly one. Raises Inexpressible for what can't be written so."""

    def turn(
        self, g: Rules, functions: Sequence[Function], *, required: bool, single: bool, answer: str | None = None
    ) -> str:
        """An expression for the whole answer: calls only if `required`, or else prose, an `answer` of a given form, or calls.

        Raises Inexpressible.
        """
        section = self.section(g, functions, single=single)
        opener = g.text(section.opener) if section.opener else ""
        call = f"{opener} {section.body}"
        again = "" if single or section.again is None else f" ({section.again} {call})*"
        if required:
            return call + again
        if answer is not None:
            return f"{answer} | {call}{again}"
        prose = g.prose(self.leading)
        if not section.opener:
            return f"{prose} | {call}{again}"
        led = f"{g.lead(section.opener, prose)} {section.body}"
        return f"{prose} | {led}" if single else f"({led})* {g.free()}"
