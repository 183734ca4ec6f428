"""Frames whose common part is encoded once are those that are encoded whole."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gnomon.serve.sse import Frames, event, frame

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT, TEXT)
def test_only_the_text_differs(name: str, text: str) -> None:
    def value(text: str) -> dict[str, Any]:
        return {
            "id": name,
            "type": "kind",
            "a": 1,
            "choices": [{"delta": {"reasoning": text, "again": text}, "logprobs": None}],
            "text": name,
        }

    assert Frames(value).frame(text) == frame(value(text))
    assert Frames(value, event).frame(text) == event(value(text))
