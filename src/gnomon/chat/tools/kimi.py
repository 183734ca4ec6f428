"""Kimi K2's calls: a section of calls that bring their own ids, `functions.name:index`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Rules
from gnomon.chat.tools.values import value

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"

_ID = re.compile(r"[^\s<{]+")
_PARTS = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kimi(ToolFormat):
    """The markers of the section may be missing."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        tagged = yield from r.took(SECTION)
        if not (yield from r.took_next(CALL)):
            raise Unparseable((yield from r.unexpected(repr(CALL))), literal=True)
        going = True
        while going:
            yield from r.space()
            id = yield from r.whole(_ID)
            if not id or not (yield from r.took_next(ARGUMENTS)):
                raise Unparseable((yield from r.unexpected(repr(ARGUMENTS))), literal=True)
            found = _PARTS.fullmatch(id)
            name = id if id in calls.tools or found is None else found.group(1)
            calls.check(name)
            yield from r.space()
            if not (yield from r.stands("{")):
                raise Unparseable((yield from r.unexpected("'{'")))
            calls.begin(name, id if ":" in id else f"functions.{name}:{calls.made}")
            yield from value(r, calls.write)
            calls.end()
            yield from r.took_next(CALL_END)
            if tagged and (yield from r.took_next(SECTION_END)):
                return
            going = yield from r.took_next(CALL)

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        ids = g.rule("/[0-9]+/")
        each = g.rule(
            " | ".join(
                f"{g.text(f'functions.{one.named(_ID)}:')} {ids} {g.text(ARGUMENTS)} {g.arguments(one)}"
                for one in functions
            )
        )
        call = g.rule(f"{g.text(CALL)} {each} {g.text(CALL_END)}")
        return Section(SECTION, f"{call}{'' if single else '+'} {g.text(SECTION_END)}")
