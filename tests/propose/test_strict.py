"""Spans of tool calls: what is settled, and that nothing else ever brings them about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_fixtures import EOS_ID, tiny_tokenizer
from gnomon.chat.reasoning import TagFormat
from gnomon.chat.spans import ToolSpans, can_settle, tool_spans
from gnomon.chat.template import ChatTemplate
from gnomon.chat.tools import parse
from gnomon.propose.strict import Strict

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"
TOKENIZER = tiny_tokenizer()


class Templated:
    """The tiny tokenizer with another model's template."""

    special_tokens = {"eos_token": "<|im_end|>"}  # noqa: RUF012

    def __init__(self, file: str) -> None:
        self.chat_templates = {"default": (TEMPLATES / file).read_text("utf-8")}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return TOKENIZER.encode(text)

    def token_id(self, piece: str) -> int | None:
        return TOKENIZER.token_id(piece)


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = (), *, closed: bool = True) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    if closed:
        parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(ids, hide=False)


@cache
def template_of(file: str) -> ChatTemplate:
    return ChatTemplate(Templated(file))


def spans_of(tools: Sequence[dict[str, Any]], file: str = "qwen3.jinja", **kwargs: Any) -> ToolSpans | None:
    return tool_spans(template_of(file), tools, decode, **kwargs)


WEATHER = tool("get_weather", {"city": {"type": "string"}}, ["city"])
TIME = tool("get_time", {"zone": {"type": "string"}}, ["zone"])
TIMER = tool("set_timer", {"minutes": {"type": "integer"}}, ["minutes"])
SEARCH = tool("search", {"query": {"type": "string"}, "limit": {"type": "integer"}}, ["query"])
TOOLS = [WEATHER, TIME, TIMER]
SPANS = spans_of(TOOLS)


def strict(spans: ToolSpans | None, most: int = 200) -> Strict:
    assert spans is not None
    return Strict(spans, TOKENIZER, {EOS_ID}, most)


def asserted(spans: ToolSpans | None, text: str) -> str:
    """What is asserted behind a text, written token by token."""
    row, ids = strict(spans), TOKENIZER.encode(text)
    for n in range(len(ids)):
        row.propose([], ids[:n], 200)
    return decode(row.propose([], ids, 200))


def test_what_is_settled_of_calls() -> None:
    spans = spans_of(TOOLS)
    assert asserted(spans, "<to") == 'ol_call>\n{"name": "'
    assert asserted(spans, '<tool_call>\n{"name": "') == ""
    # Two tools begin alike: a token further they don't.
    assert asserted(spans, '<tool_call>\n{"name": "get_') == ""
    assert asserted(spans, '<tool_call>\n{"name": "se').endswith('", "arguments": {"minutes": ')
    head = '<tool_call>\n{"name": "get_weather", "arguments": {"city": '
    assert asserted(spans, head + '"Oslo"') == ""
    assert asserted(spans, head + '"Oslo"}') == "}\n</tool_call>"
    assert asserted(spans, head + '"a } b') == ""
    assert asserted(spans, head + '"a \\"}') == ""
    number = '<tool_call>\n{"name": "set_timer", "arguments": {"minutes": '
    assert asserted(spans, number + "1") == ""
    assert asserted(spans, number + "15}") == "}\n</tool_call>"


def test_one_tool_is_settled_with_the_first_letter() -> None:
    assert asserted(spans_of([WEATHER]), "<to") == 'ol_call>\n{"name": "get_weather", "arguments": {"city": "'


def test_a_key_that_may_be_another_is_not_settled() -> None:
    assert asserted(spans_of([SEARCH]), "<to") == 'ol_call>\n{"name": "search", "arguments": {"'
    optional = tool("look", {"query": {"type": "string"}})
    # Not even that there is one.
    assert asserted(spans_of([optional]), "<to") == 'ol_call>\n{"name": "look", "arguments": {'
    # Nor what comes behind a value, if one tool of several may take more.
    head = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}'
    assert asserted(spans_of([WEATHER]), head) == "}\n</tool_call>"
    assert asserted(spans_of([WEATHER, SEARCH]), head) == ""
    assert asserted(spans_of([tool("get_weather", {"city": {"type": "string"}}, ["city"], closed=False)]), head) == ""


def test_what_a_value_begins_with_is_settled_by_its_type_alone() -> None:
    anything = tool("f", {"x": {}}, ["x"])
    assert asserted(spans_of([anything]), "<to") == 'ol_call>\n{"name": "f", "arguments": {"x": '


def test_names_that_begin_others_are_told_by_what_ends_them() -> None:
    spans = spans_of([tool("get", {"a": {"type": "string"}}, ["a"]), tool("get_all", {"b": {"type": "string"}}, ["b"])])
    assert asserted(spans, '<tool_call>\n{"name": "get') == ""
    assert asserted(spans, '<tool_call>\n{"name": "get"') == ', "arguments": {"a": "'
    assert asserted(spans, '<tool_call>\n{"name": "get_').endswith('", "arguments": {"b": "')


def test_ids_of_calls_are_the_models_to_choose() -> None:
    spans = spans_of([WEATHER], "tools/command_r.jinja")
    assert spans is not None
    assert not any("a1b2" in decode(span.ids) or "z9y8" in decode(span.ids) for span in spans.spans)


@pytest.mark.parametrize("file", ["chatml.jinja", "llama3.jinja", "tools/deepseek_v3.jinja", "harmony.jinja"])
def test_other_notations_settle_nothing(file: str) -> None:
    assert spans_of(TOOLS, file) is None
    assert not can_settle(ChatTemplate(Templated(file)))
    assert can_settle(ChatTemplate(Templated("qwen3.jinja")))


def test_too_many_tools_settle_nothing() -> None:
    assert spans_of([tool(f"t{i}", {}) for i in range(33)]) is None
    assert spans_of([WEATHER, WEATHER]) is None


CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
NEVER = [
    "`<to",
    "```\n<to",
    '```xml\n<tool_call>\n{"name": "se',
    "Write <to",
    'Like "<to',
    "> <to",
    "1. <to",
    "Sure.\n\n<to",
    "<tool_call>\n<to",
    "<<to",
    f"```\n{CALL}\n```\n<to",
    f"{CALL}\nDone. <to",
    CALL.replace("get_time", "unknown") + "\n<to",
    f"{CALL[:-1]}\n<to",
    '<tool_call>\n{"name": "get_time", "arguments": {"zone": "</tool_call>\n<to',
]


@pytest.mark.parametrize("text", NEVER)
def test_quoted_calls_code_and_prose_never_trigger(text: str) -> None:
    assert asserted(spans_of(TOOLS), text) == ""
    assert asserted(spans_of([WEATHER]), text) == ""


@settings(max_examples=50, deadline=None)
@given(st.text('`<t>\n ab"{}~', max_size=12), st.sampled_from(["<to", CALL + "\n<to", '<tool_call>\n{"name": "se']))
def test_nothing_may_stand_before_a_call(before: str, trigger: str) -> None:
    assert bool(asserted(SPANS, before + trigger)) is not bool(before.strip())


def test_calls_follow_calls() -> None:
    spans = spans_of(TOOLS)
    assert asserted(spans, CALL + "\n<to") == 'ol_call>\n{"name": "'
    assert asserted(spans, f"{CALL}\n{CALL}\n<to") == 'ol_call>\n{"name": "'


THOUGHT = TagFormat("<think>", "</think>")


def test_only_a_complete_block_of_reasoning_may_stand_before() -> None:
    spans = spans_of(TOOLS)
    assert spans is not None
    assert isinstance(spans.thinking, TagFormat)
    span = 'ol_call>\n{"name": "'
    assert asserted(spans, "<think>\nSo it is.\n</think>\n\n<to") == span
    assert asserted(spans, "<think>\n<to") == ""
    assert asserted(spans, "<think>\nso\n<to") == ""
    assert asserted(spans, "<think>\nuse `<tool_call>\n</think>\n\n<to") == ""
    assert asserted(spans, "<think>\nuse ```\n<tool_call>``` then\n</think>\n\n<to") == span
    opened = spans_of(TOOLS, generation_prompt="<think>\n")
    assert asserted(opened, "so it is.</think>\n\n<to") == span
    assert asserted(opened, "<to") == ""


def test_a_call_written_with_all_spans_is_read_as_one() -> None:
    """The model adds only what is its to choose."""
    spans = spans_of(TOOLS)
    assert spans is not None
    for words, name, arguments in (
        (["<to", "get_w", 'Oslo"}'], "get_weather", {"city": "Oslo"}),
        (["<to", "se", "15}"], "set_timer", {"minutes": 15}),
    ):
        row, ids = strict(spans), list[int]()
        injected = 0
        for word in words:
            for token in TOKENIZER.encode(word):
                ids.append(token)
                while span := row.propose([], ids, 5):
                    span = span[:5]
                    injected += len(span)
                    ids += span
        content, (call,) = parse(spans.format, decode(ids), TOOLS)
        assert (content, call.name, json.loads(call.arguments)) == ("", name, arguments)
        assert injected > len(ids) / 2


def test_a_span_the_model_leaves_is_dropped() -> None:
    row = strict(spans_of(TOOLS))
    ids = TOKENIZER.encode("<to")
    span = list(row.propose([], ids, 200))
    assert row.propose([], [*ids, *span[:3]], 200) == tuple(span[3:])
    assert row.propose([], [*ids, *span[:3], TOKENIZER.encode("x")[0]], 200) == ()


def test_spans_end_before_an_end_token_and_at_their_limit() -> None:
    spans = spans_of(TOOLS)
    assert spans is not None
    ids = TOKENIZER.encode("<to")
    assert len(strict(spans, most=4).propose([], ids, 200)) == 4
    first = spans.spans[0]
    cut = replace(spans, spans=(replace(first, ids=(*first.ids[:3], EOS_ID, *first.ids[3:])),))
    assert strict(cut).propose([], ids, 200) == first.ids[:3]
    short = replace(spans, spans=(replace(first, ids=(first.ids[0], EOS_ID)),))
    assert strict(short).propose([], ids, 200) == ()
