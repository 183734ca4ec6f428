"""GET /stats: the engine's counters, and the HTTP side's."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from gnomon.serve.services import Services, services_of

router = APIRouter()


@router.get("/stats")
async def stats(services: Annotated[Services, Depends(services_of)]) -> dict[str, Any]:
    """Sections as plain JSON; those of the engine come from the engine."""
    preparation, metrics = services.preparation, services.metrics
    histories = (services.chat_history, services.text_history)
    return {
        "server": {
            "owner": services.owner,
            "model": services.engine.model.id,
            "started_at": int(services.started_at),
        },
        **services.engine.stats(),
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
        "latency": metrics.summary(),
    }
