"""Kernels made from the sources beside this file.

A kernel is run by MLX (`mx.fast.cuda_kernel`), or recorded as one of a chain that becomes a CUDA graph (`record`).

MLX compiles a kernel when it is first evaluated and keeps the result under the kernel's name, so a name has a hash of all that went into
it. At every evaluation MLX goes through a kernel's whole text, so that text only includes the source file.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

Grid = tuple[int, int, int]


class Recorder(Protocol):
    """Takes down calls of kernels instead of running them."""

    def record(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        grid: Grid,
        block: int,
    ) -> list[Any]:
        """What stands for the kernel's outputs."""
        ...


class _Thread(threading.local):
    recorder: Recorder | None = None


thread = _Thread()
"""Who takes down the calling thread's kernels, if anybody does."""


@cache
def header(file: str) -> tuple[Path, str]:
    """A source file of this package, and its text with that of the files beside it that it includes."""
    path = Path(__file__).with_name(file)
    text = path.read_text()
    included = re.findall(r'^#include "(\w+\.cuh)"', text, re.MULTILINE)
    return path, "".join([text, *(header(name)[1] for name in included)])


@cache
def capability() -> int:
    """The GPU's compute capability, times ten; 90 where MLX doesn't say."""
    said = mx.device_info(mx.gpu) if mx.cuda.is_available() else {}
    return 10 * int(said.get("compute_capability_major", 9)) + int(said.get("compute_capability_minor", 0))


def version() -> str:
    """A short hash of all kernels' sources, Python's part included: others may give other bits."""
    texts = (path.read_text() for ending in ("*.cuh", "*.py") for path in sorted(Path(__file__).parent.glob(ending)))
    return hashlib.sha256("|".join(texts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Kernel:
    """One kernel: `body` uses what `files` define, the parameters `inputs` and `outputs`, and `NAME_shape` and `NAME_strides` of inputs."""

    name: str
    files: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    block: int
    blocks_per_processor: int
    any_strides: bool
    shared_memory: int
    waits: bool

    @cached_property
    def full_name(self) -> str:
        """The name with a hash of all that makes the kernel."""
        parts = (
            *(header(file)[1] for file in self.files),
            self.body,
            ",".join(self.inputs),
            ",".join(self.outputs),
            str(self.block),
            str(self.blocks_per_processor),
            str(self.shared_memory),
        )
        return f"gnomon_{self.name}_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"

    @cached_property
    def extras(self) -> frozenset[str]:
        """The `NAME_shape` and `NAME_strides` that the body names."""
        return frozenset(re.findall(r"\b\w+_(?:shape|strides)\b", self.body))

    @property
    def includes(self) -> str:
        """The lines that include the files."""
        return "".join(f'#include "{header(file)[0]}"\n' for file in self.files)

    @cached_property
    def _mlx(self) -> Any:
        # MLX writes the signature; its own name as a macro puts the bounds in front of it, and the body ends the macro, since MLX asks for
        # the name afterwards. Were the prefix another, there would be no bounds.
        symbol = f"custom_kernel_{self.full_name}"
        bounds = f"#define {symbol} __launch_bounds__({self.block}, {self.blocks_per_processor}) {symbol}\n"
        options: dict[str, Any] = {"ensure_row_contiguous": not self.any_strides}
        if self.shared_memory:
            options["shared_memory"] = self.shared_memory
        return mx.fast.cuda_kernel(
            name=self.full_name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=f"{self.body}\n#undef {symbol}\n",
            header=f"{self.includes}{bounds}",
            **options,
        )

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Grid,
        threadgroup: Grid,
    ) -> list[mx.array]:
        """The kernel's outputs; `grid` is in threads."""
        if thread.recorder is not None:
            return thread.recorder.record(self, inputs, output_shapes, output_dtypes, grid, threadgroup[0])
        return self._mlx(
            inputs=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes, grid=grid, threadgroup=threadgroup
        )


def make(
    name: str,
    files: str | Sequence[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    *,
    block: int,
    blocks_per_processor: int = 1,
    any_strides: bool = False,
    shared_memory: int = 0,
    waits: bool = False,
) -> Kernel:
    """A kernel whose `body` uses what `files` define, each what those before it do.

    `block` threads and `blocks_per_processor` bound its registers; `shared_memory` is a block's dynamic share in bytes. With `any_strides`,
    inputs that are not contiguous are passed as they are, otherwise MLX copies them. A kernel that `waits` runs
    `griddepcontrol.wait` in every thread before it reads or writes what another kernel of its step makes or reads, weights and lengths
    excepted, so in a graph it may be started before the kernel in front of it has ended.
    """
    return Kernel(
        name,
        (files,) if isinstance(files, str) else tuple(files),
        tuple(inputs),
        tuple(outputs),
        body,
        block,
        blocks_per_processor,
        any_strides,
        shared_memory,
        waits,
    )
