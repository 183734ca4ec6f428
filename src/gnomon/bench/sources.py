"""Memory of a server by where it comes from: what the system counts for its processes, and what the server says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import psutil

_ROLLUP = {
    "Pss": "proportional_bytes",
    "Pss_Anon": "anonymous_bytes",
    "Pss_File": "file_backed_bytes",
    "Pss_Shmem": "shared_memory_bytes",
    "Swap": "swapped_bytes",
}
"""Fields of /proc/PID/smaps_rollup, in KiB. Proportional shares can be added up over processes: shared pages count once."""
_STATS = {
    "active_bytes": ("memory", "active_bytes"),
    "peak_active_bytes": ("memory", "peak_bytes"),
    "allocator_cache_bytes": ("memory", "cache_bytes"),
    "prompt_cache_bytes": ("prompt_cache", "bytes"),
    "disk_cache_bytes": ("ssd_cache", "bytes"),
}
"""Metrics and where `/stats` has them, sections and fields."""


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty once it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def system_memory(pid: int) -> dict[str, float]:
    """Bytes of a process tree by source, as far as this system tells: on Linux from smaps_rollup, elsewhere nothing."""
    found: dict[str, float] = {}
    for member in family(pid):
        try:
            lines = Path(f"/proc/{member.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # no such file system, or the process is gone
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name in _ROLLUP:
                found[_ROLLUP[name]] = found.get(_ROLLUP[name], 0.0) + float(rest.split()[0]) * 1024
    return found


def stated_memory(stats: Mapping[str, Any]) -> dict[str, float]:
    """Bytes that a server states in its `/stats`, by the names of metrics; what it doesn't state is left out."""
    found: dict[str, float] = {}
    for metric, (section, field) in _STATS.items():
        part = stats.get(section)
        value = cast("Mapping[str, Any]", part).get(field) if isinstance(part, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[metric] = float(value)
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time that a process tree has used so far."""
    total = 0.0
    for member in family(pid):
        try:
            times = member.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += times.user + times.system
    return total
