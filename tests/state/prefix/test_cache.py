"""Budget, sharing, eviction, and why a prompt did not match further."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from gnomon.state.batch_state import BatchState
from gnomon.state.buffer import round_slots
from gnomon.state.prefix import Policy, PrefixCache, block

HEADS, DIM = 1, 2
TOKEN_BYTES = 2 * HEADS * DIM * 4
"""Keys and values of a token in one full layer, float32."""


class NoModel(nn.Module):
    pass


def row(tokens: Sequence[int], kinds: str = "full") -> BatchState:
    """A row whose keys are its tokens, so that a state tells what it is made of."""
    templates: dict[str, object] = {
        "full": KVCache(),
        "sliding": RotatingKVCache(max_size=8),
        "recurrent": ArraysCache(1),
    }
    state = BatchState(NoModel(), [templates[kind] for kind in kinds.split()])
    grow(state, tokens)
    return state


def grow(state: BatchState, tokens: Sequence[int]) -> None:
    x = mx.broadcast_to(mx.array(list(tokens), dtype=mx.float32)[None, None, :, None], (1, HEADS, len(tokens), DIM))
    state.begin(len(tokens))
    for layer in state.layers:
        if layer.kind == "recurrent":
            layer[0] = mx.array([[float(state.lengths[0] + len(tokens))]])
        else:
            layer.update_and_fetch(x, x)
    state.commit()
    mx.eval(state.arrays())


def publish(cache: PrefixCache, tokens: Sequence[int], kinds: str = "full", namespace: str = "", **how: object) -> None:
    cache.publish(namespace, tokens, row(tokens, kinds), **how)
    cache.check_integrity()


def held(cache: PrefixCache, tokens: Sequence[int]) -> list[int]:
    """The tokens that the lent state was made of."""
    lent = cache.lend("", tokens)
    if lent.snapshot is None:
        return []
    keys = lent.snapshot.layers[0].arrays["keys"]
    return [int(x) for x in keys[0, 0, :, 0].tolist()]


def numbers(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


def test_one_token_is_always_left() -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 600)
    publish(cache, tokens)
    for length in (1, 2, 256, 257, 512, 600):
        assert cache.lend("", tokens[:length]).length == length - 1
    assert cache.lend("", (*tokens, 7)).length == 600


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 600), st.integers(0, 300), st.integers(1, 40))
def test_a_state_with_room_goes_on_where_it_lies(length: int, room: int, more: int) -> None:
    """Its first tokens are the cache's; what it writes behind them is its own, and it is not copied to get room."""
    cache, tokens = PrefixCache(1 << 20), numbers(0, length)
    publish(cache, tokens)
    snapshot = cache.lend("", (*tokens, 7), slots=length + room).snapshot
    assert snapshot is not None
    assert snapshot.layers[0].has_room == (room > 0)
    state = BatchState.restore(NoModel(), [KVCache()], snapshot)
    state.begin(1)
    keys, _ = state.layers[0].in_place()
    assert keys.shape[2] == (length + room if room else round_slots(length + 1))
    state.abort()
    grow(state, numbers(5000, more))
    keys, _ = state.layers[0].keys_and_values()
    assert keys[0, 0, :, 0].tolist() == [*tokens, *numbers(5000, more)]
    assert held(cache, (*tokens, 7)) == list(tokens)


def test_equal_prefixes_are_stored_once() -> None:
    cache, shared = PrefixCache(1 << 20), numbers(0, 512)
    publish(cache, shared)
    assert cache.num_bytes == 512 * TOKEN_BYTES
    for branch in range(3):
        publish(cache, (*shared, *numbers(1000 * branch + 1000, 256)))
    assert cache.num_bytes == (512 + 3 * 256) * TOKEN_BYTES
    publish(cache, shared[:300])
    assert cache.num_bytes == (512 + 3 * 256) * TOKEN_BYTES


def test_a_longer_tail_takes_the_place_of_a_shorter() -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 256)
    for length in (10, 100, 255, 256):
        publish(cache, tokens[:length])
        assert (cache.num_blocks, cache.num_bytes) == (1, length * TOKEN_BYTES)


def test_only_processed_tokens_are_published() -> None:
    """Two tokens are known whose state does not exist; and a row whose last tokens are not known."""
    cache = PrefixCache(1 << 20)
    cache.publish("", numbers(0, 12), row(numbers(0, 10)))
    assert held(cache, numbers(0, 100)) == list(range(10))
    cache = PrefixCache(1 << 20)
    cache.publish("", numbers(0, 10), row(numbers(0, 12)))
    assert held(cache, numbers(0, 100)) == list(range(10))
    cache.publish("", numbers(100, 10), row(numbers(100, 12), "full recurrent"))
    assert cache.lend("", numbers(100, 20)).length == 0


def test_a_hash_is_verified_against_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key the same: nothing wrong is lent, and the second is not stored."""
    monkeypatch.setattr("gnomon.state.prefix.tree.chain", lambda parent, tokens: b"same")
    cache = PrefixCache(1 << 20)
    publish(cache, numbers(0, 256))
    publish(cache, numbers(5000, 256))
    assert held(cache, numbers(5000, 300)) == []
    assert held(cache, numbers(0, 300)) == list(range(256))
    assert cache.counts.refused == 1


def test_keys_follow_from_identity_and_all_tokens_before() -> None:
    a, b = block.root_key("a"), block.root_key("b")
    assert block.chain(a, (1, 2)) != block.chain(b, (1, 2))
    assert block.chain(block.chain(a, (1,)), (2,)) != block.chain(block.chain(a, (3,)), (2,))


@pytest.mark.parametrize("policy", ["lru", "cost-size"])
def test_what_was_used_longest_ago_goes_first(policy: Policy) -> None:
    cache = PrefixCache(3 * 256 * TOKEN_BYTES, policy)
    for start in (0, 1000, 2000):
        publish(cache, numbers(start, 256))
    assert held(cache, numbers(0, 300))
    publish(cache, numbers(3000, 256))
    kept = [start for start in (0, 1000, 2000, 3000) if held(cache, numbers(start, 300))]
    assert kept == [0, 2000, 3000] if policy == "lru" else 3000 in kept and len(kept) == 3


def test_cost_size_keeps_what_saves_most_per_byte() -> None:
    """A checkpoint of the same size far on saves more tokens than one near the beginning, however recent that is."""
    sizes = TOKEN_BYTES * (700 + 8) + 2 * 4
    cache = PrefixCache(sizes, "cost-size")
    publish(cache, numbers(0, 700), "recurrent full")
    publish(cache, numbers(5000, 8), "recurrent full")
    publish(cache, numbers(6000, 8), "recurrent full")
    assert cache.peek("", numbers(0, 800)) == 700
    assert cache.peek("", numbers(5000, 20)) == 0
    old = PrefixCache(sizes, "lru")
    for tokens in (numbers(0, 700), numbers(5000, 8), numbers(6000, 8)):
        publish(old, tokens, "recurrent full")
    assert old.peek("", numbers(0, 800)) == 0


def test_ends_go_before_what_they_stand_on() -> None:
    """The first block was used as long ago as the last, but a chain without its beginning would be of no use."""
    cache = PrefixCache(4 * 256 * TOKEN_BYTES)
    publish(cache, numbers(0, 1024))
    publish(cache, numbers(5000, 256))
    assert held(cache, numbers(0, 1100)) == list(range(768))


def test_what_can_not_fit_is_left_out_and_nothing_is_lost_for_it() -> None:
    cache = PrefixCache(100 * TOKEN_BYTES)
    publish(cache, numbers(0, 90))
    publish(cache, numbers(1000, 101))
    assert cache.counts.refused == 1
    assert held(cache, numbers(0, 95)) == list(range(90))


def test_a_long_row_is_kept_as_far_as_it_fits() -> None:
    """Its own beginning is not thrown out for its end."""
    cache = PrefixCache(600 * TOKEN_BYTES)
    publish(cache, numbers(0, 2000))
    assert held(cache, numbers(0, 2001)) == list(range(512))


def test_the_number_of_arrays_is_limited_too() -> None:
    cache = PrefixCache(1 << 20, max_arrays=6)
    for start in range(0, 5000, 1000):
        publish(cache, numbers(start, 3))
    assert cache.num_arrays == 6
    assert cache.num_blocks == 3


def test_memory_that_is_needed_elsewhere_is_given_up_at_once() -> None:
    cache = PrefixCache(1 << 20)
    publish(cache, numbers(0, 1024))
    cache.allow(300 * TOKEN_BYTES)
    assert cache.num_bytes == 256 * TOKEN_BYTES
    cache.check_integrity()
    publish(cache, numbers(2000, 1024))
    assert cache.num_bytes <= 300 * TOKEN_BYTES
    cache.allow(1 << 30)
    assert cache.allowed == 1 << 20
    cache.allow(-5)
    assert (cache.num_bytes, cache.num_blocks) == (0, 0)


def test_buffers_go_back_to_the_system_after_large_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[str] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: returned.append("all"))
    cache = PrefixCache(1024 * TOKEN_BYTES)
    publish(cache, numbers(0, 1024))
    before = len(returned)
    publish(cache, numbers(5000, 128))
    assert (len(returned), cache.counts.buffer_returns) == (before + 2, 1)
    publish(cache, numbers(6000, 16))
    assert (len(returned), cache.counts.buffer_returns) == (before + 3, 1)


def test_states_that_can_not_be_cut_are_lent_at_their_positions_only() -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 700)
    state = row(tokens[:300], "full recurrent sliding")
    cache.publish("", tokens, state)
    grow(state, tokens[300:])
    cache.publish("", tokens, state)
    cache.check_integrity()
    assert [cache.lend("", (*tokens[:n], 9999, 9999)).length for n in (299, 300, 301, 699, 700)] == [
        0,
        300,
        300,
        300,
        700,
    ]
    lent = cache.lend("", (*tokens[:301], 9999)).snapshot
    assert lent is not None
    assert lent.layers[1].arrays["0"].item() == 300
    assert lent.layers[0].arrays["keys"].shape[2] == 300


def test_a_checkpoint_outlives_the_shorter_tail_it_was_taken_with() -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 256)
    for length in (50, 120, 256):
        publish(cache, tokens[:length], "full recurrent")
    assert cache.num_blocks == 1
    assert [cache.lend("", (*tokens[:n], 9999)).length for n in (50, 119, 120, 255, 256)] == [50, 50, 120, 120, 256]


def test_blocks_that_no_checkpoint_needs_any_more_go_with_it() -> None:
    cache = PrefixCache(1 << 20)
    publish(cache, numbers(0, 700), "full recurrent")
    assert cache.num_blocks == 3
    cache.allow(700 * TOKEN_BYTES)
    assert (cache.num_blocks, cache.num_checkpoints, cache.num_bytes) == (0, 0, 0)


# Explanations


def test_a_prompt_like_no_other() -> None:
    cache = PrefixCache(1 << 20)
    miss = cache.lend("", (1, 2, 3)).miss
    assert miss is not None
    assert (miss.kind, miss.position, miss.theirs) == ("no entry", 0, ())
    publish(cache, numbers(100, 50))
    miss = cache.lend("", (1, 2, 3)).miss
    assert miss is not None
    assert (miss.kind, miss.position, miss.ours, miss.theirs) == ("no entry", 0, (1, 2, 3), numbers(100, 12))


@pytest.mark.parametrize("at", [3, 255, 256, 257, 512, 590])
def test_edited_text_is_shown_from_both_sides(at: int) -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 600)
    publish(cache, tokens)
    lent = cache.lend("", (*tokens[:at], *numbers(7000, 50)))
    miss = lent.miss
    assert miss is not None
    assert (miss.kind, miss.position, miss.reused, lent.length) == ("edited text", at, at, at)
    assert miss.before == tokens[max(0, at - 12) : at]
    assert miss.ours == numbers(7000, 12)
    assert miss.theirs == tokens[at : at + 12]


def test_going_on_where_a_row_ended_is_no_miss() -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 600)
    publish(cache, tokens)
    assert cache.lend("", (*tokens, 7, 8, 9)).miss is None
    assert cache.lend("", tokens).miss is None
    assert cache.lend("", tokens[:300]).miss is None


def test_the_tail_that_a_template_writes() -> None:
    """The stored prompt opened its answer at 20 with tokens up to 25; the next turn has other tokens from 22 on."""
    cache, tokens = PrefixCache(1 << 20), numbers(0, 25)
    cache.publish("", tokens, row(tokens[:-1]), boundary=20)
    miss = cache.lend("", (*tokens[:22], *numbers(500, 10))).miss
    assert miss is not None
    assert (miss.kind, miss.position) == ("template tail", 22)
    miss = cache.lend("", (*tokens[:18], *numbers(500, 10))).miss
    assert miss is not None
    assert miss.kind == "edited text"
    miss = cache.lend("", (*tokens[:18], *numbers(500, 10)), boundary=17).miss
    assert miss is not None
    assert miss.kind == "template tail"


def test_the_same_text_under_another_identity() -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 50)
    publish(cache, tokens, namespace="adapter a")
    lent = cache.lend("adapter b", (*tokens, 7))
    assert lent.length == 0
    assert lent.miss is not None
    assert (lent.miss.kind, lent.miss.position, lent.miss.theirs) == ("namespace", 0, tokens[:12])
    assert cache.lend("adapter a", (*tokens, 7)).length == 50


def test_what_was_evicted_is_named_as_evicted() -> None:
    cache, tokens = PrefixCache(4 * 256 * TOKEN_BYTES), numbers(0, 1024)
    publish(cache, tokens)
    publish(cache, numbers(5000, 512))
    lent = cache.lend("", (*tokens, 7))
    assert lent.length == 512
    assert lent.miss is not None
    assert (lent.miss.kind, lent.miss.position) == ("evicted", 512)
    publish(cache, tokens)
    assert cache.lend("", (*tokens, 7)).length == 1024


def test_an_evicted_checkpoint_is_named_as_evicted() -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 100)
    state = row(tokens[:40], "full recurrent")
    cache.publish("", tokens, state)
    grow(state, tokens[40:])
    cache.publish("", tokens, state)
    cache.lend("", (*tokens[:40], 9999))
    cache.allow(cache.num_bytes - 1)
    lent = cache.lend("", (*tokens, 7))
    assert lent.length == 40
    assert lent.miss is not None
    assert (lent.miss.kind, lent.miss.position) == ("evicted", 40)


def test_state_that_can_not_be_cut_is_named() -> None:
    cache, tokens = PrefixCache(1 << 20), numbers(0, 100)
    publish(cache, tokens, "full recurrent")
    lent = cache.lend("", tokens[:80])
    assert lent.length == 0
    assert lent.miss is not None
    assert (lent.miss.kind, lent.miss.position, lent.miss.theirs) == ("uncuttable state", 0, tokens[:12])


def test_both_sides_are_told_decoded() -> None:
    cache = PrefixCache(1 << 20)
    publish(cache, numbers(0, 30))
    miss = cache.lend("", (0, 1, 2, 77, 78)).miss
    assert miss is not None
    assert miss.told(lambda ids: " ".join(map(str, ids))) == {
        "kind": "edited text",
        "position": 3,
        "reused_tokens": 3,
        "prompt_tokens": 5,
        "before": "0 1 2",
        "prompt": "77 78",
        "stored": "3 4 5 6 7 8 9 10 11 12 13 14",
    }


# Whatever comes in, in whatever order


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["full", "full sliding", "full recurrent"]),
            st.integers(0, 7),
            st.integers(0, 600),
            st.integers(1, 400),
        ),
        min_size=1,
        max_size=14,
    ),
    kilobytes=st.integers(1, 40),
    policy=st.sampled_from(["lru", "cost-size"]),
)
def test_any_sequence_of_branches_keeps_the_books_and_lends_right_states(
    actions: list[tuple[str, int, int, int]], kilobytes: int, policy: Policy
) -> None:
    """Prompts branch off earlier ones. Nothing lent ever holds another token's state, and the budget holds at all times."""
    caches = {kinds: PrefixCache(kilobytes << 10, policy) for kinds in ("full", "full sliding", "full recurrent")}
    texts: list[tuple[int, ...]] = [()]
    for turn, (kinds, parent, at, count) in enumerate(actions):
        base = texts[parent % len(texts)][:at]
        tokens = (*base, *numbers(1000 * (turn + 1), count))
        texts.append(tokens)
        cache = caches[kinds]
        lent = cache.lend("", tokens)
        state = row(tokens[:1], kinds)
        if lent.snapshot is not None:
            assert lent.length < len(tokens)
            assert held(cache, tokens) == list(tokens[: lent.length])
            state = BatchState.restore(NoModel(), state.templates, lent.snapshot)
        if len(tokens) > state.lengths[0]:
            grow(state, tokens[state.lengths[0] :])
        cache.publish("", tokens, state)
        cache.check_integrity()
        assert cache.num_bytes <= kilobytes << 10


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 700), st.integers(1, 400)), min_size=1, max_size=10))
def test_without_pressure_the_longest_shared_prefix_is_lent(branches: list[tuple[int, int, int]]) -> None:
    """Where layers can be cut: exactly as many tokens as the prompt shares with any row seen."""
    cache, texts = PrefixCache(1 << 26), [()]
    for turn, (parent, at, count) in enumerate(branches):
        tokens = (*texts[parent % len(texts)][:at], *numbers(1000 * (turn + 1), count))
        shared = max(block.common(tokens, text) for text in texts)
        assert cache.lend("", tokens).length == min(shared, len(tokens) - 1)
        cache.publish("", tokens, row(tokens))
        texts.append(tokens)


def test_a_whole_block_that_lacks_layers_hides_no_shorter_one() -> None:
    """Five tokens can be cut anywhere; the 256 that begin with them only be used at their end."""
    cache, tokens = PrefixCache(1 << 20), numbers(0, 256)
    publish(cache, tokens[:5], "full sliding")
    publish(cache, tokens, "full sliding")
    assert held(cache, tokens) == [0, 1, 2, 3, 4]
    assert held(cache, (*tokens, 7)) == list(tokens)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 7),
            st.one_of(st.integers(0, 9), st.integers(0, 600)),
            st.one_of(st.integers(1, 9), st.integers(1, 400), st.sampled_from([256, 512])),
        ),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from(["full sliding", "full recurrent", "full recurrent sliding"]),
)
def test_without_pressure_the_longest_state_of_any_row_is_lent(
    branches: list[tuple[int, int, int]], kinds: str
) -> None:
    """A row whose state can be cut lends what it shares with a prompt, any other its whole length or nothing."""
    cache, texts, cuttable = PrefixCache(1 << 26), [()], [True]
    for turn, (parent, at, count) in enumerate(branches):
        tokens = (*texts[parent % len(texts)][:at], *numbers(1000 * (turn + 1), count))
        state = row(tokens, kinds)
        cache.publish("", tokens, state)
        texts.append(tokens)
        cuttable.append(state.can_cut(len(tokens)))
        cache.check_integrity()
        for asked in (*texts[1:], *((*text, 7) for text in texts)):
            longest = 0
            for text, can_cut in zip(texts, cuttable, strict=True):
                shared = block.common(asked, text)
                most = min(shared, len(asked) - 1)
                longest = max(longest, most if can_cut else len(text) if len(text) <= most else 0)
            assert cache.peek("", asked) == longest
            assert held(cache, asked) == list(asked[:longest])


def test_a_full_window_that_had_tokens_taken_back_is_not_cut() -> None:
    """Eight tokens of a window of eight, after three more were written and taken back: the first key is gone."""
    cache, tokens = PrefixCache(1 << 20), numbers(10, 8)
    state = row(tokens[:7], "full sliding")
    grow(state, tokens[7:])
    grow(state, (91, 92, 93))
    state.rollback([3])
    assert state.lengths == [8]
    cache.publish("", tokens, state)
    cache.check_integrity()
    assert [cache.lend("", (*tokens[:n], 1)).length for n in (5, 7, 8)] == [0, 0, 8]
