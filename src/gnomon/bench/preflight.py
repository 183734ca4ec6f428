"""Is the machine fit for measuring? Labels or refuses a busy one, watches it during a run and keeps it awake."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gnomon.bench.environment import thread_variables
from gnomon.bench.schema import Preflight

log = logging.getLogger(__name__)

MAX_OTHERS_CPU = 0.10
"""Share of the machine's processor time that others may use before it counts as busy."""
MAX_SWAP_BYTES = 1 << 30
MAX_SWAP_GROWTH = 3 << 30
"""A measurement during which swap grew by so much is void."""
MIN_AVAILABLE = 0.10
MAX_CELSIUS = 90.0
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


class BusyMachine(RuntimeError):
    """The machine isn't fit for measuring and the caller wanted a quiet one."""


class CPUWatch:
    """Share of the machine's processor time used by processes outside the watched trees, between two calls of `read`."""

    def __init__(self, roots: list[int] | None = None) -> None:
        self._roots = roots if roots is not None else [os.getpid()]
        self._own: dict[int, float] = {}
        self._before = self._times()
        self._own_seconds()

    @staticmethod
    def _times() -> tuple[float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        busy = times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)
        return idle, busy

    def _own_seconds(self) -> float:
        """Processor seconds the watched trees used since the last call. Children that came and went between calls are missed."""
        now: dict[int, float] = {}
        for root in self._roots:
            try:
                process = psutil.Process(root)
                family = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            for member in family:
                try:
                    times = member.cpu_times()
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                now[member.pid] = times.user + times.system + times.children_user + times.children_system
        used = sum(max(0.0, seconds - self._own.get(pid, 0.0)) for pid, seconds in now.items())
        self._own = now
        return used

    def read(self) -> float:
        """Share in [0, 1] since the last call (or the construction)."""
        idle, busy = self._times()
        own = self._own_seconds()
        total = (idle - self._before[0]) + (busy - self._before[1])
        others = (busy - self._before[1]) - own
        self._before = (idle, busy)
        return min(1.0, max(0.0, others / total)) if total > 0 else 0.0


def _temperature() -> float | None:
    sensors = getattr(psutil, "sensors_temperatures", None)
    if sensors is None:
        return None
    readings = [entry.current for entries in sensors().values() for entry in entries if entry.current]
    return max(readings) if readings else None


def _on_battery() -> bool | None:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def preflight(window: float = 1.0) -> Preflight:
    """Look at the machine for `window` seconds. Its verdict is `busy`, with reasons, if any limit above is exceeded."""
    watch = CPUWatch()
    time.sleep(window)
    others = watch.read()
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    battery, temperature = _on_battery(), _temperature()
    governor = GOVERNOR.read_text().strip() if GOVERNOR.is_file() else None
    problems: list[str] = []
    if others > MAX_OTHERS_CPU:
        problems.append(f"other processes use {others:.0%} of the processors (limit {MAX_OTHERS_CPU:.0%})")
    if swap.used > MAX_SWAP_BYTES:
        problems.append(f"{swap.used / 2**30:.1f} GiB of swap are in use (limit {MAX_SWAP_BYTES / 2**30:.0f} GiB)")
    if memory.available < MIN_AVAILABLE * memory.total:
        problems.append(f"{memory.available / memory.total:.0%} of memory is available (limit {MIN_AVAILABLE:.0%})")
    if battery:
        problems.append("the machine runs on battery")
    if governor == "powersave":
        problems.append("the processor governor is powersave")
    if temperature is not None and temperature > MAX_CELSIUS:
        problems.append(f"a sensor reads {temperature:.0f} °C (limit {MAX_CELSIUS:.0f} °C)")
    return Preflight(
        verdict="busy" if problems else "quiet",
        problems=tuple(problems),
        others_cpu=round(others, 4),
        load_1m=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        memory_available_bytes=memory.available,
        swap_used_bytes=swap.used,
        on_battery=battery,
        governor=governor,
        temperature_celsius=temperature,
        thread_variables=thread_variables(),
    )


def require_quiet(found: Preflight) -> None:
    """Raise `BusyMachine` with all reasons unless the verdict is `quiet`."""
    if found.verdict != "quiet":
        raise BusyMachine("the machine is busy: " + "; ".join(found.problems))


class SwapGuard:
    """Says whether swap grew too much since the last look: the sample taken meanwhile is void."""

    def __init__(self, limit: int = MAX_SWAP_GROWTH) -> None:
        self._limit = limit
        self._before = psutil.swap_memory().used

    def disturbance(self) -> str | None:
        used = psutil.swap_memory().used
        grown, self._before = used - self._before, used
        return f"swap grew by {grown / 2**30:.1f} GiB during the sample" if grown >= self._limit else None


@contextmanager
def awake() -> Generator[str | None]:
    """Keep the machine from sleeping. Yields the means, or None where the platform offers none."""
    if sys.platform == "darwin":
        command = ["caffeinate", "-i", "-w", str(os.getpid())]
    else:
        command = ["systemd-inhibit", "--what=sleep:idle", "--who=gnomon", "--why=benchmark", "sleep", "infinity"]
    if shutil.which(command[0]) is None:
        log.info("%s is missing: nothing keeps the machine awake", command[0])
        yield None
        return
    holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield command[0]
    finally:
        holder.terminate()
        holder.wait()
