"""Chat messages as requests carry them, made ready for a template without touching the request's own objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
SYSTEM = ("system", "developer")


class ChatError(ValueError):
    """A conversation that can't be rendered. `param` names the field; `code` is `template_error` when the template refused."""

    def __init__(self, message: str, param: str = "messages", code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Habits:
    """What a template expects that templates disagree on; found by trying it."""

    developer: bool = False
    """It knows the role `developer`."""
    typed_content: bool = False
    """It reads content as a list of parts only."""
    text_arguments: bool = False
    """It wants tool call arguments as JSON text."""
    no_content: Literal["absent", "empty", "none"] = "absent"
    """How it wants a message without content."""
    late_system: bool = True
    """It writes system messages that come after others."""
    repeats: bool = True
    """It takes two turns of the user's, or of the assistant's, that follow each other."""


def normalise(messages: Sequence[Mapping[str, Any]], habits: Habits = Habits()) -> list[dict[str, Any]]:
    """Fresh messages for the template: None fields dropped, developer as system, text parts joined, `reasoning` also as
    `reasoning_content` (an explicit string of that name wins), tool call arguments as objects, and, without `habits.late_system`, system
    messages as `folded` has them, and, without `habits.repeats`, turns as `joined` has them.

    Raises ChatError naming the field for shapes no template can take.
    """
    if not messages:
        raise ChatError("messages is empty: at least one message is required")
    if not habits.late_system:
        messages = folded(messages)
    if not habits.repeats:
        messages = joined(messages)
    return [_message(f"messages[{i}]", message, habits) for i, message in enumerate(messages)]


def joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with turns that follow each other as one, the user's and, where they hold no calls, the assistant's; of other
    fields the later turn's count. Raises ChatError as `normalise` does.
    """
    made: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        last = made[-1] if made else None
        if last is None or not _repeats(last, message):
            made.append(message)
            continue
        texts = [_text(f"messages[{j}].content", one.get("content") or "") for j, one in ((i - 1, last), (i, message))]
        made[-1] = {**last, **message, "content": "\n\n".join(text for text in texts if text)}
    return made


def _repeats(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    role = message.get("role")
    if role == "assistant" and (last.get("tool_calls") or message.get("tool_calls")):
        return False
    return last.get("role") == role and role in ("user", "assistant")


def folded(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with system messages at its beginning only, as one: later ones stand in the user's turn that they came after or
    before, between `<system>` and `</system>`. They stay in their place, so that what came before them is rendered as it was.

    Raises ChatError as `normalise` does.
    """
    made: list[Mapping[str, Any]] = []
    open_turn = False
    for i, message in enumerate(messages):
        where, role = f"messages[{i}].content", message.get("role")
        system = role in SYSTEM
        last = made[-1] if made else None
        if last is None or not (system or (open_turn and role == "user")):
            made.append(message)
            open_turn = False
            continue
        said = _text(where, message.get("content") or "")
        first = system and last.get("role") in SYSTEM
        open_turn = not first
        text = f"<system>\n{said}\n</system>" if system and not first else said
        if first or last.get("role") == "user":
            before = _text(where, last.get("content") or "")
            made[-1] = {**last, "content": "\n\n".join(part for part in (before, text) if part)}
        else:
            made.append({"role": "user", "content": text})
    return made


def _message(where: str, message: Mapping[str, Any], habits: Habits) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatError(f"{where}.role is {role!r}: a role's name is required", f"{where}.role")
    made: dict[str, Any] = {key: plain(value) for key, value in message.items() if value is not None}
    if role == "developer" and not habits.developer:
        made["role"] = "system"
    if "content" not in made:
        if habits.no_content != "absent":
            made["content"] = "" if habits.no_content == "empty" else None
    else:
        text = _text(f"{where}.content", made["content"])
        made["content"] = [{"type": "text", "text": text}] if habits.typed_content else text
    if not isinstance(made.get("reasoning_content"), str):
        made.pop("reasoning_content", None)
        thought = made.get("thinking", made.get("reasoning"))
        if isinstance(thought, str):
            made["reasoning_content"] = thought
    if isinstance(made.get("reasoning_content"), str):
        # gpt-oss templates read this name.
        made.setdefault("thinking", made["reasoning_content"])
    if "tool_calls" in made:
        made["tool_calls"] = _calls(f"{where}.tool_calls", made["tool_calls"], habits)
    return made


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{where} is {type(content).__name__}: a string or a list of parts is required", where)
    texts: list[str] = []
    for i, part in enumerate(cast("list[Any]", content)):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS:
            raise ChatError(
                f"{where}[{i}].type is {kind!r}: this model takes text only", f"{where}[{i}]", "unsupported_content"
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ChatError(f"{where}[{i}].text is {text!r}: a string is required", f"{where}[{i}].text")
        texts.append(text)
    return "".join(texts)


def _calls(where: str, calls: Any, habits: Habits) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ChatError(f"{where} is {type(calls).__name__}: a list is required", where)
    made: list[dict[str, Any]] = []
    for i, call in enumerate(cast("list[Any]", calls)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError(f"{where}[{i}].function has no name", f"{where}[{i}].function")
        arguments = arguments_of(function.get("arguments"), habits)
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def arguments_of(arguments: Any, habits: Habits = Habits()) -> Any:
    """A call's arguments as a template of these habits wants them: an object, where they are one, or JSON text."""
    if habits.text_arguments:
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        # A model's own bad JSON, sent back as history: the template shows it as it was.
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def plain(value: Any) -> Any:
    """A copy out of plain JSON types, so that a template can reach no method of a richer object."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, str):
        return str.__str__(value)
    return f"<{type(value).__name__}>"
