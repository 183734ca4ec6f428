"""Input items of `/v1/responses`: as they are kept, and as chat messages."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, cast

from gnomon.serve.errors import invalid, show
from gnomon.serve.wire.messages import content_text

ITEMS = ("message", "function_call", "function_call_output", "reasoning")
ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def input_items(given: Any) -> list[dict[str, Any]]:
    """The items of an `input`, each with a type, an id and a status; a string is one message. Raises APIError 400."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid(f"input must be a str or a list of items, got {show(given)}", "input")
    if not given:
        raise invalid("input must not be empty", "input")
    return [_item(item, f"input[{index}]") for index, item in enumerate(cast("list[Any]", given))]


def _item(given: Any, path: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid(f"{path} must be an object, got {show(given)}", path)
    item = cast("dict[str, Any]", given)
    kind = item.get("type", "message")
    if kind not in ITEMS:
        raise invalid(f"{path}.type must be one of {', '.join(ITEMS)}, got {show(kind)}", f"{path}.type", "unsupported")
    made = {**item, "type": kind, "status": item.get("status") or "completed"}
    if not isinstance(made.get("id"), str):
        made["id"] = f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
    if kind == "message":
        if made.get("role") not in ROLES:
            raise invalid(
                f"{path}.role must be one of {', '.join(ROLES)}, got {show(made.get('role'))}", f"{path}.role"
            )
        if isinstance(made.get("content"), str):
            text = {"type": "input_text", "text": made["content"]}
            if made["role"] == "assistant":
                text |= {"type": "output_text", "annotations": []}
            made["content"] = [text]
        elif not isinstance(made.get("content"), list):
            where = f"{path}.content"
            raise invalid(f"{where} must be a str or a list of parts, got {show(made.get('content'))}", where)
    return made


def split(items: Sequence[dict[str, Any]], model: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The texts of system messages, and all other items as chat messages: reasoning as that of an assistant's message, calls as those
    of one assistant turn.

    Raises APIError 400 naming what can't be honoured.
    """
    system: list[str] = []
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if item["type"] == "message":
            text = content_text(item["content"], f"{path}.content", model)
            if item["role"] in ("system", "developer"):
                system.append(text)
            else:
                messages.append({"role": item["role"], "content": text})
        elif item["type"] == "reasoning":
            if thought := _thought(item):
                messages.append(assistant("", [], thought))
        elif item["type"] == "function_call":
            call_id, name = _string(item, "call_id", path), _string(item, "name", path)
            space = _string(item, "namespace", path) if item.get("namespace") is not None else None
            function = {"name": namespaced(space, name), "arguments": _string(item, "arguments", path)}
            messages.append(assistant("", [{"id": call_id, "type": "function", "function": function}]))
        elif item["type"] == "function_call_output":
            output = item.get("output")
            if output is None:
                raise invalid(f"{path}.output is required", f"{path}.output")
            text = content_text(output, f"{path}.output", model)
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", path), "content": text})
    return system, messages


def namespaced(space: str | None, name: str) -> str:
    """The name under which a model knows a function of a namespace: templates know no namespaces."""
    return name if space is None else f"{space.removesuffix('__')}__{name}"


def assistant(text: str, calls: list[dict[str, Any]], thought: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def _thought(item: dict[str, Any]) -> str:
    """The text of a reasoning item: its content, or else its summary, which is where this server puts all of it."""
    for field in ("content", "summary"):
        parts: Any = item.get(field)
        if isinstance(parts, list):
            texts = (part.get("text") for part in cast("list[Any]", parts) if isinstance(part, dict))
            if thought := "\n\n".join(text for text in texts if isinstance(text, str) and text):
                return thought
    return ""


def joined(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages with an assistant's calls put to the message before them, with reasoning to what came of it, and with the tools' names
    at their results. Reasoning at the very end, of which nothing came, is left out."""
    names: dict[str, str] = {}
    last: dict[str, Any] | None = None
    for given in messages:
        message: dict[str, Any] = given
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        if last is not None and last["role"] == message["role"] == "assistant":
            thought = "\n\n".join(filter(None, (one.get("reasoning_content") for one in (last, message))))
            if _only_thought(last) or ("tool_calls" in message and not message["content"]):
                calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
                last = assistant(last["content"] or message["content"], calls, thought)
                continue
        if last is not None:
            yield last
        last = message
    if last is not None and not _only_thought(last):
        yield last


def _only_thought(message: dict[str, Any]) -> bool:
    """Whether it is a reasoning item that nothing has been put to."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _string(item: dict[str, Any], field: str, path: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise invalid(f"{path}.{field} must be a str that is not empty, got {show(value)}", f"{path}.{field}")
    return value
