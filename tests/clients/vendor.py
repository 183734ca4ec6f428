"""The vendors' published types, read strictly: a field they don't have is a difference, as is one of another type or one left out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, get_args

from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

OURS: Mapping[str, frozenset[str]] = {
    "ChatCompletionMessage": frozenset({"reasoning", "reasoning_content"}),
    "ChoiceDelta": frozenset({"reasoning", "reasoning_content"}),
    "ChatCompletionTokenLogprob": frozenset({"id"}),
    "TopLogprob": frozenset({"id"}),
    "CompletionUsage": frozenset({"cache", "lane", "tier", "speculation", "fill"}),
    # OpenAI's own responses have it, their types don't.
    "Response": frozenset({"store"}),
    # Types of other versions require it.
    "ResponseFunctionCallArgumentsDoneEvent": frozenset({"name"}),
}
"""What is added to the vendors' types, by type; clients look for it there."""


def extras(model: BaseModel, path: str) -> Iterator[str]:
    """Fields that a type doesn't have, with their places."""
    kind = type(model).__name__
    yield from (f"{path}.{name} ({kind})" for name in (model.model_extra or {}).keys() - OURS.get(kind, frozenset()))
    for name in type(model).model_fields:
        yield from _within(getattr(model, name), f"{path}.{name}")


def _within(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from extras(value, path)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _within(one, f"{path}[{index}]")


def strict(kind: type[BaseModel], value: Any) -> Any:
    """`value`, out of JSON, as a vendor's type. Raises ValidationError, or AssertionError for what the type doesn't have."""
    made = kind.model_validate(value, strict=True)
    unknown = list(extras(made, kind.__name__))
    assert not unknown, unknown
    return made


@cache
def _by_type(union: Any) -> Mapping[str, type[BaseModel]]:
    members: Collection[type[BaseModel]] = get_args(get_args(union)[0])
    return {name: one for one in members for name in get_args(one.model_fields["type"].annotation)}


def response_event(value: Mapping[str, Any]) -> Any:
    return strict(_by_type(ResponseStreamEvent)[value["type"]], value)


def message_event(value: Mapping[str, Any]) -> Any:
    """An event of a message. `ping`, which has no fields, and errors are described apart from the union of events."""
    if value["type"] == "ping":
        assert value == {"type": "ping"}
        return None
    return strict(ErrorResponse if value["type"] == "error" else _by_type(RawMessageStreamEvent)[value["type"]], value)


__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "Completion",
    "Message",
    "Response",
    "message_event",
    "response_event",
    "strict",
]
