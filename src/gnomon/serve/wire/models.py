"""`/v1/models`, `/v1` and `/health`."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class ModelBody(TypedDict):
    """OpenAI's fields, then Gnomon's. `context_window` is in tokens and null when the model doesn't say.

    `tool_format` is how the model writes tool calls: `generic` if it was taught no way and is told one, null if it has no template, or
    one that tells a way that isn't known. It and `reasoning` are null of a model that was never loaded.

    A server of several models tells the `state` of each: cold, loading, resident, draining or failed, then with the `reason`.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_window: int | None
    reasoning: bool | None
    vision: bool
    tool_format: str | None
    model_type: str
    size_bytes: int
    state: NotRequired[str]
    reason: NotRequired[str]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelBody]


class RootBody(TypedDict):
    name: str
    version: str
    model: str
    endpoints: list[str]


class HealthBody(TypedDict):
    status: str
    reason: NotRequired[str]
