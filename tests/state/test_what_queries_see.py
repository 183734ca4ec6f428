"""Attention layers show each query its own row's positions and nothing else, whatever happened to the batch before.

Keys carry a number that names row and position, so what a mask leaves visible can be read off and compared with plain lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from gnomon.state.batch_state import BatchState

WINDOW = 6
SLACK = 3
PAD = -1.0


class NoModel(nn.Module):
    """States ask a model for nothing but its recurrent mixers."""


def new_state() -> BatchState:
    return BatchState(NoModel(), [KVCache(), RotatingKVCache(max_size=WINDOW)], slack=SLACK)


@dataclass
class Batch:
    """A state beside the lists of numbers it should hold."""

    state: BatchState
    rows: list[list[float]]
    next_number: int = 1

    def advance(self, width: int, counts: list[int]) -> None:
        """Append new numbers and check, for both layers, what every real query sees."""
        state = self.state
        state.begin(width, counts)
        window = np.full((len(self.rows), width), PAD, np.float32)
        for b, count in enumerate(counts):
            for j in range(count):
                window[b, j] = self.next_number
                self.next_number += 1
        after = [[*row, *window[b, : counts[b]].tolist()] for b, row in enumerate(self.rows)]
        keys = mx.broadcast_to(mx.array(window)[:, None, :, None], (len(self.rows), 2, width, 1))
        for layer, limit in zip(state.layers, (None, WINDOW), strict=True):
            mask = layer.make_mask(width, window_size=limit)
            held, values = layer.update_and_fetch(keys, keys * 2)
            assert mx.array_equal(values, held * 2)
            assert mx.array_equal(held[:, 0], held[:, 1])
            seen = _visible(mask, np.array(held[:, 0, :, 0]), width)
            for b, row in enumerate(self.rows):
                for j in range(counts[b]):
                    upto = after[b][: len(row) + j + 1]
                    assert sorted(seen[b][j]) == (upto if limit is None else upto[-limit:])
        state.commit()
        mx.eval(state.arrays())
        state.check_integrity()
        self.rows = after
        assert state.lengths == [len(row) for row in after]

    def roll_back(self, back: list[int]) -> None:
        self.state.rollback(back)
        self.state.check_integrity()
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, back, strict=True)]

    def join(self, other: Batch) -> None:
        self.state.join(other.state)
        self.state.check_integrity()
        self.rows = self.rows + other.rows

    def keep(self, order: list[int]) -> None:
        self.state.keep(order)
        self.state.check_integrity()
        self.rows = [self.rows[i] for i in order]


def _visible(mask: mx.array | str | None, held: np.ndarray, width: int) -> list[list[list[float]]]:
    """The numbers each query of each row sees; a missing mask shows everything, `causal` aligns the ends."""
    rows, slots = held.shape
    if mask is None:
        shown = np.ones((rows, width, slots), bool)
    elif isinstance(mask, str):
        assert mask == "causal"
        shown = np.broadcast_to(np.tril(np.ones((width, slots), bool), slots - width), (rows, width, slots))
    else:
        shown = np.broadcast_to(
            np.array(mask).reshape(-1, mask.shape[-2] if mask.ndim > 1 else 1, slots), (rows, width, slots)
        )
    return [[held[b][shown[b, j]].tolist() for j in range(width)] for b in range(rows)]


def _fresh(length: int, number: int) -> Batch:
    batch = Batch(new_state(), [[]], number)
    while length:
        width = min(length, 5)
        batch.advance(width, [width])
        length -= width
    return batch


small = st.integers(0, 30)
actions = st.one_of(
    st.tuples(st.just("advance"), st.integers(1, 12), st.lists(small, min_size=4, max_size=4)),
    st.tuples(st.just("advance"), st.integers(1, 4), st.lists(small, min_size=4, max_size=4)),
    st.tuples(st.just("roll back"), st.just(0), st.lists(small, min_size=4, max_size=4)),
    st.tuples(st.just("join"), st.integers(0, 20), st.just([])),
    st.tuples(st.just("join many"), st.integers(1, 3), st.lists(small, min_size=3, max_size=3)),
    st.tuples(st.just("keep"), st.integers(1, 5), st.lists(small, min_size=6, max_size=6, unique=True)),
    st.tuples(st.just("let go"), st.integers(0, 5), st.just([])),
    st.tuples(st.just("fork"), st.integers(0, 5), st.just([])),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(actions, min_size=4, max_size=14))
def test_queries_see_their_own_rows(script: list[tuple[str, int, list[int]]]) -> None:
    batch, last_width = _fresh(4, 1), 0
    for verb, n, numbers in script:
        rows = len(batch.rows)
        if verb == "advance":
            counts = [n] if rows == 1 else [numbers[b % 4] % (n + 1) for b in range(rows)]
            batch.advance(n, counts)
            last_counts, last_width = counts, n
            continue
        if verb == "roll back":
            if last_width and (rows == 1 or last_width <= SLACK + 1):
                batch.roll_back([numbers[b % 4] % (last_counts[b] + 1) for b in range(rows)])
        elif verb in ("join", "join many") and rows < 6:
            other = _fresh(n, batch.next_number)
            for more in numbers[: n - 1] if verb == "join many" else []:
                extra = _fresh(more, other.next_number)
                other.join(extra)
                other.next_number = extra.next_number
            batch.next_number = other.next_number
            batch.join(other)
        elif verb == "keep":
            order = [i % rows for i in numbers]
            batch.keep(list(dict.fromkeys(order))[:n])
        elif verb == "let go" and rows > 1:
            order = batch.state.order_without({n % rows})
            assert sorted(order) == [i for i in range(rows) if i != n % rows]
            batch.keep(order)
        elif verb == "fork" and rows < 6:
            copy = batch.state.fork(n % rows)
            batch.join(Batch(copy, [list(batch.rows[n % rows])]))
        last_width = 0


@pytest.mark.parametrize("width", range(1, 12))
def test_windows_of_every_width_on_both_sides_of_the_wrap(width: int) -> None:
    for length in (1, 5, 6, 8, 9, 13):
        batch = _fresh(length, 1)
        batch.join(_fresh(10, 100))
        batch.join(_fresh(0, 200))
        batch.next_number = 300
        batch.advance(width, [width, width // 2, width])
        if width <= SLACK + 1:
            batch.roll_back([width, 0, width - 1])
        batch.advance(width, [1, width, 0])
        batch.advance(1, [1, 1, 1])


def test_a_copy_and_its_source_go_separate_ways() -> None:
    """Appends to one are not seen by the other, for lone and shared rows, wrapped and not."""
    for length in (3, 17):
        alone = _fresh(length, 1)
        copy = Batch(alone.state.fork(0), [list(alone.rows[0])], 500)
        alone.advance(2, [2])
        copy.advance(1, [1])
        alone.advance(1, [1])
        copy.join(_fresh(5, 700))
        copy.next_number = 900
        second = Batch(copy.state.fork(0), [list(copy.rows[0])], 950)
        copy.advance(3, [2, 3])
        second.advance(1, [1])
        alone.advance(1, [1])


def test_stale_numbers_of_a_row_that_left_are_never_read() -> None:
    """A NaN in a row's keys must not reach the row that gets its place: a masked NaN still spoils a sum."""
    batch = _fresh(8, 1)
    batch.join(_fresh(9, 100))
    poisoned = Batch(new_state(), [[]])
    poisoned.state.begin(12)
    bad = mx.full((1, 2, 12, 1), float("nan"))
    for layer in poisoned.state.layers:
        layer.update_and_fetch(bad, bad)
    poisoned.state.commit()
    batch.state.join(poisoned.state)
    batch.state.keep([0, 1])
    batch.join(_fresh(2, 200))
    batch.next_number = 300
    state = batch.state
    state.begin(1)
    x = mx.ones((3, 2, 1, 1))
    for layer in state.layers:
        keys, values = layer.update_and_fetch(x, x)
        assert mx.isfinite(keys).all()
        assert mx.isfinite(values).all()
    state.abort()
    batch.state.join(_poisoned())
    batch.state.keep([3, 0, 1, 2])
    batch.state.keep([1, 2, 3])
    state.begin(1)
    for layer in state.layers:
        assert mx.isfinite(layer.update_and_fetch(x, x)[0]).all()


def _poisoned() -> BatchState:
    state = new_state()
    state.begin(12)
    bad = mx.full((1, 2, 12, 1), float("nan"))
    for layer in state.layers:
        layer.update_and_fetch(bad, bad)
    state.commit()
    return state
