"""Pages in the engine: shared memory is held once and counted once, and what goes wrong in it leaves straight books."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import gnomon
import tiny_models
from engine_fixtures import Rig, tiny_loaded, tiny_path, usage
from gnomon.config import CacheConfig, EngineConfig, KvScheme
from gnomon.engine.api import Failed, Request
from gnomon.engine.budget import Budget, budget_for
from gnomon.engine.runner import PagesLost
from gnomon.engine.settings import Settings
from gnomon.models.fit import Needs, measure_needs
from gnomon.state.paged import PAGE, PagePool
from gnomon.state.paged.pool import SLACK
from prefix_walk import tokens_of

PAGED = KvScheme(paged=True)
CHUNK = 64
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * PAGE
"""Two layers, keys and values, two heads of 16, float32."""
WHOLE = 3
SYSTEM = tokens_of(WHOLE * PAGE)


def rig_of(budget: Budget | None = None, cache: CacheConfig | None = None, **config: Any) -> Rig:
    settings = EngineConfig(**{"prefill_chunk": 256, "batch": 8, **config})
    return Rig(tiny_loaded(), settings, budget=budget, cache=cache, kv=PAGED)


def pool_of(rig: Rig) -> PagePool:
    pages = rig.core.runner.pages
    assert pages is not None
    return pages


def request(name: str, prompt: tuple[int, ...], **how: Any) -> Request:
    return Request(name, prompt, **{"max_tokens": 8, "ignore_eos": True, **how})


def turn_until(rig: Rig, done: Callable[[], bool]) -> None:
    for _ in range(500):
        if done():
            return
        rig.turn()
    raise AssertionError("it did not come to it")


@pytest.mark.parametrize("whole", [WHOLE, pytest.param(23, marks=pytest.mark.slow)])
def test_eight_agents_hold_one_system_prompt_once(whole: int) -> None:
    """By the pool's books, by the bytes of its arrays, and by MLX's memory; in buffers of their own it is there nine times."""
    taken, system = dict[bool, int](), tokens_of(whole * PAGE)
    for paged in (True, False):
        rig = rig_of() if paged else Rig(tiny_loaded(), EngineConfig(prefill_chunk=256, batch=8))
        rig.submit(request("first", system + tokens_of(3)))
        rig.finish()
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        for n in range(8):
            rig.submit(request(f"agent {n}", system + tokens_of(20, seed=n), max_tokens=60))
        turn_until(rig, lambda rig=rig: len(rig.core.batch.rows) == 8)
        mx.eval(rig.core.batch.state.arrays() if rig.core.batch.state is not None else [])
        mx.synchronize()
        mx.clear_cache()
        taken[paged] = mx.get_active_memory() - before
        if paged:
            stats = pool_of(rig).stats()
            # One whole prompt, and a page of each agent's own.
            assert stats["held_by_rows"] == whole + 8
            assert stats["pool_bytes"] <= (1 + 9 / 8 * (whole + 9)) * PAGE_BYTES
            rig.core.take_gauges()
            assert rig.counters.kv_bytes == (whole + 8) * PAGE_BYTES
        rig.finish()
        assert all(usage(rig, f"agent {n}").cached_tokens == len(system) for n in range(8))
    assert taken[True] < (whole + 16) * PAGE_BYTES
    assert taken[False] > 8 * whole * PAGE_BYTES


def test_the_cache_holds_what_the_rows_hold_until_both_let_go() -> None:
    rig = rig_of()
    rig.submit(request("r", SYSTEM, max_tokens=300))
    turn_until(rig, lambda: bool(rig.core.batch.rows) and len(rig.core.batch.rows[0].tokens) > 20)
    pool, cache = pool_of(rig), rig.core.reuse.cache
    assert cache is not None
    # The last prompt token runs as the first step: the page that it ends is published with the next whole one.
    assert sum(page.holds > page.row_holds > 0 for page in pool.pages()) == WHOLE - 1
    assert cache.num_bytes == (WHOLE - 1) * PAGE_BYTES + (PAGE - 1) * PAGE_BYTES // PAGE
    cache.allow(0)
    assert [page.holds for page in pool.pages()] == [1] * (WHOLE + 1)
    cache.allow(1 << 30)
    rig.finish()
    assert pool.stats()["held_by_rows"] == 0
    assert pool.stats()["used"] == (len(SYSTEM) + 299) // PAGE
    cache.clear()
    pool.tidy()
    assert (pool.stats()["used"], pool.nbytes) == (0, (pool.capacity + 1) * PAGE_BYTES)
    assert pool.capacity <= SLACK


def test_a_prompt_that_leaves_the_shared_one_within_a_page_gets_a_copy_of_that_page() -> None:
    rig = rig_of()
    first = SYSTEM + tokens_of(PAGE)
    rig.submit(request("first", first))
    rig.finish()
    other = first[: WHOLE * PAGE + 100] + tokens_of(90, seed=4)
    rig.submit(request("other", other))
    rig.submit(request("first again", first))
    rig.finish()
    assert usage(rig, "other").cached_tokens == WHOLE * PAGE + 100
    plain = Rig(tiny_loaded(), EngineConfig(prefill_chunk=256, batch=8))
    for name, prompt in (("first", first), ("other", other), ("first again", first)):
        plain.submit(request(name, prompt))
        plain.finish()
    for name in ("first", "other", "first again"):
        assert rig.ids(name) == plain.ids(name), name


def test_choices_share_their_prompt() -> None:
    rig = rig_of(prompt_cache=0)
    rig.submit(request("r", SYSTEM + tokens_of(30), n=4, max_tokens=60))
    turn_until(rig, lambda: len(rig.core.batch.rows) == 4 and len(rig.core.batch.rows[0].tokens) > 2)
    assert pool_of(rig).stats()["held_by_rows"] == WHOLE + 4
    rig.finish()
    assert pool_of(rig).pages() == []


def test_the_budget_counts_a_shared_page_once() -> None:
    """Memory for two prompts and a bit lets eight requests with the same one run together."""
    needs = Needs(weights=0, full=PAGE_BYTES / PAGE, sliding=0, window=0, max_positions=4096, paged=True)
    one = needs.kv((WHOLE + 1) * PAGE)
    budget = Budget(needs, None, 10**9, int(one * 2.5))
    rig = rig_of(budget)
    rig.submit(request("first", SYSTEM + tokens_of(3)))
    turn_until(rig, lambda: bool(rig.core.batch.rows))
    for n in range(6):
        rig.submit(request(f"agent {n}", SYSTEM + tokens_of(20, seed=n), max_tokens=40))
    turn_until(rig, lambda: len(rig.core.batch.rows) >= 6)
    assert 6 * one > 2.5 * one > pool_of(rig).stats()["held_by_rows"] * PAGE_BYTES
    rig.finish()
    # In buffers of their own two run at a time.
    plain = Rig(tiny_loaded(), EngineConfig(prefill_chunk=256, batch=8), budget=budget)
    for n in range(6):
        plain.submit(request(f"agent {n}", SYSTEM + tokens_of(20, seed=n), max_tokens=40))
    most = 0
    while plain.core.jobs or not most:
        plain.turn()
        most = max(most, len(plain.core.batch.rows))
    assert most == 2


def test_pages_and_buffers_read_each_others_files(tmp_path: Path) -> None:
    """The bits are the same, so a server in pages goes on from what one without them wrote, and the other way round."""
    loaded = replace(tiny_loaded(), path=tiny_path("llama"))
    prompt = SYSTEM[: 2 * PAGE + 77]

    @contextmanager
    def on_disk(kv: KvScheme | None) -> Iterator[Rig]:
        cache = CacheConfig(ssd_cache=tmp_path / "disk", ssd_cache_min_free=0)
        rig = Rig(loaded, EngineConfig(prefill_chunk=CHUNK), cache=cache, kv=kv)
        yield rig
        rig.core.close()
        rig.core.reuse.close()

    alone = Rig(loaded, EngineConfig(prefill_chunk=CHUNK, prompt_cache=0))
    alone.submit(request("r", prompt))
    alone.finish()
    with on_disk(None) as rig:
        rig.submit(request("r", prompt))
        rig.finish()
    with on_disk(PAGED) as rig:
        rig.submit(request("r", prompt, max_tokens=PAGE))
        rig.finish()
        assert rig.ids("r")[:8] == alone.ids("r")
        assert (usage(rig, "r").cached_tokens, usage(rig, "r").cache_tier) == (len(prompt) - 1, "ssd")
        answer = rig.ids("r")
        rig.core.check_integrity()
    with on_disk(None) as rig:
        rig.submit(request("r", (*prompt, *answer, 9)))
        rig.finish()
        assert (usage(rig, "r").cached_tokens, usage(rig, "r").cache_tier) == (len(prompt) + PAGE - 1, "ssd")


def test_a_failure_that_takes_the_pages_fails_who_had_them_and_nobody_after(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of()
    rig.submit(request("before", SYSTEM))
    rig.finish()
    want = rig.ids("before")
    rig.submit(request("hit", SYSTEM, max_tokens=40))
    turn_until(rig, lambda: bool(rig.core.batch.rows))
    pool = pool_of(rig)
    with monkeypatch.context() as patch:

        def fails() -> bool:
            pool.empty()
            return False

        def breaks() -> bool:
            raise RuntimeError("injected")

        patch.setattr(pool, "recover", fails)
        patch.setattr(rig.core.stepper, "step", breaks)
        with pytest.raises(PagesLost) as lost:
            rig.turn()
        rig.core.reset(lost.value)
    end = rig.end("hit")
    assert isinstance(end, Failed)
    rig.core.check_integrity()
    assert pool.pages() == []
    rig.submit(request("after", SYSTEM))
    rig.finish()
    assert rig.ids("after") == want
    assert usage(rig, "after").cached_tokens == 0
    rig.core.check_integrity()


def test_pages_that_cant_be_computed_are_given_up() -> None:
    pool = PagePool(1)
    held = pool.take(2)
    ones = mx.ones((1, 1, 1), mx.bfloat16)
    bad = mx.gather_mm(ones, ones, rhs_indices=mx.array([0])).reshape(1, 1, 1, 1).astype(mx.float32)
    layer = pool.layers[0]
    layer.reserve(3, bad, bad)
    assert pool.recover()
    layer.keys = (layer.keys if layer.keys is not None else bad) + bad
    if mx.default_device() == mx.Device(mx.cpu):
        assert not pool.recover()
        pool.check_integrity()
        assert pool.pages() == []
        del held
        pool.check_integrity()


def test_stats_fit_and_start_tell_of_pages(tmp_path: Path) -> None:
    directory = tiny_models.save("llama", tmp_path / "tiny-llama")
    plain, paged = measure_needs(directory), measure_needs(directory, PAGED)
    assert paged.kv(1) == paged.kv(PAGE) == plain.kv(PAGE) * 9 / 8
    assert paged.kv(PAGE + 1) == 2 * paged.kv(PAGE)
    with gnomon.load(directory, Settings(EngineConfig(), kv=PAGED)) as engine:
        engine.generate(list(tokens_of(300)), max_tokens=4, ignore_eos=True)
        told = engine.stats()["paged_kv"]
        assert told["enabled"]
        assert told["page_tokens"] == PAGE
        assert told["page_bytes"] == plain.kv(PAGE)
        assert told["pool_bytes"] == (told["used"] + told["free"] + 1) * told["page_bytes"]
        assert engine.model.tier == "L1"
    with gnomon.load(directory, Settings(EngineConfig())) as engine:
        assert engine.stats()["paged_kv"] == {"enabled": False}


@pytest.mark.slow
def test_a_run_stays_within_what_the_budget_predicts(tmp_path: Path) -> None:
    directory = tiny_models.save("llama", tmp_path / "tiny-llama")
    loaded = replace(tiny_loaded(), path=directory)
    budget = budget_for(loaded, None, PAGED)
    rig = rig_of(budget, prompt_cache=0)
    rig.submit(request("r", SYSTEM + tokens_of(200), max_tokens=100))
    rig.finish()
    pool = pool_of(rig)
    assert pool.num_moves >= 1
    peak = budget.kv(len(SYSTEM) + 300, 1)
    assert peak is not None
    rig.submit(request("again", SYSTEM + tokens_of(200), max_tokens=100))
    turn_until(rig, lambda: bool(rig.core.batch.rows) and len(rig.core.batch.rows[0].tokens) > 60)
    assert pool.nbytes - PAGE_BYTES <= peak
    rig.finish()
