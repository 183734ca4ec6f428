"""This machine as `fit` sees it: its memory, and its memory bandwidth from the table of chips or measured once."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import psutil

from gnomon.hub.headers import read_json
from gnomon.models.fit import UNKNOWN_CHIP_GBPS, sku

log = logging.getLogger(__name__)

FORMAT: Final = 1
FILE: Final = "bandwidth.json"
_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """`ram` is the memory models share, in bytes (the GPU's own on CUDA), `gbps` its bandwidth in GB/s, `origin` how that is known."""

    name: str
    device: Literal["metal", "cuda", "cpu"]
    ram: int
    gbps: float
    origin: Literal["table", "measured", "assumed"]


def this_machine(cache: Path) -> Machine:
    """Describe this machine. A measurement is kept in `cache` and made again only for another processor or GPU."""
    ram = memory()
    if platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string") or "unknown chip"
        row = sku(name)
        return Machine(name, "metal", ram, row.gbps if row else UNKNOWN_CHIP_GBPS, "table" if row else "assumed")
    gpu = _cuda()
    if gpu is not None:
        return Machine(gpu[0], "cuda", ram, _remembered(cache, f"cuda {gpu[0]}", cuda_bandwidth), "measured")
    name = _processor()
    key = f"cpu {name} x{os.cpu_count()}"
    return Machine(name, "cpu", ram, _remembered(cache, key, cpu_bandwidth), "measured")


def memory() -> int:
    """Bytes of the memory that models share: the GPU's own on CUDA, else the machine's."""
    gpu = _cuda() if platform.system() != "Darwin" else None
    return gpu[1] if gpu is not None else psutil.virtual_memory().total


def _remembered(cache: Path, key: str, measure: Callable[[], float]) -> float:
    path = cache / FILE
    store = read_json(path) or {}
    known = store.get("gbps") if store.get("format") == FORMAT else None
    found = dict(known) if isinstance(known, dict) else {}
    if not isinstance(found.get(key), int | float):
        found[key] = round(measure(), 2)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"format": FORMAT, "gbps": found}, indent=2) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            log.warning("the measured bandwidth can't be kept, so it is measured again each time: %s", error)
    return float(found[key])


def cpu_bandwidth(nbytes: int = 256 << 20) -> float:
    """GB/s at which all cores together copy memory, reads and writes counted: the best of a few passes over `nbytes`."""
    threads = os.cpu_count() or 1
    source = np.ones(nbytes // 8 // threads * threads, np.float64).reshape(threads, -1)
    target = np.empty_like(source)
    target.fill(0.0)
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            # numpy lets go of the interpreter while it copies.
            for done in [pool.submit(np.copyto, target[row], source[row]) for row in range(threads)]:
                done.result()

        return 2 * source.nbytes / _best(copy) / 1e9


def cuda_bandwidth(nbytes: int = 1 << 30) -> float:
    """GB/s at which the GPU copies memory through MLX, reads and writes counted. Call it on the thread that uses the GPU."""
    import mlx.core as mx

    source = mx.ones(nbytes // 4, mx.float32)
    mx.eval(source)
    return 2 * nbytes / _best(lambda: mx.eval(source + 1.0)) / 1e9


def _best(work: Callable[[], None]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    work()
    return min(once() for _ in range(_REPEATS))


def _cuda() -> tuple[str, int] | None:
    """Name and memory in bytes of the CUDA device MLX would use, if any."""
    try:
        import mlx.core as mx
    except ImportError:
        return None
    if not mx.cuda.is_available():
        return None
    info = mx.device_info()
    name = str(info.get("device_name") or "CUDA GPU")
    for key in ("total_memory", "memory_size"):
        if isinstance(total := info.get(key), int) and total:
            return name, total
    return name, psutil.virtual_memory().total


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
