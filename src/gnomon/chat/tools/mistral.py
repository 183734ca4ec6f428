"""Mistral's calls behind `[TOOL_CALLS]`: a JSON list in older templates, `name[ARGS]{...}` in newer ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls, nine_characters
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.json_calls import call_list, call_rule
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Rules
from gnomon.chat.tools.values import value

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_WRITTEN_ID = "/[A-Za-z0-9]{9}/"
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

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        """Names and arguments where the vocabulary has the token between them, and else a list."""
        if g.special(ARGS):
            id = f"({g.text(CALL_ID)} {g.rule(_WRITTEN_ID)})?"
            named = (f"{g.text(one.named(_NAME))} {id} {g.text(ARGS)} {g.arguments(one)}" for one in functions)
            return Section(TOOL_CALLS, g.rule(" | ".join(named)), '""')
        head, tail = g.text(', "id": "'), g.text('"')
        end = f"({head} {g.rule(_WRITTEN_ID)} {tail})?"
        each = g.rule(" | ".join(call_rule(g, one, end=end) for one in functions))
        more = "" if single else f' (", " {each})*'
        return Section(TOOL_CALLS, f'" "? "[" {each}{more} "]"')


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
