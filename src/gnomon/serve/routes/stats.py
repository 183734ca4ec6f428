"""GET /stats and /stats/stream: the engine's counters, and the HTTP side's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from gnomon.serve.errors import too_many
from gnomon.serve.routes.health import reason
from gnomon.serve.services import Services, services_of
from gnomon.serve.sse import EventSourceResponse, frame

router = APIRouter()

PROMPT_TEXT = frozenset({"before", "prompt", "stored"})
"""Fields of a miss with words of prompts."""
MAX_STREAMS = 32
"""Streams of statistics at once: each costs a look at everything as often as it asks for."""


@router.get("/stats")
async def stats(services: Annotated[Services, Depends(services_of)], model: str | None = None) -> dict[str, Any]:
    """Sections as plain JSON; those of the engine come from the engine, with a pool from that of `model`, or of the one asked last."""
    return everything(services, model)


@router.get("/stats/stream", response_model=None, responses={200: {"content": {"text/event-stream": {}}}})
async def stream(
    services: Annotated[Services, Depends(services_of)],
    interval: Annotated[float, Query(ge=0.1, le=60)] = 1.0,
    model: str | None = None,
) -> EventSourceResponse:
    """What `/stats` says, with `health`, every `interval` seconds until the server drains."""
    everything(services, model)  # an unknown model is an error before the stream begins
    metrics = services.metrics
    if metrics.watchers >= MAX_STREAMS:
        said = f"{metrics.watchers} streams of statistics are open, and no more than {MAX_STREAMS} may be"
        raise too_many(said, 5, "too_many_streams")
    metrics.watchers += 1

    def closed() -> None:
        metrics.watchers -= 1

    return EventSourceResponse(_frames(services, interval, model), closed, services.timing.write)


async def _frames(services: Services, interval: float, model: str | None) -> AsyncGenerator[bytes]:
    while True:
        health = services.whole.health()
        body = {"status": health.state} if health.state == "ok" else {"status": health.state, "reason": reason(health)}
        yield frame({"health": body, **everything(services, model)})
        if health.state in ("draining", "stopped", "failed"):
            return
        await asyncio.sleep(interval)


def everything(services: Services, model: str | None = None) -> dict[str, Any]:
    """The body of `/stats`. With a pool the engine's sections are those of `model`; raises UnknownModel."""
    engine = services.engine.stats() if services.pool is None else services.pool.stats(model)
    shown = services.engine.model.id if services.pool is None else engine["pool"]["shown"]
    preparation, metrics = services.preparation, services.metrics
    every = [services] if services.pool is None else list(services.models.values())
    histories = [history for one in every for history in (one.chat_history, one.text_history)]
    cache: dict[str, Any] | None = engine.get("prompt_cache")
    if cache is not None and len(services.keys.names) > 1:
        # What one key asked is no other key's to read.
        misses = [{k: v for k, v in miss.items() if k not in PROMPT_TEXT} for miss in cache.get("recent_misses", ())]
        engine = {**engine, "prompt_cache": {**cache, "recent_misses": misses}}
    return {
        "server": {
            "owner": services.owner,
            "model": shown,
            "started_at": int(services.started_at),
        },
        **engine,
        "generations": {"open": metrics.open, **metrics.counts},
        "preparation": {
            "running": preparation.running,
            "waiting": preparation.waiting,
            "limit": preparation.limit,
            "workers": preparation.workers,
        },
        "response_store": services.responses.stats(),
        "history": {
            "entries": sum(map(len, histories)),
            "characters": sum(one.num_characters for one in histories),
            "reuses": sum(one.reuses for one in histories),
        },
        "keys": services.keys.stats(),
        **({"fetch": services.fetcher.stats()} if services.fetcher is not None else {}),
        "latency": metrics.summary(),
    }
