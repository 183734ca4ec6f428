"""Messages and tools of a chat request, checked, and named by path when something is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field, WithJsonSchema

from gnomon.serve.errors import invalid, show
from gnomon.serve.wire.sampling import Fields

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MEDIA_PARTS = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
    "document": "document",
}

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
                        "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}},
                        "required": ["type"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]


class FunctionCall(Fields):
    """A call the assistant made: `arguments` is a JSON string, or already an object."""

    name: str
    arguments: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(Fields):
    """One turn of the conversation. `developer` counts as `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class FunctionTool(Fields):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: FunctionTool


def template_messages(messages: Sequence[Message], model: str) -> list[dict[str, Any]]:
    """The messages as `ChatTemplate.render` takes them, content as text. Raises APIError 400 for what the model can't take."""
    if not messages:
        raise invalid("messages must not be empty", "messages")
    return [_message(message, f"messages[{index}]", model) for index, message in enumerate(messages)]


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def _message(message: Message, path: str, model: str) -> dict[str, Any]:
    if message.function_call is not None:
        raise invalid(f"{path}.function_call is not supported: use tool_calls", f"{path}.function_call", "unsupported")
    if message.content is None and message.role != "assistant":
        raise invalid(f"{path}.content is required of a {message.role} message", f"{path}.content")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls belong to assistant messages, not {message.role}", f"{path}.tool_calls")
    if message.role != "assistant":
        made = message.model_dump(exclude_none=True, exclude={"reasoning", "reasoning_content", "tool_calls"})
    else:
        made = message.model_dump(exclude_none=True)
    # Many templates add to the content of a message of calls only, and fail when there is none.
    made["content"] = content_text(message.content, f"{path}.content", model)
    return made


def content_text(content: Any, path: str, model: str) -> str:
    """The text of a message: a string, or the text parts of a list joined. Raises APIError 400 for any other part."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{path} must be a str or a list of parts, got {show(content)}", path)
    parts = enumerate(cast("list[Any]", content))
    return "".join(part_text(part, f"{path}[{index}]", model) for index, part in parts)


def part_kind(part: Any, path: str) -> str:
    """The type of a part of a message. Raises APIError 400 where it has none."""
    kind: Any = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{path} must be an object with a type, got {show(part)}", path)
    return kind


def document_url(part: Any) -> str | None:
    """Where the document is that a part names by URL: `input_file` of Responses, `document` of Messages, or a `file`, whose `file_data` is
    a URL, or which has a `file_url`. None for any other part."""
    if not isinstance(part, dict):
        return None
    part = cast("dict[str, Any]", part)
    kind: Any = part.get("type")
    held: Any = part.get("source") if kind == "document" else part.get("file", part) if kind == "file" else part
    if kind not in ("document", "file", "input_file") or not isinstance(held, dict):
        return None
    held = cast("dict[str, Any]", held)
    if kind == "document":
        url: Any = held.get("url") if held.get("type") == "url" else None
    else:
        data: Any = held.get("file_data")
        named = data if isinstance(data, str) and data.lower().startswith(("http://", "https://")) else None
        url = held.get("file_url") or named
    return url if isinstance(url, str) else None


def part_text(part: Any, path: str, model: str) -> str:
    """The text of a part of a message. Raises APIError 400 for a part that holds none."""
    kind = part_kind(part, path)
    if document_url(part) is not None:
        raise invalid(
            f"{path} is a document by URL, which this server does not fetch: "
            "start it with --fetch-urls (GNOMON_FETCH_URLS=1) to allow text documents",
            path,
            "unsupported",
        )
    if kind in MEDIA_PARTS:
        raise invalid(
            f"{path} is of type {kind}, but the model {model} takes no {MEDIA_PARTS[kind]} input", path, "unsupported"
        )
    if kind not in TEXT_PARTS:
        raise invalid(f"{path}.type must be one of {', '.join(TEXT_PARTS)}, got {show(kind)}", f"{path}.type")
    field = "refusal" if kind == "refusal" else "text"
    text: Any = part.get(field)
    if not isinstance(text, str):
        raise invalid(f"{path}.{field} must be of type str, got {show(text)}", f"{path}.{field}")
    return text
