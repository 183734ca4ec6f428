"""Pages: the same bits as buffers of a state's own, each page with one writer, none lost and none used twice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlx import nn
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from gnomon.kernels import coded
from gnomon.models.bindings import bind
from gnomon.state.batch_state import BatchState, UnsupportedCache
from gnomon.state.codecs import Affine, Codec, Coding, Turbo
from gnomon.state.paged import PAGE, Hold, PagePool
from gnomon.state.paged.arrays import Segment, Writing
from gnomon.state.paged.layer import PagedLayer
from prefix_walk import bits
from tiny_models import VOCAB_SIZE, make


@pytest.fixture(scope="module", autouse=True)
def coded_attention() -> None:
    """In place for all of these tests, whoever took it away in this process before."""
    coded.install()


@cache
def model_of() -> nn.Module:
    return make("llama", head_dim=64, num_hidden_layers=2)


def state_of(codec: Codec | None, pages: PagePool | None) -> BatchState:
    model = model_of()
    caches = bind(model).make_caches()
    coding = None if codec is None else Coding((codec,) * len(caches))
    return BatchState(model, caches, coding=coding, pages=pages)


class Both:
    """The same rows in pages and in buffers."""

    def __init__(self, codec: Codec | None, pool: PagePool) -> None:
        self.plain, self.paged = state_of(codec, None), state_of(codec, pool)

    def step(self, width: int, counts: list[int] | None, seed: int) -> None:
        """A window of the same tokens: every real token's logits have the same bits."""
        model, n = model_of(), self.plain.num_rows
        tokens = mx.array(np.random.default_rng(seed).integers(3, VOCAB_SIZE, (n, width)))
        found = list[np.ndarray]()
        for state in (self.plain, self.paged):
            state.begin(width, counts)
            logits = model(tokens, cache=state.caches)
            state.commit()
            mx.eval(logits, state.arrays())
            found.append(bits(logits))
        for row in range(n):
            real = width if counts is None else counts[row]
            assert np.array_equal(found[0][row, :real], found[1][row, :real]), row
        self.check()

    def abort(self, width: int) -> None:
        for state in (self.plain, self.paged):
            state.begin(width)
            model_of()(mx.zeros((state.num_rows, width), mx.int32), cache=state.caches)
            state.abort()

    def check(self) -> None:
        assert self.plain.lengths == self.paged.lengths
        self.paged.check_integrity()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from([1, 1, 3, 17, 130]), st.integers(0, 99)),
        st.tuples(st.just("join"), st.integers(1, 400), st.integers(0, 99)),
        st.tuples(st.just("back"), st.integers(0, 17), st.integers(0, 99)),
        st.tuples(st.just("fork"), st.integers(0, 7), st.integers(0, 99)),
        st.tuples(st.just("leave"), st.integers(0, 7), st.integers(0, 99)),
        st.tuples(st.just("abort"), st.sampled_from([1, 5, 300]), st.integers(0, 99)),
        st.tuples(st.just("tidy"), st.just(0), st.just(0)),
    ),
    max_size=14,
)


CODECS = [None, Affine(8), Affine(4), Turbo(8, 3)]


@pytest.mark.parametrize("codec", CODECS[:2], ids=["plain", "8"])
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=st.sampled_from([1, 250, 256, 300]), actions=ACTIONS)
def test_pages_have_the_bits_of_buffers(codec: Codec | None, first: int, actions: list[tuple[str, int, int]]) -> None:
    walk(codec, first, actions)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=["plain", "8", "4", "turbo"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=st.sampled_from([1, 250, 256, 300]), actions=ACTIONS)
def test_pages_have_the_bits_of_buffers_on_long_walks(
    codec: Codec | None, first: int, actions: list[tuple[str, int, int]]
) -> None:
    walk(codec, first, actions)


def walk(codec: Codec | None, first: int, actions: list[tuple[str, int, int]]) -> None:
    pool = PagePool(2)
    both = Both(codec, pool)
    both.step(first, None, 1)
    for what, number, seed in actions:
        rng = np.random.default_rng(seed)
        rows = both.plain.num_rows
        if what == "step":
            ragged = rows > 1 and number > 1
            both.step(number, rng.integers(0, number + 1, rows).tolist() if ragged else None, seed)
        elif what == "join" and rows < 4:
            other = Both(codec, pool)
            other.step(number, None, seed)
            both.plain.join(other.plain)
            both.paged.join(other.paged)
        elif what == "back" and both.plain.rows.width <= 17:
            back = [min(number, count) for count in both.plain.rows.counts]
            both.plain.rollback(back)
            both.paged.rollback(back)
        elif what == "fork" and rows < 4:
            both.plain.join(both.plain.fork(number % rows))
            both.paged.join(both.paged.fork(number % rows))
        elif what == "leave" and rows > 1:
            order = both.plain.order_without({number % rows})
            both.plain.keep(order)
            both.paged.keep(order)
        elif what == "abort":
            both.abort(number)
        elif what == "tidy":
            pool.tidy()
        both.check()
        pool.check_integrity()
    both.step(1, None, 5)
    del both
    assert pool.pages() == []


class Books(RuleBasedStateMachine):
    """Claims come, are shared and go, while the pool grows and shrinks, against a model that knows who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(1)
        self.marks = dict[int, float]()
        """By page, as the object's number, what is written on it."""
        self.count = 0
        self.claims = list[Hold]()

    def write(self, hold: Hold) -> None:
        self.count += 1
        x = mx.full((1, 1, PAGE, 1), float(self.count))
        segment = Segment(0, 0, PAGE, hold.page.index, 0, is_new=True)
        self.pool.write(0, Writing([segment]), x, -x)
        self.marks[id(hold.page)] = float(self.count)

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        after = self.claims[-1] if self.claims else None
        taken = self.pool.take(count, after)
        assert len({hold.page.index for hold in taken}) == count
        assert not {hold.page for hold in taken} & {hold.page for hold in self.claims}
        assert all(hold.page.index for hold in taken), "the place of zeros was given away"
        for hold in taken:
            self.write(hold)
        self.claims += taken

    @precondition(lambda self: self.claims)
    @rule(which=st.integers(0, 99), by_row=st.booleans())
    def share(self, which: int, by_row: bool) -> None:
        hold = self.claims[which % len(self.claims)]
        self.claims.append(hold.share(by_row=by_row))
        assert self.pool.is_shared(hold)

    @precondition(lambda self: self.claims)
    @rule(which=st.integers(0, 99))
    def free(self, which: int) -> None:
        del self.claims[which % len(self.claims)]

    @rule()
    def tidy(self) -> None:
        self.pool.tidy()

    @rule(count=st.integers(0, 30))
    def reserve(self, count: int) -> None:
        self.pool.reserve(count)
        moves = self.pool.num_moves
        self.pool.take(count)
        assert self.pool.num_moves == moves

    @invariant()
    def straight(self) -> None:
        self.pool.check_integrity()
        pages = {hold.page for hold in self.claims}
        assert set(self.pool.pages()) == pages
        for page in pages:
            mine = [hold for hold in self.claims if hold.page is page]
            assert (page.holds, page.row_holds) == (len(mine), sum(hold.by_row for hold in mine))
            keys = self.pool.layers[0].copy(page.index, 0, PAGE)["keys"]
            assert set(np.array(keys).ravel().tolist()) == {self.marks[id(page)]}


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=6, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck)
)


class NoModel(nn.Module):
    pass


def append(state: BatchState, width: int) -> None:
    x = mx.random.normal((state.num_rows, 2, width, 64))
    state.begin(width)
    fetched = [layer.update_and_fetch(x, x) for layer in state.layers if isinstance(layer, PagedLayer)]
    state.commit()
    mx.eval([array.sum() for pair in fetched for array in pair if isinstance(array, mx.array)], state.arrays())


def extra(work: Callable[[], object]) -> int:
    """Bytes by which memory rose above its level before, at the highest point of the work."""
    gc.collect()  # what earlier tests left must not go while this is measured
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return mx.get_peak_memory() - before


def test_appends_are_in_place_and_a_lone_run_is_not_even_gathered() -> None:
    pool = PagePool(1)
    pool.reserve(40)
    lone = BatchState(NoModel(), [KVCache()], pages=pool)
    append(lone, 2000)
    page = pool.page_bytes
    assert extra(lambda: append(lone, 1)) < page
    # A row behind it takes the place where it would go on: from then on its pages are no run.
    other = BatchState(NoModel(), [KVCache()], pages=pool)
    append(other, 300)
    append(lone, 200)
    held = 9 * page
    assert held < extra(lambda: append(lone, 1)) < held + 2 * page
    assert held < extra(lambda: append(lone, 3)) < held + 2 * page
    lone.join(other)
    assert extra(lambda: append(lone, 1)) < 2 * held + 2 * page


def test_a_fork_copies_one_page_when_it_is_written_to() -> None:
    pool = PagePool(1)
    pool.reserve(20)
    state = BatchState(NoModel(), [KVCache()], pages=pool)
    append(state, 1000)
    assert extra(lambda: state.fork(0)) <= 0
    fork = state.fork(0)
    assert len(pool.pages()) == 4
    append(fork, 1)
    assert len(pool.pages()) == 5
    append(state, 1)
    assert len(pool.pages()) == 5, "the row had its last page to itself again"
    state.join(fork)
    state.keep([1])
    assert len(pool.pages()) == 4


def test_a_failed_forward_gives_back_what_it_took() -> None:
    pool = PagePool(1)
    state = BatchState(NoModel(), [KVCache()], pages=pool)
    append(state, 250)
    fork = state.fork(0)
    before = [hold.page for hold in fork.table.held[0]] if fork.table is not None else []
    fork.begin(20)
    assert len(pool.pages()) == 3
    fork.abort()
    after = [hold.page for hold in fork.table.held[0]] if fork.table is not None else None
    assert after == before
    assert len(pool.pages()) == 1
    fork.check_integrity()


@pytest.mark.parametrize("template", [RotatingKVCache(max_size=8), CacheList(KVCache(), KVCache())])
def test_only_full_attention_is_held_in_pages(template: object) -> None:
    with pytest.raises(UnsupportedCache, match=f"{type(template).__name__} can't be held in pages"):
        BatchState(NoModel(), [template], pages=PagePool(1))
    with pytest.raises(UnsupportedCache, match="from the first token on, not from token 9"):
        BatchState(NoModel(), [KVCache()], coding=Coding((Affine(8),), 9), pages=PagePool(1))


def test_pages_and_buffers_dont_mix() -> None:
    pool = PagePool(1)
    paged, plain = BatchState(NoModel(), [KVCache()], pages=pool), BatchState(NoModel(), [KVCache()])
    append(paged, 5)
    with pytest.raises(ValueError, match="can't join"):
        paged.join(plain)
    with pytest.raises(ValueError, match="same pool"):
        paged.join(BatchState(NoModel(), [KVCache()], pages=PagePool(1)))
    with pytest.raises(ValueError, match="in pages"):
        BatchState.restore(NoModel(), [KVCache()], paged.snapshot(0))
