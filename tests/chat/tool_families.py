"""Families of models, by how they write tool calls: their templates, and how an answer ends there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon.chat import reasoning
from gnomon.chat.template import ChatTemplate
from gnomon.chat.tools import Call, parse

TEMPLATES = Path(__file__).parent / "templates"
USER = {"role": "user", "content": "Go on."}


@dataclass(frozen=True)
class Letters:
    """A tokenizer of characters, with the special tokens that a test names."""

    source: str
    tokens: tuple[str, ...] = ()
    special_tokens: Mapping[str, str] = None  # type: ignore[assignment]

    @property
    def chat_templates(self) -> Mapping[str, str]:
        return {"default": self.source}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def token_id(self, piece: str) -> int | None:
        return 1000 + self.tokens.index(piece) if piece in self.tokens else None


@dataclass(frozen=True)
class Family:
    name: str
    format: str
    file: str
    end: str
    """What the template writes behind an answer."""
    tokens: tuple[str, ...] = ()
    content: bool = True
    """Whether there may be content beside calls."""
    several: bool = True
    ids: tuple[str, str] = ("call_00000001", "call_00000002")
    steady: bool = True
    """Whether tools stay where they are in the prompt when the conversation goes on."""

    def template(self) -> ChatTemplate:
        source = (TEMPLATES / self.file).read_text("utf-8")
        return ChatTemplate(Letters(source, self.tokens, {"bos_token": "<s>", "eos_token": "</s>"}))


HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
NINE = ("abcdefgh1", "abcdefgh2")
FAMILIES = [
    Family("hermes", "json", "qwen3.jinja", "<|im_end|>"),
    Family("qwen3_coder", "qwen_xml", "tools/qwen3_coder.jinja", "<|im_end|>"),
    Family("seed_oss", "seed", "tools/seed_oss.jinja", "<seed:eos>"),
    Family("glm", "glm", "tools/glm.jinja", "<|observation|>"),
    Family("longcat", "longcat", "tools/longcat.jinja", "</longcat_s>"),
    Family("minimax", "minimax", "tools/minimax.jinja", "[e~["),
    Family("minicpm5", "minicpm", "tools/minicpm5.jinja", "<|im_end|>"),
    Family("kimi_k2", "kimi_k2", "tools/kimi_k2.jinja", "<|im_end|>", ids=("functions.f:0", "functions.g:1")),
    Family("kimi_k3", "kimi_k3", "tools/kimi_k3.jinja", "<|end_of_msg|>", XTML),
    Family("deepseek_v3", "deepseek", "tools/deepseek_v3.jinja", "<｜end▁of▁sentence｜>"),
    Family("deepseek_v31", "deepseek", "tools/deepseek_v31.jinja", "<｜end▁of▁sentence｜>"),
    Family("mistral_v3", "mistral", "mistral.jinja", "</s>", content=False, ids=NINE, steady=False),
    Family("mistral_v11", "mistral", "tools/mistral_v11.jinja", "</s>", ids=NINE),
    Family("mistral_v13", "mistral", "tools/mistral_v13.jinja", "</s>", ids=NINE),
    Family("llama3", "llama", "llama3.jinja", "<|eot_id|>", content=False, several=False),
    Family("llama4", "llama", "tools/llama4.jinja", "<|eom|>", content=False),
    Family("lfm2", "pythonic", "tools/lfm2.jinja", "<|im_end|>", content=False),
    Family("gemma4", "gemma", "tools/gemma4.jinja", "<turn|>"),
    Family("function_gemma", "function_gemma", "tools/function_gemma.jinja", "<end_of_turn>"),
    Family("command_r", "command", "tools/command_r.jinja", "<|END_OF_TURN_TOKEN|>", content=False),
    Family("harmony", "harmony", "harmony.jinja", "<|call|>", HARMONY, content=False, several=False),
]
BY_NAME = {family.name: family for family in FAMILIES}


def schema_of(value: object) -> dict[str, Any]:
    """A schema for values like this one."""
    if value is None:
        return {"type": ["string", "null"]}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return {"type": kinds[type(value)]}


def tool(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool that takes arguments like these."""
    properties = {key: schema_of(value) for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def assistant(content: str | None, calls: Sequence[Call]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ],
    }


def results(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "21"} for call in calls]


def made(family: Family, arguments: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Calls of the tools f, g, ... with these arguments, as a client sends them back."""
    return [
        Call(id, name, json.dumps(given, ensure_ascii=False))
        for id, name, given in zip(family.ids, "fg", arguments, strict=False)
    ]


def offered(arguments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [tool(name, given) for name, given in zip("fg", arguments, strict=False)]


def conversation(content: str | None, calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [USER, assistant(content, calls), *results(calls)]


def answer(template: ChatTemplate, family: Family, tools: Sequence[Mapping[str, Any]], messages) -> tuple[str, str]:
    """What the model wrote for the second message to be rendered so, and the generation prompt before it."""
    shown = tools if family.steady else None
    prompt = template.render(messages[:1], shown)
    whole = template.render(messages, shown, add_generation_prompt=False).text
    assert whole.startswith(prompt.text)
    written, end, _ = whole[len(prompt.text) :].partition(family.end)
    assert end
    return written, prompt.generation_prompt


def read(
    template: ChatTemplate, written: str, prompt: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, list[Call]]:
    """Content and calls of an answer, through the splitter and the extractor as the server does it."""
    assert template.tools is not None
    _, content = reasoning.split(template.reasoning, written, prompt)
    return parse(template.tools, content, tools)


def renamed(calls: Sequence[Call], ids: Sequence[str]) -> list[Call]:
    return [replace(call, id=id) for call, id in zip(calls, ids, strict=False)]
