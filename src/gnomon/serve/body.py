"""Reading a request: its body within the limit, its JSON, and whether the client is still there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Receive

from gnomon.serve.errors import APIError, ClientDisconnected, from_validation, invalid, show, unavailable
from gnomon.serve.services import Timing

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


def _refused(status: int, message: str, code: str | None = None) -> APIError:
    """What is still to come of the body is not read: the connection can carry no other request."""
    return APIError(status, message, code=code, headers={"connection": "close"})


def _too_large(size: str, limit: int) -> APIError:
    return _refused(413, f"the request body {size}; the limit is {limit} bytes", "body_too_large")


async def read_body(request: Request, limit: int, timing: Timing) -> bytes:
    """The whole body. Raises APIError: 413 above `limit` bytes, 408 when it pauses or comes too slowly, 415 when encoded."""
    timeout, begun = timing.read, time.monotonic()
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise _refused(415, f"content-encoding {encoding!r} is not supported; send the body as it is")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(f"has {declared} bytes", limit)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        try:
            async with asyncio.timeout(timeout):
                message = await request.receive()
        except asyncio.CancelledError:
            # Only the server's end cancels a request, and one that hasn't arrived has done nothing yet.
            raise unavailable("the server stopped before the request had arrived") from None
        except TimeoutError:
            raise _refused(408, f"no byte of the request body came for {timeout:g} s", "body_timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(f"has {size} bytes and more", limit)
        seconds = time.monotonic() - begun
        if seconds > timeout + size / timing.pace:
            said = f"{size} bytes of the request body came in {seconds:.0f} s; after {timeout:g} s it must be {timing.pace:g} a second"
            raise _refused(408, said, "body_timeout")
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; NaN, Infinity, lone surrogates and other invalid JSON raise APIError 400."""
    try:
        value: Any = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, got {show(value)}", code="invalid_json")
    return cast("dict[str, Any]", value)


def parse(model: type[Model], body: bytes) -> Model:
    """The request in `body`. Raises APIError 400 naming the field at fault. Fields the model doesn't know are ignored."""
    fields = parse_object(body)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None


async def disconnected(receive: Receive) -> None:
    """Return when the client has left. To be awaited once the body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, with ClientDisconnected raised, when the client leaves first."""
    worker = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({worker, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnected
        return worker.result()
    finally:
        listener.cancel()
        worker.cancel()
        await asyncio.gather(worker, listener, return_exceptions=True)
