"""Memory pressure: the steps, their order and their way back; requests whose allocation fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.engine.pressure import CALM, FEWEST, REMEMBERED, Pressure, code_of, is_out_of_memory

CEILING = 1000
RELEASE = 900


class Memory:
    """A device of which `held` bytes are taken, `kept` of them by what may go."""

    def __init__(self, held: int, kept: int) -> None:
        self.held, self.kept = held, kept

    def shed(self, excess: int) -> int:
        went = min(self.kept, excess)
        self.kept -= went
        self.held -= went
        return went


def pressure(memory: Memory, chunk: int = 128, **how: bool) -> Pressure:
    return Pressure(CEILING, chunk, memory.shed, active=lambda: memory.held, windows=False, **how)


def steps(one: Pressure, looks: int) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []
    for _ in range(looks):
        one.look()
        seen.append((one.step, one.chunk))
    return seen


def test_the_cache_goes_first_then_the_windows_then_the_door() -> None:
    memory = Memory(1500, 400)
    one = pressure(memory)
    assert steps(one, 4) == [("cache", 128), ("chunk", 64), ("chunk", 32), ("queue", 32)]
    assert (memory.held, memory.kept) == (1100, 0)
    assert one.is_holding
    told = one.stats()
    assert (told["step"], told["level"], told["reclaims"], told["reclaimed_bytes"]) == ("queue", 3, 1, 400)
    assert (told["chunk_halvings"], told["holds"], told["chunk_tokens"]) == (2, 1, 32)
    history = [(change["step"], change["chunk_tokens"], change["used_bytes"]) for change in told["history"]]
    assert history == [("cache", 128, 1500), ("chunk", 64, 1100), ("chunk", 32, 1100), ("queue", 32, 1100)]
    assert all(change["seconds_ago"] >= 0 for change in told["history"])


def test_as_long_as_the_cache_covers_it_nothing_else_gives_way() -> None:
    memory = Memory(1200, 10_000)
    one = pressure(memory)
    one.look()
    assert (memory.held, one.step, one.chunk) == (1000, "cache", 128)


def test_the_way_back_is_as_long_and_slower() -> None:
    memory = Memory(1100, 0)
    one = pressure(memory)
    steps(one, 3)
    assert one.step == "queue"
    memory.held = RELEASE - 1
    assert steps(one, CALM - 1)[-1] == ("queue", 32)
    assert steps(one, 1) == [("chunk", 32)]
    assert steps(one, CALM)[-1] == ("chunk", 64)
    assert steps(one, CALM)[-1] == ("cache", 128)
    assert steps(one, CALM)[-1] == ("none", 128)
    back = [(change["step"], change["chunk_tokens"]) for change in one.stats()["history"]]
    assert back[2:] == [("queue", 32), ("chunk", 32), ("chunk", 64), ("cache", 128), ("none", 128)]
    memory.held = 1100
    for _ in range(20):
        one.idle()
        one.look()
    assert len(one.stats()["history"]) == REMEMBERED


def test_between_release_and_ceiling_nothing_changes() -> None:
    memory = Memory(1100, 0)
    one = pressure(memory)
    steps(one, 2)
    assert (one.step, one.chunk) == ("chunk", 32)
    memory.held = CEILING
    assert set(steps(one, 5 * CALM)) == {("chunk", 32)}
    # Calm that was interrupted counts anew.
    for _ in range(4):
        memory.held = RELEASE - 1
        steps(one, CALM - 1)
        memory.held = RELEASE
        steps(one, 1)
    assert (one.step, one.chunk) == ("chunk", 32)


def test_switched_off_only_the_cache_gives_way() -> None:
    memory = Memory(1500, 100)
    one = pressure(memory, enabled=False)
    assert steps(one, 4)[-1] == ("cache", 128)
    assert memory.kept == 0


def test_whoever_comes_to_an_idle_engine_is_let_in() -> None:
    memory = Memory(1100, 0)
    one = pressure(memory)
    steps(one, 5)
    one.idle()
    assert not one.is_holding
    assert one.chunk == FEWEST


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 500)), max_size=200))
def test_steps_are_taken_in_order_whatever_memory_does(readings: list[tuple[int, int]]) -> None:
    memory = Memory(0, 0)
    one = pressure(memory, chunk=1000)
    for held, kept in readings:
        before = one.stats()["level"]
        memory.held, memory.kept = held, min(kept, held)
        one.look()
        level = one.stats()["level"]
        assert FEWEST <= one.chunk <= 1000
        assert (one.chunk < 1000) <= (level >= 1)
        assert not one.is_holding or one.chunk == FEWEST
        assert level >= before or one.used < RELEASE
        assert memory.held <= CEILING or level >= 1


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("[malloc] Unable to allocate 12 bytes."), True),
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU)"), True),
        (RuntimeError("cudaMallocAsync(&buf, size) failed: out of memory"), True),
        (MemoryError(), True),
        (ValueError("out of memory"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_what_counts_as_an_allocation_that_failed(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
    wrapped = ValueError("around it")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is is_one
    assert code_of(error) == ("out_of_memory" if is_one else "engine_error")
