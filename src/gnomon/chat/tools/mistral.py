"""Mistral's calls behind `[TOOL_CALLS]`: a JSON list in older templates, `name[ARGS]{...}` in newer ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls, nine_characters
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.json_calls import call_list
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.values import value

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral(ToolFormat):
    """There is no closing marker. `[ARGS]` may be missing, and so may a further call's `[TOOL_CALLS]`."""

    def make_id(self) -> str:
        return nine_characters()

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        yield from r.expect(TOOL_CALLS)
        yield from r.space()
        if (yield from r.stands("[")) and not (yield from r.first_of((TOOL_CALLS, ARGS, CALL_ID))):
            yield from call_list(r, calls)
            return
        yield from _named(r, calls, (yield from r.whole(_NAME)))
        while True:
            r.pin()
            yield from r.space()
            name = yield from r.whole(_NAME)
            yield from r.space()
            if not name or not (yield from r.first_of((CALL_ID, ARGS))):
                r.rewind()
                return
            r.unpin()
            yield from _named(r, calls, name)


def _named(r: Reader, calls: Calls, name: str) -> Steps[None]:
    yield from r.space()
    if not name or not (yield from r.first_of((CALL_ID, ARGS, "{"))):
        raise Unparseable((yield from r.unexpected(repr(ARGS))), literal=True)
    calls.check(name)
    id = (yield from r.whole(_NAME)) if (yield from r.took(CALL_ID)) else None
    yield from r.took_next(ARGS)
    yield from r.space()
    if not (yield from r.stands("{")):
        raise Unparseable((yield from r.unexpected("'{'")))
    calls.begin(name, id)
    yield from value(r, calls.write)
    calls.end()
