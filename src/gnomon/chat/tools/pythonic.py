"""Calls as a list of Python's: `[f(a=1), g(b="x")]`; in tags (LFM2) or at the beginning of the answer (Llama 4)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.json_calls import call_list
from gnomon.chat.tools.parameters import BOOLEAN
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Rules, spelt
from gnomon.chat.tools.values import PYTHON, value

_NAME = re.compile(r"[\w.-]+")
_KEYWORD = re.compile(r"\w+")
_WORDS = {BOOLEAN: ("True", "False", "true", "false"), frozenset({"null"}): ("None", "null")}


def call_expression(r: Reader, calls: Calls, *, bare: bool = False) -> Steps[None]:
    """Read `name(key=value, ...)`. `bare`: nothing but its own shape tells that this is a call."""
    name = yield from r.word(_NAME, "a name")
    yield from r.expect("(", bare=bare)
    # Llama's built-in tools are objects with this one method.
    name = calls.check(name if name in calls.tools else name.removesuffix(".call"), literal=bare)
    yield from r.space()
    calls.begin(name)
    calls.write("{")
    count = 0
    while not (yield from r.took_next(")")):
        if count and not (yield from r.took_next(",")):
            raise Unparseable((yield from r.unexpected("',' or ')'")))
        yield from r.space()
        if count and (yield from r.took(")")):
            break
        key = yield from r.word(_KEYWORD, "an argument's name")
        yield from r.space()
        yield from r.expect("=")
        yield from r.space()
        calls.write((", " if count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        yield from value(r, calls.write, PYTHON)
        count += 1
    calls.write("}")
    calls.end()


def expression_list(r: Reader, calls: Calls, *, bare: bool = False) -> Steps[None]:
    """Read `[call, call, ...]`, in Python or in JSON, of which the last bracket may be missing."""
    r.pin()
    yield from r.expect("[", bare=True)
    yield from r.space()
    keyed = yield from r.stands("{")
    r.rewind()
    if keyed:
        yield from call_list(r, calls, bare=bare)
        return
    yield from r.expect("[")
    yield from r.space()
    if not _NAME.fullmatch((yield from r.peek())):
        raise Unparseable((yield from r.unexpected("a call")), literal=True)
    yield from call_expression(r, calls, bare=bare)
    while (yield from r.took_next(",")):
        yield from r.space()
        yield from call_expression(r, calls)
    yield from r.took_next("]")


def list_rule(g: Rules, functions: Sequence[Function], *, single: bool) -> str:
    """The grammar of a list of calls."""
    each = g.rule(" | ".join(_expression(g, one) for one in functions))
    more = "" if single else f' (", " {each})*'
    return f'"[" {each}{more} "]"'


def _expression(g: Rules, function: Function) -> str:
    def write(name: str) -> str:
        words = _WORDS.get(function.types(name))
        value = g.one_of(words) if words else g.value(function, name)
        return f"{g.text(f'{spelt(function, name, _KEYWORD)}=')} {value}"

    return f'{g.text(f"{function.named(_NAME)}(")} {g.each(function, write, ", ")} ")"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Pythonic(ToolFormat):
    """The list between two tags."""

    close: str

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        yield from r.expect(self.openers[0])
        yield from r.space()
        yield from expression_list(r, calls)
        yield from r.took_next(self.close)

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        return Section(self.openers[0], f"{list_rule(g, functions, single=single)} {g.text(self.close)}")
