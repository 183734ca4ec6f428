"""Calls as JSON objects: `{"name": ..., "arguments": {...}}` and its variants, alone and in lists."""

from __future__ import annotations

import json

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.reader import Reader, Sink, Steps, Unparseable
from gnomon.chat.tools.rules import Function, Rules
from gnomon.chat.tools.values import converted, held_string, value

NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters")
IDS = ("id", "tool_call_id")
KEYS = frozenset((*NAMES, *ARGUMENTS, *IDS, "type"))


def _drop(_: str) -> None:
    """A sink for what isn't wanted."""


def call_object(r: Reader, calls: Calls, *, bare: bool = False) -> Steps[None]:
    """Read one call. `bare`: nothing but its own shape tells that this is a call, so that it is one only with a known tool.

    Keys may come in any order; arguments ahead of the name wait for it. Other keys of the object are no part of a call and are
    dropped. Arguments that are a string are read as the JSON text in it.
    """
    yield from r.expect("{", bare=True)
    name: str | None = None
    id: str | None = None
    held: list[str] | None = None
    ended = False
    sure = False
    while not (yield from r.took_next("}")):
        if sure and not (yield from r.took_next(",")):
            if ended:
                # Complete but for the object's own brace.
                return
            raise Unparseable((yield from r.unexpected("',' or '}'")))
        if sure and (yield from r.took_next("}")):
            break
        yield from r.space()
        if (yield from r.peek()) != '"':
            raise Unparseable((yield from r.unexpected("a key")), literal=not sure or bare)
        key = yield from held_string(r)
        if not sure and key not in KEYS:
            raise Unparseable(f"{key[:80]!r} is no key of a call", literal=True)
        sure = True
        yield from r.space()
        yield from r.expect(":")
        yield from r.space()
        first = yield from r.peek()
        if key in ARGUMENTS and not ended and held is None:
            if name is not None and first == "{":
                calls.begin(name, id)
                yield from value(r, calls.write)
                calls.end()
                ended = True
            else:
                held = []
                yield from _arguments(r, held.append)
        elif key == "function" and first == "{" and name is None:
            yield from call_object(r, calls)
            ended, name = True, ""
        elif key in NAMES and name is None:
            name = calls.check((yield from held_string(r)), literal=bare)
        elif key in IDS and first == '"':
            id = (yield from held_string(r)) or None
        else:
            yield from value(r, _drop)
    if ended:
        return
    if name is None:
        raise Unparseable("the call has no name", literal=bare)
    calls.begin(name, id)
    calls.write("".join(held) if held else "{}")
    calls.end()


def _arguments(r: Reader, write: Sink) -> Steps[None]:
    """A call's arguments, in one piece: an object, nothing, or a string with either."""
    first = yield from r.peek()
    parts: list[str] = []
    if first == '"':
        text = yield from held_string(r)
        read = converted(text) if text.strip() else "{}"
    else:
        yield from value(r, parts.append)
        read = "".join(parts)
    if read == "null":
        read = "{}"
    if read is None or not read.startswith("{"):
        raise Unparseable("the arguments are no object")
    write(read)


def call_list(r: Reader, calls: Calls, *, bare: bool = False) -> Steps[None]:
    """Read `[call, call, ...]`, of which the last bracket may be missing."""
    yield from r.expect("[", bare=True)
    yield from r.space()
    if (yield from r.peek()) != "{":
        raise Unparseable((yield from r.unexpected("a call")), literal=True)
    yield from call_object(r, calls, bare=bare)
    while (yield from r.took_next(",")):
        yield from r.space()
        if (yield from r.peek()) != "{":
            break
        yield from call_object(r, calls)
    yield from r.took_next("]")


def closed(r: Reader, close: str) -> Steps[bool]:
    """Step over the closing tag if it comes next, and over braces that models add before it."""
    r.pin()
    yield from r.space()
    while (yield from r.took("}")):
        yield from r.space()
    if (yield from r.took(close)):
        r.unpin()
        return True
    r.rewind()
    return False


def call_rule(g: Rules, function: Function, *, arguments: str = "arguments", end: str = "") -> str:
    """The grammar of one call as an object with its name first; `end` is an expression for further keys."""
    head = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{arguments}": '
    return f'{g.text(head)} {g.arguments(function)} {end} "}}"'
