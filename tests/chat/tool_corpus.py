"""What models write, by format: the text, and the content and calls that are in it."""
# ruff: noqa: E501  (one case a line)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gnomon.chat.tools import FORMATS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "b": {"type": "boolean"},
                    "a": {"type": "array", "items": {"type": "array"}},
                    "o": {"$ref": "#/$defs/thing"},
                    "q": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "e": {"enum": ["1", "2"]},
                },
                "$defs": {"thing": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "g.h-1", "parameters": {"type": "object", "properties": {}}}},
]
BY_NAME = {format.name: format for format in FORMATS}


@dataclass(frozen=True)
class Case:
    format: str
    text: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]
    malformed: int = 0


def plain(format: str, text: str, malformed: int = 0) -> Case:
    """All of it is content."""
    return Case(format, text, text, [], malformed)


F = '{"name": "f", "arguments": {"n": 1}}'
N = [("f", {"n": 1})]
DS, DE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CS, CE, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
K3 = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
K3_END = "<|close|>call<|sep|><|close|>tools<|sep|>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"

CASES = [
    # JSON between tags
    Case("json", f"<tool_call>\n{F}\n</tool_call>", "", N),
    Case("json", f"Hi.\n\n<tool_call>{F}</tool_call>\n<tool_call>\n{F}\n</tool_call>\n", "Hi.", N * 2),
    Case("json", f"Hi.\n<tool_call>{F}</tool_call>\nBye.", "Hi.\nBye.", N),
    Case("json", f"<tool_call>{F}\n{F}</tool_call>", "", N * 2),
    Case("json", f"<tool_call>[{F}, {F}]</tool_call>", "", N * 2),
    Case("json", f"<tool_call>{F}", "", N),
    Case("json", f"<tool_call>{F}\nand more", "and more", N),
    Case("json", f"<tool_call>{F}}}\n</tool_call>", "", N),
    Case("json", '<tool_call>{"name": "f", "arguments": {"n": 1}</tool_call>', "", N),
    Case("json", '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', "", N),
    Case("json", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', "", N),
    Case("json", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}</tool_call>', "", N),
    Case("json", '<tool_call>{"name": "g.h-1"}</tool_call>', "", [("g.h-1", {})]),
    Case("json", '<tool_call>{"name": "g.h-1", "arguments": null, "why": [1]}</tool_call>', "", [("g.h-1", {})]),
    Case("json", '<tool_call>{"name": "f", "arguments": {"s": "a\tb\\d\n\'"},}</tool_call>', "", [("f", {"s": "a\tb\\d\n'"})]),
    Case("json", "<tool_call>{\"name\": \"f\", \"arguments\": {'s': 'it\\'s \"x\"', 'b': True,}}</tool_call>", "", [("f", {"s": 'it\'s "x"', "b": True})]),
    Case("json", '<tool_call>{"name": "f", "arguments": {"s": "</tool_call><tool_call>", "a": [[1, [2]], []]}}</tool_call>', "", [("f", {"s": "</tool_call><tool_call>", "a": [[1, [2]], []]})]),
    Case("json", '<tool_call>{"name": "f", "arguments": {"s": "{\\"k\\": [1]}", "o": {"s": "1"}}}</tool_call>', "", [("f", {"s": '{"k": [1]}', "o": {"s": "1"}})]),
    Case("json", "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", "", N),
    plain("json", "The <tool_call> tag opens a call and </tool_call> ends it.\n"),
    plain("json", "Write <tool_call>{json}</tool_call>."),
    plain("json", f"Inline `<tool_call>{F}</tool_call>` code"),
    plain("json", f"Double ``<tool_call>{F}`` code"),
    plain("json", f"```\n<tool_call>{F}</tool_call>\n```\n"),
    plain("json", f"1. item\n   ~~~~xml\n<tool_call>{F}</tool_call>\n~~~\n   ~~~~\n"),
    Case("json", f"A stray ` here\n<tool_call>{F}</tool_call>", "A stray ` here", N),
    Case("json", f"```x```\n<tool_call>{F}</tool_call>", "```x```", N),
    Case("json", f"```\n`\n```\n<tool_call>{F}</tool_call>", "```\n`\n```", N),
    Case("json", f"The <tool_call> tag: <tool_call>{F}</tool_call>", "The <tool_call> tag:", N),
    plain("json", '<tool_call>{"name": "nope", "arguments": {}}</tool_call>', 1),
    plain("json", '  <tool_call>{"name": "f", "arguments": {"n": 1', 1),
    plain("json", 'x <tool_call>{"name": "f", "arguments": {"n": one}}</tool_call> y', 1),
    plain("json", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', 1),
    plain("json", '<tool_call>{"arguments": {}}</tool_call>', 1),
    Case("json", f'<tool_call>{{"name": "nope"}}</tool_call> <tool_call>{F}</tool_call>', '<tool_call>{"name": "nope"}</tool_call>', N, 1),
    plain("json", "no calls \n at all  \n\n"),
    plain("json", "  \n"),
    # The same in other tags
    Case("command", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"n": 1}}\n]<|END_ACTION|>', "", N),
    Case("nemotron", f"<TOOLCALL>[{F}]</TOOLCALL>", "", N),
    Case("granite", f"<|tool_call|>[{F}]", "", N),
    # Elements with parameters
    Case("qwen_xml", '<tool_call>\n<function=f>\n<parameter=s>\n{"a": 1}\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>', "", [("f", {"s": '{"a": 1}', "n": 1})]),
    Case("qwen_xml", "So:\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>", "So:", N),
    Case("qwen_xml", "<function=f><parameter=n>1</parameter></function><function=g.h-1></function>\n</tool_call>", "", [*N, ("g.h-1", {})]),
    Case("qwen_xml", "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</tool_call>", "", N),
    Case("qwen_xml", "<tool_call><function=f><parameter=s>\n\n  a\n</parameter>\n b</parameter> &lt;\n\n</parameter></function></tool_call>", "", [("f", {"s": "\n  a\n</parameter>\n b</parameter> &lt;\n"})]),
    Case("qwen_xml", "<tool_call><function=f><parameter=a>[[1, {'k': None}], [True]]</parameter><parameter=x>2.50</parameter></function></tool_call>", "", [("f", {"a": [[1, {"k": None}], [True]], "x": 2.5})]),
    Case("qwen_xml", "<tool_call><function=f><parameter=q>null</parameter><parameter=b>True</parameter><parameter=n>7.0</parameter></function></tool_call>", "", [("f", {"q": None, "b": True, "n": 7})]),
    Case("qwen_xml", "<tool_call><function=f><parameter=q>nullable</parameter><parameter=s>null</parameter><parameter=e>1</parameter></function></tool_call>", "", [("f", {"q": "nullable", "s": "null", "e": "1"})]),
    Case("qwen_xml", "<tool_call><function=f><parameter=n>many</parameter><parameter=unknown>12</parameter></function></tool_call>", "", [("f", {"n": "many", "unknown": "12"})]),
    Case("qwen_xml", f"<tool_call>{F}</tool_call>", "", N),
    plain("qwen_xml", "Use <function=name> and <function=f> in prose; `<function=f></function>` too."),
    plain("qwen_xml", "<tool_call>\n<function=f>\n<parameter=s>\nbroken off", 1),
    plain("qwen_xml", "<tool_call><function=f><parameter=n>1</parameter>", 1),
    plain("qwen_xml", "<tool_call><function=nope></function></tool_call>", 1),
    Case("seed", "<seed:tool_call>\n<function=f>\n<parameter=n>1</parameter>\n</function>\n</seed:tool_call>", "", N),
    # Keys and values
    Case("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value> 12 </arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "", [("f", {"s": " 12 ", "n": 1})]),
    Case("glm", "<tool_call>g.h-1</tool_call>\n<tool_call>f<arg_key>o</arg_key><arg_value>{\"k\": [1]}</arg_value></tool_call>", "", [("g.h-1", {}), ("f", {"o": {"k": [1]}})]),
    Case("glm", f"<tool_call>{F}</tool_call>", "", N),
    plain("glm", "The <tool_call> tag, <tool_call>name</tool_call> and <tool_call>f </tool", 1),
    Case("longcat", "<longcat_tool_call>f\n<longcat_arg_key>n</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n</longcat_tool_call>", "", N),
    # invoke
    Case("minimax", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">1\n2</parameter>\n<parameter name="n">1</parameter>\n</invoke>\n<invoke name="g.h-1">\n</invoke>\n</minimax:tool_call>', "", [("f", {"s": "1\n2", "n": 1}), ("g.h-1", {})]),
    Case("minimax", 'Now\n<invoke name="f"><parameter name="n">1</parameter></invoke>', "Now", N),
    plain("minimax", 'An <invoke name="f"> element in <minimax:tool_call> tags'),
    Case("muse", '<atem:function_calls><atem:invoke name="f"><atem:parameter name="n">1</atem:parameter></atem:invoke></atem:function_calls>', "", N),
    Case("dsml", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">1</｜DSML｜parameter>\n<｜DSML｜parameter name="a" string="false">[[1]]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "", [("f", {"s": "1", "a": [[1]]})]),
    Case("minicpm", '<function name="f"><param name="s"><![CDATA[a < b && c]]></param><param name="n"> 1 </param></function>', "", [("f", {"s": "a < b && c", "n": 1})]),
    Case("minicpm", '<function name="f"><param name="s"><![CDATA[]]]]><![CDATA[>]]></param></function>\n<function name="g.h-1"></function>', "", [("f", {"s": "]]>"}), ("g.h-1", {})]),
    Case("minicpm", '<function name="f"><param name="s">a &amp; b</param></function>', "", [("f", {"s": "a &amp; b"})]),
    plain("minicpm", 'A <function name="f"> element; <function name="x">'),
    # Sentinels
    Case("gemma", 'Hm.<|tool_call>call:f{s:<|"|>a{"},<|"|>,n:-1,o:{k:[1,true,null,<|"|>z<|"|>]}}<tool_call|>', "Hm.", [("f", {"s": 'a{"},', "n": -1, "o": {"k": [1, True, None, "z"]}})]),
    Case("gemma", "<|tool_call>call:g.h-1{}<tool_call|><|tool_call>call:f{s:bare word,n:1}", "", [("g.h-1", {}), ("f", {"s": "bare word", "n": 1})]),
    plain("gemma", "The <|tool_call> token; <|tool_call>calling it"),
    plain("gemma", '<|tool_call>call:f{s:<|"|>broken off', 1),
    Case("function_gemma", "<start_function_call>call:f{s:<escape>a,b<escape>,n:1,q:bare}<end_function_call>", "", [("f", {"s": "a,b", "n": 1, "q": "bare"})]),
    # Named sections
    Case("kimi_k2", f'I see.{KIMI}functions.f:0<|tool_call_argument_begin|>{{"n": 1}}<|tool_call_end|><|tool_call_begin|>functions.g.h-1:1<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>', "I see.", [*N, ("g.h-1", {})]),
    Case("kimi_k2", '<|tool_call_begin|>f<|tool_call_argument_begin|>{"n": 1}', "", N),
    plain("kimi_k2", f"{KIMI}functions.nope:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>", 1),
    Case("kimi_k3", f'{K3}<|open|>argument key="s" type="string"<|sep|>1<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>1<|close|>argument<|sep|>{K3_END}', "", [("f", {"s": "1", "n": 1})]),
    Case("kimi_k3", f'{K3}<|open|>json type="object"<|sep|>{{"n": 1}}<|close|>json<|sep|>{K3_END}', "", N),
    Case("deepseek", f'{DS}{CS}function{SEP}f\n```json\n{{"n": 1}}\n```{CE}\n{CS}function{SEP}g.h-1\n```json\n{{}}\n```{CE}{DE}', "", [*N, ("g.h-1", {})]),
    Case("deepseek", f'So.\n{DS}{CS}f{SEP}{{"n": 1}}{CE}{CS}g.h-1{SEP}{{}}{CE}{DE}', "So.", [*N, ("g.h-1", {})]),
    Case("deepseek", f'{CS}f{SEP}{{"n": 1}}{CE}', "", N),
    plain("deepseek", f"{DS}{CS}nope{SEP}{{}}{CE}{DE}", 1),
    Case("mistral", f"[TOOL_CALLS] [{F}, {F}]", "", N * 2),
    Case("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}, "id": "abcdefgh1"}]', "", N),
    Case("mistral", 'Hm[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"n": 1}[TOOL_CALLS]g.h-1[ARGS]{}', "Hm", [*N, ("g.h-1", {})]),
    Case("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}g.h-1[ARGS]{} then', "then", [*N, ("g.h-1", {})]),
    Case("mistral", '[TOOL_CALLS]f{"n": 1}', "", N),
    plain("mistral", "[TOOL_CALLS] is a token, [TOOL_CALLS]nope is no call"),
    plain("mistral", '[TOOL_CALLS]f[ARGS]{"n": ', 1),
    # Python
    Case("pythonic", "<|tool_call_start|>[f(s='a\\'b', n=1, a=[(1, 2)], o={'k': None, \"j\": true}), g.h-1()]<|tool_call_end|>Done", "Done", [("f", {"s": "a'b", "n": 1, "a": [[1, 2]], "o": {"k": None, "j": True}}), ("g.h-1", {})]),
    Case("pythonic", f"<|tool_call_start|>[{F}]<|tool_call_end|>", "", N),
    plain("pythonic", "<|tool_call_start|>[f('positional')]<|tool_call_end|>", 1),
    plain("pythonic", "<|tool_call_start|>[f(n=x)]<|tool_call_end|>", 1),
    # Llama
    Case("llama", '{"name": "f", "parameters": {"n": 1}}', "", N),
    Case("llama", '<|python_tag|>{"name": "f", "parameters": {"n": 1}}; {"name": "g.h-1", "parameters": {}}', "", [*N, ("g.h-1", {})]),
    Case("llama", '<|python_tag|>f.call(s="x")', "", [("f", {"s": "x"})]),
    Case("llama", '[f(n=1), g.h-1()]', "", [*N, ("g.h-1", {})]),
    plain("llama", '{"name": "Bob", "age": 3}'),
    plain("llama", '{"city": "Ulm"}'),
    plain("llama", "[1, 2, 3]"),
    plain("llama", "[f] is a list"),
    plain("llama", 'The call {"name": "f", "parameters": {"n": 1}} would do it, or [f(n=1)].'),
    plain("llama", "<|python_tag|>import math\nprint(f(1))"),
    # Harmony
    Case("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>', "", N),
    Case("harmony", 'Hi\n<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"n": 1}', "Hi", N),
    Case("harmony", 'to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>', "", N),
    Case("harmony", "<|channel|>commentary to=functions.g.h-1 <|constrain|>json<|message|><|call|>", "", [("g.h-1", {})]),
    plain("harmony", "to= or not to=functions.f, that is the question"),
    plain("harmony", "<|channel|>commentary to=browser.search<|message|>{}<|call|>", 1),
]  # fmt: skip
