"""A recorded step as a CUDA graph: one launch a step instead of one per kernel."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from gnomon.kernels import build
from gnomon.kernels.cuda import nvrtc
from gnomon.kernels.cuda.record import (
    MOST_AXES,
    Parameter,
    Plan,
    Symbol,
    parameters,
    record,
    roomy,
    row_major,
    signature,
    text,
)
from gnomon.kernels.cuda.sources import Kernel, make

log = logging.getLogger(__name__)

TAKE = make(
    "take",
    (),
    ["tokens", "numbers"],
    ["taken", "lengths"],
    """
  const int i = threadIdx.x;
  taken[i] = tokens[i * tokens_strides[0]];
  lengths[i] = numbers[i];
""",
    block=32,
    any_strides=True,
)
"""Tokens and lengths to places that stay, so that no other kernel's parameters change with them."""


def take(tokens: Any, lengths: Any) -> tuple[mx.array, mx.array]:
    """Copies of tokens [B, 1] or [B] and of the step's numbers [B], int32 [B] both. For recorded steps only."""
    rows = tokens.shape[0]
    return tuple(  # pyright: ignore[reportReturnType]
        TAKE(
            inputs=[tokens, lengths],
            output_shapes=[(rows,), (rows,)],
            output_dtypes=[mx.int32, mx.int32],
            grid=(rows, 1, 1),
            threadgroup=(rows, 1, 1),
        )
    )


FIRST_EARLY = 2
"""The first kernel of a chain that may be started before the one in front of it has ended: what the very first one writes (tokens,
lengths) all others may then read before they wait."""

EARLY_FROM = 90
"""Compute capability, times ten, from which kernels can wait by themselves; before, `griddepcontrol` is left out of them."""


class Graphs:
    """Makes graphs of one model with the extension `extension` (see `load`); compiled kernels are kept in `cache`."""

    def __init__(self, extension: ModuleType, cache: Path) -> None:
        self._extension: Any = extension
        self._folder, self._cache = cache, cache / "cuda"
        self._modules: dict[tuple[str, str], Any] = {}
        self._scratch: mx.array | None = None
        self._order = self._extension.Order()
        self._architecture: str = self._extension.architecture()
        self._can_be_early = int(self._architecture.strip("sm_a")) >= EARLY_FROM

    def another(self) -> Graphs:
        """For another model: graphs of different models may run at once, so they share no memory, but kernels."""
        made = Graphs(self._extension, self._folder)
        made._modules = self._modules
        return made

    def make(
        self,
        inputs: Sequence[mx.array],
        numbers: int,
        step: Callable[..., mx.array],
        shape: Sequence[int] | None = None,
    ) -> Any:
        """The graph of `step(numbers, *inputs)`: its `run(inputs, numbers)` gives the result, as `shape`, or None for other inputs.

        Raises BuildError where kernels can't be compiled, ValueError for a step that is more than kernels, RuntimeError naming what the
        driver refuses.
        """
        plan = record(inputs, numbers, step)
        found = [parameters(call) for call in plan.calls]
        modules = self._compiled([(call.kernel, signature(one)) for call, one in zip(plan.calls, found, strict=True)])
        offsets, size = plan.places()
        if self._scratch is None or self._scratch.nbytes < size:
            self._scratch = mx.zeros(size, dtype=mx.uint8)
            mx.eval(self._scratch)
        arrays: list[mx.array] = [self._scratch]
        places: dict[int, int] = {}
        launches: list[Any] = []
        for number, (call, module) in enumerate(zip(plan.calls, modules, strict=True)):
            values = [self._value(one, plan, arrays, places, offsets) for one in found[number]]
            is_early = self._can_be_early and call.kernel.waits and number >= FIRST_EARLY
            shared = call.kernel.shared_memory
            launches.append(self._extension.Launch(module, list(call.grid), call.block, shared, is_early, values))
        result = plan.result
        if result is None:
            raise ValueError("the step has no result")
        mx.eval(arrays)
        return self._extension.Graph(
            self._order,
            launches,
            arrays,
            [(list(roomy(a.shape)), a.dtype) for a in inputs],
            list(shape or result.shape),
            result.dtype,
        )

    def _compiled(self, kernels: Sequence[tuple[Kernel, str]]) -> list[Any]:
        """Modules of kernels with these signatures, compiled all at once if they aren't yet."""
        keys = [(kernel.full_name, declared) for kernel, declared in kernels]
        wanted = {key: text(*one) for key, one in zip(keys, kernels, strict=True) if key not in self._modules}
        if wanted:
            began = time.monotonic()
            names = {str(i): key for i, key in enumerate(wanted)}
            texts = {name: wanted[key] for name, key in names.items()}
            codes = nvrtc.compile_all(texts, self._architecture, self._cache)
            for name, key in names.items():
                self._modules[key] = self._extension.Module(codes[name], key[0])
            log.info("%d CUDA kernels ready in %.1f s", len(wanted), time.monotonic() - began)
        return [self._modules[key] for key in keys]

    def _value(
        self,
        parameter: Parameter,
        plan: Plan,
        arrays: list[mx.array],
        places: dict[int, int],
        offsets: Sequence[int],
    ) -> Any:
        """What the extension puts into a kernel's parameter."""
        ext, (what, _, value) = self._extension, parameter
        if what == "numbers":
            return ext.numbers()
        if what == "shape":
            if isinstance(value, Symbol) and value.kind == "input":
                return ext.shape(value.index)
            return ext.value(struct.pack(f"{MOST_AXES}i", *_padded(value.shape)))
        if what == "strides":
            if isinstance(value, Symbol) and value.kind == "input":
                return ext.strides(value.index)
            return ext.value(struct.pack(f"{MOST_AXES}q", *_padded(row_major(value.shape))))
        if not isinstance(value, Symbol):
            if id(value) not in places:
                places[id(value)] = len(arrays)
                arrays.append(value)
            return ext.array(places[id(value)])
        if value is plan.result:
            return ext.output()
        return ext.input(value.index) if value.kind == "input" else ext.array(0, offsets[value.index])


def _padded(numbers: Sequence[int]) -> list[int]:
    return [*numbers, *([0] * (MOST_AXES - len(numbers)))]


def load(cache: Path, compiler: str | None, progress: Callable[[str], None]) -> Graphs:
    """Graphs made with this machine's build of the extension, which is built if need be. Raises BuildError, or RuntimeError for a driver
    that is missing or too old."""
    made = build.ensure(cache, extension=build.CUDA, compiler=compiler, progress=progress)
    return Graphs(build.load(made), cache)


def try_out(name: str, path: str) -> str | int:
    """Run a first graph with the extension at `path`: 0, or what is wrong."""
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        return f"{path} can't be imported"
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    tokens = mx.array([[7, 1], [9, 1]], dtype=mx.int32)[:, :1]
    with tempfile.TemporaryDirectory() as room:
        graph = Graphs(extension, Path(room)).make([tokens], 2, lambda numbers, tokens: take(tokens, numbers)[1])
        found = [graph.run([tokens], [i, i + 1]) for i in range(3)]
        mx.eval(found)
        values = [one.tolist() for one in found]
    return 0 if values == [[0, 1], [1, 2], [2, 3]] else f"wrong numbers {values}"
