"""An HTTP server of completions that behaves and misbehaves on order. No model.

`python scripted_server.py PORT '{"gap": 0.01, "fault": "no usage"}'`; `after` answers so many requests well before the fault begins,
`memory` remembers prompts word by word (in the file `state` too, if that is given),
`loading` lists models before it is well.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path

PLAN = json.loads(sys.argv[2])
LOCK = threading.Lock()
STATE = Path(PLAN["state"]) if PLAN.get("state") else None
KNOWN: list[list[str]] = json.loads(STATE.read_text()) if STATE is not None and STATE.exists() else []
OPEN = 0
SEEN = 0
BEGAN = time.perf_counter()
TOGETHER = threading.Barrier(PLAN["together"]) if "together" in PLAN else None
"""No request is answered before so many are here."""


def reused(prompt: str) -> tuple[int, int]:
    """Words of the prompt, and how many of them the cache knew."""
    if not PLAN.get("memory"):
        return PLAN.get("prompt_tokens", 20), PLAN.get("cached", 0)
    words = prompt.split()
    with LOCK:
        found = max(
            (sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(words, old, strict=False))) for old in KNOWN),
            default=0,
        )
        KNOWN.append(words)
        if STATE is not None:
            STATE.write_text(json.dumps(KNOWN))
    return len(words), min(found, len(words) - 1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/stats" and PLAN.get("stats"):
            self._send(200, PLAN["stats"])
        elif self.path == "/stats":
            self._send(404, {})
        elif self.path == "/health" and time.perf_counter() - BEGAN < PLAN.get("loading", 0):
            self._send(503, {"error": {"message": "Loading model"}})
        else:
            self._send(200, {"object": "list", "data": [{"id": "scripted"}]})

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _event(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def do_POST(self) -> None:
        global OPEN, SEEN
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            OPEN += 1
            SEEN += 1
            fault = PLAN.get("fault") if PLAN.get("after", 0) < SEEN else None
            full = PLAN.get("slots", 1000) < OPEN
        try:
            self._answer(order, fault, full)
        except OSError:
            pass  # the client went
        finally:
            with LOCK:
                OPEN -= 1

    def _answer(self, order: dict, fault: str | None, full: bool) -> None:
        if fault in ("status", "500") or full:
            self._send(429 if full else 503 if fault == "status" else 500, {"error": {"message": "engine is draining"}})
            return
        count = order["max_tokens"]
        size, cached = reused(str(order.get("prompt")))
        said = {"count": count - 1, "undercount": 1, "overcount": count + 3, "null count": None}.get(fault or "", count)
        usage = {
            "prompt_tokens": size,
            "completion_tokens": said,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not order.get("stream"):
            text = PLAN.get("text", "a river")
            choice = {"message": {"content": text}} if "messages" in order else {"text": text}
            body = {"choices": [{**choice, "finish_reason": PLAN.get("finish", "length")}], "usage": usage}
            if fault == "no usage":
                del body["usage"]
            self._send(200, "nonsense" if fault == "nonsense" else body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if TOGETHER is not None:
            TOGETHER.wait(120)
        time.sleep(PLAN.get("read", 0.0) * (size - cached))
        for n in range(count):
            time.sleep(PLAN.get("gap", 0.0))
            if fault == "die" and n == 1:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if fault == "stall" and n == 1:
                time.sleep(30)
            if fault == "error" and n == 1:
                self._event(json.dumps({"error": {"message": "out of memory"}}))
                break
            if fault == "malformed" and n == 1:
                self._event('{"choices": [{"te')
            if fault == "list" and n == 1:
                self._event("[1]")
            # Two tokens in one chunk: chunks are not tokens.
            if n % 2:
                self._event(
                    json.dumps({"choices": [{"index": 0, "text": f" w{n}", "finish_reason": None}], "usage": None})
                )
        if fault != "no finish":
            self._event(json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        if fault != "no usage":
            self._event(json.dumps({"choices": [], "usage": usage}))
        if fault != "no end":
            self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


if __name__ == "__main__":
    if PLAN.get("fault") == "exit":
        sys.exit("cannot bind")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
