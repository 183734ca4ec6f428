"""Models whose template knows nothing of tools: they are told of them, and calls and results are written into the turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import ByteTokenizer

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tools import parse

TEMPLATES = Path(__file__).with_name("templates")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "wétter", "description": "<b>", "parameters": {"type": "object", "properties": {"city": {}}}},
}
# Gemma 2's template refuses system messages, and turns that don't alternate.
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
# It writes calls, but not which there are.
HISTORY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{{ c.function.arguments | tojson }}</function>{% endfor %}\n{% endfor %}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(ByteTokenizer(source))


def of(name: str) -> ChatTemplate:
    return template((TEMPLATES / name).read_text("utf-8"))


def called(*arguments: str | dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "wétter", "arguments": one}}
        for i, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(index: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{index}", "content": text}


HI = {"role": "user", "content": "Hi"}
LISTED = f"<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>"
CALL = '<tool_call>\n{"name": "wétter", "arguments": {"city": "Ulm"}}\n</tool_call>'


def test_the_tools_are_told_in_the_system_message() -> None:
    made = of("starter.jinja")
    assert made.tools is not None
    assert (made.tools.name, made.shows_tools) == ("generic", False)
    said = made.render([{"role": "system", "content": "Be kind."}, HI], [TOOL]).text
    assert said.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n\n")
    assert said.count(LISTED) == 1
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>' in said
    assert said.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    # Without a system message there is one now, and without tools nothing changes.
    assert made.render([HI], [TOOL]).text.startswith("<|im_start|>system\n# Tools\n\n")
    for nothing in (None, []):
        assert "Tools" not in made.render([HI], nothing).text


def test_without_a_system_role_the_user_s_first_turn_tells() -> None:
    made = template(NO_SYSTEM)
    said = made.render([HI, {"role": "assistant", "content": "Yes?"}, HI], [TOOL]).text
    assert said.startswith("<user># Tools\n\n")
    assert said.endswith("</tool_call>\n\nHi\n<assistant>Yes?\n<user>Hi\n<model>")
    assert LISTED in said


@pytest.mark.parametrize("name", ["starter.jinja", "gemma3.jinja", "typed.jinja"])
def test_calls_and_results_are_written_out(name: str) -> None:
    made = of(name)
    history = [
        HI,
        called('{"city": "Ulm"}', {"city": "Ulm"}),
        result(0, "21"),
        result(1, "22"),
        HI,
        called("{bad"),
        result(0, "?"),
    ]
    said = made.render(history).text
    assert f"{CALL}\n{CALL}" in said
    assert "<tool_response>\n21\n</tool_response>\n<tool_response>\n22\n</tool_response>\nHi" in said
    assert '<tool_call>\n{"name": "wétter", "arguments": "{bad"}\n</tool_call>' in said
    assert made.tools is not None
    content, calls = parse(made.tools, f"So.\n{CALL}\n{CALL}", [TOOL])
    assert (content, [(one.name, json.loads(one.arguments)) for one in calls]) == (
        "So.",
        [("wétter", {"city": "Ulm"})] * 2,
    )


def test_turns_still_alternate() -> None:
    history = [HI, called({"city": "Ulm"}), result(0, "21"), HI, {"role": "assistant", "content": "So."}, HI]
    said = template(NO_SYSTEM).render(history, [TOOL]).text
    assert said.endswith(
        f"<assistant>{CALL}\n<user><tool_response>\n21\n</tool_response>\nHi\n<assistant>So.\n<user>Hi\n<model>"
    )


def test_a_model_that_was_taught_keeps_its_notation() -> None:
    made = template(HISTORY)
    assert made.tools is not None
    assert (made.tools.name, made.shows_tools) == ("qwen_xml", False)
    said = made.render([HI, called({"city": "Ulm"}), result(0, "21")], [TOOL]).text
    assert said.startswith("<system># Tools\n")
    assert LISTED in said
    assert "<tool_call>" not in said
    assert '<function=wétter>{"city": "Ulm"}</function>' in said
    assert "<tool>21" in said


def test_a_template_that_shows_tools_is_left_alone() -> None:
    for name in ("qwen3.jinja", "mistral.jinja", "llama3.jinja", "tools/qwen3_coder.jinja"):
        assert of(name).shows_tools


def test_parts_are_what_a_typed_template_gets() -> None:
    said = of("typed.jinja").render([HI], [TOOL]).text
    assert said.index(LISTED) < said.index("Hi")
    assert said.count("Tools") == 1
    assert of("typed.jinja").takes_system
