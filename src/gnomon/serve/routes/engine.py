"""GET /engine: the process the engine runs in."""

from __future__ import annotations

import os
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from gnomon.serve.services import Services, services_of

router = APIRouter()


@router.get("/engine")
async def engine(services: Annotated[Services, Depends(services_of)]) -> dict[str, Any]:
    """The child's pid and restarts under `--isolate`; without it the engine shares this process.

    With a pool the process is the default model's, with nulls while it isn't loaded.
    """
    if services.pool is not None:
        return {**services.pool.process(), "response_store": services.responses.stats()}
    own = {"isolated": False, "pid": os.getpid(), "restarts": 0, "socket": None}
    return {**services.engine.stats().get("isolation", own), "response_store": services.responses.stats()}
