"""Which implementation of an operation runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.options import option


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Which implementation of an operation runs."""

    kernels: Literal["auto", "native", "stock"] = option(
        "auto", "auto: what won on this platform; native: our own kernels; stock: MLX's own operations"
    )
    threads: int | None = option(None, "threads of the native CPU kernels; all fast cores, up to 16", low=1, high=1024)
    l1: bool = option(False, "equal to mlx-lm to the bit: stock operations only")

    @property
    def stock(self) -> bool:
        return self.l1 or self.kernels == "stock"
