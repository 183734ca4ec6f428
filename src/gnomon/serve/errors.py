"""Failures a client hears of: one exception, and how it becomes a response. Messages name the field, the value and the limit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from gnomon.engine.api import (
    EngineError,
    EngineUnavailable,
    Failed,
    InvalidRequest,
    ModelUnavailable,
    QueueFull,
    UnknownModel,
)
from gnomon.serve.wire.errors import AnthropicErrorBody, ErrorBody

SHOWN = 80
"""Characters of an offending value that a message repeats."""


ANTHROPIC_PATHS = "/v1/messages"
"""Errors of the routes that begin so have Anthropic's body."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

ENDED = frozenset({"engine_stopped", "engine_failed"})
"""Codes of failures that are the engine's end and no fault of the request."""


class APIError(Exception):
    """A request that gets an error in place of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> AnthropicErrorBody:
        """The same as Anthropic's API says it."""
        kind = "api_error" if self.status >= 500 else _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> JSONResponse:
        """The response to a request for `path`, whose API decides on the body."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATHS) else self.body
        return JSONResponse(body, self.status, self.headers)


class ClientDisconnected(Exception):
    """The client left before its answer was complete; nobody reads what is sent now."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """A request with a field that can't be honoured: 400."""
    return APIError(400, message, param=param, code=code)


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Generator[None]:
    """Have errors raised inside name the fields as `names` maps them, the first that fits."""
    try:
        yield
    except APIError as error:
        for chat, own in names.items():
            if error.param is not None and error.param.startswith(chat):
                error.param = own + error.param.removeprefix(chat)
                if error.message.startswith(chat):
                    error.message = own + error.message.removeprefix(chat)
                break
        raise


def too_many(message: str, retry_after: int, code: str = "queue_full") -> APIError:
    """More requests wait than may: 429 with Retry-After in seconds."""
    return APIError(
        429, message, type="rate_limit_error", code=code, headers={"retry-after": str(max(1, int(retry_after)))}
    )


def unavailable(message: str, code: str = "engine_unavailable") -> APIError:
    """The engine is draining or gone, or one model is: 503."""
    return APIError(503, message, type="server_error", code=code, headers={"retry-after": "5"})


def internal(
    message: str = "internal error: the server's log has the details", code: str = "internal_error"
) -> APIError:
    return APIError(500, message, type="server_error", code=code)


def from_engine(error: EngineError) -> APIError:
    """What a request refused by the engine gets."""
    message = str(error)
    if isinstance(error, QueueFull):
        return too_many(message, error.retry_after)
    if isinstance(error, UnknownModel):
        return APIError(404, message, param="model", code="model_not_found")
    if isinstance(error, ModelUnavailable):
        return unavailable(message, "model_unavailable")
    if isinstance(error, EngineUnavailable):
        return unavailable(message)
    if isinstance(error, InvalidRequest):
        return invalid(message, error.param, error.code)
    return internal(message, "engine_error")


def from_failed(event: Failed) -> APIError:
    """What a request that failed after it was admitted gets."""
    if event.refusal is not None:
        return from_engine(event.refusal)
    if event.code == "engine_died":
        return APIError(502, event.message, type="server_error", code=event.code)
    if event.fatal or event.code in ENDED:
        return APIError(503, event.message, type="server_error", code=event.code)
    if event.code == "out_of_memory":
        return APIError(503, event.message, type="server_error", code=event.code, headers={"retry-after": "5"})
    if event.code == "grammar_failed":
        # Too many ways to read the text: the grammar was the client's.
        return invalid(event.message, code=event.code)
    return internal(event.message, event.code)


def show(value: Any) -> str:
    """A value as JSON, cut to a readable length. Never raises, whatever the client sent."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):  # integers beyond the interpreter's digit limit; nesting beyond its stack
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def path_of(loc: Sequence[int | str]) -> str:
    """`("messages", 0, "role")` → `messages[0].role`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


_TYPES = {
    "bool_type": "bool",
    "int_type": "int",
    "int_from_float": "int",
    "int_parsing": "int",
    "float_type": "float",
    "float_parsing": "float",
    "string_type": "str",
    "list_type": "list",
    "dict_type": "object",
    "model_type": "object",
    "model_attributes_type": "object",
}


def _limit(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else str(limit)


def _describe(error: ErrorDetails) -> str:
    kind, value, about = error["type"], show(error["input"]), error.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind in _TYPES:
        return f"must be of type {_TYPES[kind]}, got {value}"
    if kind == "greater_than_equal":
        return f"must be at least {_limit(about['ge'])}, got {value}"
    if kind == "less_than_equal":
        return f"must be at most {_limit(about['le'])}, got {value}"
    if kind == "finite_number":
        return f"must be a finite number, got {value}"
    if kind == "literal_error":
        return f"must be one of {about['expected']}, got {value}"
    return f"is not valid: {error['msg']}, got {value}"


def from_validation(error: ValidationError) -> APIError:
    """The first thing wrong with a body, in the words of mlx-lm's server where it has some."""
    first = error.errors(include_url=False)[0]
    param = path_of(first["loc"])
    return invalid(f"{param} {_describe(first)}", param)


def install(app: FastAPI, routes: Sequence[Route]) -> None:
    """Give the refusals of `routes`, unknown routes and wrong methods the error body."""

    async def refused(request: Request, error: Exception) -> Response:
        return cast("APIError", error).response(request.url.path)

    async def engine(request: Request, error: Exception) -> Response:
        return from_engine(cast("EngineError", error)).response(request.url.path)

    async def parameters(request: Request, error: Exception) -> Response:
        first = cast("Sequence[ErrorDetails]", cast("RequestValidationError", error).errors())[0]
        # The first part of the place is "query" or "path".
        param = path_of(first["loc"][1:])
        return invalid(f"{param} {_describe(first)}", param).response(request.url.path)

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def http(request: Request, error: Exception) -> Response:
        error = cast("HTTPException", error)
        if error.status_code == 404:
            message, code = f"no such route: {request.method} {request.url.path}", "unknown_route"
        elif error.status_code == 405:
            # The framework tells the methods of the path's first route only.
            known = (*routes, *(one for one in app.routes if isinstance(one, Route)))
            fitting = (route for route in known if route.matches(request.scope)[0] is not Match.NONE)
            allowed = ", ".join(sorted({method for route in fitting for method in route.methods or ()}))
            error = HTTPException(405, headers={"allow": allowed})
            message = f"method {request.method} is not allowed for {request.url.path}; allowed: {allowed}"
            code = "method_not_allowed"
        else:
            message, code = str(error.detail or HTTPStatus(error.status_code).phrase), None
        return APIError(error.status_code, message, code=code, headers=error.headers).response(request.url.path)

    app.add_exception_handler(APIError, refused)
    app.add_exception_handler(EngineError, engine)
    app.add_exception_handler(RequestValidationError, parameters)
    app.add_exception_handler(ClientDisconnected, gone)
    app.add_exception_handler(HTTPException, http)
