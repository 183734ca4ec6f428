"""What is copied, by a search of the whole text for each call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.propose.echo import INDEX_AT_ONCE, Echo

LINE = 9


def expected(text: Sequence[int], k: int, candidates: int, most: int) -> list[int]:
    """The rules, one after another, over every place of the text."""
    tail = list(text[-k:])
    places = [end for end in range(len(text) - 1, k - 1, -1) if list(text[end - k : end]) == tail][:candidates]
    span: list[int] = []
    while len(span) < most:
        nexts = {text[place + len(span)] for place in places if place + len(span) < len(text)}
        if len(nexts) != 1:
            break
        span += nexts
        if len(span) >= 2 and span[-1] == LINE:
            break
    return span if len(text) >= k and len(span) >= 2 else []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2) | st.just(LINE), max_size=60),
    st.lists(st.integers(0, 2) | st.just(LINE), max_size=30),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(2, 6),
)
def test_spans_are_those_of_a_plain_search(
    prompt: list[int], answer: list[int], k: int, candidates: int, most: int
) -> None:
    echo = Echo(k, candidates, most, ends_line=lambda token: token == LINE)
    for n in range(len(answer) + 1):
        text = prompt + answer[:n]
        for limit in (1, most, most + 3):
            assert list(echo.propose(prompt, answer[:n], limit)) == expected(text, k, candidates, min(limit, most))


def test_forks_are_counted_and_end_a_span() -> None:
    echo = Echo(2)
    assert echo.propose([1, 2, 5, 6, 7, 1, 2, 5, 6, 8, 1, 2], [], 10) == [5, 6]
    assert (echo.branch_stops, echo.grade) == (1, 1)
    assert Echo(2).propose([1, 2, 5, 6, 7, 1, 2], [], 10) == [5, 6, 7, 1, 2]


def test_nearer_places_come_first() -> None:
    # Three places, of which two count: the nearest two agree, the oldest does not.
    text = [1, 2, 9, 9, 1, 2, 5, 6, 1, 2, 5, 6, 1, 2]
    assert Echo(2, candidates=2).propose(text, [], 2) == [5, 6]
    assert Echo(2, candidates=3).propose(text, [], 2) == ()


def test_a_full_index_stays_as_it_is() -> None:
    echo = Echo(2, capacity=6)
    text = [1, 2, 5, 6, 7, 8, 3, 3, 4, 4, 3, 3, 1, 2]
    assert echo.propose(text, [], 3) == [5, 6, 7]
    assert echo.truncated
    assert echo.propose(text, [3, 3], 3) == ()
    assert echo.propose(text, [3, 3, 1, 2], 9) == [5, 6, 7, 8]
    assert not Echo(2, capacity=20).truncated


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    prompt = [*range(100, 100 + INDEX_AT_ONCE + 50), 100, 101]
    echo = Echo(2)
    assert echo.propose(prompt, [], 3) == ()
    assert echo.propose(prompt, [], 3) == [102, 103, 104]


@pytest.mark.parametrize("prompt", [[], [1], [1, 2]])
def test_a_short_text_has_nothing_to_copy(prompt: list[int]) -> None:
    assert Echo(8).propose(prompt, [], 5) == ()
