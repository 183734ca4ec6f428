"""What the cache lends has the captured bits and goes on as mlx-lm's own caches would."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.models.cache import trim_prompt_cache

from engine_fixtures import tiny_model
from gnomon.state.prefix import PrefixCache
from prefix_walk import check_continues_alike, new_state, restored, run, stock, tokens_of

EDGES = (1, 63, 255, 256, 257, 511, 512, 513, 599)
CUTTABLE = ("llama", "qwen3_moe", "deepseek_v3")
UNCUTTABLE = ("qwen3_5", "gemma3", "gemma4", "gpt_oss", "mamba2")


@pytest.mark.parametrize("model_type", CUTTABLE)
def test_any_prefix_of_a_row_is_lent_where_all_layers_can_be_cut(model_type: str) -> None:
    """mlx-lm trims its own caches to the same length."""
    model, tokens = tiny_model(model_type), tokens_of(600)
    state, cache = new_state(model), PrefixCache(1 << 30)
    run(model, state, tokens)
    cache.publish("", tokens, state)
    for length in EDGES:
        lent = cache.lend("", (*tokens[:length], 2, 2))
        assert lent.length == length
        assert lent.snapshot is not None
        caches = stock(model, tokens)
        trim_prompt_cache(caches, len(tokens) - length)
        check_continues_alike(model, restored(model, lent.snapshot), caches, seed=length)
    cache.check_integrity()


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *((model_type, "float32") for model_type in UNCUTTABLE),
        pytest.param("qwen3_5", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_are_lent_where_some_layer_cannot_be_cut(model_type: str, dtype: str) -> None:
    """mlx-lm's caches ran through the same windows up to the checkpoint; the row here was published on its way."""
    model, tokens = tiny_model(model_type, dtype), tokens_of(600)
    ends = EDGES[1:]
    state, cache = new_state(model), PrefixCache(1 << 30)
    for end in ends:
        run(model, state, tokens[:end])
        cache.publish("", tokens, state)
    for before, length in pairwise(ends):
        assert cache.lend("", (*tokens[: length - 1], 2, 2)).length == before
        lent = cache.lend("", (*tokens[:length], 2, 2))
        assert lent.length == length
        assert lent.snapshot is not None
        caches = stock(model, tokens[:length], ends)
        check_continues_alike(model, restored(model, lent.snapshot), caches, seed=length)
    assert cache.lend("", (*tokens[:450], 2, 2)).length == 257
    cache.check_integrity()


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "gpt_oss"])
def test_a_window_that_has_not_wrapped_is_cut(model_type: str) -> None:
    """The windows are 40 wide."""
    model, tokens = tiny_model(model_type), tokens_of(39)
    state, cache = new_state(model), PrefixCache(1 << 30)
    run(model, state, tokens)
    cache.publish("", tokens, state)
    assert cache.num_checkpoints == 0
    for length in (1, 20, 38, 39):
        lent = cache.lend("", (*tokens[:length], 2, 2))
        assert lent.length == length
        assert lent.snapshot is not None
        caches = stock(model, tokens)
        trim_prompt_cache(caches, len(tokens) - length)
        check_continues_alike(model, restored(model, lent.snapshot), caches, seed=length)


@pytest.mark.parametrize("model_type", ["gemma3", "gpt_oss"])
def test_blocks_of_a_wrapped_window_are_completed_by_a_shorter_row(model_type: str) -> None:
    model, tokens = tiny_model(model_type), tokens_of(300)
    state, cache = new_state(model), PrefixCache(1 << 30)
    run(model, state, tokens)
    cache.publish("", tokens, state)
    assert cache.lend("", (*tokens[:30], 2)).length == 0
    short = new_state(model)
    run(model, short, tokens[:35])
    cache.publish("", tokens, short)
    assert cache.lend("", (*tokens[:30], 2)).length == 30
    assert cache.lend("", (*tokens, 2)).length == 300
    cache.check_integrity()


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_5"])
def test_rows_of_a_batch_are_published_and_lent_like_lone_ones(model_type: str) -> None:
    """Each row has its own length; what is lent is what a snapshot of the row holds."""
    model = tiny_model(model_type)
    prompts = [tokens_of(length, seed=length) for length in (70, 300, 20)]
    states = [new_state(model) for _ in prompts]
    for state, prompt in zip(states, prompts, strict=True):
        run(model, state, prompt)
    batch = states[0]
    for other in states[1:]:
        batch.join(other)
    cache = PrefixCache(1 << 30)
    for row, prompt in enumerate(prompts):
        cache.publish("", prompt, batch, row)
    for row, prompt in enumerate(prompts):
        lent = cache.lend("", (*prompt, 2))
        assert lent.snapshot is not None
        assert lent.length == len(prompt)
        kept = batch.snapshot(row)
        for mine, theirs in zip(lent.snapshot.layers, kept.layers, strict=True):
            assert (mine.kind, mine.numbers) == (theirs.kind, theirs.numbers)
            assert mine.arrays.keys() == theirs.arrays.keys()
            assert all(mx.array_equal(mine.arrays[name], theirs.arrays[name]) for name in mine.arrays)


def test_a_published_row_can_go_on_and_the_cache_does_not_change() -> None:
    """Nothing lent or kept is a view of a buffer that is written to."""
    model, tokens = tiny_model("llama"), tokens_of(700)
    state, cache = new_state(model), PrefixCache(1 << 30)
    run(model, state, tokens[:600])
    cache.publish("", tokens[:600], state)
    first = cache.lend("", (*tokens[:600], 2)).snapshot
    assert first is not None
    before = [bytes(memoryview(a)) for a in first.arrays()]
    run(model, state, tokens)
    other = restored(model, first)
    run(model, other, (*tokens[:600], *tokens_of(80, seed=5)))
    again = cache.lend("", (*tokens[:600], 2)).snapshot
    assert again is not None
    assert [bytes(memoryview(a)) for a in again.arrays()] == before
