"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gnomon.chat.messages import ChatError
from gnomon.chat.reasoning import Splitter
from gnomon.chat.template import Rendered
from gnomon.chat.tools import (
    CallArguments,
    CallEnd,
    CallEvent,
    CallStart,
    Extractor,
    collected,
)
from gnomon.engine import api
from gnomon.serve import volatile
from gnomon.serve.body import parse, read_body
from gnomon.serve.choose import with_model
from gnomon.serve.constrain import chat_demand
from gnomon.serve.errors import invalid
from gnomon.serve.generation import MALFORMED, Generation, Piece
from gnomon.serve.prepare import Job, check_size, extractor_for, tier
from gnomon.serve.schema import json_body
from gnomon.serve.services import FINGERPRINT, Services, services_of
from gnomon.serve.sse import DONE, PING, EventSourceResponse, Frames, frame, guarded
from gnomon.serve.wire.chat import (
    CalledFunctionDelta,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    MadeCallDelta,
)
from gnomon.serve.wire.logprobs import ChatLogprobs, chat_logprobs
from gnomon.serve.wire.messages import template_messages, template_tools
from gnomon.serve.wire.usage import usage_body, weakest

router = APIRouter()

NO_FORMAT = "this model's way of writing tool calls is not known: a call it makes is text in content"


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A conversation ready for the engine."""

    job: Job
    text: str
    """The rendered conversation."""
    splitter: Callable[[], Splitter]
    extractor: Callable[[], Extractor] | None
    logprobs: bool


def prepare(body: bytes, services: Services, trace_id: str) -> ChatJob:
    """Parse, check, render and tokenise. Raises APIError 400 naming what can't be honoured."""
    return plan(parse(ChatRequest, body), services, trace_id, f"chatcmpl-{uuid.uuid4().hex}")


def plan(request: ChatRequest, services: Services, trace_id: str, name: str) -> ChatJob:
    """Check, render and tokenise a conversation, whichever route it came by; `name` is what its answer is called.

    Raises APIError 400 naming what can't be honoured.
    """
    request.refuse_unsupported()
    model = services.engine.model
    template = services.template
    messages = template_messages(request.messages, model.id)
    check_size((message["content"] for message in messages), services, "messages")
    messages, moved = volatile.settle(messages) if services.http.stable_prompts else (messages, ())
    offered = request.offered_tools()
    stop, logprobs = request.stops(), request.wanted_logprobs()
    form = chat_demand(request, services)
    messages = form.told(messages)
    try:
        kwargs = template.thinking_kwargs(
            request.chat_template_kwargs, request.reasoning_effort, services.sampling.thinking
        )
        tools = template_tools(offered)
        rendered = template.render(messages, tools, **kwargs)
    except ChatError as error:
        raise invalid(str(error), error.param, error.code) from error
    ids = services.chat_history.encode(rendered.text) or tuple(rendered.ids)
    engine_request = api.Request(
        id=name,
        prompt=ids,
        sampling=request.sampling(services.sampling, model.vocab_size, logprobs, rendered.thinking),
        max_tokens=request.cap or services.sampling.max_tokens,
        stop=stop,
        ignore_eos=bool(request.ignore_eos),
        n=request.n or 1,
        trace_id=trace_id,
        session=request.session_id,
        boundary=boundary_of(rendered, ids),
        constraint=form.constraint,
        thinking=template.thinking(rendered) if form.constraint is not None and not form.constraint.turn else None,
        spans=services.spans.get(template, tools, decode_all(services), rendered.generation_prompt, kwargs)
        if model.asserts_calls and tools and form.constraint is None and logprobs is None
        else None,
        text=rendered.text,
    )
    job = Job(
        id=name,
        created=int(time.time()),
        requests=(engine_request,),
        stream=bool(request.stream),
        usage=request.wants_usage,
        tier=tier(services, request),
        warnings=((NO_FORMAT,) if tools and template.tools is None else ()) + form.warnings,
        moved=moved,
    )
    return ChatJob(
        job,
        rendered.text,
        lambda: template.splitter(rendered.generation_prompt),
        extractor_for(template.tools, tools if form.calls else None, single=request.parallel_tool_calls is False),
        logprobs is not None,
    )


def decode_all(services: Services) -> Callable[[Sequence[int]], str]:
    """The text of ids with special tokens written out."""
    return lambda ids: services.vocabulary.decode(ids, hide=False)


def start(prepared: ChatJob, services: Services, endpoint: str, prompt_field: str) -> Generation:
    """Hand a conversation to the engine. Raises APIError when it refuses; `prompt_field` is what the route calls the conversation."""

    def remember(request: api.Request, ids: Sequence[int]) -> None:
        services.chat_history.record(prepared.text, request.prompt, ids)

    return Generation(
        services,
        endpoint,
        prepared.job.requests,
        prompt_field,
        prepared.splitter,
        prepared.extractor,
        remember=remember,
    )


def boundary_of(rendered: Rendered, ids: Sequence[int]) -> int | None:
    """Where in `ids`, which may be other than those rendered, the template opens the answer; None where no token begins there."""
    if rendered.stable_tokens is None:
        return None
    tail = tuple(rendered.ids[rendered.stable_tokens :])
    start = len(ids) - len(tail)
    return start if tuple(ids[start:]) == tail else None


@router.post("/v1/chat/completions", response_model=ChatCompletion, openapi_extra=json_body(ChatRequest))
async def create(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Continue a conversation."""
    body = await read_body(request, services.http.body_limit, services.timing)
    return await with_model(request, services, body, lambda body, own: answer(body, own, request.state.trace_id))


async def answer(body: bytes, services: Services, trace_id: str) -> Response:
    prepared = await services.preparation.run(lambda: prepare(body, services, trace_id))
    job = prepared.job
    generation = start(prepared, services, "chat", "messages")
    if job.stream:
        told = guarded(frames(generation, prepared, services), job.id, lambda error: frame(error.body))
        return EventSourceResponse(told, generation.close, services.timing.write, job.headers())
    try:
        completion = await complete(generation, prepared, services)
    finally:
        generation.close()
    return JSONResponse(completion, headers=headers(prepared, generation))


def headers(prepared: ChatJob, generation: Generation) -> dict[str, str]:
    """Those of a whole answer, once it has ended."""
    job = prepared.job
    if generation.malformed:
        job = replace(job, warnings=(*job.warnings, MALFORMED))
    return job.headers(weakest([job.tier, *(one.tier for one in generation.usages)]))


async def complete(generation: Generation, prepared: ChatJob, services: Services) -> ChatCompletion:
    """The whole answer at once."""
    made: list[list[Piece]] = [[] for _ in range(generation.choices)]
    async for pieces in generation.pieces():
        for piece in pieces or ():
            made[piece.index].append(piece)
    return {
        "id": prepared.job.id,
        "object": "chat.completion",
        "created": prepared.job.created,
        "model": services.engine.model.id,
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {
                "index": index,
                "message": _message(pieces),
                "logprobs": _logprobs(prepared, pieces),
                "finish_reason": pieces[-1].finish or "stop",
            }
            for index, pieces in enumerate(made)
        ],
        "usage": usage_body(generation.usages, prepared.job.tier, generation.reasoning_tokens),
    }


def _message(pieces: list[Piece]) -> ChatMessage:
    content = "".join(piece.content for piece in pieces)
    _, calls = collected(event for piece in pieces for event in piece.calls)
    message: ChatMessage = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    reasoning = "".join(piece.reasoning for piece in pieces)
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    return message


def _logprobs(prepared: ChatJob, pieces: list[Piece]) -> ChatLogprobs | None:
    return chat_logprobs([one for piece in pieces for one in piece.logprobs]) if prepared.logprobs else None


async def frames(generation: Generation, prepared: ChatJob, services: Services) -> AsyncGenerator[bytes]:
    """The answer as server-sent events."""
    texts = Texts(prepared, services)
    # Whether there will be content isn't known where there may be calls only.
    nothing = None if prepared.extractor else ""
    for index in range(generation.choices):
        yield frame(_chunk(prepared, services, index, {"role": "assistant", "content": nothing, "refusal": None}))
    async for pieces in generation.pieces(services.timing.keep_alive):
        if pieces is None:
            yield PING
        else:
            yield b"".join([texts.frames(piece) for piece in pieces])
    if prepared.job.usage:
        last = _chunk(prepared, services, None, {})
        last["usage"] = usage_body(generation.usages, prepared.job.tier, generation.reasoning_tokens)
        yield frame(last)
    yield DONE


class Texts:
    """The pieces of an answer as frames. Of those with nothing but text, which most are, only the text is encoded."""

    def __init__(self, prepared: ChatJob, services: Services) -> None:
        self._prepared = prepared
        self._services = services
        self._content: dict[int, Frames] = {}
        self._reasoning: dict[int, Frames] = {}

    def frames(self, piece: Piece) -> bytes:
        prepared, index = self._prepared, piece.index
        if prepared.logprobs or not piece.is_text:
            return b"".join(frame(chunk) for chunk in _chunks(prepared, self._services, piece))
        if piece.content:
            made = self._content.get(index) or self._made(self._content, index, _content)
            return made.frame(piece.content)
        made = self._reasoning.get(index) or self._made(self._reasoning, index, _reasoning)
        return made.frame(piece.reasoning)

    def _made(self, known: dict[int, Frames], index: int, delta: Callable[[str], ChatDelta]) -> Frames:
        known[index] = Frames(lambda text: _chunk(self._prepared, self._services, index, delta(text)))
        return known[index]


def _content(text: str) -> ChatDelta:
    return {"content": text}


def _reasoning(text: str) -> ChatDelta:
    return {"reasoning_content": text, "reasoning": text}


def _chunks(prepared: ChatJob, services: Services, piece: Piece) -> list[ChatChunk]:
    """Reasoning, content and each part of a call go apart; log-probabilities with the first; the finish alone, as OpenAI sends it."""
    deltas: list[ChatDelta] = []
    if piece.reasoning:
        deltas.append(_reasoning(piece.reasoning))
    if piece.content:
        deltas.append(_content(piece.content))
    calls: list[MadeCallDelta | None] = [_call(event) for event in piece.calls]
    deltas.extend({"tool_calls": [call]} for call in calls if call is not None)
    if piece.logprobs and not deltas:
        deltas.append({"content": ""})
    chunks = [_chunk(prepared, services, piece.index, delta) for delta in deltas]
    if chunks and prepared.logprobs:
        chunks[0]["choices"][0]["logprobs"] = chat_logprobs(piece.logprobs)
    if piece.finish is not None:
        chunks.append(_chunk(prepared, services, piece.index, {}, piece.finish))
    return chunks


def _call(event: CallEvent) -> MadeCallDelta | None:
    match event:
        case CallStart():
            function: CalledFunctionDelta = {"name": event.name, "arguments": ""}
            return {"index": event.index, "id": event.id, "type": "function", "function": function}
        case CallArguments():
            return {"index": event.index, "function": {"arguments": event.fragment}}
        case CallEnd():
            return None


def _chunk(
    prepared: ChatJob, services: Services, index: int | None, delta: ChatDelta, finish: str | None = None
) -> ChatChunk:
    chunk: ChatChunk = {
        "id": prepared.job.id,
        "object": "chat.completion.chunk",
        "created": prepared.job.created,
        "model": services.engine.model.id,
        "system_fingerprint": FINGERPRINT,
        "choices": [],
    }
    if index is not None:
        chunk["choices"] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}]
    if prepared.job.usage:
        chunk["usage"] = None
    return chunk
