"""The native kernels of this process: built, loaded and put in place once, whoever asks first."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import mlx.nn as nn
import psutil

from gnomon.kernels import blocks, build, dispatch, layers, operations

if TYPE_CHECKING:
    # A start on a CPU needs none of these modules, nor the models that they know.
    from gnomon.kernels.cuda.graphs import Graphs

log = logging.getLogger(__name__)

Policy = Literal["auto", "native", "int8", "stock"]
HOPPER = 90
"""The compute capability, times ten, that the CUDA kernels were checked and measured on."""
MOST_DEFAULT_THREADS = 16

CUDA = "cuda"
"""What stands for an instruction set where the kernels are those of `gnomon.kernels.cuda`."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs and why. `reason` says why operations are stock though native ones were asked for."""

    policy: Policy
    native: bool
    reason: str | None = None
    isa: str | None = None
    threads: int = 0
    path: Path | None = None
    build_seconds: float = 0.0
    integer: bool = False
    """Whether products of 4- and 8-bit weights round activations to 8 bits instead of 16."""
    layers: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many layers of each class were swapped for fused ones."""
    graph: str | None = None
    """On CUDA, what keeps decode steps from being one launch; None if nothing does."""

    @property
    def name(self) -> str:
        """What runs, as far as speed depends on it."""
        return f"{self._kind} {self.isa} x{self.threads}" if self.native else "stock"

    @property
    def identity(self) -> str:
        """Whose operations run: others give other bits."""
        if self.isa == CUDA:
            from gnomon.kernels.cuda import sources

            return f"native {CUDA} {sources.version()}"
        return f"{self._kind} {self.isa} {self.path.parent.name}" if self.native and self.path is not None else "stock"

    @property
    def _no_graph(self) -> str | None:
        from gnomon.kernels.cuda import decode

        return self.graph or next(iter(decode.graph_failures), None)

    @property
    def _kind(self) -> str:
        return "int8" if self.integer else "native"

    def stats(self) -> Mapping[str, Any]:
        """For `/stats`, as plain JSON values."""
        return {
            "policy": self.policy,
            "native": self.native,
            "int8": self.integer,
            "reason": self.reason,
            "isa": self.isa,
            "threads": self.threads,
            "layers": dict(self.layers),
            **({"graph": self._no_graph is None, "graph_reason": self._no_graph} if self.isa == CUDA else {}),
            "operations": dispatch.installed() if self.native else [],
            "stock_calls": dict(dispatch.stock_calls),
        }


_lock = threading.Lock()
_extension: ModuleType | None = None
_build: build.Build | None = None
_graphs: Graphs | None = None
_no_graphs: str | None = None


def start(
    policy: Policy = "auto",
    *,
    cache: Path,
    threads: int | None = None,
    isa: str = "auto",
    compiler: str | None = None,
    graph: bool = True,
    progress: Callable[[str], None] = log.info,
) -> Kernels:
    """Prepare what `policy` asks for and let the calling thread's steps take it.

    Builds on first use, into `cache`. A machine on which that fails gets one warning and stock operations. Threads and
    instruction set are the process's: the last engine to start decides. Raises ValueError for threads or an instruction set that can't be.
    """
    wanted = meant(policy)
    if wanted == "native" and is_cuda():
        from gnomon.kernels.cuda import operations as cuda_operations

        dispatch.install(cuda_operations.ALL, cuda_operations)
        dispatch.choose(True)
        return Kernels(
            policy, True, isa=CUDA, graph=_load_graphs(cache, compiler, progress) if graph else "switched off"
        )
    integer = wanted == "int8"
    if wanted == "stock" or mx.default_device() != mx.Device(mx.cpu):
        dispatch.choose(False)
        reason = (
            None
            if wanted == "stock"
            else f"{'int8' if integer else 'native'} kernels are for CPUs{'' if integer else ' and CUDA'}, "
            f"the default device is {mx.default_device()}"
        )
        if integer:
            log.warning("%s: operations are stock", reason)
        return Kernels(policy, False, reason)
    try:
        extension, made = _load(cache, compiler, progress)
    except build.BuildError as e:
        log.warning("native CPU kernels are not available, using MLX's own operations: %s", e)
        dispatch.choose(False)
        return Kernels(policy, False, str(e))
    extension.set_isa(isa)
    extension.set_threads(threads or default_threads())
    dispatch.install(operations.ALL, extension)
    dispatch.choose(True, integer)
    return Kernels(policy, True, None, extension.isa(), extension.threads(), made.path, made.seconds, integer)


def prepare(
    model: nn.Module,
    policy: Policy = "auto",
    *,
    cache: Path,
    threads: int | None = None,
    graph: bool = True,
    progress: Callable[[str], None] = log.warning,
) -> Kernels:
    """`start`, then swap the layers of a model that the calling thread will step."""
    kernels = start(policy, cache=cache, threads=threads, graph=graph, progress=progress)
    if kernels.isa == CUDA:
        from gnomon.kernels.cuda import chunks, decode, mixtures, recurrent

        steps = decode.swap(model, _graphs if kernels.graph is None else None)
        found = {
            **mixtures.swap(model),
            **recurrent.swap(model),
            **steps,
            **(chunks.swap(model) if chunks.ran(model) else {}),
        }
        why = (
            None
            if hasattr(model, "decoder")
            else f"models of {type(model).__module__} such as this have no compiled step"
        )
        return replace(kernels, layers=found, graph=kernels.graph or why)
    extension = _extension
    if not kernels.native or extension is None:
        return kernels
    swapped = layers.swap(model, extension, kernels.integer)
    return replace(kernels, layers={**swapped, **blocks.swap(model, extension)})


def _load(cache: Path, compiler: str | None, progress: Callable[[str], None]) -> tuple[ModuleType, build.Build]:
    global _extension, _build
    with _lock:
        if _extension is None or _build is None:
            made = build.ensure(cache, compiler=compiler, progress=progress)
            _extension, _build = build.load(made), made
        return _extension, _build


def meant(policy: Policy) -> Literal["native", "int8", "stock"]:
    """What a policy means here. A path is what `auto` means only where it won its paired comparisons: on Linux CPUs and Hopper GPUs."""
    if policy != "auto":
        return policy
    if is_cuda():
        from gnomon.kernels.cuda.sources import capability

        return "native" if capability() == HOPPER else "stock"
    return "native" if sys.platform == "linux" else "stock"


def _load_graphs(cache: Path, compiler: str | None, progress: Callable[[str], None]) -> str | None:
    """Get ready to make graphs: None, or what is in the way."""
    global _graphs, _no_graphs
    with _lock:
        if _graphs is None and _no_graphs is None:
            try:
                from gnomon.kernels.cuda import graphs

                _graphs = graphs.load(cache, compiler, progress)
            # RuntimeError: a build of before the driver went or became another.
            except (build.BuildError, RuntimeError) as e:
                log.warning(
                    "decode steps are launched kernel by kernel, which costs the host a few times as much: %s", e
                )
                _no_graphs = str(e)
        return _no_graphs


def is_cuda() -> bool:
    """Whether MLX computes on an NVIDIA GPU by default."""
    return mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu)


def extension() -> ModuleType | None:
    """The loaded extension, if there is one."""
    return _extension


def default_threads() -> int:
    """Fast cores that this process may run on, up to 16: decoding is bound by memory long before that.

    On hybrid CPUs only the performance cores count: a chunk on a slow core is one that all others wait for.
    """
    allowed = os.sched_getaffinity(0)
    fast = allowed & _performance_cores() or allowed
    physical = psutil.cpu_count(logical=False) or len(fast)
    return max(1, min(len(fast), physical, MOST_DEFAULT_THREADS))


def _performance_cores() -> set[int]:
    """Logical CPUs of the fastest kind, as the kernel tells them: Intel's `cpu_core` device, or the highest `cpu_capacity` on arm64."""
    try:
        return _cpu_list(Path("/sys/devices/cpu_core/cpus").read_text())
    except (OSError, ValueError):
        pass
    capacities: dict[int, int] = {}
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpu_capacity"):
        try:
            capacities[int(path.parent.name[3:])] = int(path.read_text())
        except (OSError, ValueError):
            continue
    best = max(capacities.values(), default=0)
    return {cpu for cpu, capacity in capacities.items() if capacity * 10 >= best * 8}


def _cpu_list(text: str) -> set[int]:
    """ "0-3,8" as a set."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
