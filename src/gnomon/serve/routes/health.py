"""GET /health: the engine's heartbeat."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from gnomon.engine.api import Health
from gnomon.serve.services import Services, services_of
from gnomon.serve.wire.models import HealthBody

router = APIRouter()


def reason(health: Health) -> str:
    if health.message:
        return health.message
    if health.state == "stalled":
        return f"the engine's loop last turned {health.beat_age:.1f} s ago"
    return f"the engine is {health.state}"


@router.get("/health", response_model=HealthBody, responses={503: {"model": HealthBody}})
async def health(services: Annotated[Services, Depends(services_of)]) -> Response:
    """200 while the engine's loop turns, else 503 with its state and the reason."""
    now = services.whole.health()
    if now.state == "ok":
        body: HealthBody = {"status": "ok"}
    else:
        body = {"status": now.state, "reason": reason(now)}
    # The separators are part of the contract: supervisors compare the bytes.
    return Response(json.dumps(body), 200 if now.state == "ok" else 503, media_type="application/json")
