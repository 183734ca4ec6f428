"""Every operation that has a native version."""

from __future__ import annotations

from gnomon.kernels import attention, codes, matmul, norm, quantized_matmul, recurrent, rope, vocabulary
from gnomon.kernels.dispatch import Operation

ALL: tuple[Operation, ...] = (
    *quantized_matmul.OPERATIONS,
    *matmul.OPERATIONS,
    *norm.OPERATIONS,
    *rope.OPERATIONS,
    *attention.OPERATIONS,
    *codes.OPERATIONS,
    *recurrent.OPERATIONS,
    *vocabulary.OPERATIONS,
)
