"""Gemma 4's and FunctionGemma's calls: `call:name{key:value}` between sentinels, strings in marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import ITEM, Function, Inexpressible, Rules
from gnomon.chat.tools.schema import STRING
from gnomon.chat.tools.values import Notation, value

_NAME = re.compile(r"[\w.:/-]+")
_KEY = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma(ToolFormat):
    """Keys and everything but strings are bare; a word that is no JSON literal is a string too."""

    close: str
    notation: Notation

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        yield from r.expect(self.openers[0])
        yield from r.space()
        yield from r.expect("call:", bare=True)
        going = True
        while going:
            name = calls.check((yield from r.word(_NAME, "a name")))
            yield from r.space()
            if not (yield from r.stands("{")):
                raise Unparseable((yield from r.unexpected("'{'")))
            calls.begin(name)
            yield from value(r, calls.write, self.notation)
            calls.end()
            if (yield from r.took_next(self.close)):
                return
            going = yield from r.took_next("call:")

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:  # noqa: ARG002
        each = g.rule(" | ".join(self._call(g, one) for one in functions))
        return Section(self.openers[0], f"{each} {g.text(self.close)}", '""')

    def _call(self, g: Rules, function: Function) -> str:
        arguments = self._object(g, function) if function.flat else g.arguments(function)
        return f"{g.text(f'call:{function.named(_NAME)}')} {arguments}"

    def _object(self, g: Rules, function: Function) -> str:
        def write(name: str) -> str:
            bare = name if _KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)
            return f"{g.text(f'{bare}:')} {self._value(g, function, name)}"

        return f'"{{" {g.each(function, write, ",")} "}}"'

    def _value(self, g: Rules, function: Function, name: str) -> str:
        """In the family's own notation where all that is demanded can be told so, and else as JSON, which is read as well."""
        schema: Any = function.properties[name]
        mark = self.notation.mark or ""
        try:
            if function.types(name) == STRING:
                return f"{g.text(mark)} {g.strings(function, name, mark)}"
            if isinstance(schema, dict) and "type" in schema:
                inner = function.within(cast("dict[str, Any]", schema))
                if inner.schema["type"] == "object" and inner.flat:
                    return self._object(g, inner)
                if inner.schema["type"] == "array" and inner.listed:
                    one = self._value(g, inner, ITEM)
                    return f'"[" ({one} ("," {one})*)? "]"'
        except Inexpressible:
            pass
        return g.value(function, name)
