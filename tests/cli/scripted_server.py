"""A local HTTP server that says what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Script:
    """`answers` are given in turn: a list of chunks to stream (strings go out as they are, functions are
    called in between), or (status, body)."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.url = ""


def chat(*deltas: Any, reason: str = "stop", tokens: int = 3, done: bool = True) -> list[Any]:
    """A stream as OpenAI sends it."""
    chunks: list[Any] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]},
        ": keep-alive",
    ]
    chunks += [
        delta if callable(delta) else {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in deltas
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}})
    return [*chunks, "data: [DONE]"] if done else chunks


@contextmanager
def scripted(make: type[Any] = ThreadingHTTPServer, address: Any = ("127.0.0.1", 0)) -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            script.asked.append((self.path, {}, dict(self.headers)))
            self._json(200, {"object": "list", "data": [{"id": "scripted-model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            script.asked.append((self.path, body, dict(self.headers)))
            answer = script.answers.pop(0)
            if isinstance(answer, tuple):
                self._json(*answer)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for chunk in answer:
                if callable(chunk):
                    chunk()
                    continue
                line = chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}"
                self.wfile.write(f"{line}\n\n".encode())
                self.wfile.flush()

        def _json(self, status: int, body: Any) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(make):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients that leave are part of the script."""

    server = Server(address, Handler)
    script.url = f"http://127.0.0.1:{server.server_address[1]}" if isinstance(address, tuple) else f"unix:{address}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
