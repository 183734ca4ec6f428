"""Arguments of formats that write each parameter as text between tags: turned into one JSON object as they come."""

from __future__ import annotations

import json
import math
from typing import Literal

from gnomon.chat.tools.calls import Calls
from gnomon.chat.tools.rules import Function, Rules, inexact
from gnomon.chat.tools.values import NUMBER, converted, escaped

Framing = Literal["none", "newline", "space"]
Undeclared = Literal["string", "json"]

BOOLEAN = frozenset({"boolean"})
_YES = frozenset({"true", "1", "yes", "on"})
_NO = frozenset({"false", "0", "no", "off"})
_NOTHING = frozenset({"null", "none", "nil"})
_LONGEST_NOTHING = 4


class Arguments:
    """The arguments of the call under way."""

    def __init__(self, calls: Calls, framing: Framing = "none", undeclared: Undeclared = "json") -> None:
        """`framing`: what the format puts around a value and is not part of it. `undeclared`: what a parameter is read as
        that the tool's schema says nothing of."""
        self._calls = calls
        self._framing: Framing = framing
        self._undeclared: Undeclared = undeclared
        self._count = 0

    def parameter(self, name: str, types: frozenset[str] | None = None) -> ParameterValue:
        """The next parameter, to be fed its text. `types` as the call itself declares them, or else by the schema."""
        declared = self._calls.types(name) if types is None else types
        if declared is None:
            declared = frozenset({"string"} if self._undeclared == "string" else ())
        self._calls.write(("{" if self._count == 0 else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._count += 1
        return ParameterValue(self._calls, declared, self._framing)

    def end(self) -> None:
        """Close the object and the call."""
        self._calls.write("}" if self._count else "{}")
        self._calls.end()


class ParameterValue:
    """One parameter's text. Strings are written as they grow, other types when they are whole."""

    def __init__(self, calls: Calls, types: frozenset[str], framing: Framing) -> None:
        self._calls = calls
        self._types = types
        self._framing: Framing = framing
        self._text: list[str] = []
        self._held = ""
        self._begun = False
        self._streams = bool(types) and types <= {"string", "null"}
        self._nullable = "null" in types
        self._quoted = False

    def feed(self, text: str) -> None:
        text = self._held + text
        if not self._begun:
            if self._framing == "space":
                text = text.lstrip()
            elif self._framing == "newline":
                text = text.removeprefix("\n")
            self._begun = bool(text) or self._framing == "newline"
        kept = len(text)
        if self._framing == "space":
            kept = len(text.rstrip())
        elif self._framing == "newline" and text.endswith("\n"):
            kept -= 1
        self._held = text[kept:]
        self._take(text[:kept])

    def raw(self, text: str) -> None:
        """Text that has no framing of its own: from a section that says so."""
        self._begun, self._held = True, ""
        self._take(text)

    def _take(self, text: str) -> None:
        if not text:
            return
        if not self._streams:
            self._text.append(text)
            return
        if not self._quoted:
            if self._nullable:
                self._text.append(text)
                text = "".join(self._text)
                if len(text) <= _LONGEST_NOTHING:
                    return
            self._quoted = True
            self._calls.write('"')
        self._calls.write(escaped(text))

    def end(self) -> None:
        """The text is whole."""
        if self._quoted:
            self._calls.write('"')
        else:
            self._calls.write(typed("".join(self._text), self._types))


def written(
    g: Rules, function: Function, name: str, head: str, close: str, framing: Framing = "none", free: str | None = None
) -> str:
    """The grammar of one parameter as `Arguments` reads it: `head`, its text, `close`. Raises Inexpressible.

    `free` is an expression for any string with its `close`, where that isn't simply all up to it.
    """
    types = function.types(name)
    frame = "\n" if framing == "newline" else ""
    if types and types <= {"string", "null"}:
        text = g.strings(function, name, close, frame=frame, free=free, fits=_unframed if framing == "space" else _any)
    elif "string" in types:
        # What looks like a number or an array would be read as one.
        if function.exact:
            raise inexact(function, name)
        text = free or g.until(close)
    elif types == BOOLEAN:
        text = f"{g.one_of(('true', 'false', 'True', 'False'))} {g.text(frame + close)}"
    else:
        text = f"{g.value(function, name)} {g.text(frame + close)}"
    return f"{g.text(head + frame)} {text}"


def _unframed(text: str) -> bool:
    return text == text.strip()


def _any(_: str) -> bool:
    return True


def typed(text: str, types: frozenset[str]) -> str:
    """JSON of a parameter's whole text, by the types it may have; of any if `types` is empty. What fits none of them is a string."""
    bare = text.strip()
    word = bare.lower()
    if "null" in types and word in _NOTHING:
        return "null"
    if types & {"integer", "number"} and (number := _number(bare)) is not None:
        return number
    if "boolean" in types and word in _YES | _NO:
        return "true" if word in _YES else "false"
    if types <= {"string", "null"} and types:
        return json.dumps(text, ensure_ascii=False)
    read = converted(bare)
    # Quotes are the string's own where a string may stand.
    if read is None or (types and (not _fits(read, types) or read[0] == '"')):
        return json.dumps(text, ensure_ascii=False)
    return read


def _number(text: str) -> str | None:
    """A number as JSON writes it, a whole one without a fraction."""
    if len(text) > 400:
        return None
    whole = text.partition(".")[0] if text.rstrip("0").endswith(".") else text
    if NUMBER.fullmatch(whole):
        return whole
    try:
        value = float(text)
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None


def _fits(read: str, types: frozenset[str]) -> bool:
    kind = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(
        read[0], "number"
    )
    return kind in types or (kind == "number" and "integer" in types)
