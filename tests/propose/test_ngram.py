"""Prompt lookup against the rule as it is written down, applied from scratch at every place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.propose import ngram
from gnomon.propose.ngram import NGram


def looked_up(history: Sequence[int], longest: int, shortest: int, most: int) -> list[int]:
    """For k from longest to shortest: what follows the first occurrence of the last k tokens that has something following it."""
    for k in range(longest, shortest - 1, -1):
        tail = list(history[len(history) - k :])
        for start in range(len(history) - k):
            if k < len(history) and list(history[start : start + k]) == tail:
                return list(history[start + k : start + k + most])
    return []


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    output=st.lists(st.integers(0, 3), max_size=30),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=10),
    limit=st.integers(1, 16),
)
def test_it_proposes_what_the_rule_says(
    prompt: list[int], output: list[int], sizes: tuple[int, int], steps: list[int], limit: int
) -> None:
    longest, shortest = max(sizes), min(sizes)
    proposer = NGram(longest, shortest)
    generated: list[int] = []
    for count in [0, *steps]:
        generated += output[len(generated) : len(generated) + count]
        expected = looked_up([*prompt, *generated], longest, shortest, min(10, limit))
        assert list(proposer.propose(prompt, generated, limit)) == expected


def test_by_hand() -> None:
    # The last two tokens, 2 3, came first before a 4; the last one alone, 3, too. 9 has not come before.
    proposer = NGram(3, 1)
    assert list(proposer.propose([1, 2, 3, 4, 5, 2, 3], [], 10)) == [4, 5, 2, 3]
    assert proposer.grade == 2
    assert list(proposer.propose([1, 2, 3, 4, 5, 2, 3], [9], 10)) == []


def test_a_long_prompt_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INDEX_AT_ONCE", 4)
    proposer, prompt = NGram(3, 1), [1, 2, 3, 4, 5, 6, 7, 1, 2]
    found = [list(proposer.propose(prompt, [3], 2)) for _ in range(4)]
    assert found == [[], [], [4, 5], [4, 5]]


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (3, 0)])
def test_sizes_that_cannot_be(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match=f"got {shortest} and {longest}"):
        NGram(longest, shortest)
