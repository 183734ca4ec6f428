"""POST /admin/…: make the cache durable, end a session, and drain a model or the server."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gnomon.engine.api import FlushReport
from gnomon.serve import sessions
from gnomon.serve.body import parse, read_body, until_disconnect
from gnomon.serve.errors import APIError, invalid
from gnomon.serve.schema import json_body
from gnomon.serve.server import in_thread
from gnomon.serve.services import Services, services_of
from gnomon.serve.wire.admin import ClosedBody, CloseSession, Drain, DrainBody, FlushBody

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
    report = await until_disconnect(request, in_thread(lambda: services.whole.flush(timeout)))
    return JSONResponse(flush_body(report), 200 if report.durable else 503)


@router.post("/admin/cache/session/close", response_model=ClosedBody, openapi_extra=json_body(CloseSession))
async def close_session(request: Request, services: Annotated[Services, Depends(services_of)]) -> ClosedBody:
    """Stop holding on to a session's states. None of them is removed."""
    wanted = parse(CloseSession, await read_body(request, services.http.body_limit, services.timing))
    session = sessions.own(wanted.session_id)
    return {"closed": await in_thread(lambda: services.whole.close_session(session))}


@router.post(
    "/admin/drain",
    response_model=DrainBody,
    responses={503: {"model": DrainBody}},
    openapi_extra=json_body(Drain),
)
async def drain(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Let the open requests end and write the cache to disk; only over a unix socket.

    A model's process then ends, and starts again when the model is asked for. A whole server takes no request any more: what remains is
    to end it. 503 when requests were still open after `--shutdown-timeout-ms`, or not all is on disk.
    """
    if services.http.unix is None:
        raise APIError(403, "/admin/drain is open to a --unix socket only", code="unix_only")
    body = await read_body(request, services.http.body_limit, services.timing)
    wanted = parse(Drain, body or b"{}")
    work = _drain_all(services) if wanted.model is None else _drain_one(services, wanted.model)
    drained, report = await until_disconnect(request, work)
    cache = None if report is None else flush_body(report)
    done: DrainBody = {"drained": drained, "cache": cache}
    return JSONResponse(done, 200 if drained and (report is None or report.durable) else 503)


async def _drain_one(services: Services, model: str) -> tuple[bool, FlushReport | None]:
    pool, timeout = services.pool, services.http.shutdown_timeout
    if pool is None:
        raise invalid("model: a server of one model is drained as a whole", "model")
    return True, await in_thread(lambda: pool.unload(model, timeout))


async def _drain_all(services: Services) -> tuple[bool, FlushReport | None]:
    whole, timeout = services.whole, services.http.shutdown_timeout
    drained = await in_thread(lambda: whole.drain(timeout))
    if "ssd_cache" not in whole.stats():
        return drained, None
    return drained, await in_thread(lambda: whole.flush(timeout))
