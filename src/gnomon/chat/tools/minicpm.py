"""MiniCPM5's calls: `<function name="f"><param name="k">v</param></function>`, with CDATA around what looks like markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.invoke import attributes
from gnomon.chat.tools.parameters import Arguments, ParameterValue, written
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Rules, spelt

CDATA, CDATA_END = "<![CDATA[", "]]>"
FUNCTION, FUNCTION_END = "<function", "</function>"
PARAM, PARAM_END = "<param ", "</param>"

_NAME = re.compile(r"[^<>\"\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPM(ToolFormat):
    """White space around a value is not part of it, unless in CDATA. Entities are not decoded: the template writes none."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        yield from r.expect(FUNCTION)
        name = calls.check((yield from attributes(r)).get("name", ""), literal=True)
        yield from r.space()
        if not (yield from r.first_of((PARAM, FUNCTION_END))):
            raise Unparseable((yield from r.unexpected(repr(PARAM))), literal=True)
        calls.begin(name)
        arguments = Arguments(calls, "space", "string")
        while (yield from r.took(PARAM)):
            parameter = arguments.parameter((yield from attributes(r)).get("name", ""))
            yield from _value(r, parameter)
            parameter.end()
            yield from r.space()
        yield from r.expect(FUNCTION_END)
        arguments.end()

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:  # noqa: ARG002
        each = g.rule(" | ".join(self._call(g, one) for one in functions))
        return Section(self.openers[0], f"{each} {g.text(FUNCTION_END)}", '"\\n"?')

    def _call(self, g: Rules, function: Function) -> str:
        plain = g.until(PARAM_END, g.prose((CDATA,)))
        free = g.rule(f"{plain} | {g.text(CDATA)} {g.until(CDATA_END)} {g.text(PARAM_END)}")

        def write(name: str) -> str:
            head = f'{PARAM}name="{spelt(function, name, _NAME)}">'
            return written(g, function, name, head, PARAM_END, "space", free)

        head = g.text(f'"{function.named(_NAME)}">')
        return f"{head} {g.each(function, write)}"


def _value(r: Reader, parameter: ParameterValue) -> Steps[None]:
    if not (yield from r.took_next(CDATA)):
        yield from r.until_before(PARAM_END, (PARAM, FUNCTION_END), parameter.feed)
        return
    while True:
        yield from r.until_before(CDATA_END, (PARAM_END, CDATA), parameter.raw)
        yield from r.space()
        if not (yield from r.took(CDATA)):
            yield from r.expect(PARAM_END)
            return
