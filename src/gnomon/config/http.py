"""Where the server listens and what it lets in."""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gnomon.config.units import KiB, MiB
from gnomon.options import option


@dataclass(frozen=True, slots=True)
class HTTPConfig:
    """Where the server listens and what it lets in. Limits are in bytes unless the name says otherwise."""

    host: str = option("127.0.0.1", "address to bind; others than loopback need --api-key or --api-key-file")
    port: int = option(8080, "TCP port; 0 takes a free one", low=0, high=65_535)
    unix: Path | None = option(None, "listen on this unix socket in place of TCP", metavar="PATH")
    api_keys: tuple[str, ...] = option(
        (), "bearer key that clients must send; may be repeated", flag="--api-key", secret=True
    )
    api_key_file: Path | None = option(
        None,
        "further keys: lines NAME:sha256$HEX, as `gnomon key new` prints them; read again when it changes",
        metavar="FILE",
    )
    key_concurrency: int | None = option(
        None, "requests that one API key may have under way; more get 429", low=1, high=1_000_000
    )
    prompt_cache_per_key: bool = option(
        False,
        "reuse for a request only states that requests of the same API key left: none can guess at another's prompts",
    )
    allowed_hosts: tuple[str, ...] = option((), "further Host header accepted; may be repeated", flag="--allowed-host")
    allowed_origins: tuple[str, ...] = option(
        (), "further Origin accepted from browsers; may be repeated", flag="--allowed-origin"
    )
    body_limit: int = option(64 * MiB, "largest request body", low=0.001, high=16_384, unit="MiB", scale=MiB)
    header_limit: int = option(64 * KiB, "largest request head", low=1, high=1024, unit="KiB", scale=KiB)
    stable_prompts: bool = option(
        True, "move lines that known clients change with every request off the front of system prompts"
    )
    preparation_queue: int = option(64, "requests that may wait for rendering and tokenising", low=1, high=1_000_000)
    no_open: bool = option(False, "don't open the chat page in a browser when started from a terminal")
    shutdown_timeout_ms: int = option(
        120_000, "how long open requests may finish after SIGTERM", low=0, high=86_400_000, unit="ms"
    )

    @property
    def shutdown_timeout(self) -> float:
        """In seconds."""
        return self.shutdown_timeout_ms / 1000
