"""Markers that are special tokens of a real tokenizer reach the extractor as text."""

from __future__ import annotations

import pytest
from chat_oracle import build
from tool_families import FAMILIES, answer, conversation, made, offered

from gnomon.chat.template import ChatTemplate
from gnomon.chat.tokenizer import Tokenizer
from gnomon.chat.tools import Extractor, collected

MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "mistral_v11": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


@pytest.mark.parametrize("name", MARKERS)
def test_special_tokens_become_calls(name, tmp_path):
    family = next(family for family in FAMILIES if family.name == name)
    source = family.template().sources["default"]
    build(source, MARKERS[name]).save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    template = ChatTemplate(tokenizer)
    assert template.tools is not None
    assert template.tools.name == family.format
    arguments = {"city": "Zürich 🙂", "n": 3}
    tools = offered([arguments])
    written, _ = answer(template, family, tools, conversation(None, made(family, [arguments])))
    ids = tokenizer.encode(written)
    assert all(tokenizer.token_id(marker) in ids for marker in MARKERS[name] if marker in written)
    stream, extractor = tokenizer.stream(), Extractor(template.tools, tools)
    events = [event for token in ids for event in extractor.push(stream.push(token))]
    events += [*extractor.push(stream.finish()), *extractor.finish()]
    content, calls = collected(events)
    assert content.strip() in ("", "<think>\n\n</think>")
    assert [call.name for call in calls] == ["f"]
    assert '"Zürich 🙂"' in calls[0].arguments
