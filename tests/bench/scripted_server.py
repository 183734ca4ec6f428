"""An HTTP server of completions that behaves and misbehaves on order. No model.

`python scripted_server.py PORT '{"gap": 0.01, "fault": "no usage"}'`
"""

from __future__ import annotations

import json
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLAN = json.loads(sys.argv[2])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
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
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = PLAN.get("fault")
        if fault == "status":
            self._send(503, {"error": {"message": "engine is draining"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = order["max_tokens"]
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
            # Two tokens in one chunk: chunks are not tokens.
            if n % 2:
                self._event(
                    json.dumps({"choices": [{"index": 0, "text": f" w{n}", "finish_reason": None}], "usage": None})
                )
        if fault != "no finish":
            self._event(json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        if fault != "no usage":
            said = count - 1 if fault == "count" else count
            usage = {
                "prompt_tokens": 20,
                "completion_tokens": said,
                "prompt_tokens_details": {"cached_tokens": PLAN.get("cached", 0)},
            }
            self._event(json.dumps({"choices": [], "usage": usage}))
        if fault != "no end":
            self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


if __name__ == "__main__":
    if PLAN.get("fault") == "exit":
        sys.exit("cannot bind")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
