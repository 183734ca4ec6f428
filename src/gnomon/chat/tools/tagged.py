"""Calls between two tags, as JSON objects or as elements with parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.json_calls import call_list, call_object, call_rule, closed
from gnomon.chat.tools.parameters import Framing
from gnomon.chat.tools.qwen import FUNCTION, element_rule, function_element
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import NEWLINE, Function, Inexpressible, Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(ToolFormat):
    """What stands between the tags decides how it is read, whatever the model was taught: fine-tunes mix the notations.

    JSON: Hermes, Qwen2.5 and 3, SmolLM3, Granite, Command R and many more. Elements: Qwen3-Coder, Seed-OSS; with `FUNCTION` among
    the openers they may stand without the outer tag.
    """

    close: str
    framing: Framing = "newline"
    """What stands around the values of elements."""
    style: Literal["object", "list", "elements"] = "object"
    """What the family was taught to write between the tags."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        opener = yield from r.first_of(self.openers)
        bare = opener == FUNCTION
        if not bare:
            r.at += len(opener)
            yield from r.space()
        kind = yield from r.first_of(("{", "[", FUNCTION))
        if not kind:
            raise Unparseable((yield from r.unexpected("a call")), literal=True)
        while kind:
            if kind == "{":
                yield from call_object(r, calls)
            elif kind == "[":
                yield from call_list(r, calls)
            else:
                yield from function_element(r, calls, self.close, self.framing, bare=bare)
            if (yield from closed(r, self.close)):
                return
            kind = yield from r.next_of((FUNCTION,) if bare else ("{", FUNCTION))

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        each = g.rule(" | ".join(self._call(g, one) for one in functions))
        if self.style != "list":
            return Section(self.openers[0], f"{NEWLINE} {each} {NEWLINE} {g.text(self.close)}", NEWLINE)
        space = "/[ \\n]{0,8}/"
        more = "" if single else f' ("," {space} {each})*'
        # Granite's closing tag is none: its turn ends.
        end = f"({g.text(self.close)})?" if self.name == "granite" else g.text(self.close)
        return Section(self.openers[0], f'"[" {space} {each}{more} {space} "]" {end}')

    def _call(self, g: Rules, function: Function) -> str:
        if self.style == "elements" and function.flat:
            try:
                return element_rule(g, function, self.framing)
            except Inexpressible:
                pass  # as JSON, which is read as well, it is said in full
        if self.name != "command":
            return call_rule(g, function)
        name = json.dumps(function.name, ensure_ascii=False)
        head = g.text('{"tool_call_id": "')
        then = g.text(f'", "tool_name": {name}, "parameters": ')
        return f'{head} {g.rule("/[A-Za-z0-9_-]{1,40}/")} {then} {g.arguments(function)} "}}"'
