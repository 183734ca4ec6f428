"""Calls that a grammar holds a model to: it takes what the families' templates write, and what it takes the extractor reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np
import pytest
from chat_oracle import build
from tool_families import BY_NAME, FAMILIES, Family, answer, conversation, made, read

from engine_fixtures import tiny_compiler, tiny_tokenizer
from gnomon.chat.constraint import Constraint, ConstraintError, json_schema
from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.chat.tool_choice import Unwritable, tool_call
from gnomon.chat.tools import FORMATS, ToolFormat, Tools, parse
from gnomon.grammar import Compiler, Matcher, Unenforceable, Vocabulary

MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "deepseek_v3": tuple(f"<｜tool▁{one}｜>" for one in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    "deepseek_v31": tuple(f"<｜tool▁{one}｜>" for one in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    "mistral_v3": ("[TOOL_CALLS]",),
    "mistral_v11": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "mistral_v13": ("[TOOL_CALLS]", "[ARGS]"),
    "llama4": ("<|python_start|>", "<|python_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "command_r": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"),
}
"""Special tokens that a family's vocabulary has."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
    },
    "required": ["city", "n"],
}
WHOLE = {"city": "Zürich, 'the' 🙂 [old]", "n": 3, "unit": "C", "tags": ["a", "b"], "at": {"k": "v"}}
GOOD: list[dict[str, Any]] = [WHOLE, {"city": "Ulm", "n": -1}, {"city": "", "n": 0, "tags": []}]
BAD: list[dict[str, Any]] = [{"city": "Ulm"}, {"city": "Ulm", "n": "x"}, {"city": "Ulm", "n": 1, "unit": "K"}]


def tool(name: str, strict: bool = False, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


TOOLS = [tool(name, **SCHEMA) for name in "fg"]
UP = tool("up", properties={"x": {"$ref": "#/$defs/k"}}, required=["x"], **{"$defs": {"k": {"type": "integer"}}})


@cache
def family_parts(name: str) -> tuple[ChatTemplate, Tokenizer, Compiler]:
    """A family's template over a vocabulary that has its special tokens."""
    source = BY_NAME[name].template().sources["default"]
    with TemporaryDirectory() as directory:
        build(source, MARKERS.get(name, ())).save_pretrained(directory)
        tokenizer = Tokenizer.load(Path(directory))
    end = tokenizer.token_id("<|call|>") if name == "harmony" else None
    return (
        ChatTemplate(tokenizer),
        tokenizer,
        Compiler(Vocabulary(tokenizer, {*tokenizer.eos_ids, *([end] if end else [])})),
    )


def walked(matcher: Matcher, ids: Sequence[int]) -> bool:
    """Whether the grammar takes these tokens as a whole answer."""
    for token in ids:
        if not matcher.allows(token):
            return False
        matcher.advance(token)
    return matcher.accepting


def written(family: Family, arguments: Sequence[dict[str, Any]]) -> str:
    template = family_parts(family.name)[0]
    text, _ = answer(template, family, TOOLS, conversation(None, made(family, arguments)))
    return text if family.format == "harmony" else text.strip()


def takes(family: Family, text: str, **choice: Any) -> bool:
    template, tokenizer, compiler = family_parts(family.name)
    wanted = tool_call(template.tools, choice.pop("tools", TOOLS), split=tokenizer.split, **choice)
    return walked(compiler.compile(wanted).start(), tokenizer.encode(text))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_grammar_takes_what_the_template_writes(family: Family) -> None:
    template, tokenizer, _ = family_parts(family.name)
    assert template.tools is not None
    assert template.tools.name == family.format
    assert all(any(isinstance(part, int) for part in tokenizer.split(one)) for one in MARKERS.get(family.name, ()))
    for arguments in GOOD:
        text = written(family, [arguments])
        assert takes(family, text), text
        assert takes(family, text, name="f", single=True)
        assert not takes(family, text, name="g")
        assert takes(family, text, required=False)
    for arguments in BAD:
        assert not takes(family, written(family, [arguments])), arguments
    text = written(family, GOOD[:1])
    assert not takes(family, text[:-2])
    if family.several:
        both = written(family, GOOD[:2])
        assert takes(family, both)
        assert takes(family, both, required=False)
        assert not takes(family, both, single=True)
    assert not takes(family, "Hello.")
    assert not takes(family, "")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_the_grammar_takes_the_extractor_reads(family: Family) -> None:
    """Walks at random through the grammar: every whole answer is calls whose arguments are valid, and nothing else."""
    template, tokenizer, compiler = family_parts(family.name)
    strict = [tool(one, strict=True, **SCHEMA) for one in "fg"]
    wanted = tool_call(template.tools, strict, split=tokenizer.split)
    compiled = compiler.compile(wanted)
    prompt = template.render(conversation(None, [])[:1], strict).generation_prompt
    for seed in range(4):
        text = tokenizer.decode(wandered(compiled.start(), tokenizer, seed))
        content, calls = read(template, text, prompt, strict)
        # Harmony may announce its calls.
        assert not content.strip() or family.format == "harmony", text
        assert calls, text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMA)


CLOSERS = (
    "}",
    "]",
    ")",
    '"',
    ">",
    "\n",
    "]]>",
    "</param>",
    "</parameter>",
    "</arg_value>",
    "</longcat_arg_value>",
    "```",
)


def wandered(matcher: Matcher, tokenizer: Tokenizer, seed: int, most: int = 2000) -> list[int]:
    """A random whole answer, in which what may close something is likely."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    closers = [tokenizer.encode(text) for text in CLOSERS]
    while len(ids) < most:
        if matcher.accepting and (matcher.finished or random.random() < 0.5):
            return ids
        bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        allowed = allowed[~np.isin(allowed, matcher.vocabulary.eos_ids)]
        special = [[int(i)] for i in allowed if tokenizer.is_special(int(i))]
        chosen = [int(random.choice(allowed))]
        likely = [one for one in (*closers, *special) if one[0] in allowed]
        if likely and random.random() < 0.6:
            chosen = likely[random.integers(len(likely))]
        for token in chosen:
            if not matcher.allows(token):
                break
            ids.append(token)
            matcher.advance(token)
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(ids)}")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_prose_is_free_and_calls_in_it_are_not(family: Family) -> None:
    strict = [tool(one, strict=True, **SCHEMA) for one in "fg"]
    good, bad = written(family, GOOD[:1]), written(family, BAD[-1:])
    said = {"harmony": "<|channel|>final<|message|>{}", "kimi_k3": "<|open|>response<|sep|>{}<|close|>response<|sep|>"}
    prose = said.get(family.format, "{}")
    free = {"required": False, "tools": strict}
    assert takes(family, prose.format("Hello. 1 < 2, {x}: `code`\n"), **free)
    assert takes(family, good, **free)
    assert not takes(family, bad, **free)
    if family.format not in ("harmony", "llama"):  # where a call is a turn of its own, or begins it
        assert takes(family, prose.format("Let me see.") + good, **free)
        assert not takes(family, prose.format("Let me see.") + bad, **free)
    form = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    if family.name == "llama3":  # its objects begin like an answer, and its tag isn't in this vocabulary
        with pytest.raises(Unwritable, match="told from a call"):
            takes(family, good, answer=form, **free)
        return
    assert takes(family, good, answer=form, **free)
    assert takes(family, prose.replace("{}", '{"a": 1}'), answer=form, **free)
    assert not takes(family, prose.format("Hello."), answer=form, **free)
    assert not takes(family, bad, answer=form, **free)


HARD = {
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z]{3}$"},
        "either": {"type": ["string", "integer"]},
        "when": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["code"],
    "additionalProperties": False,
}
RAW = {"minimax", "minicpm", "muse"}
"""Notations of elements only: what a string must look like can't be told there."""


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_strict_tools_are_enforced_in_full_or_not_at_all(format: ToolFormat) -> None:
    tools = [tool("f", strict=True, **HARD)]
    if format.name in RAW:
        with pytest.raises(Unwritable, match=r"properties\.code"):
            tool_call(format, tools)
    else:
        compiled = tiny_compiler().compile(tool_call(format, tools, name="f"))
        # Harmony's markers are special tokens in every vocabulary of its own.
        if format.name != "harmony":
            text = tiny_tokenizer().decode(wandered(compiled.start(), tiny_tokenizer(), 0))
            _, calls = parse(format, text, Tools(tools))
            assert calls
            for call in calls:
                jsonschema.validate(json.loads(call.arguments), HARD)
    # Not strict: what can be told is enforced.
    tiny_compiler().compile(tool_call(format, [tool("f", **HARD)]))
    unique = tool("f", strict=True, properties={"x": {"type": "array", "uniqueItems": True}})
    with pytest.raises((Unenforceable, Unwritable), match=r"uniqueItems|properties"):
        tiny_compiler().compile(tool_call(format, [unique]))
    tiny_compiler().compile(tool_call(format, [tool("f", properties={"x": {"type": "array", "uniqueItems": True}})]))


def taken(wanted: Constraint, text: str) -> tuple[bool, bool]:
    """Whether the grammar takes the text as a whole answer, and whether that is then the end."""
    matcher = tiny_compiler().compile(wanted).start()
    return walked(matcher, tiny_tokenizer().encode(text)), matcher.finished


def by_name(name: str) -> ToolFormat:
    return next(one for one in FORMATS if one.name == name)


def test_one_call_is_the_end() -> None:
    one = '<tool_call>\n{"name": "up", "arguments": {"x": 3}}\n</tool_call>'
    assert taken(tool_call(by_name("json"), [UP], single=True), one) == (True, True)
    assert taken(tool_call(by_name("json"), [UP]), one) == (True, False)
    assert taken(tool_call(by_name("json"), [UP]), f"{one}\n{one}") == (True, False)


def test_the_tool_must_be_there_and_sound() -> None:
    format = by_name("json")
    with pytest.raises(ConstraintError, match="'left', but the tools are: up"):
        tool_call(format, [UP], name="left")
    with pytest.raises(ConstraintError, match="the tools are: none"):
        tool_call(format, [])
    with pytest.raises(ConstraintError) as caught:
        tool_call(format, [UP, tool("f", properties={"a": {"type": "it"}})])
    assert caught.value.param == "tools[1].function.parameters.properties.a.type"
    with pytest.raises(Unwritable, match="not known"):
        tool_call(None, [UP])
    for name in ("gemma", "kimi_k2", "harmony", "minimax"):
        with pytest.raises(Unwritable) as caught:
            tool_call(by_name(name), [UP, tool('do"wn <ä>')])
        assert caught.value.param == "tools[1].function.name"
