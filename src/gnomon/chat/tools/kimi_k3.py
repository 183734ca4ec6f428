"""Kimi K3's calls in its XTML: elements between `<|open|>` and `<|close|>`, arguments with the type of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import Section, ToolFormat
from gnomon.chat.tools.parameters import Arguments
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Inexpressible, Rules, spelt
from gnomon.chat.tools.schema import STRING
from gnomon.chat.tools.values import value

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
TOOLS, CALL, ARGUMENT, OBJECT = f"{OPEN}tools{SEP}", f"{OPEN}call", f"{OPEN}argument", f"{OPEN}json"
CALL_END, ARGUMENT_END = f"{CLOSE}call{SEP}", f"{CLOSE}argument{SEP}"

_NAME = re.compile(r"[^<>\"&\s]+")
_INDEX = r'/( index="[0-9]+")?/'
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _attributes(r: Reader) -> Steps[dict[str, str]]:
    text = yield from r.held(SEP)
    return {key: quoted.replace("&quot;", '"').replace("&amp;", "&") for key, quoted in _ATTRIBUTE.findall(text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3(ToolFormat):
    """A call has `argument` elements, or one `json` element with all of them. The section's own tags may be missing."""

    def parse(self, r: Reader, calls: Calls) -> Steps[None]:
        yield from r.took(TOOLS)
        if not (yield from r.took_next(CALL)):
            raise Unparseable((yield from r.unexpected(repr(CALL))), literal=True)
        going = True
        while going:
            name = calls.check((yield from _attributes(r)).get("tool", ""))
            kind = yield from r.next_of((ARGUMENT, OBJECT, CALL_END))
            if not kind:
                raise Unparseable((yield from r.unexpected(repr(ARGUMENT))))
            if kind == OBJECT:
                yield from _object(r, calls, name)
            else:
                yield from _each(r, calls, name)
            if (yield from r.took_next(f"{CLOSE}tools{SEP}")):
                return
            going = yield from r.took_next(CALL)

    def section(self, g: Rules, functions: Sequence[Function], *, single: bool) -> Section:
        call = g.rule(" | ".join(_call(g, one) for one in functions))
        return Section(TOOLS, f"{call}{'' if single else '+'} {g.text(f'{CLOSE}tools{SEP}')}")

    def turn(
        self, g: Rules, functions: Sequence[Function], *, required: bool, single: bool, answer: str | None = None
    ) -> str:
        """What is said stands in an element of its own, ahead of the calls; the message's own end may be written."""
        section = self.section(g, functions, single=single)
        calls = f"{g.text(TOOLS)} {section.body}"
        end = f"({g.text(f'{CLOSE}message{SEP}')})?"
        if required:
            return f"{calls} {end}"
        said = f"{g.text(f'{OPEN}response{SEP}')} {answer or g.free()} {g.text(f'{CLOSE}response{SEP}')}"
        return f"(({said})? {calls} | {said}) {end}" if answer is None else f"({calls} | {said}) {end}"


def _object(r: Reader, calls: Calls, name: str) -> Steps[None]:
    yield from _attributes(r)
    yield from r.space()
    if not (yield from r.stands("{")):
        raise Unparseable((yield from r.unexpected("'{'")))
    calls.begin(name)
    yield from value(r, calls.write)
    calls.end()
    if (yield from r.took_next(f"{CLOSE}json{SEP}")):
        yield from r.took_next(CALL_END)


def _each(r: Reader, calls: Calls, name: str) -> Steps[None]:
    calls.begin(name)
    arguments = Arguments(calls)
    while (yield from r.took_next(ARGUMENT)):
        said = yield from _attributes(r)
        text = said.get("type", "string") == "string"
        argument = arguments.parameter(said.get("key", ""), frozenset({"string"} if text else ()))
        yield from r.until_before(ARGUMENT_END, (ARGUMENT, CALL_END), argument.feed)
        argument.end()
    yield from r.space()
    yield from r.expect(CALL_END)
    arguments.end()


def _call(g: Rules, function: Function) -> str:
    end = f'"{SEP}'

    def write(name: str) -> str:
        head = f'{ARGUMENT} key="{spelt(function, name, _NAME)}" type="'
        types = function.types(name)
        if types == STRING:
            try:
                return f"{g.text(f'{head}string{end}')} {g.strings(function, name, ARGUMENT_END)}"
            except Inexpressible:
                pass  # as JSON it is said in full
        kinds = sorted({"number" if kind == "integer" else kind for kind in types - {"string"}}) or ["object"]
        return f"{g.text(head)} {g.one_of(kinds)} {g.text(end)} {g.value(function, name)} {g.text(ARGUMENT_END)}"

    tool = g.text(f'{CALL} tool="{function.named(_NAME)}"')
    head = f"{tool} {g.rule(_INDEX)} {g.text(SEP)}"
    if not function.flat:
        return f"{head} {g.text(f'{OBJECT}{SEP}')} {g.arguments(function)} {g.text(f'{CLOSE}json{SEP}{CALL_END}')}"
    return f"{head} {g.each(function, write)} {g.text(CALL_END)}"
