"""Calls as elements with a parameter each: Qwen3-Coder's notation, also Seed-OSS's with another outer tag."""

from __future__ import annotations

import re

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.parameters import Arguments, Framing, written
from gnomon.chat.tools.reader import Reader, Steps, Unparseable
from gnomon.chat.tools.rules import NEWLINE, Function, Rules, spelt

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_NAME = re.compile(r"[^<>\s]+")
_KEY = re.compile(r"[^<>\n]+")


def function_element(
    r: Reader, calls: Calls, outer_end: str, framing: Framing = "newline", *, bare: bool = False
) -> Steps[None]:
    """Read `<function=name><parameter=key>value</parameter>...</function>`; values are raw text.

    `bare`: it stands without the outer tag. The element's own end may be missing before that of the outer tag.
    """
    yield from r.expect(FUNCTION)
    name = calls.check((yield from r.word(_NAME, "a name")).strip("\"'"), literal=bare)
    yield from r.space()
    yield from r.expect(">", bare=bare)
    yield from r.space()
    ends = (FUNCTION_END, outer_end)
    if not (yield from r.first_of((PARAMETER, *ends))):
        raise Unparseable((yield from r.unexpected(repr(PARAMETER))), literal=bare)
    calls.begin(name)
    arguments = Arguments(calls, framing, "string")
    while (yield from r.took(PARAMETER)):
        value = arguments.parameter((yield from r.word(_KEY, "a name")).strip().strip("\"'"))
        yield from r.expect(">")
        yield from r.until_before(PARAMETER_END, (PARAMETER, *ends), value.feed)
        value.end()
        yield from r.space()
    if not (yield from r.took(FUNCTION_END)) and not (yield from r.stands(outer_end)):
        raise Unparseable((yield from r.unexpected(repr(FUNCTION_END))))
    arguments.end()


def element_rule(g: Rules, function: Function, framing: Framing) -> str:
    """The grammar of one call. Raises Inexpressible."""

    def write(name: str) -> str:
        head = f"{PARAMETER}{spelt(function, name, _KEY)}>"
        return f"{written(g, function, name, head, PARAMETER_END, framing)} {NEWLINE}"

    head = g.text(f"{FUNCTION}{function.named(_NAME)}>\n")
    return f"{head} {g.each(function, write)} {g.text(FUNCTION_END)}"
