"""Taking tokens back from recurrent layers by running their mixers again on what stays.

A recurrent state can't be cut at a position. Its mixer, the module that reads and writes it, is a function of the state before the forward
and of the mixer's inputs, so the state after a kept prefix is had by calling it again on that prefix. Only the state is evaluated:
MLX being lazy, the mixer's output side (gates, norms, projections) is never computed, nor is the rest of the model.

To see the inputs, a module that takes a cache gets a subclass of its own class, with one more step in `__call__`. mlx-lm's code, the
parameter tree and `isinstance` checks stay as they are, and a call with any other cache does what it did.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from gnomon.state.composite import CompositeLayer
from gnomon.state.rows import Rows


@dataclass(frozen=True)
class Call:
    """One call of a mixer: the unwrapped function and its arguments by name."""

    function: Callable[..., object]
    arguments: Mapping[str, object]


class Replayable(Protocol):
    """What a replay needs of a recurrent layer."""

    rows: Rows
    cache: list[mx.array | None]
    before: list[mx.array | None]
    calls: list[Call]
    is_recording: bool
    pad_safe: bool

    def make_mask(self, N: int) -> mx.array | None: ...


class _Passing:
    """Stands in for the attention half of a composite layer during a replay: its keys are stored already."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @property
    def offset(self) -> int | mx.array:
        return self.rows.offsets if self.rows.num_rows > 1 else self.rows.lengths[0]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


_watched: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def watch(model: nn.Module) -> None:
    """Let the model's mixers note their calls in recurrent layers that record. Done once per model."""
    if _watched.get(id(model)) is model:
        return
    for name, module in model.named_modules():
        original = type(module)
        if name and "cache" in inspect.signature(original.__call__).parameters and "notes_calls" not in vars(original):
            module.__class__ = _noting(original)
    _watched[id(model)] = model


@functools.cache
def _noting(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a module's class whose calls are noted."""
    function = cast("Callable[..., object]", original.__call__)
    signature = inspect.signature(function)
    position = list(signature.parameters).index("cache") - 1

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        cache = kwargs.get("cache", args[position] if position < len(args) else None)
        layer = _recording(cache)
        if layer is None:
            return function(self, *args, **kwargs)
        noted = len(layer.calls)
        result = function(self, *args, **kwargs)
        if len(layer.calls) == noted:  # no module inside this one noted it
            layer.calls.append(Call(function, signature.bind(self, *args, **kwargs).arguments))
        return result

    return type(
        original.__name__, (original,), {"__call__": call, "__module__": original.__module__, "notes_calls": True}
    )


def _recording(cache: object) -> Replayable | None:
    """The recording recurrent layer that is `cache` or a part of it."""
    for part in cache.caches if isinstance(cache, CompositeLayer) else (cache,):
        if getattr(part, "is_recording", False):
            return cast("Replayable", part)
    return None


def replay(layer: Replayable, back: Sequence[int]) -> None:
    """Take back `back[b]` tokens of the last forward from row `b` of a recurrent layer, whose rows still have the lengths after it.

    Rows that lose nothing keep their arrays' values; rows that lose all get those from before the forward; the others are replayed,
    in groups that keep equally much if padding would disturb the mixer.
    """
    counts = layer.rows.counts
    kept = [count - n for count, n in zip(counts, back, strict=True)]
    partly = [row for row, n in enumerate(back) if n and kept[row]]
    none = [row for row, n in enumerate(back) if n and not kept[row]]
    if partly and not layer.calls:
        raise ValueError("a recurrent layer has no noted calls to replay: the window was longer than slack + 1 tokens")
    groups = [partly] if layer.pad_safe else [[r for r in partly if kept[r] == n] for n in {kept[r] for r in partly}]
    result = list(layer.cache)
    for group in groups:
        if group:
            replayed = _run(layer, group, [kept[row] for row in group])
            result = [_with_rows(a, group, b) for a, b in zip(result, replayed, strict=True)]
    if none:
        index = mx.array(none)
        for i, (array, before) in enumerate(zip(result, layer.before, strict=True)):
            if array is not None:
                old = mx.zeros((len(none), *array.shape[1:]), array.dtype) if before is None else before[index]
                result[i] = _with_rows(array, none, old)
        if len(none) == len(counts):
            result = list(layer.before)
    layer.cache = result


def _run(layer: Replayable, group: Sequence[int], kept: Sequence[int]) -> list[mx.array | None]:
    """The layer's arrays `[len(group), ...]` after the first `kept[i]` window tokens of row `group[i]`."""
    rows, cache = layer.rows, layer.cache
    width = max(kept)
    index = None if list(group) == list(range(rows.num_rows)) else mx.array(list(group))
    part = Rows(len(group))
    part.lengths = [rows.lengths[row] - rows.counts[row] for row in group]
    part.begin(width, kept)
    layer.rows = part
    layer.cache = [array if array is None or index is None else array[index] for array in layer.before]
    try:
        for call in layer.calls:
            arguments = {
                name: _part_of(name, value, layer, (rows.num_rows, rows.width), index)
                for name, value in call.arguments.items()
            }
            call.function(arguments.pop("self"), **arguments)
        return layer.cache
    finally:
        layer.rows, layer.cache = rows, cache


def _part_of(name: str, value: object, layer: Replayable, window: tuple[int, int], index: mx.array | None) -> object:
    """An argument of a noted call, cut to the replayed rows and positions."""
    rows = layer.rows
    if name == "mask":
        return layer.make_mask(rows.width)
    if isinstance(value, CompositeLayer):
        return [part if isinstance(part, ArraysCache) else _Passing(rows) for part in value]
    if not isinstance(value, mx.array):
        return value
    if value.shape[:2] == window:
        return (value if index is None else value[index])[:, : rows.width]
    if name == "offset" and value.shape == (window[0],):
        return rows.offsets if rows.num_rows > 1 else rows.lengths[0]
    return value


def _with_rows(array: mx.array | None, rows: Sequence[int], new: mx.array | None) -> mx.array | None:
    """`array` with the given rows replaced."""
    if array is None or new is None or len(rows) == array.shape[0]:
        return new
    index = mx.array(list(rows)).reshape(-1, *[1] * (array.ndim - 1))
    return mx.put_along_axis(array, mx.broadcast_to(index, new.shape), new.astype(array.dtype), axis=0)
