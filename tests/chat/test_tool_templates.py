"""Render a conversation with calls, read the answer in it, render what was read: the same text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.chat_templates import deepseek_v32
from tool_families import BY_NAME, FAMILIES, USER, answer, conversation, made, offered, read, renamed

from gnomon.chat.tools import detect, parse

KEYS = st.text("abcxyz_", min_size=1, max_size=4)
PLAIN = st.text("ab <>&\"'{}[]()\\/\n\t,:=|`é😀", max_size=12)
LOOKALIKES = st.sampled_from(
    [
        '{"a": 1}',
        "[1, 2]",
        "123",
        "true",
        "null",
        "None",
        "1e5",
        '"quoted"',
        "</parameter>",
        "<tool_call>",
        "&lt;&amp;",
        "```\ncode\n```",
        "def f(x):\n    return [x]\n",
        "  indented",
        "\nframed\n",
        "\\d+\\n",
        "a, b",
    ]
)
STRINGS = PLAIN | LOOKALIKES
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.sampled_from([0.5, -1.25, 1e-7, 1e22]) | STRINGS
VALUES = SCALARS | st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


def spelt(arguments, family) -> bool:
    """Whether the family's own template can write these arguments so that they can be told."""
    strings = [value for value in arguments.values() if isinstance(value, str)]
    if family.name == "minicpm5":
        return all(s == s.strip() or "\n" in s or "<" in s or "&" in s for s in strings)
    return True


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_render_parse_render_is_the_identity(family, data):
    template = family.template()
    assert template.tools is not None
    assert template.tools.name == family.format
    count = data.draw(st.integers(1, 2)) if family.several else 1
    arguments = data.draw(st.lists(ARGUMENTS.filter(lambda a: spelt(a, family)), min_size=count, max_size=count))
    content = data.draw(st.sampled_from([None, "Let me see.", "Two\nlines."])) if family.content else None
    tools, calls = offered(arguments), made(family, arguments)
    written, prompt = answer(template, family, tools, conversation(content, calls))
    said, found = read(template, written, prompt, tools)
    assert said == (content or "")
    assert [(call.name, json.loads(call.arguments)) for call in found] == list(zip("fg", arguments, strict=False))
    if family.name != "mistral_v3":  # its ids come behind the arguments, too late for a stream
        ids_written = all(call.id in written for call in calls)
        assert ids_written == all(one.id == other.id for one, other in zip(calls, found, strict=True))
    again = answer(template, family, tools, conversation(said, renamed(found, family.ids)))
    assert again == (written, prompt)


@settings(max_examples=50, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=2))
def test_deepseek_v32_as_mlx_lm_renders_it(arguments):
    """The encoder that ships with mlx-lm writes; its own reader of parameters agrees as well."""
    format = detect(None, lambda token: token == "｜DSML｜")
    assert format is not None
    messages = conversation("So.", made(BY_NAME["glm"], arguments))
    whole = deepseek_v32.apply_chat_template([USER, messages[1]], thinking_mode="chat", tools=None)
    written = whole.partition("<｜Assistant｜></think>")[2].removesuffix("<｜end▁of▁sentence｜>")
    said, found = parse(format, written, offered(arguments))
    assert said == "So."
    assert [json.loads(call.arguments) for call in found] == arguments


def test_results_are_rendered_where_the_template_wants_them():
    """A whole exchange of each family: every name, argument and result is in the prompt, and the template raises nothing."""
    for family in FAMILIES:
        template = family.template()
        calls = made(family, [{"city": "Ulm"}])
        text = template.render([*conversation(None, calls), {"role": "user", "content": "Thanks."}], offered([{}])).text
        assert text.index("Go on.") < text.index("Ulm") < text.index("21") < text.index("Thanks."), family.name
