"""How long and how much of responses is kept, by a clock that the test moves."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.serve.response_store import MAX_BYTES, TTL, Conversation, ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response(text: str = "") -> StoredResponse:
    return StoredResponse({"text": text}, [], Conversation())


EMPTY = len(json.dumps([{"text": ""}, [], None, [], []]))


def test_an_hour_and_no_longer() -> None:
    clock = Clock()
    store = ResponseStore(clock=clock)
    store.put("a", response())
    clock.now = TTL - 1
    store.put("b", response())
    assert store.get("a") is not None
    clock.now = TTL
    assert store.get("a") is None
    assert store.get("b") is not None
    assert not store.delete("a")
    assert store.stats() == {
        "entries": 1,
        "bytes": EMPTY,
        "max_bytes": 32 * 1024 * 1024,
        "ttl_ms": 3_600_000,
        "too_large": 0,
    }
    clock.now = 3 * TTL
    assert store.stats()["bytes"] == 0
    assert (TTL, MAX_BYTES) == (3600, 32 << 20)


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(max_bytes=3 * EMPTY)
    for name in "abc":
        assert store.put(name, response())
    assert store.get("a") is not None
    store.put("d", response())
    assert [name for name in "abcd" if store.get(name) is not None] == ["a", "c", "d"]
    store.put("e", response("x" * EMPTY))
    assert [name for name in "acde" if store.get(name) is not None] == ["d", "e"]


def test_what_is_larger_than_all_room_is_not_kept_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(max_bytes=EMPTY + 3)
    assert store.put("a", response("abc"))
    assert not store.put("b", response("äö"))
    assert "b has" in caplog.text
    assert store.get("a") is not None
    assert store.get("b") is None
    assert store.stats()["too_large"] == 1
    assert not store.put("a", response("abcd"))
    assert store.get("a") is None


steps = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abcd"), st.integers(0, 40)),
    st.tuples(st.just("get"), st.sampled_from("abcd"), st.just(0)),
    st.tuples(st.just("delete"), st.sampled_from("abcd"), st.just(0)),
    st.tuples(st.just("wait"), st.just(""), st.integers(1, 40)),
)


@given(st.lists(steps, max_size=40))
def test_never_more_bytes_nor_older_than_may_be(script: list[tuple[str, str, int]]) -> None:
    clock = Clock()
    store = ResponseStore(ttl=60, max_bytes=3 * EMPTY, clock=clock)
    put: dict[str, tuple[str, float]] = {}
    for verb, name, number in script:
        if verb == "put":
            store.put(name, response("x" * number))
            put[name] = "x" * number, clock.now
        elif verb == "get":
            found = store.get(name)
            if found is not None:
                text, at = put[name]
                assert found.body == {"text": text}
                assert clock.now < at + 60
        elif verb == "delete":
            store.delete(name)
            assert store.get(name) is None
        else:
            clock.now += number
        stats = store.stats()
        kept = [name for name in put if store.get(name) is not None]
        assert stats["entries"] == len(kept)
        assert stats["bytes"] == sum(EMPTY + len(put[name][0]) for name in kept) <= 3 * EMPTY
