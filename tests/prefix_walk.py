"""Rows that run through a model in given windows, ours and mlx-lm's, for tests of the prefix cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from gnomon.models.bindings import bind
from gnomon.state.batch_state import BatchState
from gnomon.state.snapshot import LayerSnapshot, RowSnapshot
from tiny_models import VOCAB_SIZE

CHUNK = 64


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([length, seed]).integers(3, VOCAB_SIZE, length).tolist())


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x.view(mx.uint32))


def new_state(model: nn.Module) -> BatchState:
    binding = bind(model)
    return BatchState(model, binding.make_caches(), pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim)


def restored(model: nn.Module, snapshot: RowSnapshot) -> BatchState:
    binding = bind(model)
    return BatchState.restore(
        model, binding.make_caches(), snapshot, pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim
    )


def forward(model: nn.Module, state: BatchState, window: Sequence[int]) -> mx.array:
    state.begin(len(window))
    logits = model(mx.array([list(window)]), cache=state.caches)
    state.commit()
    mx.eval(logits, state.arrays())
    return logits


def windows(start: int, stop: int, ends: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Chunks of `CHUNK` tokens from `start` to `stop`, cut at `ends` too."""
    found: list[tuple[int, int]] = []
    while start < stop:
        end = min([start + CHUNK, stop, *(end for end in ends if end > start)])
        found.append((start, end))
        start = end
    return found


def run(model: nn.Module, state: BatchState, tokens: Sequence[int], ends: Sequence[int] = ()) -> None:
    """Bring a lone row from where it is to the end of `tokens`."""
    for start, end in windows(state.lengths[0], len(tokens), ends):
        forward(model, state, tokens[start:end])


def stock(model: nn.Module, tokens: Sequence[int], ends: Sequence[int] = ()) -> list[Any]:
    """mlx-lm's own caches after `tokens` in the same windows."""
    caches = make_prompt_cache(model)
    for start, end in windows(0, len(tokens), ends):
        mx.eval(model(mx.array([list(tokens[start:end])]), cache=caches), [c.state for c in caches if not c.empty()])
    return caches


def check_continues_alike(model: nn.Module, state: BatchState, caches: list[Any], seed: int) -> None:
    """A window of several tokens, then single steps: every logit has the same bits as mlx-lm's over its own caches."""
    more = tokens_of(9, seed)
    for window in (more[:5], *((token,) for token in more[5:])):
        theirs = model(mx.array([list(window)]), cache=caches)
        assert np.array_equal(bits(forward(model, state, window)), bits(theirs))


def record(model: nn.Module) -> tuple[list[mx.array], Callable[[], None]]:
    """The logits of every forward of the model from now on, until the returned function is called."""
    seen: list[mx.array] = []
    stock = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        seen.append(stock.__call__(self, *args, **kwargs))
        return seen[-1]

    model.__class__ = type(stock.__name__, (stock,), {"__call__": call})

    def stop() -> None:
        model.__class__ = stock

    return seen, stop


def hash_of(layers: Mapping[int, LayerSnapshot]) -> str:
    """Over kinds, numbers and the bits of the arrays themselves."""
    digest = hashlib.sha256()
    for number, layer in sorted(layers.items()):
        digest.update(repr((number, layer.kind, sorted(layer.numbers.items()))).encode())
        for name, array in sorted(layer.arrays.items()):
            digest.update(repr((name, array.dtype, array.shape)).encode())
            digest.update(bytes(memoryview(array.reshape(-1).view(mx.uint8))) if array.size else b"")
    return digest.hexdigest()
