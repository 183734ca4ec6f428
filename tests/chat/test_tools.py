"""Tool calls in texts, whole and in pieces."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tool_corpus import BY_NAME, CASES, TOOLS

from gnomon.chat import reasoning
from gnomon.chat.tools import (
    FORMATS,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Extractor,
    Malformed,
    Tools,
    collected,
    detect,
    joined,
    parse,
)

PROSE = [
    "Hello ",
    "a\n",
    "\n\n",
    " ",
    "`",
    "``",
    "```\n",
    "```json\n",
    "~~~\n",
    "é😀",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
]
PROSE += [
    "(",
    ")",
    ",",
    ":",
    "=",
    "<",
    ">",
    "</",
    "<|",
    "|>",
    "1",
    "null",
    "name",
    '"name": "f"',
    '{"name": "f"',
    "f",
    "\x00",
]


def told(format, pieces, single=False):
    """Events of a text in pieces, as if it had come at once; ids by their order, for most are random."""
    extractor = Extractor(format, TOOLS, single=single)
    events = [event for piece in pieces for event in extractor.push(piece)]
    events += extractor.finish()
    assert extractor.push("more") == []
    assert extractor.finish() == []
    return [
        CallStart(e.index, str(e.index) if re.fullmatch("call_[0-9a-f]{24}|[a-zA-Z0-9]{9}", e.id) else e.id, e.name)
        if isinstance(e, CallStart)
        else e
        for e in joined(events)
    ]


def check(text, events):
    """What holds for every text."""
    content, calls = collected(events)
    for call in calls:
        assert call.name in ("f", "g.h-1")
        assert isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()
    if not any(isinstance(event, CallEnd) for event in events):
        assert content == text
    open_ = None
    for event in events:
        match event:
            case CallStart():
                assert open_ is None
                open_ = event.index
            case CallArguments():
                assert event.index == open_
                assert event.fragment
            case CallEnd():
                assert event.index == open_
                open_ = None
            case Malformed():
                assert event.index == open_
                open_ = None
            case Content():
                assert open_ is None
                assert event.text
    assert open_ is None
    starts = [event.index for event in events if isinstance(event, CallStart)]
    assert starts == list(range(len(starts)))


FRAME = r'\s|[\]};,]|```|</?[^<>\s]+>|<\|close\|>\w+<\|sep\|>|,\s*"id": "\w+"\}'
"""What stands around calls: white space, brackets and commas of lists, closing tags, an id that comes late."""


class Accountant(Extractor):
    """Keeps the text of each complete call."""

    def __init__(self, format):
        super().__init__(format, TOOLS)
        self.kept = []

    def _told(self, event):
        if isinstance(event, CallEnd):
            self.kept.append(self._reader.give_up())
        super()._told(event)


def account(format, text):
    """Every character of the text is in the content, in a call, or in a call's frame; and in that order."""
    accountant = Accountant(format)
    events = [*accountant.push(text), *accountant.finish()]
    calls = iter(accountant.kept)
    parts: list[str] = []
    for event in events:
        words = event.text.split() if isinstance(event, Content | Malformed) else []
        parts += [next(calls)] if isinstance(event, CallEnd) else words
    frame = f"(?:{FRAME})*?"
    assert re.fullmatch(frame + "".join(re.escape(part) + frame for part in parts), text), parts


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]!r}")
def test_the_corpus_whole_and_cut_everywhere(case):
    format = BY_NAME[case.format]
    whole = told(format, [case.text])
    content, calls = collected(whole)
    assert content == case.content
    assert [(call.name, json.loads(call.arguments)) for call in calls] == case.calls
    assert sum(isinstance(event, Malformed) for event in whole) == case.malformed
    check(case.text, whole)
    account(format, case.text)
    assert told(format, case.text) == whole
    for cut in range(len(case.text) + 1):
        assert told(format, [case.text[:cut], case.text[cut:]]) == whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]!r}")
def test_a_text_that_breaks_off_anywhere_loses_nothing(case):
    format = BY_NAME[case.format]
    for end in range(len(case.text)):
        check(case.text[:end], told(format, [case.text[:end]]))


@st.composite
def texts(draw):
    """A format and a text of pieces of its corpus, of other formats', and of prose, some of them damaged."""
    format = draw(st.sampled_from(FORMATS))
    own = [case.text for case in CASES if case.format == format.name]
    snippets = st.sampled_from(own) | st.sampled_from(own) | st.sampled_from([case.text for case in CASES])
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        part = draw(snippets | st.sampled_from(PROSE) | st.sampled_from((*format.openers, *format.leading)))
        if draw(st.booleans()) and part:
            start = draw(st.integers(0, len(part) - 1))
            end = draw(st.integers(start, len(part)))
            damage = draw(st.sampled_from(["keep", "cut", "drop", "put"]))
            if damage == "cut":
                part = part[start:end]
            elif damage == "drop":
                part = part[:start] + part[end:]
            elif damage == "put":
                part = part[:start] + draw(st.sampled_from(PROSE)) + part[start:]
        parts.append(part)
    return format, "".join(parts)


@settings(max_examples=600, deadline=None)
@given(texts(), st.lists(st.integers(0, 400), max_size=8))
def test_any_pieces_of_any_text_tell_the_same(made, cuts):
    format, text = made
    whole = told(format, [text])
    check(text, whole)
    account(format, text)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert told(format, [text[a:b] for a, b in pairwise(places)]) == whole
    assert told(format, text) == whole


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CASES), st.sampled_from(CASES), st.text("abc .\n", max_size=9))
def test_prose_around_calls_comes_through(first, second, between):
    """Words nobody could take for part of a call are all there, in order, and no white space between them is made up."""
    format = BY_NAME[first.format]
    text = f"One, {first.text} two {between} three."
    content = collected(told(format, [text]))[0]
    words = re.findall("One,|two|three.", content)
    if "`" not in first.text and not first.malformed:
        assert words[0] == "One,"
        assert words[-1] == "three."
    assert set("".join(content.split())) <= set("".join(text.split()))


@given(st.text(max_size=60), st.sampled_from(FORMATS))
@example("<tool_call>", BY_NAME["json"])
@settings(max_examples=300, deadline=None)
def test_text_without_calls_is_content_as_it_is(text, format):
    check(text, told(format, text))


def test_the_name_comes_once_it_is_certain_and_arguments_as_they_grow():
    extractor = Extractor(BY_NAME["json"], TOOLS)
    assert extractor.push("Hi. <tool_call>") == [Content("Hi.")]
    assert extractor.push('{"name": "f", "argum') == []
    start, opening = extractor.push('ents": {')
    assert isinstance(start, CallStart)
    assert re.fullmatch("call_[0-9a-f]{8,}", start.id)
    assert (start.index, start.name, opening) == (0, "f", CallArguments(0, "{"))
    assert extractor.push('"s": "on') == [CallArguments(0, '"s": "on')]
    assert extractor.push('e"') == [CallArguments(0, 'e"')]
    assert extractor.push("}") == [CallArguments(0, "}"), CallEnd(0)]
    assert extractor.push("}\n</tool_call>\n") == []
    assert extractor.finish() == []


def test_string_parameters_of_elements_grow_and_others_come_whole():
    extractor = Extractor(BY_NAME["qwen_xml"], TOOLS)
    events = extractor.push('<tool_call>\n<function=f>\n<parameter=s>\nA "line"\nand')
    assert events[1:] == [CallArguments(0, '{"s": "A \\"line\\"\\nand')]
    assert extractor.push(" more\n</parameter>\n") == [CallArguments(0, " more")]
    assert extractor.push("<parameter=a>[[1") == [CallArguments(0, '", "a": ')]
    assert extractor.push("]]</parameter>\n</function>") == [CallArguments(0, "[[1]]}"), CallEnd(0)]


def test_a_call_that_breaks_is_void_and_its_text_content():
    extractor = Extractor(BY_NAME["json"], TOOLS)
    text = ' <tool_call>{"name": "f", "arguments": {"n": 1, oops'
    assert [type(event) for event in extractor.push(text)] == [CallStart, CallArguments, Malformed, Content]
    events = told(BY_NAME["json"], [text + " <tool_call>" + '{"name": "f", "arguments": {}}'])
    assert events[2] == Malformed(text[:-4], "a string expected, found 'o'", 0)
    assert events[3] == Content("oops")
    assert isinstance(events[4], CallStart)
    assert events[4].index == 1


def test_deep_nesting_is_refused_and_no_recursion():
    text = '<tool_call>{"name": "f", "arguments": ' + '{"o": ' * 5000 + "1"
    events = told(BY_NAME["json"], [text])
    assert next(event for event in events if isinstance(event, Malformed)).reason.startswith(
        "values are nested more than"
    )
    check(text, events)


def test_one_call_only():
    format = BY_NAME["json"]
    call = '<tool_call>{"name": "f", "arguments": {"n": %d}}</tool_call>'
    extractor = Extractor(format, TOOLS, single=True)
    events = extractor.push("Hi. " + call % 1 + call % 2 + "more")
    assert extractor.over
    assert collected([*events, *extractor.push(call % 3), *extractor.finish()])[1][0].arguments == '{"n": 1}'
    assert extractor.complete == 1
    content, calls = parse(format, "Hi. " + call % 1 + call % 2 + "more", TOOLS)
    assert (content, len(calls)) == ("Hi. more", 2)


def test_ids():
    def ids(name, text):
        return [call.id for call in parse(BY_NAME[name], text, TOOLS)[1]]

    assert ids("kimi_k2", "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}") == ["functions.f:7"]
    assert ids("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}") == ["functions.f:0"]
    assert ids("mistral", '[TOOL_CALLS] [{"name": "f", "id": "abcdefghi", "arguments": {}}]') == ["abcdefghi"]
    (made,) = ids("mistral", "[TOOL_CALLS]f[ARGS]{}")
    assert re.fullmatch("[a-zA-Z0-9]{9}", made)
    first, second = ids("json", '<tool_call>{"name": "f"}</tool_call>' * 2)
    assert first != second


def test_nothing_is_offered_nothing_is_called():
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(BY_NAME["json"], text, []) == (text, [])


def test_half_characters_stay_escapes():
    """A client must be able to encode what it gets."""
    text = '<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"\\\\ud83d\\"}"}</tool_call>'
    (call,) = parse(BY_NAME["json"], text, TOOLS)[1]
    assert call.arguments.encode() == b'{"s": "\\ud83d"}'
    assert parse(BY_NAME["pythonic"], "<|tool_call_start|>[f(s='\\U0000d83d')]", TOOLS)[1][0].arguments.isascii()


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ('{{ "<tool_call>\\n" }}{{ tool_call.name }}', (), "json"),
        ("<tool_call>\\n<function=", ("<tool_call>",), "qwen_xml"),
        ("<tool_call>{{ name }}<arg_key>", ("<tool_call>",), "glm"),
        ("[TOOL_CALLS]", (), "mistral"),
        ("Environment: ipython {\"name\": \"parameters\": ", (), "llama"),
        ("nothing of the kind", ("<|python_tag|>",), "llama"),
        ("nothing of the kind", ("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
        ("nothing of the kind", ("<|channel|>", "<|start|>", "<|message|>"), "harmony"),
        (None, ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "kimi_k3"),
        ("nothing of the kind", ("<|im_start|>",), None),
        (None, (), None),
    ],
)  # fmt: skip
def test_detection(template, tokens, name):
    found = detect(template, lambda token: token in tokens)
    assert (found and found.name) == name


def test_a_call_ends_thinking_in_the_families_that_do_so():
    """Kimi and DeepSeek go from thinking to calling without closing the block; a call within others' thinking is a thought."""
    kimi = BY_NAME["kimi_k2"]
    section = '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 1}'
    format = reasoning.TagFormat("<think>", "</think>", enders=kimi.ends_thinking)
    for text in (f"<think>Hm.{section}", f"<think>Hm.</think>{section}"):
        splitter = format.splitter()
        segments = [one for c in text for one in splitter.feed(c)] + splitter.finish()
        thought = "".join(one.text for one in segments if one.kind == "reasoning")
        content = "".join(one.text for one in segments if one.kind == "content")
        assert thought == "Hm."
        assert [call.name for call in parse(kimi, content, TOOLS)[1]] == ["f"]
    plain = reasoning.TagFormat("<think>", "</think>", enders=BY_NAME["json"].ends_thinking)
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert reasoning.split(plain, f"<think>{call}</think>No.") == (call, "No.")


def test_types_of_parameters_are_found_through_references_that_go_in_circles():
    options = [{"$ref": "#/$defs/a"}] * 50
    parameters = {
        "properties": {
            "p": {"$ref": "#/$defs/a"},
            "q": {"allOf": [{"type": ["integer", "null"]}]},
            "r": {"const": "x"},
        },
        "$defs": {"a": {"anyOf": [*options, {"type": "string"}]}},
    }
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools.types("f", "p") == {"string"}
    assert tools.types("f", "q") == {"integer", "null"}
    assert tools.types("f", "r") == {"string"}
    assert tools.types("f", "other") is None
