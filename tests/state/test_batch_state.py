"""The verbs' contracts: what they refuse, and what an inconsistent state is found by."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from gnomon.state.batch_state import BatchState, UnsupportedCache


class NoModel(nn.Module):
    pass


def _state(length: int = 4, slack: int = 3) -> BatchState:
    state = BatchState(NoModel(), [KVCache(), CacheList(RotatingKVCache(max_size=8), KVCache())], slack=slack)
    _advance(state, length)
    return state


def _advance(state: BatchState, width: int, counts: list[int] | None = None) -> None:
    x = mx.ones((state.num_rows, 1, width, 2))
    state.begin(width, counts)
    for layer in state.layers:
        layer.update_and_fetch(x, x)
    state.commit()
    mx.eval(state.arrays())


def _two() -> BatchState:
    state = _state(4)
    state.join(_state(6))
    return state


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (ChunkedKVCache(8), "ChunkedKVCache"),
        (QuantizedKVCache(), "QuantizedKVCache"),
        (RotatingKVCache(max_size=8, keep=4), "first 4 tokens"),
        (CacheList(KVCache(), ChunkedKVCache(8)), "ChunkedKVCache"),
        (type("Mine", (KVCache,), {})(), "Mine"),
    ],
)
def test_unknown_caches_are_refused_by_name(template: object, named: str) -> None:
    with pytest.raises(UnsupportedCache, match=named):
        BatchState(NoModel(), [template])


@pytest.mark.parametrize("counts", [[1], [3, 1], [-1, 2], [1, 1, 1]])
def test_impossible_counts_are_refused(counts: list[int]) -> None:
    state = _two()
    with pytest.raises(ValueError, match="counts"):
        state.begin(2, counts)
    state.check_integrity()


def test_a_lone_row_and_a_model_that_bears_no_padding_take_whole_windows() -> None:
    with pytest.raises(ValueError, match="lone row"):
        _state().begin(3, [2])
    states = [BatchState(NoModel(), [ArraysCache(1)], pad_safe=False) for _ in range(2)]
    states[0].join(states[1])
    with pytest.raises(ValueError, match="padding"):
        states[0].begin(3, [3, 2])
    states[0].begin(3, [3, 3])


@pytest.mark.parametrize("back", [[1], [0, 3], [-1, 0], [3, 0]])
def test_no_more_is_taken_back_than_was_given(back: list[int]) -> None:
    state = _two()
    _advance(state, 2, [2, 1])
    with pytest.raises(ValueError, match="back"):
        state.rollback(back)
    assert state.lengths == [6, 7]
    state.rollback([1, 1])
    state.rollback([1, 0])
    assert state.lengths == [4, 6]
    with pytest.raises(ValueError, match=r"0\.\.0"):
        state.rollback([1, 0])


def test_nothing_is_taken_back_after_rows_changed() -> None:
    state = _two()
    _advance(state, 2)
    state.keep([1, 0])
    with pytest.raises(ValueError, match="back"):
        state.rollback([1, 1])


def test_windows_wider_than_the_slack_stay() -> None:
    state = _two()
    _advance(state, 5)
    with pytest.raises(ValueError, match=r"slack \+ 1 = 4"):
        state.rollback([1, 0])
    assert state.lengths == [9, 11]


@pytest.mark.parametrize("order", [[], [0, 0], [2], [-1]])
def test_impossible_orders_are_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="order"):
        _two().keep(order)


def test_rows_change_only_between_forwards() -> None:
    state = _two()
    state.begin(1)
    for verb in (
        lambda: state.keep([0]),
        lambda: state.join(_state()),
        lambda: _state().join(state),
        lambda: state.snapshot(0),
        lambda: state.rollback([0, 0]),
        lambda: state.begin(1),
    ):
        with pytest.raises(ValueError, match="open"):
            verb()
    state.abort()
    state.check_integrity()
    state.abort()


def test_only_states_of_the_same_kind_join() -> None:
    state = _state()
    with pytest.raises(ValueError, match="itself"):
        state.join(state)
    with pytest.raises(ValueError, match="same model"):
        state.join(_state(slack=4))
    with pytest.raises(ValueError, match="same model"):
        state.join(BatchState(NoModel(), [KVCache()], slack=3))


def test_snapshots_of_other_models_are_refused() -> None:
    snapshot = _state().snapshot(0)
    with pytest.raises(ValueError, match="not this model's"):
        BatchState.restore(NoModel(), [KVCache()], snapshot)
    other = [KVCache(), CacheList(RotatingKVCache(max_size=9), KVCache())]
    with pytest.raises(ValueError, match="window is 8, this layer's is 9"):
        BatchState.restore(NoModel(), other, snapshot)
    with pytest.raises(ValueError, match=r"0\.\.0"):
        _state().snapshot(1)


def test_inconsistencies_are_found_and_named() -> None:
    state = _two()
    state.check_integrity()
    state.rows.lengths[1] = 600
    with pytest.raises(RuntimeError, match="layer 0: keys of shape"):
        state.check_integrity()
    lone = _state()
    lone.rows.lengths[0] = 3
    with pytest.raises(RuntimeError, match="offset is 4, the row has 3 tokens"):
        lone.check_integrity()
    lone.rows.lengths = [4, 4]
    with pytest.raises(RuntimeError, match="lone row"):
        lone.check_integrity()


def test_the_cheap_order_moves_last_rows_into_holes() -> None:
    state = _state()
    for _ in range(5):
        state.join(_state())
    assert state.order_without({5}) == [0, 1, 2, 3, 4]
    assert state.order_without({1}) == [0, 5, 2, 3, 4]
    assert sorted(state.order_without({0, 4})) == [1, 2, 3, 5]
    assert state.order_without({0, 4})[1:4] == [1, 2, 3]
    assert state.order_without({0, 1, 2, 3, 4}) == [5]


def test_layers_a_model_never_uses_do_no_harm() -> None:
    def fresh() -> BatchState:
        made = BatchState(NoModel(), [KVCache(), KVCache(), RotatingKVCache(max_size=8)], slack=3)
        x = mx.ones((1, 1, 3, 2))
        made.begin(3)
        made.layers[0].update_and_fetch(x, x)
        made.commit()
        return made

    state = fresh()
    state.rollback([1])
    state.join(fresh())
    state.join(state.fork(0))
    state.keep([2, 0])
    state.check_integrity()
    state.keep([1])
    state.begin(1)
    state.abort()
    state.check_integrity()
    assert state.lengths == [2]
