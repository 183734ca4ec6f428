"""/v1/responses: OpenAI's stateful API. Responses are kept in this process only."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gnomon.serve import sessions
from gnomon.serve.body import parse, read_body
from gnomon.serve.choose import with_model
from gnomon.serve.errors import APIError, invalid, naming, show
from gnomon.serve.response_run import ResponseJob, ResponseRun
from gnomon.serve.response_store import Conversation, StoredResponse
from gnomon.serve.routes.chat_completions import headers, plan, start
from gnomon.serve.schema import json_body
from gnomon.serve.services import Services, services_of
from gnomon.serve.sse import PING, EventSourceResponse, guarded
from gnomon.serve.wire.responses import Deleted, ItemList, ResponseBody, ResponsesRequest
from gnomon.serve.wire.responses_items import input_items, split

router = APIRouter()

CHAT_NAMES = {"messages": "input", "response_format.json_schema": "text.format", "response_format": "text.format"}
"""Fields of chat completions, and what this route calls them."""
PAGE = 20
MAX_PAGE = 100


def prepare(body: bytes, services: Services, trace_id: str, owner: str | None) -> ResponseJob:
    """Parse, check, render and tokenise. Raises APIError: 404 for an unknown previous response, 400 naming what can't be honoured."""
    request = parse(ResponsesRequest, body)
    items = input_items(request.input)
    before = Conversation()
    if request.previous_response_id is not None:
        before = _stored(services, request.previous_response_id, owner, "previous_response_id").conversation
    system, messages = split(items, services.engine.model.id)
    conversation = Conversation(
        before.instructions if request.instructions is None else request.instructions,
        (*before.system, *system),
        (*before.messages, *messages),
    )
    asked = request.chat(conversation)
    with naming(CHAT_NAMES):
        chat = plan(asked, services, trace_id, f"resp_{secrets.token_hex(12)}")
    chat = replace(chat, job=replace(chat.job, warnings=(*chat.job.warnings, *request.warnings())))
    echo = {**request.echo(), "instructions": conversation.instructions}
    return ResponseJob(chat, echo, items, conversation, request.store is not False, owner, request.spaces())


@router.post("/v1/responses", response_model=ResponseBody, openapi_extra=json_body(ResponsesRequest))
async def create(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Answer items, or go on from an earlier response."""
    body = await read_body(request, services.http.body_limit, services.timing)
    return await with_model(request, services, body, lambda body, own: answer(body, own, request.state.trace_id))


async def answer(body: bytes, services: Services, trace_id: str) -> Response:
    owner = sessions.key_name.get()
    prepared = await services.preparation.run(lambda: prepare(body, services, trace_id, owner))
    job = prepared.chat.job
    generation = start(prepared.chat, services, "responses", "input")
    run = ResponseRun(prepared, generation, services.responses, services.engine.model.id)
    if job.stream:
        told = guarded(frames(run, services), run.name, run.failed)
        return EventSourceResponse(told, run.close, services.timing.write, job.headers())
    try:
        async for pieces in generation.pieces():
            for piece in pieces or ():
                run.outline.take(piece)
        run.finish()
    except APIError as error:
        if run.status != "cancelled":
            raise
        run.fail(error)
    finally:
        run.close()
    return JSONResponse(run.body(), headers=headers(prepared.chat, generation))


async def frames(run: ResponseRun, services: Services) -> AsyncGenerator[bytes]:
    """The response as server-sent events."""
    yield run.begin()
    async for pieces in run.generation.pieces(services.timing.keep_alive):
        if pieces is None:
            yield PING
        elif told := b"".join(run.feed(piece) for piece in pieces):
            yield told
    run.finish()
    yield run.end()


def _stored(services: Services, name: str, owner: str | None, param: str = "response_id") -> StoredResponse:
    """Another key's response is as unknown as one that never was."""
    found = services.responses.get(name, owner)
    if found is None:
        raise APIError(
            404,
            f"{param} {show(name)} is not known: it was never stored here, was deleted, or is too old",
            param=param,
            code="previous_response_not_found" if param == "previous_response_id" else "response_not_found",
        )
    return found


@router.get("/v1/responses/{response_id}", response_model=ResponseBody)
async def retrieve(
    response_id: str, services: Annotated[Services, Depends(services_of)], stream: str = "false"
) -> Response:
    """A response as it ended, or as it is now."""
    if stream == "true":
        raise invalid("stream: a response's events are told once, while it is made", "stream", "unsupported")
    owner = sessions.key_name.get()
    run = services.responses.under_way(response_id, owner)
    return JSONResponse(_stored(services, response_id, owner).body if run is None else run.body())


@router.delete("/v1/responses/{response_id}", response_model=Deleted)
async def delete(response_id: str, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Forget a response."""
    owner = sessions.key_name.get()
    _stored(services, response_id, owner)
    services.responses.delete(response_id, owner)
    deleted: Deleted = {"id": response_id, "object": "response", "deleted": True}
    return JSONResponse(deleted)


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseBody)
async def cancel(response_id: str, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Stop a response under way; it is not stored."""
    owner = sessions.key_name.get()
    run = services.responses.under_way(response_id, owner)
    if run is None:
        status = _stored(services, response_id, owner).body["status"]
        raise invalid(f"response_id {show(response_id)} is {status} and can't be cancelled", "response_id")
    return JSONResponse(run.cancel())


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList)
async def list_input(
    response_id: str,
    services: Annotated[Services, Depends(services_of)],
    limit: str = str(PAGE),
    order: str = "desc",
    after: str | None = None,
) -> Response:
    """The items of the request that a response answers, the last first."""
    items: list[dict[str, Any]] = list(_stored(services, response_id, sessions.key_name.get()).input)
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_PAGE:
        raise invalid(f"limit must be at least 1 and at most {MAX_PAGE}, got {show(limit)}", "limit")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, got {show(order)}", "order")
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid(f"after {show(after)} is none of the items", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    listed: ItemList = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
    return JSONResponse(listed)
