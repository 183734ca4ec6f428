"""Anthropic's turns and content blocks as chat messages."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import WithJsonSchema

from gnomon.serve.errors import invalid, show
from gnomon.serve.wire.messages import content_text, part_kind, part_text
from gnomon.serve.wire.sampling import Fields

BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")

Content = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"enum": list(BLOCKS)}},
                        "required": ["type"],
                    },
                },
            ]
        }
    ),
]


_SEAL = "gnomon-1."


def sealed(thought: str) -> str:
    """The signature of thinking that is not shown. As Anthropic's do, it carries the text, so that the next turn can go on from it."""
    return _SEAL + base64.b64encode(thought.encode()).decode()


def _thought(block: dict[str, Any]) -> str:
    """The text of a thinking block: as it was shown, or out of its signature. Another server's signature holds none."""
    shown, signature = block.get("thinking"), block.get("signature")
    if isinstance(shown, str) and shown:
        return shown
    if not isinstance(signature, str) or not signature.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        # Cut or changed on its way: as good as none.
        return ""


class Turn(Fields):
    role: Literal["user", "assistant", "system"]
    content: Content


def chat_messages(system: Any, turns: Sequence[Turn], model: str) -> list[dict[str, Any]]:
    """The conversation as messages of a chat completion: thinking as their reasoning, which the template shows or not, tool results as
    messages of their own, turns of one role joined.

    Raises APIError 400 naming what can't be honoured.
    """
    if not turns:
        raise invalid("messages must not be empty", "messages")
    if turns[-1].role == "assistant":
        raise invalid(
            "messages must not end with an assistant turn: continuing one is not supported",
            f"messages[{len(turns) - 1}].role",
            "unsupported",
        )
    messages: list[dict[str, Any]] = []
    said = content_text(system, "system", model)
    if said:
        messages.append({"role": "system", "content": said})
    names: dict[str, str] = {}
    for index, turn in enumerate(turns):
        path = f"messages[{index}].content"
        for message in _messages(turn, path, model, names):
            _join(messages, message)
    return messages


def _join(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or message["role"] not in ("user", "assistant"):
        messages.append(message)
        return
    for field in ("content", "reasoning_content"):
        if field in message:
            last[field] = "\n\n".join(text for text in (last.get(field), message[field]) if text)
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _messages(turn: Turn, path: str, model: str, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The messages of a turn; `names` maps the ids of calls so far to the tools' names."""
    if not isinstance(turn.content, list):
        # A missing content is an error here, though not in a chat completion.
        if not isinstance(turn.content, str):
            raise invalid(f"{path} must be a str or a list of blocks, got {show(turn.content)}", path)
        yield {"role": turn.role, "content": turn.content}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results = 0
    for index, block in enumerate(cast("list[Any]", turn.content)):
        where = f"{path}[{index}]"
        kind = part_kind(block, where)
        if kind in ("thinking", "redacted_thinking") and turn.role == "assistant":
            if kind == "thinking" and (thought := _thought(block)):
                thoughts.append(thought)
            continue
        if kind == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, where, names))
        elif kind == "tool_result" and turn.role == "user":
            if texts:
                yield {"role": "user", "content": "".join(texts)}
                texts = []
            results += 1
            yield _result(block, where, model, names)
        elif kind in BLOCKS and kind != "text":
            raise invalid(f"{where} is of type {kind}, which a turn of the {turn.role} can't hold", where)
        else:
            if kind not in ("text", "image", "document") and "audio" not in kind:
                raise invalid(
                    f"{where}.type must be one of {', '.join(BLOCKS)}, got {show(kind)}", f"{where}.type", "unsupported"
                )
            texts.append(part_text(block, where, model))
    if calls or texts or not results:
        message: dict[str, Any] = {"role": turn.role, "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n\n".join(thoughts)
        yield {**message, "tool_calls": calls} if calls else message


def _string(block: dict[str, Any], field: str, where: str) -> str:
    value = block.get(field)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{field} must be a str that is not empty, got {show(value)}", f"{where}.{field}")
    return value


def _call(block: dict[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    call_id, name = _string(block, "id", where), _string(block, "name", where)
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.input must be of type object, got {show(arguments)}", f"{where}.input")
    names[call_id] = name
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: dict[str, Any], where: str, model: str, names: dict[str, str]) -> dict[str, Any]:
    call_id = _string(block, "tool_use_id", where)
    text = content_text(block.get("content"), f"{where}.content", model)
    if block.get("is_error") is True:
        text = f"Error: {text}"
    message = {"role": "tool", "tool_call_id": call_id, "content": text}
    return {**message, "name": names[call_id]} if call_id in names else message
