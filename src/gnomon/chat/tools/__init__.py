"""Tool calls in what models write: a parser for each family's notation, and one extractor that streams."""

from gnomon.chat.tools.detect import FORMATS, GENERIC, detect
from gnomon.chat.tools.events import CallArguments, CallEnd, CallEvent, CallStart, Content, Event, Malformed
from gnomon.chat.tools.extractor import Call, Extractor, collected, joined, parse
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.schema import Tools

__all__ = [
    "FORMATS",
    "GENERIC",
    "Call",
    "CallArguments",
    "CallEnd",
    "CallEvent",
    "CallStart",
    "Content",
    "Event",
    "Extractor",
    "Malformed",
    "ToolFormat",
    "Tools",
    "collected",
    "detect",
    "joined",
    "parse",
]
