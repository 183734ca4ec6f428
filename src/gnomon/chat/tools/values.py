"""Values as models write them, turned into JSON text as they come.

Models write JSON, almost JSON (Python's quotes and words, control characters in strings, commas before the end) and their families'
own notations. What comes out is always JSON, and is the model's own text wherever that is JSON already.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from gnomon.chat.tools.reader import Reader, Sink, Steps, Unparseable

MAX_DEPTH = 100
"""Containers within containers; more is no call that a client could use."""
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}

_PLAIN = re.compile(r"""[^"'\\\x00-\x1f]+""")
_WORD = re.compile(r"[-+.\w]+")
_BARE = re.compile(r"[^,\]}]+")
_BARE_KEY = re.compile(r"[^:,{}\[\]]+")
_HEX = re.compile(r"[0-9a-fA-F]+")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_LENGTHS = {"x": 2, "u": 4, "U": 8}
_PYTHON_ESCAPES = {"a": "\a", "v": "\v", "'": "'", "\n": ""}


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes values.

    `mark` stands at both ends of a string without escapes. `bare` allows keys without quotes, and takes a word that is no literal
    for a string. `python` reads escapes and tuples as Python does.
    """

    mark: str | None = None
    bare: bool = False
    python: bool = False


JSON = Notation()
PYTHON = Notation(python=True)


def escaped(text: str) -> str:
    """The text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value(r: Reader, write: Sink, notation: Notation = JSON, depth: int = 0) -> Steps[None]:
    """Read one value and write it as JSON. Raises Unparseable where no value stands, or one that doesn't end."""
    if notation.mark and (yield from r.took(notation.mark)):
        yield from _marked(r, write, notation.mark)
        return
    first = yield from r.peek()
    if first in ("{", "[") or (first == "(" and notation.python):
        if depth >= MAX_DEPTH:
            raise Unparseable(f"values are nested more than {MAX_DEPTH} deep")
        yield from _container(r, write, notation, depth + 1)
    elif first in ('"', "'") and first:
        yield from string(r, write, python=notation.python)
    elif notation.bare:
        word = (yield from r.word(_BARE, "a value")).strip()
        write(_literal(word) or json.dumps(word, ensure_ascii=False))
    else:
        word = yield from r.word(_WORD, "a value")
        known = _literal(word)
        if known is None:
            raise Unparseable(f"{word!r} is no value")
        write(known)


def _literal(word: str) -> str | None:
    return word if NUMBER.fullmatch(word) else WORDS.get(word)


def string(r: Reader, write: Sink, *, python: bool = False) -> Steps[None]:
    """Read a string in either kind of quotes."""
    quote = yield from r.peek()
    if quote not in ('"', "'") or not quote:
        raise Unparseable((yield from r.unexpected("a string")))
    r.at += 1
    write('"')
    while True:
        write(r.run(_PLAIN))
        char = yield from r.peek()
        if not char:
            raise Unparseable("the text ended inside a string")
        if char in ("\\", '"', "'") or char < " ":
            r.at += 1
            if char == quote:
                write('"')
                return
            if char == "\\":
                yield from _escape(r, write, python)
            else:
                write(escaped(char))


def _escape(r: Reader, write: Sink, python: bool) -> Steps[None]:
    char = yield from r.peek()
    if not char:
        raise Unparseable("the text ended inside a string")
    if char == "u" or (python and char in "xU"):
        r.pin()
        r.at += 1
        digits = yield from _digits(r, _LENGTHS[char])
        code = int(digits, 16) if digits else -1
        if 0 <= code <= 0x10FFFF:
            r.unpin()
            write(f"\\u{digits}" if char == "u" else escaped(chr(code)))
            return
        r.rewind()
    elif char in '"\\/bfnrt' and not (python and char == "/"):
        r.at += 1
        write("\\" + char)
        return
    elif char == "'" or (python and char in _PYTHON_ESCAPES):
        r.at += 1
        write(escaped(_PYTHON_ESCAPES[char]))
        return
    # No escape at all, as in a regular expression: the backslash stands for itself.
    write("\\\\")


def _digits(r: Reader, count: int) -> Steps[str]:
    """`count` hexadecimal digits, or none."""
    digits = ""
    while len(digits) < count:
        char = yield from r.peek()
        if not _HEX.fullmatch(char):
            return ""
        digits += char
        r.at += 1
    return digits


def _marked(r: Reader, write: Sink, mark: str) -> Steps[None]:
    write('"')
    yield from r.until(mark, lambda text: write(escaped(text)))
    write('"')


def _container(r: Reader, write: Sink, notation: Notation, depth: int) -> Steps[None]:
    opened = yield from r.peek()
    r.at += 1
    close, keyed = _CLOSERS[opened], opened == "{"
    opening, closing = ("{", "}") if keyed else ("[", "]")
    write(opening)
    count = 0
    while True:
        space = yield from r.space()
        if (yield from r.took(close)):
            write(space + closing)
            return
        # A comma is written only with a value behind it.
        write(("," if count else "") + space)
        if keyed:
            yield from _key(r, write, notation)
        yield from value(r, write, notation, depth)
        count += 1
        write((yield from r.space()))
        if not (yield from r.took(",")):
            yield from r.expect(close)
            write(closing)
            return


def _key(r: Reader, write: Sink, notation: Notation) -> Steps[None]:
    if notation.mark and (yield from r.took(notation.mark)):
        yield from _marked(r, write, notation.mark)
    elif notation.bare and (yield from r.peek()) not in ('"', "'"):
        write(json.dumps((yield from r.word(_BARE_KEY, "a key")).strip(), ensure_ascii=False))
    else:
        yield from string(r, write, python=notation.python)
    write((yield from r.space()))
    yield from r.expect(":")
    write(":")
    write((yield from r.space()))


def held_string(r: Reader, *, python: bool = False) -> Steps[str]:
    """A string's own text."""
    parts: list[str] = []
    yield from string(r, parts.append, python=python)
    return str(json.loads("".join(parts)))


def converted(text: str, notation: Notation = PYTHON) -> str | None:
    """JSON of a whole text that is one value, or None."""
    r, parts = Reader(), list[str]()
    r.feed(text.strip())
    r.ended = True
    steps = value(r, parts.append, notation)
    try:
        next(steps)
    except StopIteration:
        return "".join(parts) if r.at == len(r.text) else None
    except Unparseable:
        return None
    raise RuntimeError("a parser waits for more of a text that has ended")
