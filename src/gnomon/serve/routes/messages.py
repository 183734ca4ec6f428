"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gnomon.serve.body import parse, read_body
from gnomon.serve.choose import with_model
from gnomon.serve.errors import naming
from gnomon.serve.generation import Generation
from gnomon.serve.outline import Change, Closed, Grown, Opened, Outline, Part
from gnomon.serve.routes.chat_completions import ChatJob, headers, plan, start
from gnomon.serve.schema import json_body
from gnomon.serve.services import Services, services_of
from gnomon.serve.sse import EventSourceResponse, Frames, event, guarded
from gnomon.serve.wire.anthropic import (
    Block,
    MessageBody,
    MessagesRequest,
    MessageUsage,
    TokenCount,
    message_usage,
    stop_reason,
)
from gnomon.serve.wire.anthropic_history import sealed

router = APIRouter()

CHAT_NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
"""Fields of chat completions, and what this route calls them."""
PING = event({"type": "ping"})


@dataclass(frozen=True, slots=True)
class MessageJob:
    """A conversation ready for the engine. `hidden` thinking is told of, but not its text."""

    chat: ChatJob
    hidden: bool


def prepare(body: bytes, services: Services, trace_id: str) -> MessageJob:
    """Parse, check, render and tokenise. Raises APIError 400 naming what can't be honoured."""
    request = parse(MessagesRequest, body)
    asked = request.chat(services.engine.model.id)
    with naming(CHAT_NAMES):
        chat = plan(asked, services, trace_id, f"msg_{secrets.token_hex(12)}")
    job = replace(chat.job, warnings=(*chat.job.warnings, *request.warnings()))
    return MessageJob(replace(chat, job=job), request.hides_thinking)


@router.post("/v1/messages", response_model=MessageBody, openapi_extra=json_body(MessagesRequest))
async def create(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Continue a conversation."""
    body = await read_body(request, services.http.body_limit, services.timing)
    return await with_model(request, services, body, lambda body, own: answer(body, own, request.state.trace_id))


@router.post("/v1/messages/count_tokens", response_model=TokenCount, openapi_extra=json_body(MessagesRequest))
async def count(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """How many tokens a conversation has as a prompt, tools and system included; nothing is generated."""
    body = await read_body(request, services.http.body_limit, services.timing)
    trace_id = request.state.trace_id
    prepared = await with_model(
        request, services, body, lambda body, own: own.preparation.run(lambda: prepare(body, own, trace_id))
    )
    counted: TokenCount = {"input_tokens": _prompt_tokens(prepared)}
    return JSONResponse(counted)


def _prompt_tokens(prepared: MessageJob) -> int:
    return sum(len(request.prompt) for request in prepared.chat.job.requests)


async def answer(body: bytes, services: Services, trace_id: str) -> Response:
    prepared = await services.preparation.run(lambda: prepare(body, services, trace_id))
    job = prepared.chat.job
    generation = start(prepared.chat, services, "messages", "messages")
    if job.stream:
        told = guarded(frames(generation, prepared, services), job.id, lambda error: event(error.anthropic_body))
        return EventSourceResponse(told, generation.close, services.timing.write, job.headers())
    outline = Outline()
    try:
        async for pieces in generation.pieces():
            for piece in pieces or ():
                outline.take(piece)
    finally:
        generation.close()
    message = _message(prepared, services, message_usage(generation.usages))
    message["content"] = [_block(part, prepared.hidden) for part in outline.told]
    message["stop_reason"] = stop_reason(outline.finish, outline.stop)
    message["stop_sequence"] = outline.stop if message["stop_reason"] == "stop_sequence" else None
    return JSONResponse(message, headers=headers(prepared.chat, generation))


def _message(prepared: MessageJob, services: Services, usage: MessageUsage) -> MessageBody:
    return {
        "id": prepared.chat.job.id,
        "type": "message",
        "role": "assistant",
        "model": services.engine.model.id,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _block(part: Part, hidden: bool) -> Block:
    if part.kind == "reasoning":
        if hidden:
            return {"type": "thinking", "thinking": "", "signature": sealed(part.text) if part.text else ""}
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": json.loads(part.text or "{}")}


async def frames(generation: Generation, prepared: MessageJob, services: Services) -> AsyncGenerator[bytes]:
    """The answer as server-sent events."""
    outline = Outline()
    growing: dict[int, Frames] = {}
    # What of the prompt was cached is known only at the end.
    usage: MessageUsage = {
        "input_tokens": _prompt_tokens(prepared),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    yield event({"type": "message_start", "message": _message(prepared, services, usage)})
    yield PING
    async for pieces in generation.pieces(services.timing.keep_alive):
        if pieces is None:
            yield PING
            continue
        changes = (change for piece in pieces for change in outline.feed(piece))
        if told := b"".join(_told(change, prepared.hidden, growing) for change in changes):
            yield told
    reason = stop_reason(outline.finish, outline.stop)
    sequence = outline.stop if reason == "stop_sequence" else None
    yield event(
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": message_usage(generation.usages),
        }
    )
    yield event({"type": "message_stop"})


def _told(change: Change, hidden: bool, growing: dict[int, Frames]) -> bytes:
    """The events of a change; `growing` are the parts' own, of which most have nothing new but text."""
    part = change.part
    match change:
        case Grown():
            if part.kind == "reasoning" and hidden:
                return b""
            if part.index not in growing:
                growing[part.index] = Frames(lambda text: _grown(part, text), event)
            return growing[part.index].frame(change.text)
        case Opened():
            empty = _block(replace(part, fragments=[]), hidden)
            return event({"type": "content_block_start", "index": part.index, "content_block": empty})
        case Closed():
            stop = event({"type": "content_block_stop", "index": part.index})
            if part.kind != "reasoning":
                return stop
            delta = {"type": "signature_delta", "signature": sealed(part.text) if hidden else ""}
            return event({"type": "content_block_delta", "index": part.index, "delta": delta}) + stop


def _grown(part: Part, text: str) -> Mapping[str, Any]:
    if part.kind == "reasoning":
        delta = {"type": "thinking_delta", "thinking": text}
    elif part.kind == "text":
        delta = {"type": "text_delta", "text": text}
    else:
        delta = {"type": "input_json_delta", "partial_json": text}
    return {"type": "content_block_delta", "index": part.index, "delta": delta}
