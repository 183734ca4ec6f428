"""Kernels made from the sources beside this file.

MLX compiles a kernel when it is first evaluated and keeps the result on disk under the kernel's name, so a name has a hash of all that
went into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]


@cache
def header(file: str) -> str:
    """The text of a source file of this package."""
    return resources.files(__package__).joinpath(file).read_text()


def make(
    name: str,
    file: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    *,
    block: int,
    blocks_per_processor: int = 1,
    any_strides: bool = False,
) -> Kernel:
    """A kernel whose `body` uses what `file` defines.

    `block` threads and `blocks_per_processor` bound its registers. With `any_strides`, inputs that are not contiguous are passed as they
    are, otherwise MLX copies them.
    """
    text = header(file)
    parts = (text, body, ",".join(inputs), ",".join(outputs), str(block), str(blocks_per_processor))
    full = f"gnomon_{name}_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"
    # MLX writes the signature; its own name as a macro puts the bounds in front of it. Were the prefix another, there would be no bounds.
    symbol = f"custom_kernel_{full}"
    bounds = f"#define {symbol} __launch_bounds__({block}, {blocks_per_processor}) {symbol}\n"
    options: dict[str, Any] = {"ensure_row_contiguous": not any_strides}
    return mx.fast.cuda_kernel(
        name=full,
        input_names=list(inputs),
        output_names=list(outputs),
        source=body,
        header=text + bounds,
        **options,
    )
