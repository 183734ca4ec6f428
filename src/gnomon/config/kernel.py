"""Which implementation of an operation runs."""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from gnomon.options import option


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Which implementation of an operation runs."""

    kernels: Literal["auto", "native", "int8", "stock"] = option(
        "auto",
        "auto: native on a Linux CPU and on GPUs of compute capability 9.0, else stock; native: our own kernels; "
        "int8: those, with activations rounded to 8 bits before 4- and 8-bit weights; stock: MLX's own operations",
    )
    threads: int | None = option(None, "threads of the native CPU kernels; all fast cores, up to 16", low=1, high=1024)
    kernel_cache: Path = option(
        Path(platformdirs.user_cache_dir("gnomon", appauthor=False)) / "kernels",
        "builds of the native CPU kernels; apart from --cache, so that all caches of a machine share them",
        metavar="DIR",
    )
    cuda_graph: bool = option(True, "launch a decode step's kernels on CUDA at once; off: one by one")
    l1: bool = option(False, "equal to mlx-lm to the bit: stock operations only")

    @property
    def stock(self) -> bool:
        return self.l1 or self.kernels == "stock"
