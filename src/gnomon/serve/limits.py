"""The outermost layer: request ids, trace ids, the size of the request head, and the count and time of every request."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gnomon.logs import request_id as about
from gnomon.serve import sessions
from gnomon.serve.errors import APIError, internal, show
from gnomon.serve.metrics import Metrics

logger = logging.getLogger("gnomon.serve.access")

HEADER_COUNT = 128
PROBED = frozenset({"/health", "/metrics"})
"""Asked for every few seconds by supervisors: logged only when something is wrong."""
TRACE_HEADER = "x-gnomon-trace-id"
_TRACE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestFrame:
    """Checks the head of a request, names it, and counts it when its response has ended.

    `scope["state"]` gets `request_id` and `trace_id` (the adopted `x-gnomon-trace-id`, else the request id); both go back as
    `x-request-id` (and `request-id`, as Anthropic's clients read it) and `x-gnomon-trace-id`.
    """

    def __init__(self, app: ASGIApp, header_limit: int, metrics: Metrics) -> None:
        self.app = app
        self.header_limit = header_limit
        self.metrics = metrics

    def _refusal(self, scope: Scope, trace_id: str | None) -> APIError | None:
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self.header_limit:
            return APIError(
                431, f"the request head has {size} bytes; the limit is {self.header_limit}", code="head_too_large"
            )
        if len(scope["headers"]) > HEADER_COUNT:
            return APIError(
                431,
                f"the request has {len(scope['headers'])} headers; the limit is {HEADER_COUNT}",
                code="head_too_large",
            )
        if trace_id is not None and not _TRACE_ID.fullmatch(trace_id):
            return APIError(
                400,
                f"{TRACE_HEADER} must be 1 to 128 characters of A-Z a-z 0-9 . _ : / + = -, got {show(trace_id)}",
                param=TRACE_HEADER,
            )
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy that goes by the other one sees other requests on this connection (RFC 9112, 6.3 and 11.2).
            said = (
                "the request has both transfer-encoding and content-length: where its body ends can be read in two ways"
            )
            return APIError(400, said, code="ambiguous_body", headers={"connection": "close"})
        session = headers.get(sessions.HEADER, "")
        if len(session) > sessions.MAX_CHARACTERS:
            return APIError(
                400,
                f"{sessions.HEADER} has {len(session)} characters; the limit is {sessions.MAX_CHARACTERS}",
                param=sessions.HEADER,
            )
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = f"req_{uuid.uuid4().hex}"
        trace_id = Headers(scope=scope).get(TRACE_HEADER)
        refusal = self._refusal(scope, trace_id)
        trace_id = trace_id if trace_id is not None and refusal is None else request_id
        scope.setdefault("state", {}).update(request_id=request_id, trace_id=trace_id)
        about.set(request_id)
        sessions.named.set(Headers(scope=scope).get(sessions.HEADER) or None)
        sessions.key_name.set(None)
        sent: list[int] = []

        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent.append(message["status"])
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id
                headers[TRACE_HEADER] = trace_id
            await send(message)

        try:
            await (self.app if refusal is None else refusal.response(scope["path"]))(scope, receive, framed)
        except Exception:  # nobody foresaw it: the client hears of it with the id under which the log has it
            if sent:
                raise
            logger.exception("%s of %s failed", scope["method"], getattr(scope.get("route"), "path", "unmatched"))
            await internal().response(scope["path"])(scope, receive, framed)
        finally:
            # Without a response the client had left.
            status = sent[0] if sent else 499
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "unmatched")
            self.metrics.request(scope["method"], route, status, seconds)
            level = logging.DEBUG if scope["path"] in PROBED and status == 200 else logging.INFO
            # As it came, percent-encoded: the decoded path may hold line breaks.
            raw: bytes = scope.get("raw_path") or b"?"
            target = raw.decode("ascii", "replace")
            key: str | None = scope["state"].get("key_name")
            line = (scope["method"], target, status, seconds * 1e3, f" key {key}" if key else "")
            logger.log(level, "%s %s %d %.1f ms%s", *line, extra={"key": key} if key else None)
