"""Tool calls that a request insists on: what the grammar takes is what the extractor reads as calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_fixtures import tiny_compiler, tiny_tokenizer
from gnomon.chat.constraint import Constraint, ConstraintError
from gnomon.chat.tool_choice import NOTATIONS, tool_call
from gnomon.chat.tools import FORMATS, ToolFormat, Tools, parse
from gnomon.grammar import Unenforceable


def tool(name: str, strict: bool = False, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


UP = tool("up", properties={"x": {"$ref": "#/$defs/k"}}, required=["x"], **{"$defs": {"k": {"type": "integer"}}})
DOWN = tool('do"wn-ä', properties={"tags": {"type": "array", "uniqueItems": True}}, additionalProperties=False)
BARE = {"type": "function", "function": {"name": "bare"}}


def by_name(name: str) -> ToolFormat:
    return next(one for one in FORMATS if one.name == name)


def taken(wanted: Constraint, text: str) -> tuple[bool, bool]:
    """Whether the grammar takes the text as a whole answer, and whether that is then the end."""
    matcher = tiny_compiler().compile(wanted).start()
    for token in tiny_tokenizer().encode(text):
        if not matcher.allows(token):
            return False, False
        matcher.advance(token)
    return matcher.accepting, matcher.finished


def written(format: ToolFormat, name: str, arguments: str) -> str:
    opened, closed = format.openers[0], format.close  # pyright: ignore[reportAttributeAccessIssue]
    return f'{opened}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{closed}'


@pytest.mark.parametrize("notation", NOTATIONS)
def test_what_the_grammar_takes_the_extractor_reads(notation: str) -> None:
    format, tools = by_name(notation), [UP, DOWN, BARE]
    up, down = written(format, "up", '{"x": 3}'), written(format, 'do"wn-ä', '{"tags":["a", 1]}')
    bare = written(format, "bare", '{"any": null}')
    anyone = tool_call(format, tools)
    for text in (up, down, bare, f"{down}\n{up}"):
        assert taken(anyone, text) == (True, False)
    _, calls = parse(format, f"{down}\n{up}", Tools(tools))
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ('do"wn-ä', {"tags": ["a", 1]}),
        ("up", {"x": 3}),
    ]
    alone = tool_call(format, tools, name="up", single=True)
    assert taken(alone, up) == (True, True)
    for text in (down, f"{up}\n{up}", written(format, "up", '{"x": "3"}'), written(format, "up", "{}"), "Hello", ""):
        assert not taken(alone, text)[0]


def test_strict_tools_are_enforced_in_full_or_not_at_all() -> None:
    format = by_name("json")
    exact = tool("f", strict=True, properties={"x": {"type": "integer"}}, required=["x"], additionalProperties=False)
    assert taken(tool_call(format, [exact]), written(format, "f", '{"x": 3}'))[0]
    unique = tool("f", strict=True, properties={"x": {"type": "array", "uniqueItems": True}})
    with pytest.raises(Unenforceable, match="uniqueItems"):
        tiny_compiler().compile(tool_call(format, [unique]))


@pytest.mark.parametrize("format", [None, *(one for one in FORMATS if one.name not in NOTATIONS)])
def test_other_notations_are_refused(format: ToolFormat | None) -> None:
    with pytest.raises(ConstraintError, match="notation"):
        tool_call(format, [UP])


def test_the_tool_must_be_there_and_sound() -> None:
    format = by_name("json")
    with pytest.raises(ConstraintError, match="'left', but the tools are: up"):
        tool_call(format, [UP], name="left")
    with pytest.raises(ConstraintError, match="the tools are: none"):
        tool_call(format, [])
    with pytest.raises(ConstraintError) as caught:
        tool_call(format, [UP, tool("f", properties={"a": {"type": "it"}})])
    assert caught.value.param == "tools[1].function.parameters.properties.a.type"
