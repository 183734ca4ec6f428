"""Kimi K3's calls in its XTML: elements between `<|open|>` and `<|close|>`, arguments with the type of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.format import ToolFormat
from gnomon.chat.tools.parameters import Arguments
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.values import value

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
TOOLS, CALL, ARGUMENT, OBJECT = f"{OPEN}tools{SEP}", f"{OPEN}call", f"{OPEN}argument", f"{OPEN}json"
CALL_END, ARGUMENT_END = f"{CLOSE}call{SEP}", f"{CLOSE}argument{SEP}"

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
