"""The error bodies of OpenAI's API and of Anthropic's."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    """`param` names the request field at fault, as a path such as `messages[0].content`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail
