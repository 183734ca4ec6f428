"""What of a tool call is settled by the tools and the template: found by rendering calls and comparing their tokens.

    <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>
    ~~~~~ trigger                                                            by what the model has written …
         ~~~~~~~~~~~~~~~~~                                                   … the scaffold follows
                          ~~~~ trigger
                              ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~              … the name's rest and, if there is but one, the key
                                                                   ~~~ trigger
                                                                      ~~~~~~~~~~~~~~ … the end

Only ids of real renderings are ever used.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

from gnomon.chat.messages import ChatError
from gnomon.chat.reasoning import TagFormat
from gnomon.chat.template import ChatTemplate
from gnomon.chat.tools import GENERIC, parse
from gnomon.chat.tools.tagged import Tagged

MAX_TOOLS = 32
MAX_SPAN = 64
MAX_TRIGGER = 8
"""Most tokens of a name that tell it from the others."""
PROBES: Mapping[str, tuple[Any, Any]] = {
    "string": ("Quixotic zebra", "jumps over 12"),
    "integer": (7315, 2),
    "number": (7315, 2.5),
    "boolean": (True, False),
}
"""Two values of a kind that have nothing in common."""
IDS = ("a1b2c3d4e", "z9y8x7w6v")
"""Ids of calls, in turn: what a template writes of them is the model's to choose. Mistral's want nine letters or digits."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a call's text is `trigger` so far, `ids` follow."""

    trigger: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """A call that begins with `head`, one JSON value and a beginning of `tail` ends as `rests` says: by what of the tail is left."""

    head: str
    tail: str
    rests: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ToolSpans:
    """What is settled of the calls of one request. `opener` begins them, `close` ends them."""

    opener: str
    close: str
    spans: tuple[Span, ...]
    endings: tuple[Ending, ...]
    tools: tuple[Mapping[str, Any], ...]
    format: Tagged
    thinking: TagFormat | None = None
    starts_thinking: bool = False
    """The prompt has opened a reasoning block."""

    def are_calls(self, text: str) -> bool:
        """Whether a text is nothing but complete calls."""
        content, calls = parse(self.format, text, self.tools)
        return not content.strip() and text.count(self.opener) == len(calls) > 0


@dataclass(frozen=True, slots=True)
class _Written:
    """A call as the template writes it: its ids, and the text up to the end of each."""

    ids: tuple[int, ...]
    ends: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.ends[-1]


def can_settle(template: ChatTemplate) -> bool:
    """Whether anything of a model's calls can be settled: it was taught to write them as JSON or elements between tags, and reasoning, if
    any, too."""
    tagged = isinstance(template.tools, Tagged) and template.tools is not GENERIC
    return tagged and (template.reasoning is None or isinstance(template.reasoning, TagFormat))


def tool_spans(
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]],
    decode: Callable[[Sequence[int]], str],
    *,
    generation_prompt: str = "",
    **variables: Any,
) -> ToolSpans | None:
    """What is settled of calls of these tools (OpenAI's), rendered with the template's `variables`. None if nothing is.

    That is so for models that don't write calls as JSON between tags, or whose reasoning isn't between tags, for more than 32 tools,
    and for tools without names.
    """
    format = template.tools
    if not can_settle(template) or not isinstance(format, Tagged) or not 0 < len(tools) <= MAX_TOOLS:
        return None
    renderer = _Renderer(template, format, tools, decode, variables)
    functions = [cast("Mapping[str, Any]", tool["function"]) for tool in tools]
    if len({function["name"] for function in functions}) < len(functions):
        return None
    try:
        heads = [renderer.head(function) for function in functions]
        endings = _endings(renderer, functions)
    except (ChatError, _Unsettled):
        return None
    spans = tuple(_spans(heads))
    if not spans and not endings:
        return None
    opened = template.splitter(generation_prompt).thinking
    return ToolSpans(
        format.openers[0],
        format.close,
        spans,
        endings,
        tuple(tools),
        format,
        cast("TagFormat | None", template.reasoning),
        starts_thinking=opened,
    )


class SpanCache:
    """Spans by tools and template variables, the last `capacity` of them: finding them takes several renderings. For any thread."""

    def __init__(self, capacity: int = 32) -> None:
        self._capacity = capacity
        self._known: OrderedDict[str, ToolSpans | None] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self,
        template: ChatTemplate,
        tools: Sequence[Mapping[str, Any]],
        decode: Callable[[Sequence[int]], str],
        generation_prompt: str,
        variables: Mapping[str, Any],
    ) -> ToolSpans | None:
        """As `tool_spans`."""
        key = json.dumps([list(tools), generation_prompt, dict(variables)], default=str)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        made = tool_spans(template, tools, decode, generation_prompt=generation_prompt, **variables)
        with self._lock:
            self._known[key] = made
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return made


class _Unsettled(Exception):
    """The template doesn't write calls as expected."""


class _Renderer:
    def __init__(
        self,
        template: ChatTemplate,
        format: Tagged,
        tools: Sequence[Mapping[str, Any]],
        decode: Callable[[Sequence[int]], str],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._template = template
        self._format = format
        self._tools = tools
        self._decode = decode
        self._kwargs = kwargs
        self._ids = deque(IDS)

    def call(self, name: str, arguments: Mapping[str, Any]) -> _Written:
        """A call of a tool, from its opener to its close."""
        user = {"role": "user", "content": "?"}
        function = {"name": name, "arguments": dict(arguments)}
        self._ids.rotate()
        call = {"id": self._ids[0], "type": "function", "function": function}
        made = {"role": "assistant", "content": "", "tool_calls": [call]}
        before = self._template.render([user], self._tools, **self._kwargs).text
        whole = self._template.render([user, made], self._tools, add_generation_prompt=False, **self._kwargs).text
        # What a generation prompt adds to open the answer need not come back in history.
        start = whole.find(self._format.openers[0], len(_common(before, whole)))
        end = whole.find(self._format.close, start)
        if start < 0 or end < 0:
            raise _Unsettled
        text = whole[start : end + len(self._format.close)]
        ids = tuple(self._template.tokenizer.encode(text))
        ends = tuple(self._decode(ids[: n + 1]) for n in range(len(ids)))
        if not ends or ends[-1] != text:
            raise _Unsettled
        return _Written(ids, ends)

    def head(self, function: Mapping[str, Any]) -> _Written:
        """What every call of a tool begins with."""
        name, (key, kinds) = function["name"], _only_key(function)
        if key is not None:
            made = [self.call(name, {key: value}) for kind in kinds for value in PROBES[kind]]
        else:
            made = [self.call(name, {"quixotic": "zebra"}), self.call(name, {"jumps": 12})]
            if not _schema(function).get("required"):
                made.append(self.call(name, {}))
        return _shared(made)


def _endings(renderer: _Renderer, functions: Sequence[Mapping[str, Any]]) -> tuple[Ending, ...]:
    """How calls end; nothing, unless each tool takes exactly one argument."""
    made: list[Ending] = []
    for function in functions:
        key, kinds = _only_key(function)
        required, closed = _schema(function).get("required"), _schema(function).get("additionalProperties") is False
        if key is None or required != [key] or not closed:
            return ()
        written = [
            (renderer.call(function["name"], {key: value}), json.dumps(value))
            for kind in kinds
            for value in PROBES[kind]
        ]
        parts = [call.text.partition(literal) for call, literal in written]
        heads, tails = {head for head, _, _ in parts}, {tail for _, _, tail in parts}
        if len(heads) != 1 or len(tails) != 1:
            # No JSON, or not only.
            return ()
        (head,), (tail,) = heads, tails
        by_rest = [_rests(call, head + literal) for call, literal in written]
        rests = {rest: ids for rest, ids in by_rest[0].items() if all(other.get(rest) == ids for other in by_rest)}
        made.append(Ending(head, tail, rests))
    return tuple(made)


def _rests(call: _Written, behind: str) -> dict[str, tuple[int, ...]]:
    """The ends of a call that begin behind its value, on a token, by their text."""
    return {
        call.text[len(end) :]: call.ids[n + 1 :]
        for n, end in enumerate(call.ends[:-1])
        if len(end) > len(behind) and end == call.text[: len(end)]
    }


def _spans(heads: Sequence[_Written]) -> list[Span]:
    made: list[Span] = []
    scaffold = _shared(heads)
    begin = next((n for n, end in enumerate(scaffold.ends) if any(char.isalpha() for char in end)), len(scaffold.ids))
    if len(scaffold.ids) - begin - 1 >= 2:
        made.append(Span(scaffold.ends[begin], scaffold.ids[begin + 1 :][:MAX_SPAN]))
    if len(heads) == 1:
        return made
    for head in heads:
        others = [other.text for other in heads if other is not head]
        for n in range(len(scaffold.ids), min(len(scaffold.ids) + MAX_TRIGGER, len(head.ids))):
            trigger = head.ends[n]
            if not any(other.startswith(trigger) or trigger.startswith(other) for other in others):
                if len(head.ids) - n - 1 >= 2:
                    made.append(Span(trigger, head.ids[n + 1 :][:MAX_SPAN]))
                break
    return made


def _shared(calls: Sequence[_Written]) -> _Written:
    """The ids that all begin with. Raises _Unsettled if there are none."""
    first = calls[0]
    size = sum(
        1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*(call.ids for call in calls), strict=False))
    )
    if not size:
        raise _Unsettled
    return _Written(first.ids[:size], first.ends[:size])


def _only_key(function: Mapping[str, Any]) -> tuple[str | None, Sequence[str]]:
    """The one argument a tool takes and must be given, and the kinds of its value."""
    schema = _schema(function)
    properties: Mapping[str, Any] = schema.get("properties") or {}
    if len(properties) != 1 or list(properties) != list(schema.get("required") or ()):
        return None, ()
    ((key, value),) = properties.items()
    kind = value.get("type") if isinstance(value, Mapping) else None
    # Of any kind: what the value begins with is not settled.
    return key, (kind,) if isinstance(kind, str) and kind in PROBES else ("string", "integer", "boolean")


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or {}


def _common(a: str, b: str) -> str:
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return a[:size]
