"""POST /admin/cache/…: make the cache durable, and end a session."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gnomon.engine.api import FlushReport
from gnomon.serve.body import parse, read_body, until_disconnect
from gnomon.serve.schema import json_body
from gnomon.serve.server import in_thread
from gnomon.serve.services import Services, services_of
from gnomon.serve.wire.admin import ClosedBody, CloseSession, FlushBody

router = APIRouter()


def flush_body(report: FlushReport) -> FlushBody:
    """A report as the route says it."""
    return {
        "durable": report.durable,
        "flushedSnapshots": report.flushed,
        "pendingSnapshots": report.pending,
        "pendingSpills": report.pending_spills,
        "pendingSpillBytes": report.pending_spill_bytes,
        "droppedSpills": report.dropped,
        "failedSpills": report.failed,
        "missingSnapshots": report.missing,
        "elapsedMs": round(report.seconds * 1e3, 3),
        "entries": report.entries,
        "longest_durable_prefix_tokens": report.longest,
    }


@router.post("/admin/cache/flush", response_model=FlushBody, responses={503: {"model": FlushBody}})
async def flush(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Write every state that only memory holds: 200 when all of them are on disk, else 503."""
    await read_body(request, services.http.body_limit, services.timing)
    timeout = services.http.shutdown_timeout
    report = await until_disconnect(request, in_thread(lambda: services.engine.flush(timeout)))
    return JSONResponse(flush_body(report), 200 if report.durable else 503)


@router.post("/admin/cache/session/close", response_model=ClosedBody, openapi_extra=json_body(CloseSession))
async def close_session(request: Request, services: Annotated[Services, Depends(services_of)]) -> ClosedBody:
    """Stop holding on to a session's states. None of them is removed."""
    wanted = parse(CloseSession, await read_body(request, services.http.body_limit, services.timing))
    return {"closed": await in_thread(lambda: services.engine.close_session(wanted.session_id))}
