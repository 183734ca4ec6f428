"""The application: routes, doors and limits around one engine."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from gnomon.chat.template import ChatTemplate
from gnomon.config import FetchConfig, HTTPConfig, SamplingDefaults
from gnomon.engine.api import Engine
from gnomon.fetch import Fetcher, Limits
from gnomon.isolate import ModelPool
from gnomon.serve import errors, schema, volatile
from gnomon.serve.auth import HostDoor, KeyDoor, OriginDoor
from gnomon.serve.choose import LeaseKeeper
from gnomon.serve.history import History
from gnomon.serve.keys import KeyRing
from gnomon.serve.limits import TRACE_HEADER, RequestFrame
from gnomon.serve.metrics import Metrics
from gnomon.serve.preparation import PreparationPool
from gnomon.serve.routes import (
    admin,
    chat_completions,
    completions,
    embeddings,
    health,
    messages,
    metrics,
    models,
    responses,
    root,
    stats,
    web,
)
from gnomon.serve.routes import (
    engine as engine_route,
)
from gnomon.serve.services import VERSION, Services, Timing, Vocabulary, Voice
from gnomon.serve.wire.admin import CloseSession, Drain
from gnomon.serve.wire.anthropic import MessagesRequest
from gnomon.serve.wire.chat import ChatRequest
from gnomon.serve.wire.completions import CompletionRequest
from gnomon.serve.wire.embeddings import EmbeddingRequest
from gnomon.serve.wire.responses import ResponsesRequest
from gnomon.trace import OFF, Tracer

ROUTES = (
    admin,
    chat_completions,
    completions,
    embeddings,
    messages,
    responses,
    models,
    root,
    health,
    stats,
    metrics,
    engine_route,
    web,
)
EXPOSED = ("x-request-id", "request-id", TRACE_HEADER, "x-gnomon-tier", volatile.HEADER, "retry-after", "warning")


def _routes() -> Iterator[APIRoute]:
    for module in ROUTES:
        yield from (route for route in module.router.routes if isinstance(route, APIRoute))


def _endpoints() -> Iterator[str]:
    for route in _routes():
        if route.include_in_schema:
            yield from (f"{method} {route.path_format}" for method in route.methods or ())


def _fetcher(fetch: FetchConfig) -> Fetcher | None:
    if not fetch.fetch_urls:
        return None
    return Fetcher(Limits(fetch.fetch_limit, fetch.fetch_timeout), anywhere=fetch.allow_private_media)


def create_app(
    engine: Engine,
    tokenizer: Vocabulary,
    template: ChatTemplate,
    http: HTTPConfig,
    sampling: SamplingDefaults,
    *,
    timing: Timing | None = None,
    owner: str = "gnomon",
    tracer: Tracer = OFF,
    fetch: FetchConfig | None = None,
    pool: ModelPool[Voice] | None = None,
) -> FastAPI:
    """An ASGI application over `engine`, or over the models of `pool`, of whose default the others are then.

    A request passes the frame (ids, head size, counts), the Host and Origin doors, CORS for allowed origins, the key, and then its
    route. Every refusal has OpenAI's error body, or Anthropic's on its routes. `owner` is what `/v1/models` says of the served model.
    Raises KeyFileError when the file of keys can't be used.
    """
    app = FastAPI(
        title="Gnomon",
        version=VERSION,
        description="A local language-model server that speaks OpenAI's and Anthropic's API.",
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False},
    )
    keys = KeyRing.of(http)
    app.state.services = services = Services(
        engine=engine,
        vocabulary=tokenizer,
        template=template,
        sampling=sampling,
        http=http,
        timing=timing or Timing(),
        keys=keys,
        metrics=Metrics(engine if pool is None else pool, keys),
        preparation=PreparationPool(http.preparation_queue),
        chat_history=History(tokenizer),
        text_history=History(tokenizer),
        owner=owner,
        pool=pool,
        tracer=tracer,
        fetcher=_fetcher(fetch or FetchConfig()),
        endpoints=tuple(sorted(_endpoints())),
    )
    for module in ROUTES:
        app.include_router(module.router)
    errors.install(app, tuple(_routes()))
    schema.install(
        app, (ChatRequest, CloseSession, CompletionRequest, Drain, EmbeddingRequest, MessagesRequest, ResponsesRequest)
    )
    # The last added is the outermost.
    app.add_middleware(LeaseKeeper)
    app.add_middleware(KeyDoor, keys=keys)
    if http.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=http.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    app.add_middleware(OriginDoor, origins=http.allowed_origins)
    # No browser reaches a unix socket, and its clients write what they like into Host.
    app.add_middleware(HostDoor, names=("*",) if http.unix else (http.host, *http.allowed_hosts))
    app.add_middleware(RequestFrame, header_limit=http.header_limit, metrics=services.metrics)
    return app
