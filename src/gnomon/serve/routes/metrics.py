"""GET /metrics: Prometheus' text."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from gnomon.serve.services import Services, services_of

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(services: Annotated[Services, Depends(services_of)]) -> Response:
    """Every counter, gauge and histogram."""
    return Response(services.metrics.text(), media_type=CONTENT_TYPE_LATEST)
