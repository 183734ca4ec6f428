"""Which model a request is for: the one of its exact id where a server has several, loaded first if need be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gnomon.chat.spans import SpanCache
from gnomon.engine.api import EngineError
from gnomon.isolate import Lease, ModelPool
from gnomon.serve.body import parse_object, until_disconnect
from gnomon.serve.documents import with_documents
from gnomon.serve.errors import from_engine, invalid, show
from gnomon.serve.history import History
from gnomon.serve.services import Services, Voice

T = TypeVar("T")
HELD = "gnomon.leases"
"""Key of the scope under which the leases of a request are."""


class LeaseKeeper:
    """Gives back the leases of a request when its response has ended, however it did."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            scope[HELD] = held
            await self.app(scope, receive, send)


async def with_model(
    request: Request, services: Services, body: bytes, work: Callable[[bytes, Services], Awaitable[T]]
) -> T:
    """The result of `work` with the body, documents that it names by URL put into it, and the services of the model that it asks for,
    which stays until the response has ended.

    A server of one model serves it whatever is asked for. Raises APIError: 404 for a model that isn't here, 429 when too many requests
    wait for one, 503 with the reason when it can't be had, 400 for a document that can't be; ClientDisconnected when the client leaves
    first.
    """

    async def chosen() -> T:
        own = await services_for(request, services, body)
        return await work(await with_documents(body, own), own)

    return await until_disconnect(request, chosen())


async def services_for(request: Request, services: Services, body: bytes) -> Services:
    """The services of the model that `body` asks for."""
    pool = services.pool
    if pool is None:
        return services
    fields = await services.preparation.run(lambda: parse_object(body))
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid(f"model must be of type str, got {show(model)}", "model")
    lease = await _acquire(pool, model)
    held: ExitStack = request.scope[HELD]
    held.callback(lease.release)
    return _own(services, lease)


async def _acquire(pool: ModelPool[Voice], model: str | None) -> Lease[Voice]:
    try:
        waiting = pool.acquire(model)
        try:
            return await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            # It may have come true in the meantime.
            waiting.add_done_callback(_give_back)
            raise
    except EngineError as error:
        raise from_engine(error) from error


def _give_back(done: Future[Lease[Voice]]) -> None:
    if not done.cancelled() and done.exception() is None:
        done.result().release()


def _own(services: Services, lease: Lease[Voice]) -> Services:
    """The services with what is a model's own; what it remembers of conversations outlives its process."""
    voice, known = lease.parts, services.models.get(lease.id)
    if known is None or known.vocabulary is not voice.vocabulary:
        known = replace(
            services,
            vocabulary=voice.vocabulary,
            template=voice.template,
            sampling=voice.sampling,
            chat_history=History(voice.vocabulary),
            text_history=History(voice.vocabulary),
            spans=SpanCache(),
        )
    if known.engine is not voice.engine:
        known = replace(known, engine=voice.engine)
    services.models[lease.id] = known
    return known
