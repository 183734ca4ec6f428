"""How fast this machine can read memory and multiply, measured once and cached, and how near to that a measured rate came.

On a CPU the limits are the machine's own (all cores, numpy and its BLAS), not those of MLX's stock CPU operations; on a GPU they are
measured with MLX. Bandwidth is measured as `fit` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gnomon.bench.cost import Cost
from gnomon.bench.environment import child_environment

CACHE_FORMAT = 1
REPEATS = 5
CPU_SIDE = 2048
GPU_SIDE = 8192


@dataclass(frozen=True, slots=True)
class Roofline:
    """Limits of a device: bytes read per second, and operations per second in the given dtype. `quiet` tells how the machine was."""

    device: str
    machine: str
    mlx: str
    bytes_per_second: float
    operations_per_second: float
    dtype: str
    quiet: bool
    measured: str

    def seconds(self, cost: Cost) -> float:
        """Least time of a cost: reading and multiplying may overlap entirely."""
        return max(cost.bytes / self.bytes_per_second, cost.operations / self.operations_per_second)

    def bound(self, cost: Cost) -> str:
        """Which limit holds: "bandwidth" or "arithmetic"."""
        reading = cost.bytes / self.bytes_per_second
        return "bandwidth" if reading >= cost.operations / self.operations_per_second else "arithmetic"

    def fraction(self, cost: Cost, seconds: float) -> float:
        """Share of the limit that a measured time for that cost reached. Raises `ValueError` unless the time is positive."""
        if seconds <= 0:
            raise ValueError(f"a measured time must be positive, not {seconds}")
        return self.seconds(cost) / seconds


def _best(work: Callable[[], object]) -> float:
    """Shortest time in seconds of several repetitions, after one to warm up."""
    work()
    times: list[float] = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _measure_cpu() -> tuple[float, str]:
    import numpy as np

    a = np.ones((CPU_SIDE, CPU_SIDE), dtype=np.float32)
    return 2 * CPU_SIDE**3 / _best(lambda: a @ a), "float32"


def _measure_gpu() -> tuple[float, str]:
    import mlx.core as mx

    a = mx.ones((GPU_SIDE, GPU_SIDE), dtype=mx.bfloat16)
    mx.eval(a)
    return 2 * GPU_SIDE**3 / _best(lambda: mx.eval(a @ a)), "bfloat16"


def measure() -> Roofline:
    """Measure in this process, in about ten seconds. Thread variables of this process count; `roofline` runs it in a clean child."""
    import mlx.core as mx

    from gnomon.bench.preflight import preflight
    from gnomon.bench.provenance import device, machine
    from gnomon.bench.store import now
    from gnomon.models.machine import cpu_bandwidth, cuda_bandwidth

    quiet = preflight().verdict == "quiet"
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    reading = 1e9 * (cpu_bandwidth() if on_cpu else cuda_bandwidth())
    operations, dtype = _measure_cpu() if on_cpu else _measure_gpu()
    return Roofline(device(), machine(), metadata.version("mlx"), reading, operations, dtype, quiet, now().isoformat())


def _cached(path: Path) -> Roofline | None:
    from gnomon.bench.provenance import device, machine

    try:
        stored: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    if stored.get("format") != CACHE_FORMAT:
        return None
    found = Roofline(**stored["roofline"])
    same = (found.device, found.machine, found.mlx) == (device(), machine(), metadata.version("mlx"))
    return found if same else None


def roofline(cache: Path, *, remeasure: bool = False) -> Roofline:
    """This machine's limits, from `cache` if they were measured with this device and MLX, else measured in a child and stored there.

    Raises `RuntimeError` if the child fails.
    """
    known = None if remeasure else _cached(cache)
    if known is not None:
        return known
    command = [sys.executable, "-m", "gnomon.bench.roofline"]
    done = subprocess.run(
        command, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"measuring the roofline failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    found = Roofline(**json.loads(done.stdout))
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"format": CACHE_FORMAT, "roofline": asdict(found)}))
    partial.replace(cache)
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
