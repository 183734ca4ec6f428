"""The error body of OpenAI's API."""

from __future__ import annotations

from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    """`param` names the request field at fault, as a path such as `messages[0].content`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail
