"""Tools for models whose template has no place for them: told in the system's text, their calls and results written into the turns.

The wording is that of Hermes and Qwen2.5, which most fine-tunes for calls have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.chat.messages import arguments_of, normalise

OFFER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>"""
NOTATION = """

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def offer(tools: Sequence[Mapping[str, Any]], *, notation: bool) -> str:
    """What a model is told of tools (OpenAI's), and, if `notation`, of how to call them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return OFFER.replace("{tools}", listed) + (NOTATION if notation else "")


def told(messages: Sequence[Mapping[str, Any]], text: str, *, system: bool) -> list[Mapping[str, Any]]:
    """The conversation with `text` at the end of its system message, or, without `system`, before the user's first.

    Contents are texts; there is at least one message.
    """
    made = list(messages)
    roles = ("system", "developer") if system else ("user",)
    first = made[0]
    if first["role"] not in roles:
        return [{"role": roles[0], "content": text}, *made]
    said = first.get("content") or ""
    parts = (said, text) if system else (text, said)
    return [{**first, "content": "\n\n".join(part for part in parts if part)}, *made[1:]]


def written_out(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with calls as text of the assistant's turns, and results as text of the user's, several in one turn.

    Raises ChatError as `normalise` does.
    """
    made: list[dict[str, Any]] = []
    answering = False
    for message in normalise(messages):
        result = message["role"] == "tool"
        if result:
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            message = {"role": "user", "content": text}
        elif message.get("tool_calls"):
            calls = [_call(call["function"]) for call in message.pop("tool_calls")]
            message["content"] = "\n".join(part for part in (message.get("content"), *calls) if part)
        if answering and message["role"] == "user":
            # Templates that want turns to alternate refuse two of the user's.
            made[-1]["content"] += f"\n{message.get('content') or ''}"
        else:
            made.append(message)
            answering = result
    return made


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": arguments_of(function.get("arguments"))}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
