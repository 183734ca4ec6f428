"""An OpenAI-compatible server without a model that streams by the clock and remembers what it did.

    uv run python benchmarks/load_check/timed.py --port PORT [--first 0.1] [--gap 0.025] [--name timed]

Token n of an answer goes out `first + n * gap` seconds after its request has come, whoever else is served: what every request of a load
must take is known beforehand. One event loop with next to no work in it, so that the generator has the processor to itself. `GET /record`
lists all answers that have ended: instants of the system's monotonic clock at which the request was there, its first and its last token
went out, and their number, so that a load generator's own times of the same requests can be held against them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Served:
    """One answer: instants in seconds of `perf_counter`, which is the monotonic clock of all processes on Linux."""

    arrived: float
    first: float
    ended: float
    tokens: int
    prompt: str


class Connection(asyncio.Protocol):
    """One client's connection: requests one after another, answers by the clock."""

    def __init__(self, first: float, gap: float, name: str, record: list[Served]) -> None:
        self._first, self._gap, self._name, self._record = first, gap, name, record
        self._held = b""
        self._due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (the protocol names it)
        if self._due is not None:
            self._due.cancel()

    def data_received(self, data: bytes) -> None:
        self._held += data
        while b"\r\n\r\n" in self._held:
            head, rest = self._held.split(b"\r\n\r\n", 1)
            asked, *lines = head.decode("latin-1").split("\r\n")
            headers = {
                name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                return
            self._held = rest[length:]
            method, path, _ = asked.split(" ", 2)
            self._answer(method, path, rest[:length])

    def _answer(self, method: str, path: str, body: bytes) -> None:
        arrived = time.perf_counter()
        if method == "GET":
            models = {"object": "list", "data": [{"id": self._name, "object": "model"}]}
            found = {"/v1/models": models, "/health": {"status": "ok"}, "/record": [asdict(s) for s in self._record]}
            self._whole(200 if path in found else 404, found.get(path, {}))
            return
        order: dict[str, Any] = json.loads(body)
        count = order.get("max_tokens") or order.get("max_completion_tokens")
        if path not in ("/v1/completions", "/v1/chat/completions") or not order.get("stream") or not count:
            self._whole(400, {"error": {"message": "only streamed completions of max_tokens"}})
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._token(order, path.startswith("/v1/chat"), arrived, int(count), 0, 0.0)

    def _token(self, order: dict[str, Any], chat: bool, arrived: float, count: int, sent: int, first: float) -> None:
        """Send the tokens that are due, or wait for the next one."""
        now = time.perf_counter()
        due = arrived + self._first + sent * self._gap
        if now < due:
            arguments = (order, chat, arrived, count, sent, first)
            self._due = asyncio.get_running_loop().call_later(due - now, self._token, *arguments)
            return
        choice = {"index": 0, "delta": {"content": f" w{sent}"}} if chat else {"index": 0, "text": f" w{sent}"}
        last = sent + 1 == count
        events = self._event(order, chat, [{**choice, "finish_reason": "length" if last else None}])
        first = first or now
        if last:
            prompt = str(order["messages"][-1]["content"] if chat else order["prompt"])
            words = len(prompt.split())
            usage = {"prompt_tokens": words, "completion_tokens": count, "total_tokens": words + count}
            if (order.get("stream_options") or {}).get("include_usage"):
                events += self._event(order, chat, [], usage)
            events += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            self._record.append(Served(arrived, first, now, count, prompt))
            self._transport.write(events)
            return
        self._transport.write(events)
        self._token(order, chat, arrived, count, sent + 1, first)

    def _event(
        self, order: dict[str, Any], chat: bool, choices: list[Any], usage: dict[str, int] | None = None
    ) -> bytes:
        body = {
            "id": "cmpl-1",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 0,
            "model": order.get("model", self._name),
            "choices": choices,
            "usage": usage,
        }
        return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def _whole(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} .\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self._transport.write(head.encode() + data)


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve(port: int, first: float, gap: float, name: str) -> None:
    """Serve on the loopback until cancelled."""
    record: list[Served] = []
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(first, gap, name, record), "127.0.0.1", port
    )
    async with server:
        await server.serve_forever()


def timed_command(first: float, gap: float) -> Callable[[int], list[str]]:
    """Command line of such a server, by port."""
    times = ["--first", str(first), "--gap", str(gap)]
    return lambda port: [sys.executable, str(Path(__file__).resolve()), "--port", str(port), *times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first", type=float, default=0.1, metavar="SECONDS", help="from a request to its first token")
    parser.add_argument("--gap", type=float, default=0.025, metavar="SECONDS", help="between two tokens of an answer")
    parser.add_argument("--name", default="timed", help="the model's name")
    args = parser.parse_args()
    asyncio.run(serve(args.port, args.first, args.gap, args.name))


if __name__ == "__main__":
    main()
