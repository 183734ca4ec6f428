"""The cache's second tier, on disk, and how long either tier keeps what."""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gnomon.config.units import GiB
from gnomon.options import option


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """States of prompts and answers on disk. Sizes are in bytes."""

    ssd_cache: Path | None = option(
        None, "also keep states of prompts and answers in this directory; they outlive the server", metavar="DIR"
    )
    ssd_cache_max: int | None = option(
        None,
        "most that all files there may take; the ones used longest ago go first",
        low=0.001,
        high=1e6,
        unit="GiB",
        scale=GiB,
    )
    ssd_cache_min_free: int = option(
        2 * GiB, "free space of that disk below which nothing is written", low=0, high=1e6, unit="GiB", scale=GiB
    )
    ssd_cache_verify: bool = option(
        False, "check the hash of every array read from there, beside the sum over the file that is always checked"
    )
    ssd_cache_demote_idle: float = option(
        300.0,
        "memory gives up states that are on disk and were not used for so long; 0 keeps them",
        aliases=("--ssd-demote-idle",),
        low=0,
        high=1e9,
        unit="s",
    )
    ssd_cache_queue: int = option(
        GiB // 2,
        "memory for states on their way to disk, beside --prompt-cache",
        low=0.001,
        high=1e6,
        unit="GiB",
        scale=GiB,
    )
    ssd_writebehind: bool = option(
        True, "write states when they are made; off: when memory gives them up, and at a flush"
    )
    session_cache: bool = option(True, "states of requests that name a session are the last that memory gives up")
