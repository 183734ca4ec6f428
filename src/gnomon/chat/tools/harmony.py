"""Harmony's calls: messages addressed to a function, `<|channel|>commentary to=functions.name<|message|>{...}<|call|>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gnomon.chat.reasoning import CALL, CHANNEL, END, MESSAGE, RETURN, START
from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.values import value

ENDS = (CALL, END, RETURN)
MAX_HEADER = 400
"""Characters of a message's header; text without an end to its header is no message."""

_HEADER = re.compile(r"[^<\n]+")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:/-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmony(ToolFormat):
    """Messages without a recipient never come here: they are reasoning and content."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        header = ""
        while not (yield from r.took(MESSAGE)):
            header += yield from r.whole(_HEADER)
            marker = yield from r.first_of((START, CHANNEL, MESSAGE, "<|constrain|>"))
            if marker != MESSAGE:
                header += marker + " "
                r.at += len(marker)
            if not marker or len(header) > MAX_HEADER:
                raise Unparseable("the message's header doesn't end", literal=True)
        found = _RECIPIENT.search(header)
        if found is None:
            raise Unparseable("the message has no recipient", literal=True)
        name = calls.check(found.group(1))
        yield from r.space()
        if (yield from r.first_of(ENDS)):
            calls.begin(name)
            calls.write("{}")
        elif (yield from r.stands("{")):
            calls.begin(name)
            yield from value(r, calls.write)
        else:
            raise Unparseable((yield from r.unexpected("'{'")))
        calls.end()
        for end in ENDS:
            if (yield from r.took_next(end)):
                break
