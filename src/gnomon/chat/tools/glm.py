"""GLM's and LongCat's calls: a name, then keys and values in elements of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.json_calls import call_object, call_rule, closed
from gnomon.chat.tools.parameters import Arguments, written
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Inexpressible, Rules, spelt

_NAME = re.compile(r"[^<>{}\s]+")
_KEY = re.compile(r"[^<>\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm(ToolFormat):
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`. Strings are raw text, other values JSON."""

    close: str
    prefix: str = ""
    """Of the inner tags' names."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        yield from r.expect(self.openers[0])
        yield from r.space()
        if (yield from r.stands("{")):
            yield from call_object(r, calls)
            yield from closed(r, self.close)
            return
        name = yield from r.whole(_NAME)
        key, key_end = f"<{self.prefix}arg_key>", f"</{self.prefix}arg_key>"
        value_end = f"</{self.prefix}arg_value>"
        yield from r.space()
        if not name or not (yield from r.first_of((key, self.close))):
            raise Unparseable((yield from r.unexpected(repr(key))), literal=True)
        calls.begin(name)
        arguments = Arguments(calls)
        while (yield from r.took(key)):
            parameter = arguments.parameter((yield from r.held(key_end)).strip())
            yield from r.space()
            yield from r.expect(f"<{self.prefix}arg_value>")
            yield from r.until_before(value_end, (key, self.close), parameter.feed)
            parameter.end()
            yield from r.space()
        yield from r.expect(self.close)
        arguments.end()

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:  # noqa: ARG002
        each = g.rule(" | ".join(self._call(g, one) for one in functions))
        return Section(self.openers[0], f"{each} {g.text(self.close)}", '"\\n"?')

    def _call(self, g: Rules, function: Function) -> str:
        def write(name: str) -> str:
            key = g.text(f"<{self.prefix}arg_key>{spelt(function, name, _KEY)}</{self.prefix}arg_key>")
            value = written(g, function, name, f"<{self.prefix}arg_value>", f"</{self.prefix}arg_value>")
            return f'{key} "\\n"? {value} "\\n"?'

        if function.flat:
            try:
                return f'{g.text(function.named(_NAME))} "\\n"? {g.each(function, write)}'
            except Inexpressible:
                pass  # as JSON, which is read as well, it is said in full
        return f'"\\n"? {call_rule(g, function)} "\\n"?'
