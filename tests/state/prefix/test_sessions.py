"""What open sessions left is evicted last, and closing one evicts nothing."""

from __future__ import annotations

import pytest
from test_cache import TOKEN_BYTES, held, numbers, publish

from gnomon.state.prefix import Policy, PrefixCache, Sessions
from gnomon.state.prefix.sessions import MAX_SESSIONS


def turn(sessions: Sessions, cache: PrefixCache, name: str, tokens: tuple[int, ...]) -> None:
    sessions.turn(name, tokens, cache.entries_of("", tokens))


@pytest.mark.parametrize("policy", ["lru", "cost-size"])
def test_a_session_s_states_go_last(policy: Policy) -> None:
    """The session's turn was used longest ago; two others have to go for one that comes."""
    cache, sessions = PrefixCache(4 * 256 * TOKEN_BYTES, policy), Sessions()
    publish(cache, numbers(0, 512))
    turn(sessions, cache, "mine", numbers(0, 512))
    for start in (2000, 3000, 4000, 5000):
        publish(cache, numbers(start, 256))
    assert held(cache, numbers(0, 600)) == list(range(512))
    assert cache.num_bytes == 4 * 256 * TOKEN_BYTES
    assert sessions.close("mine") is True
    assert held(cache, numbers(0, 600)) == list(range(512))
    for start in (6000, 7000, 8000, 9000):
        publish(cache, numbers(start, 256))
    assert held(cache, numbers(0, 600)) != list(range(512))
    assert sessions.close("mine") is False


def test_what_is_guarded_goes_when_nothing_else_is_left() -> None:
    cache, sessions = PrefixCache(2 * 256 * TOKEN_BYTES), Sessions()
    publish(cache, numbers(0, 512))
    turn(sessions, cache, "mine", numbers(0, 512))
    publish(cache, numbers(5000, 256))
    assert held(cache, numbers(5000, 300)) == list(numbers(5000, 256))
    assert held(cache, numbers(0, 600)) == list(range(256))


def test_the_next_turn_takes_the_guard_over() -> None:
    """The turn before is in another branch: its end goes like any other."""
    cache, sessions = PrefixCache(5 * 256 * TOKEN_BYTES), Sessions()
    for tokens in ((*numbers(0, 256), *numbers(1000, 256)), (*numbers(0, 256), *numbers(2000, 256))):
        publish(cache, tokens)
        turn(sessions, cache, "mine", tokens)
    for start in (5000, 6000, 7000):
        publish(cache, numbers(start, 256))
    assert len(held(cache, (*numbers(0, 256), *numbers(2000, 300)))) == 512
    assert len(held(cache, (*numbers(0, 256), *numbers(1000, 300)))) == 256


def test_hits_are_of_the_session_s_own() -> None:
    cache, sessions = PrefixCache(1 << 20), Sessions()
    sessions.lent("mine", numbers(0, 10), 5)
    assert (sessions.hits, sessions.misses) == (0, 1)
    turn(sessions, cache, "mine", numbers(0, 20))
    sessions.lent("mine", numbers(0, 30), 20)
    sessions.lent("mine", numbers(0, 30), 0)
    sessions.lent("mine", numbers(50, 30), 20)
    assert (sessions.hits, sessions.misses) == (1, 3)


def test_the_number_of_open_sessions_is_limited() -> None:
    cache, sessions = PrefixCache(1 << 20), Sessions()
    publish(cache, numbers(0, 256))
    for i in range(MAX_SESSIONS + 5):
        turn(sessions, cache, str(i), numbers(0, 256))
    assert len(sessions) == MAX_SESSIONS
    (entry,) = cache.entries_of("", numbers(0, 256))
    assert entry.guards == MAX_SESSIONS
    sessions.clear()
    assert (entry.guards, len(sessions)) == (0, 0)
