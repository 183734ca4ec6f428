"""Rules of a grammar in llguidance's Lark, for what a model may write where calls are enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from gnomon.chat.tools.schema import Tools, resolve

Split = Callable[[str], Sequence[str | int]]
"""A text as runs of plain text and the ids of the special tokens written in it, which no plain text can spell."""

ANYTHING = "(?s:.*)"
NEWLINE = r'"\n"'
"""The expression of one."""
COMPACT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""White space in JSON, in llguidance's words: at most one space behind a comma or colon."""
FLEXIBLE: Mapping[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,80}",
    "item_separator": ",",
    "key_separator": ":",
}
"""Room to indent, but not endless."""
ITEM = "items"
"""What an array's items are called as a parameter."""
MAX_DEPTH = 32
"""References and alternatives followed within a parameter's schema."""

_NOTES = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"}
    | {"$comment", "$schema", "$id", "$defs", "definitions"}
)
_ROOT = _NOTES | {"properties", "required", "additionalProperties"}


class Inexpressible(ValueError):
    """A tool that can't be called in a notation, or not with all that its schema demands. `param` says where."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Function:
    """An offered tool. `exact` demands that all of its schema is enforced; `path` is where the request has it."""

    name: str
    schema: Mapping[str, Any]
    exact: bool
    path: str

    @property
    def properties(self) -> Mapping[str, Any]:
        """Parameters by name, in the schema's order."""
        found = self.schema.get("properties")
        return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        found = self.schema.get("required")
        return frozenset(cast("list[str]", found)) if isinstance(found, list) else frozenset()

    @property
    def flat(self) -> bool:
        """Whether the schema says no more than what each parameter may be and which are required."""
        open_ended = not self.properties and self.schema.get("additionalProperties") is not False
        return not open_ended and self.schema.keys() <= _ROOT and self.required <= self.properties.keys()

    @property
    def listed(self) -> bool:
        """Whether this is what is `within` an array that may hold any number of its items."""
        return ITEM in self.properties and self.schema.keys() <= _ROOT | {"items"}

    def within(self, schema: Mapping[str, Any]) -> Function:
        """What a parameter with this schema holds, as if it were a tool's: an object's properties, or an array's items as `ITEM`."""
        inner = {**self.shared, **schema}
        if "items" in schema and "properties" not in schema:
            inner["properties"] = {ITEM: schema["items"]}
        return Function(self.name, inner, self.exact, self.path)

    @property
    def shared(self) -> dict[str, Any]:
        """Definitions that parameters refer to."""
        return {name: self.schema[name] for name in ("$defs", "definitions") if name in self.schema}

    def types(self, parameter: str) -> frozenset[str]:
        """As the extractor takes them from the schema."""
        return self._tools.types(self.name, parameter) or frozenset()

    @cached_property
    def _tools(self) -> Tools:
        return Tools([{"function": {"name": self.name, "parameters": self.schema}}])

    def named(self, pattern: re.Pattern[str]) -> str:
        """The name. Raises Inexpressible where the notation has no room for it."""
        if not pattern.fullmatch(self.name):
            raise Inexpressible(
                f"{self.path}.name {self.name[:80]!r} can't be written in this model's notation of calls",
                f"{self.path}.name",
            )
        return self.name


class Rules:
    """A grammar under construction: its methods return expressions, which may stand in other expressions."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._rules: list[str] = []
        self._known: dict[str, str] = {}

    def source(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def rule(self, expression: str, attributes: str = "") -> str:
        """The name of a rule for an expression. Terminals have an expression of one token."""
        return self._add("r", f"{attributes}: {expression}")

    def terminal(self, regex: str) -> str:
        """The name of a terminal."""
        return self._add("T", f": {regex}")

    def _add(self, prefix: str, body: str) -> str:
        name = self._known.get(body)
        if name is None:
            name = self._known[body] = f"{prefix}{len(self._known)}"
            self._rules.append(name + body)
        return name

    def special(self, text: str) -> bool:
        """Whether the text is a special token of the vocabulary."""
        return len(parts := self._split(text)) == 1 and isinstance(parts[0], int)

    def text(self, text: str) -> str:
        """Exactly this text, special tokens included."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in self._split(text)) or '""'

    def one_of(self, texts: Iterable[str]) -> str:
        return f"({' | '.join(self.text(text) for text in texts)})"

    def free(self) -> str:
        """Any text without special tokens."""
        return self.terminal(f"/{ANYTHING}/")

    def until(self, close: str, text: str | None = None) -> str:
        """Any text, or one of the terminal `text`, up to the first `close`, which is part of it."""
        parts = list(self._split(close))
        at = next((i for i, part in enumerate(parts) if isinstance(part, int)), None)
        if at is None:
            return self.rule(text or self.free(), f"[suffix={_quoted(close)}]")
        before = "".join(part for part in parts[:at] if isinstance(part, str))
        return self.rule(f"{(not before and text) or self.ending(before)} {self.text(close[len(before) :])}")

    def prose(self, barred: Sequence[str] = ()) -> str:
        """Any text without special tokens that doesn't begin with one of some marks."""
        if not barred:
            return self.free()
        return self.terminal(rf"/{ANYTHING}/ & ~/\s*({'|'.join(map(_escaped, barred))}){ANYTHING}/")

    def lead(self, opener: str, prose: str) -> str:
        """Prose up to the first `opener`, which is part of it."""
        parts = list(self._split(opener))
        if all(isinstance(part, str) for part in parts):
            return self.rule(f"{prose} {_quoted(opener)}", "[lazy]")
        before = parts[0] if isinstance(parts[0], str) else ""
        text = prose if not before else self.ending(before)
        return self.rule(f"{text} {self.text(opener[len(before) :])}")

    def ending(self, text: str) -> str:
        """A text without special tokens that ends like this."""
        return self.terminal(f"/{ANYTHING}{_escaped(text)}/")

    def schema(self, schema: Any, *, exact: bool, spacing: Mapping[str, Any] = COMPACT) -> str:
        """JSON that a schema accepts, on one line. Unless `exact`, what of it can't be enforced is left out."""
        guided = {**spacing, "lenient": not exact, "coerce_one_of": not exact}
        body = {**cast("Mapping[str, Any]", schema), "x-guidance": guided} if isinstance(schema, Mapping) else schema
        return self.rule(f"%json {json.dumps(body)}")

    def answer(self, source: str, any_whitespace: bool, *, exact: bool) -> str:
        """An answer of JSON that a schema (its text) accepts."""
        return self.schema(json.loads(source), exact=exact, spacing=FLEXIBLE if any_whitespace else COMPACT)

    def arguments(self, function: Function) -> str:
        """All arguments as a JSON object."""
        return self.schema({"type": "object", **function.schema}, exact=function.exact)

    def value(self, function: Function, parameter: str) -> str:
        """One argument as JSON. Raises Inexpressible where its schema can't stand alone."""
        schema = function.properties[parameter]
        shared = function.shared
        if not all(one.startswith(tuple(f"#/{name}/" for name in shared)) for one in _references([schema, shared])):
            if function.exact:
                raise inexact(function, parameter)
            return self.schema({}, exact=False)
        return self.schema({**schema, **shared} if isinstance(schema, Mapping) else schema, exact=function.exact)

    def strings(
        self,
        function: Function,
        parameter: str,
        close: str,
        *,
        frame: str = "",
        free: str | None = None,
        fits: Callable[[str], bool] = lambda _: True,
    ) -> str:
        """One argument that is a string (or null) as its own text up to `close`, which is part of it.

        `frame` stands between an enumerated string and `close`; `free` is an expression for any other string with its
        `close`. `fits` tells of an enumerated string whether it is read as it is written. Raises Inexpressible where `exact` and the
        schema demands more of it than to be one of some strings.
        """
        choices, exact = _strings(function.properties[parameter], function.schema, MAX_DEPTH)
        if choices is not None and any(close in one or not fits(one) for one in choices):
            choices, exact = None, False
        if function.exact and not exact:
            raise inexact(function, parameter)
        if choices is None:
            return free or self.until(close)
        return f"{self.one_of(choices)} {self.text(frame + close)}"

    def each(self, function: Function, write: Callable[[str], str], between: str = "") -> str:
        """Every parameter that is to come, in the schema's order, with `between` between two. Raises Inexpressible.

        `write` makes the expression of a whole one.
        """
        if function.exact and not function.flat:
            raise Inexpressible(
                f"{function.path}.parameters can't be enforced in this model's notation of calls: only properties can",
                f"{function.path}.parameters",
            )
        if not between:
            written = ((name, write(name)) for name in function.properties)
            return " ".join(one if name in function.required else f"({one})?" for name, one in written) or '""'
        first, further = '""', '""'
        for name in reversed(list(function.properties)):
            one, needed = write(name), name in function.required
            # Either this one begins and the others follow it, or it is left out.
            begun = f"{one} {further}"
            first = self.rule(begun if needed else f"{begun} | {first}")
            further = self.rule(
                f"{self.text(between)} {begun}" if needed else f"{self.text(between)} {begun} | {further}"
            )
        return first


def spelt(function: Function, parameter: str, pattern: re.Pattern[str]) -> str:
    """The parameter's name. Raises Inexpressible where the notation has no room for it."""
    if not pattern.fullmatch(parameter):
        where = f"{function.path}.parameters.properties.{parameter[:80]}"
        raise Inexpressible(f"{where}: the name can't be written in this model's notation of calls", where)
    return parameter


def inexact(function: Function, parameter: str) -> Inexpressible:
    where = f"{function.path}.parameters.properties.{parameter}"
    return Inexpressible(f"{where} can't be enforced in full in this model's notation of calls", where)


def _strings(part: Any, root: Mapping[str, Any], left: int) -> tuple[list[str] | None, bool]:
    """The texts a string may be (None: any), and whether that is all that its schema says."""
    if not isinstance(part, Mapping) or not left:
        return None, part is True
    schema = cast("Mapping[str, Any]", part)
    more = schema.keys() - _NOTES
    if more == {"$ref"} and str(schema["$ref"]).startswith("#/"):
        return _strings(resolve(str(schema["$ref"]), root), root, left - 1)
    if more in ({"enum"}, {"const"}):
        values = cast("list[Any]", schema["enum"] if "enum" in schema else [schema["const"]])
        if all(value is None or isinstance(value, str) for value in values):
            return ["null" if value is None else value for value in values], True
        return None, False
    if more in ({"anyOf"}, {"oneOf"}):
        (key,) = more
        found = [_strings(one, root, left - 1) for one in cast("list[Any]", schema[key])]
        exact = all(one for _, one in found) and key == "anyOf"
        if any(choices is None for choices, _ in found):
            return None, exact
        return [text for choices, _ in found for text in choices or ()], exact
    if more:
        return None, False
    # "null" is read as nothing where nothing may stand.
    return (["null"] if schema.get("type") == "null" else None), True


def _references(node: Any) -> Iterable[str]:
    if isinstance(node, Mapping):
        for key, value in cast("Mapping[str, Any]", node).items():
            if key == "$ref" and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(node, list):
        for value in cast("list[Any]", node):
            yield from _references(value)


def _quoted(text: str) -> str:
    """A text in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A text in a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
