"""Harmony's calls: messages addressed to a function, `<|channel|>commentary to=functions.name<|message|>{...}<|call|>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.reasoning import CALL, CHANNEL, END, MESSAGE, RETURN, START
from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Rules
from gnomon.chat.tools.values import value

ENDS = (CALL, END, RETURN)
MAX_HEADER = 400
"""Characters of a message's header; text without an end to its header is no message."""

_HEADER = re.compile(r"[^<\n]+")
_NAME = re.compile(r"[\w.:/-]+")
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

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:  # noqa: ARG002
        """The recipient stands in the role's part of the header or in the channel's; the call's end is the turn's."""
        each = g.rule(" | ".join(self._call(g, one) for one in functions))
        return Section("", each)

    def _call(self, g: Rules, function: Function) -> str:
        to = f"to=functions.{function.named(_NAME)}"
        early = g.text(f" {to}{CHANNEL}commentary")
        late = g.text(f"{CHANNEL}commentary {to}")
        kind = f"({g.text(' <|constrain|>json')} | {g.text(' json')})?"
        return f"({early} | {late}) {kind} {g.text(MESSAGE)} {g.arguments(function)}"

    def turn(
        self, g: Rules, functions: Sequence[Function], *, required: bool, single: bool, answer: str | None = None
    ) -> str:
        """Messages that think or announce, and then a call or the final message."""
        before = g.rule(
            f"{g.text(CHANNEL)} {g.one_of(('analysis', 'commentary'))} {g.text(MESSAGE)} {g.until(END)} "
            f"{g.text(f'{START}assistant')}"
        )
        call = self.section(g, functions, single=single).body
        if required:
            return f"{before}* {call}"
        final = f"{g.text(f'{CHANNEL}final{MESSAGE}')} {answer or g.free()}"
        return f"{before}* ({final} | {call})"
