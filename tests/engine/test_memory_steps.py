"""An engine that runs short of memory: smaller windows, a closed door, and allocations that fail, one request each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from engine_fixtures import Rig, tiny_engine, tiny_loaded
from gnomon.config import EngineConfig
from gnomon.engine.api import Failed, Finished, Request
from gnomon.engine.pressure import CALM, FEWEST
from solo import GAP_BOUNDS, Solo, solo, ties_until_equal

STEPS = 10


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(3, 300, length).tolist())


@cache
def alone(length: int) -> Solo:
    return solo(tiny_loaded().model, prompt_of(length), STEPS)


@contextmanager
def without_memory(model: nn.Module, lacks: Callable[[mx.array], bool]) -> Iterator[None]:
    """Inputs that `lacks` picks find no memory, in the words of MLX's allocator."""
    stock = type(model)

    def call(self: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if lacks(tokens):
            raise RuntimeError("[malloc] Unable to allocate 123456789 bytes.")
        return stock.__call__(self, tokens, *args, **kwargs)

    model.__class__ = type(stock.__name__, (stock,), {"__call__": call})
    try:
        yield
    finally:
        model.__class__ = stock


def submit(rig: Rig, *lengths: int) -> None:
    for length in lengths:
        rig.submit(Request(str(length), prompt_of(length), max_tokens=STEPS, ignore_eos=True))


def assert_unharmed(rig: Rig, *lengths: int) -> None:
    for length in lengths:
        assert isinstance(rig.end(str(length)), Finished)
        ties_until_equal(rig.ids(str(length)), alone(length), GAP_BOUNDS["float32"])
    rig.core.check_integrity()


def out_of_memory(rig: Rig, name: str) -> bool:
    end = rig.end(name)
    return isinstance(end, Failed) and end.code == "out_of_memory" and not end.fatal


def rig_of(**fields: Any) -> Rig:
    return Rig(tiny_loaded(), EngineConfig(prefill_chunk=128, **fields))


def test_a_prompt_without_memory_fails_alone() -> None:
    rig = rig_of()
    submit(rig, 40)
    rig.finish()
    assert rig.core.reuse.stats()["bytes"] > 0
    with without_memory(rig.loaded.model, lambda tokens: tokens.shape[1] > 100):
        submit(rig, 30, 7)
        rig.turn(2)
        submit(rig, 200)
        rig.finish()
    assert out_of_memory(rig, "200")
    assert_unharmed(rig, 30, 7)
    told = rig.core.pressure.stats()
    assert (told["allocation_failures"], told["chunk_tokens"], told["full_chunk_tokens"]) == (1, 64, 128)
    assert told["reclaims"] == 1
    # The smaller windows that it left behind are what the next such prompt takes.
    with without_memory(rig.loaded.model, lambda tokens: tokens.shape[1] > 100):
        rig.submit(Request("again", prompt_of(200), max_tokens=STEPS, ignore_eos=True))
        rig.finish()
    assert isinstance(rig.end("again"), Finished)
    ties_until_equal(rig.ids("again"), alone(200), GAP_BOUNDS["float32"])


def test_a_shared_step_without_memory_costs_the_last_comer() -> None:
    rig = rig_of()
    with without_memory(rig.loaded.model, lambda tokens: tokens.shape == (3, 1)):
        submit(rig, 30, 7)
        rig.turn(2)
        submit(rig, 9)
        rig.finish()
    assert out_of_memory(rig, "9")
    assert_unharmed(rig, 30, 7)
    assert rig.counters.failed_requests == 1


def test_while_the_door_is_closed_nobody_joins_and_everybody_is_served() -> None:
    rig = rig_of(prompt_cache=0)
    rig.core.pressure.ceiling = 1
    submit(rig, 30)
    rig.turn(4)
    submit(rig, 7, 9)
    most = 0
    for _ in range(200):
        rig.turn()
        most = max(most, rig.core.batch.num_open)
        if not rig.core.has_work:
            break
    assert most == 1
    assert rig.core.pressure.stats()["holds"] >= 1
    assert_unharmed(rig, 30, 7, 9)
    rig.core.pressure.ceiling = 1 << 60
    submit(rig, 11, 12, 13)
    rig.turn(3 * CALM)
    rig.finish()
    assert_unharmed(rig, 11, 12, 13)
    assert rig.core.pressure.stats()["level"] < 3


def test_a_prompt_under_way_takes_smaller_windows() -> None:
    rig = rig_of(prompt_cache=0)
    submit(rig, 500)
    rig.turn()
    assert rig.counters.prefill_chunks == 1
    rig.core.pressure.ceiling = 1
    rig.finish()
    # 128 tokens, then 64, then windows of the fewest.
    assert rig.core.pressure.chunk == FEWEST
    assert rig.counters.prefill_chunks == 2 + -(-(499 - 128 - 64) // FEWEST)
    assert_unharmed(rig, 500)


def test_the_steps_can_be_switched_off() -> None:
    rig = rig_of(prompt_cache=0, memory_steps=False)
    rig.core.pressure.ceiling = 1
    submit(rig, 300, 7)
    rig.turn(6)
    assert rig.core.batch.num_open == 2
    rig.finish()
    assert rig.counters.prefill_chunks == -(-299 // 128) + 1
    told = rig.core.pressure.stats()
    assert (told["enabled"], told["step"], told["chunk_tokens"]) == (False, "none", 128)


def test_the_steps_are_in_the_stats() -> None:
    with tiny_engine() as engine:
        told = engine.stats()["memory_pressure"]
        assert told["step"] == "none"
        assert 0 < told["release_bytes"] < told["ceiling_bytes"]
        assert told["chunk_tokens"] == engine.config.prefill_chunk
