"""DeepSeek's calls: V3 and R1 write the arguments in a code fence behind the name, V3.1 right behind a separator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Rules
from gnomon.chat.tools.values import value

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

_NAME = re.compile(r"[^\s<{]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeek(ToolFormat):
    """The markers of the section may be missing."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        yield from r.took(SECTION)
        if not (yield from r.took_next(CALL)):
            raise Unparseable((yield from r.unexpected(repr(CALL))), literal=True)
        going = True
        while going:
            yield from r.space()
            name = yield from r.whole(_NAME)
            if not (yield from r.took_next(SEPARATOR)):
                raise Unparseable((yield from r.unexpected(repr(SEPARATOR))), literal=True)
            yield from r.space()
            fenced = not (yield from r.stands("{"))
            if fenced:
                # What stood there was the type, "function".
                name = yield from r.whole(_NAME)
                yield from r.space()
                if (yield from r.took("```")):
                    yield from r.took("json")
                    yield from r.space()
            calls.check(name)
            if not (yield from r.stands("{")):
                raise Unparseable((yield from r.unexpected("'{'")))
            calls.begin(name)
            yield from value(r, calls.write)
            calls.end()
            if fenced:
                yield from r.took_next("```")
            yield from r.took_next(CALL_END)
            if (yield from r.took_next(SECTION_END)):
                return
            going = yield from r.took_next(CALL)

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        """Either generation's form: the model chooses the one it was taught."""
        each = g.rule(" | ".join(self._call(g, one) for one in functions))
        call = f"{g.text(CALL)} {each} {g.text(CALL_END)}"
        more = "" if single else f' ("\\n"? {call})*'
        return Section(SECTION, f"{call}{more} {g.text(SECTION_END)}")

    def _call(self, g: Rules, function: Function) -> str:
        name, arguments = function.named(_NAME), g.arguments(function)
        fence, json = g.text("\n```"), g.text("json\n")
        plain = f"{g.text(name + SEPARATOR)} {arguments}"
        return f"{plain} | {g.text(f'function{SEPARATOR}{name}')} {fence} {json} {arguments} {fence}"
