"""A decode step's kernels taken down as a plan: what a CUDA graph is made from, and the text each kernel is compiled from.

The plan comes from the very function that runs the kernels one by one, called with stand-ins for what differs from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import mlx.core as mx

from gnomon.kernels.cuda.sources import Grid, Kernel, thread

TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned int",
    mx.int16: "short",
    mx.uint16: "unsigned short",
    mx.int8: "signed char",
    mx.uint8: "unsigned char",
    mx.int64: "long long",
    mx.uint64: "unsigned long long",
    mx.bool_: "bool",
}
MOST_AXES, MOST_NUMBERS, ALIGNMENT = 8, 32, 256
SLOTTED, SLOTS, LEAST_SLOTS = 4, 2, 512
"""Inputs of four axes are buffers whose third axis are slots."""

PRELUDE = f"""
struct Shape {{ int n[{MOST_AXES}]; __device__ int operator[](int i) const {{ return n[i]; }} }};
struct Strides {{ long long n[{MOST_AXES}]; __device__ long long operator[](int i) const {{ return n[i]; }} }};
struct Numbers {{ int n[{MOST_NUMBERS}]; __device__ int operator[](int i) const {{ return n[i]; }} }};
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
"""


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """Stands for an array of a step: an `input`, the step's `numbers`, or what a kernel has `made`."""

    kind: Literal["input", "numbers", "made"]
    index: int
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel of the chain; `grid` is in blocks."""

    kernel: Kernel
    inputs: tuple[Symbol | mx.array, ...]
    outputs: tuple[Symbol, ...]
    grid: Grid
    block: int


@dataclass(slots=True)
class Plan:
    """Kernels in the order in which they run, and the symbol they are run for."""

    calls: list[Call] = field(default_factory=list[Call])
    inputs: int = 0
    made: list[Symbol] = field(default_factory=list[Symbol])
    result: Symbol | None = None

    def record(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        grid: Grid,
        block: int,
    ) -> list[Any]:
        """See `sources.Recorder`."""
        if not kernel.any_strides and any(isinstance(one, Symbol) and one.kind == "input" for one in inputs):
            raise ValueError(f"the step hands an input to {kernel.name}, which takes contiguous arrays only")
        outputs = [
            Symbol("made", len(self.made) + i, tuple(shape), dtype)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self.made += outputs
        blocks = (-(-grid[0] // block), grid[1], grid[2])
        self.calls.append(Call(kernel, tuple(inputs), tuple(outputs), blocks, block))
        return list(outputs)

    def places(self) -> tuple[list[int], int]:
        """Byte offsets of what kernels make, and how many bytes they take together.

        A place is used again once the last kernel that reads it has come: kernels run one after the other. The result has none.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for i, call in enumerate(self.calls):
            for symbol in call.outputs:
                first[symbol.index] = last[symbol.index] = i
            for symbol in call.inputs:
                if isinstance(symbol, Symbol) and symbol.kind == "made":
                    last[symbol.index] = i
        offsets, end = [0] * len(self.made), 0
        taken: list[tuple[int, int, int]] = []  # begin, end, the last call that needs it
        for symbol in self.made:
            if symbol is self.result:
                continue
            now = first[symbol.index]
            taken = sorted(one for one in taken if one[2] >= now)
            size = -(-symbol.nbytes // ALIGNMENT) * ALIGNMENT
            at = 0
            for begin, stop, _ in taken:
                if begin - at >= size:
                    break
                at = max(at, stop)
            offsets[symbol.index] = at
            taken.append((at, at + size, last[symbol.index]))
            end = max(end, at + size)
        return offsets, end


def roomy(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of which a step is recorded for an input of this one: buffers [rows, heads, slots, ...] have 512, 1024, ... slots.

    Kernels take positions from the rows' lengths, strides from the buffers themselves; more slots only make more blocks that end at once.
    """
    if len(shape) != SLOTTED:
        return tuple(shape)
    return (*shape[:SLOTS], max(LEAST_SLOTS, 1 << (shape[SLOTS] - 1).bit_length()), *shape[SLOTS + 1 :])


def record(inputs: Sequence[mx.array], numbers: int, step: Callable[..., mx.array]) -> Plan:
    """The plan of `step(numbers, *inputs)`, whose result must be made by a kernel, for inputs of their `roomy` shapes.

    `numbers` int32 of the step come from the host.

    Raises ValueError if something but a kernel was to be done with a stand-in.
    """
    plan = Plan(inputs=len(inputs))
    symbols = [Symbol("input", i, roomy(a.shape), a.dtype) for i, a in enumerate(inputs)]
    thread.recorder = plan
    try:
        result: Any = step(Symbol("numbers", 0, (numbers,), mx.int32), *symbols)
    except (AttributeError, TypeError, ValueError) as e:
        raise ValueError(f"the step does more than run kernels: {e}") from e
    finally:
        thread.recorder = None
    if not isinstance(result, Symbol) or result.kind != "made":
        raise ValueError("the step's result is not a kernel's")
    plan.result = result
    return plan


Parameter = tuple[str, str, Symbol | mx.array]
"""What a kernel's parameter holds (`pointer`, `shape`, `strides` or `numbers`), its declaration, and of what."""


def parameters(call: Call) -> list[Parameter]:
    """A kernel's parameters in order."""
    kernel = call.kernel
    found: list[Parameter] = []
    for name, value in zip(kernel.inputs, call.inputs, strict=True):
        if isinstance(value, Symbol) and value.kind == "numbers":
            found.append(("numbers", f"const Numbers {name}", value))
            continue
        found.append(("pointer", f"const {TYPES[value.dtype]}* {name}", value))
        for what, type_name in (("shape", "Shape"), ("strides", "Strides")):
            if f"{name}_{what}" in kernel.extras:
                found.append((what, f"const {type_name} {name}_{what}", value))
    found += [
        ("pointer", f"{TYPES[made.dtype]}* {name}", made)
        for name, made in zip(kernel.outputs, call.outputs, strict=True)
    ]
    return found


def signature(found: Sequence[Parameter]) -> str:
    """The declarations of a kernel's parameters."""
    return ", ".join(declaration for _, declaration, _ in found)


def text(kernel: Kernel, signature: str) -> str:
    """What a kernel of the chain is compiled from; the function's name is the kernel's full name."""
    return (
        f"{PRELUDE}{kernel.includes}"
        f'extern "C" __global__ void __launch_bounds__({kernel.block}, {kernel.blocks_per_processor}) '
        f"{kernel.full_name}({signature}) {{\n{kernel.body}\n}}\n"
    )


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous array."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


def as_array(symbol: Symbol) -> mx.array:
    """For functions that take arrays and hand them to kernels."""
    return cast("mx.array", symbol)
