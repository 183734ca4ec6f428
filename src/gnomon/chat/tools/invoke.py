"""Calls as `invoke` elements with `parameter` elements: MiniMax M2, Muse Spark and DeepSeek V3.2, with different prefixes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.parameters import Arguments, written
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import NEWLINE, Function, Inexpressible, Rules, spelt
from gnomon.chat.tools.schema import STRING

_INSIDE = re.compile(r"[^<>]+")
_NAME = re.compile(r"[^<>\"\s]+")
_ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")


def attributes(r: Reader) -> Steps[dict[str, str]]:
    """The rest of a tag, stepping over its `>`."""
    text = yield from r.whole(_INSIDE)
    yield from r.expect(">", bare=True)
    return {key: double or single or plain for key, double, single, plain in _ATTRIBUTE.findall(text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoke(ToolFormat):
    """A section of `<invoke name="f"><parameter name="k">v</parameter></invoke>`; the section's own tags may be missing.

    The openers are the section's tag and the element's. Values are raw text. An attribute `string` tells whether a value is one; or
    else the tool's schema does.
    """

    close: str
    prefix: str = ""
    declares: bool = False
    """Whether parameters say with the attribute whether they are strings."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        tagged = yield from r.took(self.openers[0])
        invoke, parameter = f"<{self.prefix}invoke", f"<{self.prefix}parameter"
        invoke_end, parameter_end = f"</{self.prefix}invoke>", f"</{self.prefix}parameter>"
        if not (yield from r.took_next(invoke)):
            raise Unparseable((yield from r.unexpected(repr(invoke))), literal=True)
        going = True
        while going:
            name = calls.check((yield from attributes(r)).get("name", ""), literal=not tagged)
            yield from r.space()
            if not (yield from r.first_of((parameter, invoke_end))):
                raise Unparseable((yield from r.unexpected(repr(parameter))), literal=not tagged)
            calls.begin(name)
            arguments = Arguments(calls)
            while (yield from r.took(parameter)):
                said = yield from attributes(r)
                types = {"true": frozenset({"string"}), "false": frozenset[str]()}.get(said.get("string", ""))
                value = arguments.parameter(said.get("name", ""), types)
                yield from r.until_before(parameter_end, (parameter, invoke_end), value.feed)
                value.end()
                yield from r.space()
            yield from r.expect(invoke_end)
            arguments.end()
            if (yield from r.took_next(self.close)):
                return
            going = yield from r.took_next(invoke)

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        call = g.rule(" | ".join(self._call(g, one) for one in functions))
        more = "" if single else f" ({call})*"
        return Section(self.openers[0], f"{NEWLINE} {call}{more} {g.text(self.close)}")

    def _call(self, g: Rules, function: Function) -> str:
        end = f"</{self.prefix}parameter>"

        def write(name: str) -> str:
            head = f'<{self.prefix}parameter name="{spelt(function, name, _NAME)}"'
            return f"{self._value(g, function, name, head, end)} {NEWLINE}"

        head = g.text(f'<{self.prefix}invoke name="{function.named(_NAME)}">\n')
        return f"{head} {g.each(function, write)} {g.text(f'</{self.prefix}invoke>')} {NEWLINE}"

    def _value(self, g: Rules, function: Function, name: str, head: str, end: str) -> str:
        if not self.declares:
            return written(g, function, name, f"{head}>", end)
        yes, no = (f' string="{word}">' for word in ("true", "false"))
        if function.types(name) == STRING:
            try:
                return f"{g.text(head + yes)} {g.strings(function, name, end)}"
            except Inexpressible:
                pass  # as JSON it is said in full
        return f"{g.text(head + no)} {g.value(function, name)} {g.text(end)}"
