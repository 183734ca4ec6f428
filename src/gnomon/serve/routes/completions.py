"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gnomon.engine import api
from gnomon.engine.api import TokenLogprob
from gnomon.serve.body import parse, read_body
from gnomon.serve.choose import with_model
from gnomon.serve.constrain import demand
from gnomon.serve.generation import Generation, Piece
from gnomon.serve.prepare import Job, check_ids, check_size, tier
from gnomon.serve.prompt_echo import PromptEcho, echoes, joined
from gnomon.serve.schema import json_body
from gnomon.serve.services import FINGERPRINT, Services, services_of
from gnomon.serve.sse import DONE, PING, EventSourceResponse, Frames, frame, guarded
from gnomon.serve.wire.completions import Completion, CompletionChoice, CompletionRequest
from gnomon.serve.wire.logprobs import LegacyLogprobs, MLXLogprobs, legacy_logprobs, mlx_logprobs
from gnomon.serve.wire.usage import usage_body, weakest

router = APIRouter()


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """Prompts ready for the engine. `logprobs` is None, or how many of the most likely tokens are told; `legacy` their shape.

    With `echo` choices begin with the prompt; if `only_echo` they end with it.
    """

    job: Job
    texts: tuple[str | None, ...]
    """The prompts; None for one given as token ids."""
    logprobs: int | None
    legacy: bool
    echo: bool
    only_echo: bool


def prepare(body: bytes, services: Services, trace_id: str) -> CompletionJob:
    """Parse, check and tokenise. Raises APIError 400 naming what can't be honoured."""
    request = parse(CompletionRequest, body)
    request.refuse_unsupported()
    model = services.engine.model
    prompts = request.prompts()
    stop, logprobs = request.stops(), request.wanted_logprobs()
    form = demand(request, services)
    # Without a template nothing says whether the model thinks: a model's own temperature holds as it is.
    sampling = request.sampling(services.sampling, model.vocab_size, logprobs, thinking=True)
    name = f"cmpl-{uuid.uuid4().hex}"
    requests: list[api.Request] = []
    texts: list[str | None] = []
    for index, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            check_size((prompt,), services, param)
        ids = (
            _encode(prompt, services, reuse=not request.echo)
            if isinstance(prompt, str)
            else check_ids(prompt, model.vocab_size, param)
        )
        texts.append(prompt if isinstance(prompt, str) else None)
        requests.append(
            api.Request(
                id=name if len(prompts) == 1 else f"{name}-{index}",
                prompt=ids,
                sampling=sampling,
                max_tokens=request.max_tokens or services.sampling.max_tokens,
                stop=stop,
                ignore_eos=bool(request.ignore_eos),
                n=request.n or 1,
                trace_id=trace_id,
                session=request.session_id,
                constraint=form.constraint,
                text=prompt if isinstance(prompt, str) else None,
            )
        )
    job = Job(
        id=name,
        created=int(time.time()),
        requests=tuple(requests),
        stream=bool(request.stream),
        usage=request.wants_usage,
        tier=tier(services, request),
        warnings=form.warnings,
    )
    only_echo = request.max_tokens == 0
    return CompletionJob(job, tuple(texts), logprobs, request.legacy_logprobs, bool(request.echo), only_echo)


def _encode(text: str, services: Services, *, reuse: bool) -> tuple[int, ...]:
    """The ids of a text; with `reuse` those that it had when it was generated, which another tokenisation of it would not be."""
    known = services.text_history.encode(text) if reuse else None
    return known or tuple(services.vocabulary.encode(text, special=True))


@router.post("/v1/completions", response_model=Completion, openapi_extra=json_body(CompletionRequest))
async def create(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Continue raw prompts."""
    body = await read_body(request, services.http.body_limit, services.timing)
    return await with_model(request, services, body, lambda body, own: answer(body, own, request.state.trace_id))


async def answer(body: bytes, services: Services, trace_id: str) -> Response:
    prepared = await services.preparation.run(lambda: prepare(body, services, trace_id))
    job = prepared.job
    texts = {request.id: text for request, text in zip(job.requests, prepared.texts, strict=True)}

    def remember(request: api.Request, ids: Sequence[int]) -> None:
        text = texts[request.id]
        if text is not None:
            services.text_history.record(text, request.prompt, ids)

    echoed = await _echoed(prepared, services)
    generation: Generation | None = None
    if not prepared.only_echo:
        generation = Generation(services, "completions", job.requests, "prompt", remember=remember)
    close = _nothing_to_close if generation is None else generation.close
    if job.stream:
        told = guarded(frames(generation, prepared, echoed, services), job.id, lambda error: frame(error.body))
        return EventSourceResponse(told, close, services.timing.write, job.headers())
    try:
        completion = await complete(generation, prepared, echoed, services)
    finally:
        close()
    tiers = [job.tier, *(usage.tier for usage in _usages(generation, prepared, services))]
    return JSONResponse(completion, headers=job.headers(weakest(tiers)))


def _nothing_to_close() -> None:
    """Of a response that only gives back its prompts."""


async def _echoed(prepared: CompletionJob, services: Services) -> list[PromptEcho]:
    """What each choice begins with; empty if that is nothing."""
    if not prepared.echo:
        return []
    requests = prepared.job.requests
    made = await echoes([one.prompt for one in requests], prepared.texts, prepared.logprobs, services)
    return [echo for echo, one in zip(made, requests, strict=True) for _ in range(one.n)]


def _usages(generation: Generation | None, prepared: CompletionJob, services: Services) -> Sequence[api.Usage]:
    if generation is not None:
        return generation.usages
    return [api.Usage(len(one.prompt), 0, tier=services.engine.model.tier) for one in prepared.job.requests]


async def complete(
    generation: Generation | None, prepared: CompletionJob, echoed: Sequence[PromptEcho], services: Services
) -> Completion:
    """The whole answer at once."""
    made: list[list[Piece]] = [[] for _ in range(len(echoed) if generation is None else generation.choices)]
    if generation is not None:
        async for pieces in generation.pieces():
            for piece in pieces or ():
                made[piece.index].append(piece)
    completion = _completion(prepared, services)
    completion["usage"] = usage_body(_usages(generation, prepared, services), prepared.job.tier)
    completion["choices"] = [
        _whole(index, pieces, prepared, echoed[index] if echoed else None, services)
        for index, pieces in enumerate(made)
    ]
    return completion


def _whole(
    index: int, pieces: Sequence[Piece], prepared: CompletionJob, echo: PromptEcho | None, services: Services
) -> CompletionChoice:
    text = "" if echo is None else echo.text
    logprobs = _logprobs(prepared, services, [one for piece in pieces for one in piece.logprobs], len(text))
    if echo is not None and echo.logprobs is not None and logprobs is not None and "tokens" in logprobs:
        logprobs = joined(echo.logprobs, logprobs)
    return {
        "index": index,
        "text": text + "".join(piece.content for piece in pieces),
        "logprobs": logprobs,
        "finish_reason": pieces[-1].finish if pieces else "length",
    }


async def frames(
    generation: Generation | None, prepared: CompletionJob, echoed: Sequence[PromptEcho], services: Services
) -> AsyncGenerator[bytes]:
    """The answer as server-sent events, each choice's prompt first if it is echoed."""
    for index, echo in enumerate(echoed):
        end = "length" if generation is None else None
        yield frame(_chunk(prepared, services, index, echo.text, echo.logprobs, end))
    if generation is not None:
        offsets = [len(echo.text) for echo in echoed] or [0] * generation.choices
        texts: dict[int, Frames] = {}

        def told(piece: Piece) -> bytes:
            if prepared.logprobs is not None or not piece.is_text:
                return frame(_next(prepared, services, piece, offsets))
            index = piece.index
            if index not in texts:
                texts[index] = Frames(lambda text: _chunk(prepared, services, index, text, None, None))
            return texts[index].frame(piece.content)

        async for pieces in generation.pieces(services.timing.keep_alive):
            if pieces is None:
                yield PING
            else:
                yield b"".join([told(piece) for piece in pieces])
    if prepared.job.usage:
        last = _completion(prepared, services)
        last["usage"] = usage_body(_usages(generation, prepared, services), prepared.job.tier)
        yield frame(last)
    yield DONE


def _next(prepared: CompletionJob, services: Services, piece: Piece, offsets: list[int]) -> Completion:
    """A chunk with what is new; `offsets` counts the characters of each choice's tokens so far."""
    logprobs = _logprobs(prepared, services, piece.logprobs, offsets[piece.index]) if piece.logprobs else None
    offsets[piece.index] += sum(len(one.token) for one in piece.logprobs)
    return _chunk(prepared, services, piece.index, piece.content, logprobs, piece.finish)


def _chunk(
    prepared: CompletionJob,
    services: Services,
    index: int,
    text: str,
    logprobs: LegacyLogprobs | MLXLogprobs | None,
    finish: str | None,
) -> Completion:
    chunk = _completion(prepared, services)
    choice: CompletionChoice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
    chunk["choices"] = [choice]
    if prepared.job.usage:
        chunk["usage"] = None
    return chunk


def _completion(prepared: CompletionJob, services: Services) -> Completion:
    return {
        "id": prepared.job.id,
        "object": "text_completion",
        "created": prepared.job.created,
        "model": services.engine.model.id,
        "system_fingerprint": FINGERPRINT,
        "choices": [],
    }


def _logprobs(
    prepared: CompletionJob, services: Services, tokens: Sequence[TokenLogprob], offset: int
) -> LegacyLogprobs | MLXLogprobs | None:
    if prepared.logprobs is None:
        return None
    if prepared.legacy:
        return legacy_logprobs(tokens, prepared.logprobs, offset)
    piece = services.vocabulary.piece
    pieces = [[piece(one.id), *(piece(top.id) for top in one.top)] for one in tokens] if prepared.logprobs else []
    return mlx_logprobs(tokens, prepared.logprobs, pieces)
