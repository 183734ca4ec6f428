"""GET /v1: who answers here."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from gnomon.serve.services import VERSION, Services, services_of
from gnomon.serve.wire.models import RootBody

router = APIRouter()
NAME = "gnomon"


@router.get("/v1")
async def root(services: Annotated[Services, Depends(services_of)]) -> RootBody:
    """Name, version, model and endpoints; also what tells a starting server that the port is taken."""
    return {"name": NAME, "version": VERSION, "model": services.whole.model.id, "endpoints": list(services.endpoints)}
