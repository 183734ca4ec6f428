"""Logging and traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.options import option


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logging to stderr. Prompts and answers are logged only when asked for."""

    log_format: Literal["text", "json"] = option("text", "shape of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severity logged")
    log_prompts: bool = option(False, "the server logs prompts and answers too")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Phase traces of requests."""

    p2r_trace: bool = option(False, "write the phases of every request to stderr as JSON lines")
    p2r_sync: bool = option(False, "wait for the device at the end of every traced phase; slows the engine")
    otlp_endpoint: str | None = option(
        None,
        "send the phases as OpenTelemetry spans to this OTLP collector (needs the extra otel)",
        env_aliases=("OTEL_EXPORTER_OTLP_ENDPOINT",),
        metavar="URL",
    )
