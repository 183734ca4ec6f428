"""Whether the model is split over several processes."""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.options import option

Backend = Literal["off", "ring", "nccl", "mpi", "jaccl"]


@dataclass(frozen=True, slots=True)
class DistributedConfig:
    """Which processes hold the model together, each a part of every layer. `mlx.launch` starts them and tells each its rank."""

    distributed: Backend = option(
        "off",
        "split the model over the processes that mlx.launch started with this backend; rank 0 serves, the others follow it",
    )
    distributed_host: str = option(
        "127.0.0.1", "address of rank 0 at which the other processes follow it; give each the same", metavar="HOST"
    )
