"""Rows come and go at the price of that row: peak memory shows whether anything else was copied."""

from __future__ import annotations

import gc
from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from gnomon.state.batch_state import BatchState

HEADS, DIM = 2, 64


class NoModel(nn.Module):
    pass


def _state(length: int, window: int | None = None) -> BatchState:
    template = KVCache() if window is None else RotatingKVCache(max_size=window)
    state = BatchState(NoModel(), [template])
    _advance(state, length)
    return state


def _advance(state: BatchState, width: int, counts: list[int] | None = None) -> None:
    x = mx.random.normal((state.num_rows, HEADS, width, DIM))
    state.begin(width, counts)
    for layer in state.layers:
        layer.update_and_fetch(x, x)
    state.commit()
    mx.eval(state.arrays())


def _extra(work: Callable[[], object], state: BatchState) -> int:
    """Bytes by which memory rose above its level before, at the highest point of the work."""
    gc.collect()  # what earlier tests left must not go while this is measured
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.eval(state.arrays())
    mx.synchronize()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("window", [None, 2000])
def test_join_and_leave_cost_their_row(window: int | None) -> None:
    state = _state(1500, window)
    for _ in range(4):
        state.join(_state(1500, window))  # five rows: there is room for eight
    mx.eval(state.arrays())
    held, row = state.nbytes(), 2 * HEADS * 100 * DIM * 4
    guest = _state(100, window)
    mx.eval(guest.arrays())
    assert held > 40 * row
    guest_bytes = guest.nbytes()
    assert _extra(lambda: state.join(guest), state) < 3 * guest_bytes
    assert state.nbytes() == held
    leaving = _extra(lambda: state.keep(state.order_without({2})), state)
    assert state.lengths == [1500, 1500, 100, 1500, 1500]
    assert leaving < 4 * row
    assert state.nbytes() == held


def test_appends_are_in_place() -> None:
    state = _state(1500)
    state.join(_state(1400))
    _advance(state, 1)
    held = state.nbytes()
    assert _extra(lambda: _advance(state, 2, [2, 1]), state) < held / 10
    snapshot = state.snapshot(0)
    mx.eval(snapshot.arrays())
    assert _extra(lambda: _advance(state, 1), state) < held / 10, "a snapshot holds on to the live buffer"
    assert snapshot.nbytes() == 2 * HEADS * snapshot.length * DIM * 4


def test_snapshots_keep_nothing_of_the_batch_alive() -> None:
    state = _state(900)
    for _ in range(3):
        state.join(_state(900))
    mx.eval(state.arrays())
    snapshot = state.snapshot(1)
    mx.eval(snapshot.arrays())
    held = state.nbytes()
    mx.synchronize()
    before = mx.get_active_memory()
    del state
    assert before - mx.get_active_memory() >= held
    assert snapshot.nbytes() < held / 3


def test_room_is_given_back_when_rows_leave() -> None:
    state = _state(5000)
    for _ in range(7):
        state.join(_state(60))
    mx.eval(state.arrays())
    full = state.nbytes()
    state.keep(state.order_without({0}))
    mx.eval(state.arrays())
    assert state.nbytes() < full / 10
    state.keep([3, 1])
    mx.eval(state.arrays())
    state.keep([1])
    assert state.nbytes() == 2 * HEADS * 256 * DIM * 4
    state.check_integrity()


def test_bytes_are_those_of_the_arrays() -> None:
    state = _state(10)
    assert state.nbytes() == sum(x.nbytes for x in state.arrays()) == 2 * HEADS * 256 * DIM * 4
    assert _state(0 + 1, window=8).nbytes() == 2 * HEADS * 8 * DIM * 4
