"""One connection: uvicorn's protocol, with error bodies of ours and an end to clients that never finish a request's head."""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gnomon.serve.errors import APIError
from gnomon.serve.sse import ABORT, WRITE

logger = logging.getLogger(__name__)


class Protocol(H11Protocol):
    """uvicorn's, with OpenAI's error body for what isn't HTTP, and a way to drop a client that has stopped reading.

    A head may take `head_seconds` from the connection, or from its own first byte, to its last, however steadily its bytes come.
    """

    def __init__(self, *args: Any, head_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: transport.abort, WRITE: self._write}
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_head_timer()
        super().connection_lost(exc)

    def _write(self, part: bytes) -> bool:
        """Send a part of a body that is under way in chunks; False if it isn't, or the client has to read first.

        A chunk is no change of state, so that it need not pass the layers and h11, which cost several times as much as its text.
        """
        cycle = self.cycle
        if (
            not cycle.response_started
            or cycle.response_complete
            or cycle.disconnected
            or self.flow.write_paused
            or self.conn.their_http_version != b"1.1"
            or self.conn.our_state is not h11.SEND_BODY
        ):
            return False
        if part:
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def _watch_head(self) -> None:
        """Start the clock of a head that is not there yet; stop it when it is."""
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            self._unset_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        begun, _ = self.conn.trailing_data
        if begun:
            said = f"the request head was not complete after {self.head_seconds:g} s"
            self._refuse(APIError(408, said, code="head_timeout"))
        else:
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        # Whoever asks for a WebSocket gets an answer over HTTP; the log needs no advice on packages to install.
        logger.debug("an upgrade of the connection was asked for and is not offered")

    def send_400_response(self, msg: str) -> None:
        self._refuse(APIError(400, msg, code="invalid_http"))

    def _refuse(self, error: APIError) -> None:
        """Answer what is no request, and close."""
        body = json.dumps(error.body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
