"""Prompts that start from held states: how many tokens, the same bits, and nobody else disturbed."""

from __future__ import annotations

import gc
import logging
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from engine_fixtures import EOS_ID, Rig, ask, tiny_engine, tiny_loaded, tiny_model, tiny_tokenizer, usage
from gnomon.config import EngineConfig
from gnomon.engine import core
from gnomon.engine.api import ChoiceFinished, Delta, Failed, Finished, Request, SamplingParams
from gnomon.engine.budget import Budget, ceiling
from gnomon.engine.reuse import cache_bytes
from gnomon.models.fit import Needs
from gnomon.state.prefix import PrefixCache, block
from prefix_walk import bits, record, tokens_of
from solo import GAP_BOUNDS, solo, ties_until_equal

TYPES = ("llama", "qwen3_moe", "deepseek_v3", "qwen3_5", "gemma3", "gemma4", "gpt_oss", "mamba2")
CHUNK = 64


def rig_of(model_type: str = "llama", **config: Any) -> Rig:
    return Rig(tiny_loaded(model_type), EngineConfig(**{"prefill_chunk": CHUNK, **config}))


@pytest.mark.parametrize("length", [39, 252, 253, 254, 511])
@pytest.mark.parametrize("model_type", TYPES)
def test_the_next_turn_goes_on_as_if_the_row_had_never_ended(model_type: str, length: int) -> None:
    """Four tokens are generated, so that rows end on both sides of the edges of blocks. mlx-lm runs the same windows and steps without
    a break; every logit of the second turn has the same bits."""
    model, first, more = tiny_model(model_type, "float32"), tokens_of(length), tokens_of(70, seed=length)
    rig = rig_of(model_type)
    answer = ask(rig, "first", first)
    second = (*first, *answer[:-1], *more)

    caches = make_prompt_cache(model)
    feeds = [first[i : min(i + CHUNK, length - 1)] for i in range(0, length - 1, CHUNK)]
    feeds += [(first[-1],), *((token,) for token in answer[:-1])]
    for feed in feeds:
        mx.eval(model(mx.array([list(feed)]), cache=caches))
    theirs = [model(mx.array([list(feed)]), cache=caches) for feed in (more[:CHUNK], more[CHUNK:-1], more[-1:])]
    expected = int(mx.argmax(theirs[-1][0, -1]).item())

    seen, stop = record(model)
    assert ask(rig, "second", second, tokens=1) == [expected]
    stop()
    assert usage(rig, "second").cached_tokens == length + 3
    assert [x.shape for x in seen] == [x.shape for x in theirs]
    assert all(np.array_equal(bits(x), bits(y)) for x, y in zip(seen, theirs, strict=True))


def test_the_very_same_prompt_needs_no_prefill() -> None:
    rig, prompt = rig_of(), tokens_of(300)
    answer = ask(rig, "a", prompt)
    chunks = rig.counters.prefill_chunks
    assert ask(rig, "b", prompt) == answer
    assert rig.counters.prefill_chunks == chunks
    used = usage(rig, "b")
    assert (used.prompt_tokens, used.cached_tokens, used.cache_tier, used.cache_miss) == (300, 299, "ram", None)
    assert usage(rig, "a").cached_tokens == 0
    assert usage(rig, "a").cache_tier == "none"


@pytest.mark.parametrize("model_type", ["qwen3_5", "gemma3", "mamba2"])
def test_the_template_boundary_is_a_checkpoint(model_type: str) -> None:
    """The next turn differs right behind it, where the first opened its answer. A boundary in the middle of a block."""
    rig, prompt = rig_of(model_type), tokens_of(300)
    ask(rig, "a", prompt, boundary=290)
    ask(rig, "b", (*prompt[:290], *tokens_of(40, seed=1)), boundary=320)
    assert usage(rig, "b").cached_tokens == 290
    ask(rig, "c", (*prompt[:290], *tokens_of(40, seed=1)[:30], 5, 6, 7), boundary=320)
    assert usage(rig, "c").cached_tokens == 320


def test_no_prefill_stops_for_a_boundary_where_all_layers_can_be_cut() -> None:
    """mlx-lm's schedule holds: 299 tokens in chunks of 64."""
    rig = rig_of()
    ask(rig, "a", tokens_of(300), boundary=290)
    assert rig.counters.prefill_chunks == 5


def test_a_long_prefill_leaves_checkpoints_on_its_way() -> None:
    rig, prompt = rig_of("qwen3_5", checkpoint_every=100), tokens_of(450)
    ask(rig, "a", prompt)
    for name, shared, expected in (("b", 399, 300), ("c", 400, 400), ("d", 99, 0)):
        ask(rig, name, (*prompt[:shared], 5, 6))
        assert usage(rig, name).cached_tokens == expected
    miss = usage(rig, "d").cache_miss
    assert miss is not None
    assert (miss.kind, miss.position) == ("uncuttable state", 0)


def test_a_prompt_still_in_prefill_lends_its_whole_blocks() -> None:
    rig, prompt = rig_of(), tokens_of(1200)
    rig.submit(Request("long", prompt, max_tokens=2))
    while usage_of_prefill(rig) < 600:
        rig.turn()
    rig.submit(Request("short", (*prompt[:520], 5, 6), max_tokens=2))
    rig.finish()
    assert usage(rig, "short").cached_tokens == 512


def test_an_answer_under_way_lends_its_whole_blocks() -> None:
    """Not its last tokens: those come when it has ended."""
    rig, prompt = rig_of(), tokens_of(200)
    rig.submit(Request("long", prompt, max_tokens=400, ignore_eos=True))
    while len(rig.ids("long")) < 330:
        rig.turn()
    answer = rig.ids("long")
    rig.submit(Request("branch", (*prompt, *answer[:325], 5, 6), max_tokens=2))
    while rig.events["branch"] == [] or not isinstance(rig.events["branch"][-1], Finished):
        rig.turn()
    assert "long" in rig.core.jobs
    assert usage(rig, "branch").cached_tokens == 512
    rig.finish()
    ask(rig, "later", (*prompt, *answer[:325], 7, 8))
    assert usage(rig, "later").cached_tokens == 525


def usage_of_prefill(rig: Rig) -> int:
    long = rig.core.scheduler.long
    return long.prefill.done if long is not None else 0


def test_prompts_that_share_a_beginning_are_not_computed_side_by_side() -> None:
    """Three come at once. Two that begin alike would fit one window: the second waits for what the first computes."""
    rig, shared = rig_of(prefill_chunk=2048), tokens_of(400)
    for name, prompt in (("a", (*shared, 5, 6, 7)), ("b", (*shared, 8, 9)), ("c", tokens_of(300, seed=3))):
        rig.submit(Request(name, prompt, max_tokens=3, ignore_eos=True))
    rig.finish()
    assert [usage(rig, name).cached_tokens for name in "abc"] == [0, 400, 0]
    assert rig.counters.prefill.tokens == 402 + 1 + 299


def test_uncached_short_prompts_still_share_a_window() -> None:
    rig = rig_of(prefill_chunk=2048)
    for i in range(4):
        rig.submit(Request(str(i), tokens_of(50 + i, seed=i), max_tokens=2))
    rig.finish()
    assert rig.counters.prefill_chunks == 1


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_5"])
def test_prompts_with_held_beginnings_share_a_window(model_type: str) -> None:
    """Each goes on at its own position; the answers are those of mlx-lm alone, up to ties."""
    model, rig = tiny_model(model_type), rig_of(model_type, prefill_chunk=2048)
    firsts = [tokens_of(length, seed=length) for length in (70, 300, 129)]
    seconds: list[tuple[int, ...]] = []
    for i, first in enumerate(firsts):
        answer = ask(rig, f"first {i}", first)
        seconds.append((*first, *answer[:-1], *tokens_of(10 + 7 * i, seed=i)))
    chunks = rig.counters.prefill_chunks
    for i, second in enumerate(seconds):
        rig.submit(Request(f"second {i}", second, max_tokens=8, ignore_eos=True))
    rig.finish()
    assert rig.counters.prefill_chunks == chunks + 1
    for i, second in enumerate(seconds):
        assert usage(rig, f"second {i}").cached_tokens == len(firsts[i]) + 3
        ties_until_equal(rig.ids(f"second {i}"), solo(model, second, 8), GAP_BOUNDS["float32"])


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5"])
def test_choices_of_a_request_go_on_from_one_lent_state_and_are_kept_apart(model_type: str) -> None:
    rig, prompt = rig_of(model_type), tokens_of(280)
    ask(rig, "warm", prompt)
    cold = rig_of(model_type, prompt_cache=0)
    sampling = SamplingParams(temperature=1.0, seed=7)
    for one in (rig, cold):
        one.submit(Request("n", prompt, sampling, max_tokens=6, ignore_eos=True, n=3))
        one.finish()
    answers = [rig.ids("n", i) for i in range(3)]
    assert answers == [cold.ids("n", i) for i in range(3)]
    assert len(set(map(tuple, answers))) == 3
    assert usage(rig, "n").cached_tokens == 279
    for i, answer in enumerate(answers):
        ask(rig, f"next {i}", (*prompt, *answer[:-1], 5))
        assert usage(rig, f"next {i}").cached_tokens == 285


def test_an_answer_that_ended_by_itself_is_lent_with_its_end() -> None:
    """The token that ended it was fed already when it was read, one step behind."""
    rig, prompt = rig_of(), tokens_of(50)
    bias = ((EOS_ID, 1000.0),)
    rig.submit(Request("a", prompt, SamplingParams(logit_bias=bias), max_tokens=20))
    rig.finish()
    assert rig.events["a"][-2] == ChoiceFinished("a", 0, "stop")
    ask(rig, "b", (*prompt, EOS_ID, 5, 6))
    assert usage(rig, "b").cached_tokens in (50, 51)


def test_a_cancelled_row_leaves_what_it_processed() -> None:
    rig, prompt = rig_of(), tokens_of(100)
    rig.submit(Request("a", prompt, max_tokens=500, ignore_eos=True))
    while len(rig.ids("a")) < 20:
        rig.turn()
    rig.cancel("a")
    rig.finish()
    answer = rig.ids("a")
    ask(rig, "b", (*prompt, *answer, 5))
    assert usage(rig, "b").cached_tokens >= 100 + len(answer) - 1


def test_a_failed_row_leaves_its_prompt_only() -> None:
    rig, prompt = rig_of(), tokens_of(100)
    heard: list[object] = []

    def sink(event: object) -> None:
        heard.append(event)
        if len(heard) > 6:
            raise RuntimeError("gone")

    job = rig.submit(Request("a", prompt, max_tokens=50, ignore_eos=True))
    job.sink = sink
    rig.finish()
    assert any(isinstance(event, Failed) for event in heard)
    answer = [i for event in heard if isinstance(event, Delta) for i in event.ids]
    assert len(answer) > 2
    ask(rig, "b", (*prompt, *answer, 5))
    assert usage(rig, "b").cached_tokens == 99


def test_another_namespace_shares_nothing() -> None:
    rig, prompt = rig_of(), tokens_of(100)
    ask(rig, "a", prompt, namespace="adapter a")
    ask(rig, "b", prompt, namespace="adapter b")
    used = usage(rig, "b")
    assert used.cached_tokens == 0
    assert used.cache_miss is not None
    assert (used.cache_miss.kind, used.cache_miss.position) == ("namespace", 0)


def test_a_miss_is_told_in_the_log_and_in_the_stats(caplog: pytest.LogCaptureFixture) -> None:
    """Position, kind and, in the stats, both sides in words. The log says no word of a prompt at its usual level."""
    tokenizer = tiny_tokenizer()
    first = tuple(tokenizer.encode("the cat sat on the mat and the dog ran after the cat"))
    second = tuple(tokenizer.encode("the cat sat on the mat and the captain ran after the cat"))
    at = block.common(first, second)
    caplog.set_level(logging.INFO, "gnomon.engine.reuse")
    rig = rig_of()
    ask(rig, "a", first)
    ask(rig, "b", second)
    stats = rig.core.reuse.stats()
    assert (stats["hits"], stats["misses"], stats["reused_tokens"]) == (1, 1, at)
    told = stats["recent_misses"][-1]
    assert told["request"] == "b"
    assert (told["kind"], told["position"], told["reused_tokens"], told["prompt_tokens"]) == (
        "edited text",
        at,
        at,
        len(second),
    )
    assert told["before"].endswith(" the ") or told["before"].endswith(" the")
    assert told["prompt"].lstrip().startswith("captain")
    assert told["stored"].lstrip().startswith("dog")
    assert (
        f"request b: {at} of {len(second)} prompt tokens reused, no further than token {at}: edited text" in caplog.text
    )
    assert "captain" not in caplog.text


def test_without_a_cache_nothing_is_kept() -> None:
    rig, prompt = rig_of(prompt_cache=0), tokens_of(100)
    assert ask(rig, "a", prompt) == ask(rig, "b", prompt)
    assert usage(rig, "b").cached_tokens == 0
    assert rig.core.reuse.stats()["enabled"] is False


@pytest.mark.parametrize("verb", ["lend", "publish"])
def test_a_failing_cache_costs_time_only(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, prompt = rig_of(), tokens_of(100)
    expected = ask(rig, "a", prompt)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(PrefixCache, verb, fail)
    assert ask(rig, "b", prompt) == expected
    stats = rig.core.reuse.stats()
    assert stats["failures"] > 0
    assert verb == "lend" or stats["entries"] == 0


def test_the_cache_gives_way_to_requests_under_a_memory_budget() -> None:
    """The limit leaves the state of 400 tokens beside one request of 304, and of 250 beside another one of 150 as well."""
    per_token = 2 * 2 * 2 * 16 * 4
    needs = Needs(weights=0, full=per_token, sliding=0, window=0, max_positions=2048)
    limit = int(needs.total(304)) + 400 * per_token
    rig = Rig(tiny_loaded(), EngineConfig(prefill_chunk=CHUNK), budget=Budget(needs, limit, 10**9))
    first = ask(rig, "a", tokens_of(300))
    assert rig.core.reuse.stats()["bytes"] == 303 * per_token
    rig.submit(Request("b", tokens_of(300, seed=1), max_tokens=4, ignore_eos=True))
    rig.turn()
    assert rig.core.reuse.stats()["allowed_bytes"] == 400 * per_token
    rig.submit(Request("c", tokens_of(146, seed=1), max_tokens=4, ignore_eos=True))
    rig.turn()
    assert rig.core.reuse.stats()["allowed_bytes"] == 250 * per_token
    assert rig.core.reuse.stats()["evictions"] > 0
    rig.finish()
    assert rig.core.reuse.stats()["allowed_bytes"] == limit
    assert ask(rig, "d", tokens_of(300)) == first


@pytest.mark.parametrize("prompt", [40, 200])
def test_the_cache_gives_way_when_memory_runs_short(prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen after a window of prefill, and every so many steps. What is asked for meanwhile is answered as ever."""
    monkeypatch.setattr(core, "CLEAR_CACHE_STEPS", 8)
    expected = ask(rig_of(prompt_cache=0), "b", tokens_of(prompt, seed=1), tokens=20)
    rig = rig_of()
    ask(rig, "a", tokens_of(300))
    held = rig.core.reuse.stats()["bytes"]
    gc.collect()  # what earlier tests left would make room
    rig.core.pressure.ceiling = mx.get_active_memory() - held // 2
    rig.submit(Request("b", tokens_of(prompt, seed=1), max_tokens=20, ignore_eos=True))
    while len(rig.ids("b")) < 12:
        rig.turn()
    stats = rig.core.reuse.stats()
    assert stats["bytes"] < held
    assert stats["reclaims"] >= 1
    assert stats["allowed_bytes"] == stats["max_bytes"]
    rig.finish()
    assert rig.ids("b") == expected
    rig.core.pressure.ceiling = 1 << 60
    ask(rig, "c", tokens_of(300))
    ask(rig, "d", tokens_of(300))
    assert usage(rig, "d").cached_tokens == 299


def test_the_ceiling_is_a_share_of_the_device_or_of_the_operators_limit() -> None:
    assert ceiling(1000) == 850
    assert 0 < ceiling(None) == ceiling(1 << 60)


def test_memory_grows_by_what_the_cache_says_it_holds() -> None:
    """Prompts together and alone, two choices each: rows leave nothing else behind."""
    rig = rig_of()
    ask(rig, "warm", tokens_of(3))
    gc.collect()
    mx.clear_cache()
    active, held = mx.get_active_memory(), rig.core.reuse.stats()["bytes"]
    for i in range(48):
        rig.submit(Request(str(i), tokens_of(10 + 2 * i, seed=i), max_tokens=5, ignore_eos=True, n=1 + i % 2))
        if i % 8 == 7:
            rig.finish()
    grown = rig.core.reuse.stats()["bytes"] - held
    assert grown > 1_000_000
    assert mx.get_active_memory() - active <= 1.01 * grown


def test_half_of_what_the_weights_leave_is_taken_at_most() -> None:
    assert cache_bytes(8 << 30, Budget(None, None, 6 << 30)) == 3 << 30
    assert cache_bytes(1 << 30, Budget(None, None, 6 << 30)) == 1 << 30
    assert cache_bytes(0, Budget(None, None, 6 << 30)) == 0
    assert cache_bytes(5, Budget(None, None, 0)) == 5


def test_the_running_engine_tells_what_it_reused() -> None:
    with tiny_engine() as engine:
        prompt = tokens_of(100)
        first = engine.generate(prompt, max_tokens=4, ignore_eos=True)
        second = engine.generate(prompt, max_tokens=4, ignore_eos=True)
        assert first.choices[0].ids == second.choices[0].ids
        assert second.usage.cached_tokens == 99
        stats = engine.stats()["prompt_cache"]
        assert (stats["hits"], stats["misses"]) == (1, 1)
        assert 0 < stats["bytes"] <= stats["max_bytes"] <= 8 << 30


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 700), st.integers(1, 90), st.integers(1, 6), st.booleans()),
        min_size=2,
        max_size=7,
    )
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_5", "gemma3"])
def test_branches_edits_and_further_turns(model_type: str, turns: list[tuple[int, int, int, int, bool]]) -> None:
    """A tree of prompts, sometimes two at once. Where layers can be cut, the longest prefix that any row processed is reused;
    nowhere more. Answers are mlx-lm's alone, up to ties, and the books are straight."""
    model, rig = tiny_model(model_type), rig_of(model_type, checkpoint_every=50)
    processed: list[tuple[int, ...]] = [()]
    texts: list[tuple[int, ...]] = [()]
    open_now: list[tuple[str, tuple[int, ...]]] = []
    for turn, (parent, at, count, tokens, wait) in enumerate(turns):
        prompt = (*texts[parent % len(texts)][:at], *tokens_of(count, seed=1000 + turn))
        name = str(turn)
        alone = not open_now
        shared = max(block.common(prompt, text) for text in processed)
        # The step in flight when a row ended had fed its last token too, if others kept the batch going.
        most = max(block.common(prompt, text) for text in texts)
        rig.submit(Request(name, prompt, max_tokens=tokens, ignore_eos=True))
        open_now.append((name, prompt))
        texts.append(prompt)
        if wait and turn + 1 < len(turns):
            continue
        rig.finish()
        for one, its in open_now:
            used = usage(rig, one)
            assert used.cached_tokens < len(its)
            if alone and len(open_now) == 1:
                least = min(shared, len(its) - 1) if model_type == "llama" else 0
                assert least <= used.cached_tokens <= min(most, len(its) - 1)
            answer = rig.ids(one)
            run = solo(model, its, len(answer), CHUNK)
            ties_until_equal(answer, run, GAP_BOUNDS["float32"])
            processed.append((*its, *answer[:-1]))
            texts.append((*its, *answer))
        open_now = []
        rig.core.check_integrity()


def test_requests_of_a_session_keep_its_states() -> None:
    """Room for the states of 700 tokens: three others come between two turns."""
    per_token = 2 * 2 * 2 * 16 * 4
    rig = rig_of(prompt_cache=700 * per_token)
    answer = ask(rig, "a", tokens_of(300), session="mine")
    for i in range(3):
        ask(rig, str(i), tokens_of(300, seed=i + 1))
    ask(rig, "b", (*tokens_of(300), *answer, 5, 6), session="mine")
    assert usage(rig, "b").cached_tokens >= 303
    stats = rig.core.reuse.stats()
    assert (stats["sessions"], stats["session_hits"], stats["session_misses"]) == (1, 1, 1)
    assert rig.core.reuse.close_session("mine") is True
    assert rig.core.reuse.close_session("mine") is False
