"""mlx-lm's parsers of whole texts agree where they cover a format."""

from __future__ import annotations

import importlib
import json

import pytest
from tool_corpus import BY_NAME, TOOLS
from tool_families import BY_NAME as FAMILIES
from tool_families import answer, conversation, made, offered

from gnomon.chat.tools import parse

MODULES = {
    "json_tools": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm47": "glm",
    "laguna": "glm",
    "longcat": "longcat",
    "minimax_m2": "minimax",
    "minicpm5": "minicpm5",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "mistral": "mistral_v11",
    "pythonic": "lfm2",
    "gemma4": "gemma4",
    "function_gemma": "function_gemma",
}
ARGUMENTS = [
    {},
    {"city": "Ulm", "days": 3},
    {"text": 'Grüße "quoted" <b>&amp;</b>', "on": True, "x": -2.5},
    {"code": "def f():\n    return 1", "zip": "12345", "json": '{"a": [1]}'},
    {"list": [[1, 2], ["a", {"k": False}]], "object": {"a": {"b": [None, 1.5]}}},
]
NESTED = {"function_gemma"}


def oracle(module: str, written: str, tools) -> list[tuple[str, object]]:
    """What mlx-lm's server makes of the text: the parser gets what stands between the markers."""
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{module}")
    found = []
    for part in written.split(parser.tool_call_start)[1:]:
        inner = part.partition(parser.tool_call_end)[0] if parser.tool_call_end else part
        calls = parser.parse_tool_call(inner.replace("[CALL_ID]abcdefgh1", ""), tools)
        found += calls if isinstance(calls, list) else [calls]
    return [(call["name"], call["arguments"]) for call in found]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
@pytest.mark.parametrize("module", MODULES)
def test_mlx_lm_agrees(module, arguments):
    family = FAMILIES[MODULES[module]]
    if (module, arguments) == ("longcat", {}):
        pytest.skip("its parser raises on calls without arguments")
    if module in NESTED and any(isinstance(value, list | dict) or "}" in str(value) for value in arguments.values()):
        pytest.skip("its parser takes no brackets within values")
    template = family.template()
    tools = offered([arguments])
    written, _ = answer(template, family, tools, conversation(None, made(family, [arguments])))
    assert template.tools is not None
    content, calls = parse(template.tools, written, tools)
    assert content.strip() in ("", "<think>\n\n</think>")
    ours = [(call.name, json.loads(call.arguments)) for call in calls]
    assert ours == [("f", arguments)]
    assert ours == oracle(module, written, tools)


def test_muse_spark_agrees():
    text = (
        '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="s">Ulm</atem:parameter>\n'
        '<atem:parameter name="a">[[1], []]</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    )
    _, calls = parse(BY_NAME["muse"], text, TOOLS)
    ours = [(call.name, json.loads(call.arguments)) for call in calls]
    assert ours == [("f", {"s": "Ulm", "a": [[1], []]})]
    assert ours == oracle("muse_spark", text, TOOLS)


def test_every_parser_of_mlx_lm_has_its_counterpart():
    from pathlib import Path

    import mlx_lm.tool_parsers

    shipped = {file.stem for file in Path(mlx_lm.tool_parsers.__path__[0]).glob("[!_]*.py")}
    assert shipped == {*MODULES, "muse_spark"}
