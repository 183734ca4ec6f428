"""Coded rows in a batch: each gives what the same windows give alone, whatever the others do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from gnomon.kernels import coded
from gnomon.models.bindings import bind
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs import Affine, Codec, Coding, Turbo
from tiny_models import VOCAB_SIZE, make


@pytest.fixture(scope="module", autouse=True)
def coded_attention() -> None:
    """In place for all of these tests, whoever took it away in this process before."""
    coded.install()


BOUND = 2e-5
"""Largest difference of a float32 logit between a batch and the row alone, as a share of the largest logit; sums run in another order."""

AFFINE, TURBO = Affine(8), Turbo(8, 4)


@cache
def model_of(model_type: str) -> nn.Module:
    shape = {"gemma3": {"sliding_window_pattern": 2, "num_hidden_layers": 2}, "qwen3_5": {"full_attention_interval": 2}}
    more: dict[str, Any] = shape.get(model_type, {"num_hidden_layers": 2})
    return make(model_type, head_dim=64, **more)


def state_of(model: nn.Module, codec: Codec, start: int, *, sliding: bool = False) -> BatchState:
    binding = bind(model)
    caches = binding.make_caches()
    kinds = (KVCache, RotatingKVCache) if sliding else (KVCache,)
    codecs = tuple(codec if type(one) in kinds else None for one in caches)
    return BatchState(model, caches, pad_safe=binding.pad_safe, coding=Coding(codecs, start))


@dataclass
class Pair:
    """A row of the batch, and the same row in a state of its own."""

    alone: BatchState
    seed: int
    length: int = 0

    def tokens(self, count: int) -> list[int]:
        rng = np.random.default_rng([self.seed, self.length])
        return rng.integers(3, VOCAB_SIZE, count).tolist()


def forward(
    model: nn.Module, state: BatchState, window: list[list[int]], counts: list[int] | None = None
) -> np.ndarray:
    state.begin(len(window[0]), counts)
    logits = model(mx.array(window), cache=state.caches)
    state.commit()
    mx.eval(logits, state.arrays())
    state.check_integrity()
    return np.array(logits)


class Shadowed:
    """A batch whose every row is also run alone."""

    def __init__(self, model: nn.Module, codec: Codec, start: int, *, sliding: bool) -> None:
        self.model = model
        self.new = lambda: state_of(model, codec, start, sliding=sliding)
        self.batch: BatchState | None = None
        self.pairs: list[Pair] = []
        self.seed = 0

    def join(self, length: int) -> None:
        if len(self.pairs) == 4:
            return
        self.seed += 1
        pair, own = Pair(self.new(), self.seed), self.new()
        if length:
            tokens = pair.tokens(length)
            for state in (pair.alone, own):
                forward(self.model, state, [tokens])
            pair.length = length
        self.pairs.append(pair)
        if self.batch is None:
            self.batch = own
        else:
            self.batch.join(own)
        self.batch.check_integrity()

    def step(self, width: int, real: list[int], back: list[int]) -> None:
        """A window in which row b has real[b] of `width` tokens at most, of which back[b] at most are taken back."""
        assert self.batch is not None
        n = len(self.pairs)
        counts = [min(width, 1 + real[b] % width) for b in range(n)]
        if n == 1 or not self.batch.pad_safe:
            counts = [width] * n
        backs = [back[b] % counts[b] for b in range(n)]
        texts = [pair.tokens(count) for pair, count in zip(self.pairs, counts, strict=True)]
        got = forward(self.model, self.batch, [text + [5] * (width - len(text)) for text in texts], counts)
        for b, (pair, text) in enumerate(zip(self.pairs, texts, strict=True)):
            want = forward(self.model, pair.alone, [text])[0]
            assert np.abs(got[b, : len(text)] - want).max() <= BOUND * np.abs(want).max(), f"row {b} of {n}"
            pair.alone.rollback([backs[b]])
            pair.length += counts[b] - backs[b]
        self.batch.rollback(backs)
        self.batch.check_integrity()

    def leave(self, row: int) -> None:
        if len(self.pairs) < 2 or self.batch is None:
            return
        order = self.batch.order_without({row % len(self.pairs)})
        self.batch.keep(order)
        self.pairs = [self.pairs[i] for i in order]
        self.batch.check_integrity()

    def restore(self, row: int) -> None:
        """A row goes and comes back out of a snapshot."""
        assert self.batch is not None
        row %= len(self.pairs)
        snapshot = self.batch.snapshot(row)
        mx.eval(snapshot.arrays())
        fresh = self.new()
        fresh = BatchState.restore(self.model, fresh.templates, snapshot, pad_safe=fresh.pad_safe, coding=fresh.coding)
        pair = self.pairs[row]
        if len(self.pairs) == 1:
            self.batch = fresh
        else:
            order = self.batch.order_without({row})
            self.batch.keep(order)
            self.pairs = [*(self.pairs[i] for i in order), pair]
            self.batch.join(fresh)
        self.batch.check_integrity()


numbers = st.lists(st.integers(0, 16), min_size=4, max_size=4)
actions = st.one_of(
    st.tuples(st.just("step"), st.sampled_from([1, 1, 1, 3, 9]), numbers, numbers),
    st.tuples(st.just("step"), st.sampled_from([1, 2, 5]), numbers, numbers),
    st.tuples(st.just("join"), st.sampled_from([0, 1, 7, 30, 55])),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("restore"), st.integers(0, 3)),
)


def run(model_type: str, codec: Codec, start: int, then: list[Any], *, sliding: bool = False) -> None:
    walk = Shadowed(model_of(model_type), codec, start, sliding=sliding)
    for length in (30, 1, 55):
        walk.join(length)
    for name, *values in then:
        getattr(walk, name)(*values)


def examples(count: int) -> Any:
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


WALKS: list[tuple[str, Codec, int, bool]] = [
    ("llama", AFFINE, 0, False),
    ("llama", AFFINE, 33, False),
    ("llama", TURBO, 0, False),
    ("llama", TURBO, 33, False),
    ("qwen3_5", AFFINE, 33, False),
    ("gemma3", AFFINE, 0, True),
    ("gemma3", AFFINE, 33, True),
    ("gemma3", TURBO, 33, False),
]


@pytest.mark.parametrize(("model_type", "codec", "start", "sliding"), WALKS)
@examples(2)
@given(then=st.lists(actions, min_size=10, max_size=14))
def test_a_batch_gives_what_each_row_gives_alone(
    model_type: str, codec: Codec, start: int, sliding: bool, then: list[Any]
) -> None:
    run(model_type, codec, start, then, sliding=sliding)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "codec", "start", "sliding"), WALKS)
@examples(40)
@given(then=st.lists(actions, min_size=20, max_size=40))
def test_long_walks(model_type: str, codec: Codec, start: int, sliding: bool, then: list[Any]) -> None:
    run(model_type, codec, start, then, sliding=sliding)


def test_rows_convert_one_by_one_and_the_batch_holds_both() -> None:
    walk = Shadowed(model_of("llama"), AFFINE, 33, sliding=False)
    for length in (30, 40, 34, 10):
        walk.join(length)
    assert walk.batch is not None
    seen: set[tuple[tuple[bool, tuple[int, ...]], ...]] = set()
    for _ in range(25):
        walk.step(1, [0] * 4, [0] * 4)
        layer: Any = walk.batch.layers[0]
        seen.add(tuple((part.is_coded, tuple(part.members)) for part in layer._parts))
    assert seen == {
        ((True, (1, 2)), (False, (0, 3))),
        ((True, (0, 1, 2)), (False, (3,))),
        ((True, (0, 1, 2, 3)),),
    }


@pytest.mark.parametrize("codec", [Affine(4), Affine(8), TURBO], ids=lambda codec: codec.name)
def test_bytes_held_are_those_of_the_arrays(codec: Codec) -> None:
    """2 layers, 2 heads of 64, 256 slots of float32 plain; then words of 200 tokens, and 256 slots more as mlx-lm's caches grow."""
    model = model_of("llama")
    state = state_of(model, codec, 0)
    forward(model, state, [[5] * 200])
    assert state.nbytes() == 2 * 2 * 2 * 256 * 64 * 4
    forward(model, state, [[5]])
    per_token = {"affine4g64": 2 * (32 + 8), "affine8g64": 2 * (64 + 8), "turbo-k8v4": (64 + 8) + (32 + 4)}[codec.name]
    assert state.nbytes() == 2 * 2 * (200 + 256) * per_token


def test_what_a_row_took_back_is_gone_to_the_bit() -> None:
    """After a roll-back across the threshold's window the state is that of a row that never saw those tokens."""
    model = model_of("llama")
    for codec, start in ((AFFINE, 0), (TURBO, 0), (AFFINE, 33), (TURBO, 33)):
        one, other = state_of(model, codec, start), state_of(model, codec, start)
        text = np.random.default_rng(1).integers(3, VOCAB_SIZE, 60).tolist()
        for state in (one, other):
            forward(model, state, [text[:30]])
        forward(model, one, [text[30:36]])
        one.rollback([6])
        for width in (4, 1, 1):
            start_at = one.lengths[0]
            window = [text[start_at : start_at + width]]
            assert np.array_equal(forward(model, one, window), forward(model, other, window))


def test_snapshots_of_another_codec_are_refused() -> None:
    model = model_of("llama")
    coded_state, templates = state_of(model, Affine(8), 0), bind(model).make_caches()
    forward(model, coded_state, [[5] * 10])
    snapshot = coded_state.snapshot(0)
    with pytest.raises(ValueError, match=r"the snapshot is coded .* this layer is plain"):
        BatchState.restore(model, templates, snapshot)
    with pytest.raises(ValueError, match="codec is number 8064, this layer's is 4064"):
        BatchState.restore(model, templates, snapshot, coding=Coding((Affine(4),) * 2))
    with pytest.raises(ValueError, match="same model, slack and coding"):
        coded_state.join(state_of(model, Affine(4), 0))


def test_a_delayed_row_cant_be_cut() -> None:
    model = model_of("llama")
    state = state_of(model, AFFINE, 33)
    forward(model, state, [[5] * 40])
    assert not state.can_cut(40)
    with pytest.raises(ValueError, match=r"coded from token 33 on can't be cut at 0..10"):
        state.layers[0].cut(0, 0, 10)


def test_views_belong_together() -> None:
    model = model_of("llama")
    state, other = state_of(model, AFFINE, 0), state_of(model, AFFINE, 0)
    for one in (state, other):
        forward(model, one, [[5] * 10])
        one.begin(1)
    x = mx.zeros((1, 2, 1, 64))
    keys, _ = state.layers[0].update_and_fetch(x, x)  # pyright: ignore[reportAttributeAccessIssue]
    _, values = other.layers[0].update_and_fetch(x, x)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="values that were fetched with them"):
        mx.fast.scaled_dot_product_attention(mx.zeros((1, 4, 1, 64)), keys, values, scale=1.0)
