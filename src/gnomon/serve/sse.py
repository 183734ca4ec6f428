"""Server-sent events as OpenAI's and Anthropic's clients read them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gnomon.serve.body import disconnected
from gnomon.serve.errors import APIError, internal

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which clients skip: keeps the connection open, and finds out whether it still is."""
ABORT = "gnomon.abort"
"""Key of `scope["state"]` under which the server puts a function that drops the connection at once."""
WRITE = "gnomon.write"
"""Key of `scope["state"]` under which the server puts a function that takes a part of a response's body, once that has begun, unless it
has to wait for the client: it tells whether it took it."""


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_quoted = json.encoder.encode_basestring


def frame(value: Mapping[str, Any]) -> bytes:
    """One event: `data: {…}` and a blank line."""
    return f"data: {_encode(value)}\n\n".encode()


def event(value: Mapping[str, Any]) -> bytes:
    """One event that is named by its own `type`."""
    return f"event: {value['type']}\n".encode() + frame(value)


class Frames:
    """Frames that differ in one string only, of which the rest is encoded once."""

    def __init__(
        self, value: Callable[[str], Mapping[str, Any]], encode: Callable[[Mapping[str, Any]], bytes] = frame
    ) -> None:
        """`value` puts a string, which must be a value in it, wherever it belongs; `encode` is `frame` or `event`."""
        # A string that is nowhere else in it.
        mark = uuid.uuid4().hex
        self._parts = encode(value(mark)).decode().split(f'"{mark}"')

    def frame(self, text: str) -> bytes:
        """What `encode` makes of the value with `text`."""
        return _quoted(text).join(self._parts).encode()


async def guarded(frames: AsyncGenerator[bytes], name: str, last: Callable[[APIError], bytes]) -> AsyncGenerator[bytes]:
    """The frames of the answer `name`; where making them fails, `last` of the failure ends them."""
    async with contextlib.aclosing(frames):
        try:
            async for part in frames:
                yield part
        except APIError as error:
            yield last(error)
        except Exception:  # the status is sent: whatever it is, this request alone hears of it here
            logger.exception("stream %s failed", name)
            yield last(internal())


def _taken_by_nobody(part: bytes) -> bool:  # noqa: ARG001  (of servers that have no such function)
    return False


class EventSourceResponse(Response):
    """Sends frames as they come, and ends at once when the client leaves or doesn't take a frame for `write_timeout` seconds.

    `close` is called exactly once, however it ends, even if no frame was ever asked for.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes],
        close: Callable[[], None],
        write_timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        # The base class knows an empty body's length; a stream has none.
        del self.headers["content-length"]
        self.frames = frames
        self.close = close
        self.write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(scope, send))
        listener = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({writer, listener}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            self.close()
            listener.cancel()
            writer.cancel()
            await asyncio.gather(writer, listener, return_exceptions=True)
            await self.frames.aclose()

    async def _write(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        write: Callable[[bytes], bool] = scope.get("state", {}).get(WRITE, _taken_by_nobody)
        try:
            async for part in self.frames:
                if write(part):
                    continue
                async with asyncio.timeout(self.write_timeout):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except TimeoutError:
            logger.warning("client took no data for %g s: dropped", self.write_timeout)
            abort: Callable[[], None] | None = scope.get("state", {}).get(ABORT)
            if abort is not None:
                abort()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
