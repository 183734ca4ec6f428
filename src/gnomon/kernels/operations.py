"""Every operation that has a native version."""

from __future__ import annotations

from gnomon.kernels import quantized_matmul
from gnomon.kernels.dispatch import Operation

ALL: tuple[Operation, ...] = (*quantized_matmul.OPERATIONS,)
