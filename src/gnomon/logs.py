"""Logging set-up: lines of text or JSON on stderr, each with the id of the request it belongs to, if any."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import Any

from gnomon.config import LogConfig

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Set by whoever handles a request; threads that serve many pass `extra={"request_id": ...}` in its place."""

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "taskName", "color_message"}

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _RequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = request_id.get()
        return True


class TextFormatter(logging.Formatter):
    """`12:34:56 warning gnomon.engine [chatcmpl-1] message`."""

    def format(self, record: logging.LogRecord) -> str:
        about: str | None = getattr(record, "request_id", None)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        # A message may carry what a client wrote: it stays on its line and steers no terminal.
        message = _CONTROL.sub(lambda m: m[0].encode("unicode_escape").decode(), record.getMessage())
        line = f"{clock} {record.levelname.lower()} {record.name}{f' [{about}]' if about else ''} {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JSONFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, message, request_id, and whatever came in `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {key: value for key, value in vars(record).items() if key not in _PLAIN}
        line |= {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if about := getattr(record, "request_id", None):
            line["request_id"] = about
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup(config: LogConfig) -> None:
    """Send the root logger to stderr in the chosen shape. Chatty libraries stay at warning unless debug is asked for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if config.log_format == "json" else TextFormatter())
    handler.addFilter(_RequestId())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = getattr(logging, config.log_level.upper())
    root.setLevel(level if level == logging.DEBUG else max(level, logging.WARNING))
    logging.getLogger("gnomon").setLevel(level)
