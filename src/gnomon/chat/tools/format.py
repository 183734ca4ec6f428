"""What a family's way of writing tool calls has to say for itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls, call_id
from gnomon.chat.tools.reader import Reader, Steps


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

    def make_id(self) -> str:
        """The id of a call for which the model wrote none."""
        return call_id()

    @abstractmethod
    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        """Read the calls that begin here, at one of the openers, with all that belongs to them.

        Raises Unparseable where what stands here is no call; a call that had begun is void then.
        """
