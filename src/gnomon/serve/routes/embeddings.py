"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gnomon.chat.embedding import prompt_for
from gnomon.engine.api import EngineError
from gnomon.serve.body import parse, read_body
from gnomon.serve.choose import with_model
from gnomon.serve.errors import from_engine, invalid
from gnomon.serve.prepare import check_ids, check_size
from gnomon.serve.schema import json_body
from gnomon.serve.services import Services, services_of
from gnomon.serve.wire.embeddings import EmbeddingBody, EmbeddingList, EmbeddingRequest

router = APIRouter()


@router.post("/v1/embeddings", response_model=EmbeddingList, openapi_extra=json_body(EmbeddingRequest))
async def create(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Turn texts into vectors of length 1."""
    body = await read_body(request, services.http.body_limit, services.timing)
    return await with_model(request, services, body, answer)


async def answer(body: bytes, services: Services) -> Response:
    asked, prompts = await services.preparation.run(lambda: prepare(body, services))
    try:
        vectors = await asyncio.wrap_future(services.engine.embed(prompts))
    except EngineError as error:
        raise from_engine(error) from error
    width = len(vectors[0])
    if asked.dimensions is not None and asked.dimensions > width:
        raise invalid(f"dimensions must be at most {width}, got {asked.dimensions}", "dimensions")
    tokens = sum(map(len, prompts))
    made: EmbeddingList = {
        "object": "list",
        "data": [_body(index, vector, asked) for index, vector in enumerate(vectors)],
        "model": services.engine.model.id,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return JSONResponse(made)


def prepare(body: bytes, services: Services) -> tuple[EmbeddingRequest, list[tuple[int, ...]]]:
    """Parse, check and tokenise. Raises APIError 400."""
    asked = parse(EmbeddingRequest, body)
    inputs = asked.inputs()
    prompts: list[tuple[int, ...]] = []
    for index, one in enumerate(inputs):
        where = "input" if len(inputs) == 1 else f"input[{index}]"
        if isinstance(one, str):
            check_size((one,), services, where)
        text = one if isinstance(one, str) else check_ids(one, services.engine.model.vocab_size, where)
        ids = prompt_for(services.vocabulary, text, asked.instruction)
        if not ids:
            raise invalid(f"{where} must not be empty", where)
        prompts.append(ids)
    return asked, prompts


def _body(index: int, vector: Sequence[float], asked: EmbeddingRequest) -> EmbeddingBody:
    values = np.asarray(vector, dtype="<f4")
    if asked.dimensions is not None and asked.dimensions < len(values):
        # What is left of a unit vector is one again.
        values = values[: asked.dimensions]
        values = (values / max(float(np.linalg.norm(values)), 1e-12)).astype("<f4")
    coded = asked.encoding_format == "base64"
    return {
        "object": "embedding",
        "index": index,
        "embedding": base64.b64encode(values.tobytes()).decode() if coded else values.tolist(),
    }
