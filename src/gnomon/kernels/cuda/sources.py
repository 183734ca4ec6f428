"""Kernels made from the sources beside this file.

MLX compiles a kernel when it is first evaluated and keeps the result under the kernel's name, so a name has a hash of all that went into
it. At every evaluation MLX goes through a kernel's whole text, so that text only includes the source file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]


@cache
def header(file: str) -> tuple[Path, str]:
    """A source file of this package, and its text with that of the files beside it that it includes."""
    path = Path(__file__).with_name(file)
    text = path.read_text()
    return path, "".join(
        [text, *(header(name)[1] for name in re.findall(r'^#include "(\w+\.cuh)"', text, re.MULTILINE))]
    )


def version() -> str:
    """A short hash of all kernels' sources: others may give other bits."""
    texts = (path.read_text() for path in sorted(Path(__file__).parent.glob("*.cuh")))
    return hashlib.sha256("|".join(texts).encode()).hexdigest()[:12]


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
    path, text = header(file)
    parts = (text, body, ",".join(inputs), ",".join(outputs), str(block), str(blocks_per_processor))
    full = f"gnomon_{name}_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"
    # MLX writes the signature; its own name as a macro puts the bounds in front of it, and the body ends the macro, since MLX asks for the
    # name afterwards. Were the prefix another, there would be no bounds.
    symbol = f"custom_kernel_{full}"
    bounds = f"#define {symbol} __launch_bounds__({block}, {blocks_per_processor}) {symbol}\n"
    options: dict[str, Any] = {"ensure_row_contiguous": not any_strides}
    kernel = mx.fast.cuda_kernel(
        name=full,
        input_names=list(inputs),
        output_names=list(outputs),
        source=f"{body}\n#undef {symbol}\n",
        header=f'#include "{path}"\n{bounds}',
        **options,
    )
    return cast("Kernel", kernel)
