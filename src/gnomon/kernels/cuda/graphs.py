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
from gnomon.kernels.cuda.record import MOST_AXES, Plan, Symbol, parameters, record, row_major, text
from gnomon.kernels.cuda.sources import make

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
    """Copies of tokens [B, 1] and of the step's numbers [B], int32 [B] both. For recorded steps only."""
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
"""The first kernel of a chain that is started before the one in front of it has ended. What the very first one writes (tokens, lengths) all
others may then read before they wait."""


class Graphs:
    """Makes graphs of one model with the extension `extension` (see `load`); compiled kernels are kept in `cache`."""

    def __init__(self, extension: ModuleType, cache: Path) -> None:
        self._extension: Any = extension
        self._folder, self._cache = cache, cache / "cuda"
        self._modules: dict[tuple[str, str], Any] = {}
        self._scratch: mx.array | None = None
        self._order = self._extension.Order()

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
        self._compile(plan)
        offsets, size = plan.places()
        if self._scratch is None or self._scratch.nbytes < size:
            self._scratch = mx.zeros(size, dtype=mx.uint8)
            mx.eval(self._scratch)
        arrays: list[mx.array] = [self._scratch]
        places: dict[int, int] = {}
        launches = [self._launch(plan, i, arrays, places, offsets) for i in range(len(plan.calls))]
        result = plan.result
        if result is None:
            raise ValueError("the step has no result")
        mx.eval(arrays)
        return self._extension.Graph(
            self._order, launches, arrays, list(inputs), list(shape or result.shape), result.dtype
        )

    def _compile(self, plan: Plan) -> None:
        wanted = {(call.kernel.full_name, text(call)) for call in plan.calls} - self._modules.keys()
        if not wanted:
            return
        began = time.monotonic()
        names = dict(enumerate(sorted(wanted)))
        codes = nvrtc.compile_all(
            {str(i): source for i, (_, source) in names.items()}, self._extension.architecture(), self._cache
        )
        for i, key in names.items():
            self._modules[key] = self._extension.Module(codes[str(i)], key[0])
        log.info("%d CUDA kernels ready in %.1f s", len(wanted), time.monotonic() - began)

    def _launch(
        self, plan: Plan, number: int, arrays: list[mx.array], places: dict[int, int], offsets: Sequence[int]
    ) -> Any:
        ext, call = self._extension, plan.calls[number]
        found: list[Any] = []
        for what, _, value in parameters(call):
            if what == "numbers":
                found.append(ext.numbers())
            elif what == "shape":
                found.append(ext.value(struct.pack(f"{MOST_AXES}i", *_padded(value.shape))))
            elif what == "strides":
                if isinstance(value, Symbol) and value.kind == "input":
                    found.append(ext.strides(value.index))
                else:
                    found.append(ext.value(struct.pack(f"{MOST_AXES}q", *_padded(row_major(value.shape)))))
            elif not isinstance(value, Symbol):
                if id(value) not in places:
                    places[id(value)] = len(arrays)
                    arrays.append(value)
                found.append(ext.array(places[id(value)]))
            elif value is plan.result:
                found.append(ext.output())
            else:
                found.append(ext.input(value.index) if value.kind == "input" else ext.array(0, offsets[value.index]))
        is_early = number >= FIRST_EARLY
        module = self._modules[call.kernel.full_name, text(call)]
        return ext.Launch(module, list(call.grid), call.block, call.kernel.shared_memory, is_early, found)


def _padded(numbers: Sequence[int]) -> list[int]:
    return [*numbers, *([0] * (MOST_AXES - len(numbers)))]


def load(cache: Path, compiler: str | None, progress: Callable[[str], None]) -> Graphs:
    """Graphs made with this machine's build of the extension, which is built if need be. Raises BuildError."""
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
