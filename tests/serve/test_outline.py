"""Parts of an answer, whatever the pieces it came in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.chat.tools import CallArguments, CallEnd, CallEvent, CallStart
from gnomon.serve.generation import Piece
from gnomon.serve.outline import Change, Closed, Grown, Opened, Outline, Part


def call(index: int) -> tuple[CallEvent, ...]:
    return (
        CallStart(index, f"call_{index}", "f"),
        CallArguments(index, '{"x":'),
        CallArguments(index, "1}"),
        CallEnd(index),
    )


def walk(outline: Outline, pieces: list[Piece]) -> list[Change]:
    return [change for piece in pieces for change in outline.feed(piece)]


def shape(parts: list[Part]) -> list[tuple[str, str, bool]]:
    return [(part.kind, part.text, part.complete) for part in parts]


def test_thinking_text_and_calls() -> None:
    outline = Outline()
    changes = walk(
        outline,
        [
            Piece(0, reasoning="hm"),
            Piece(0, reasoning="m", content="So", calls=call(0)),
            Piece(0, calls=call(1), finish="tool_calls"),
        ],
    )
    assert shape(outline.told) == [
        ("reasoning", "hmm", True),
        ("text", "So", True),
        ("call", '{"x":1}', True),
        ("call", '{"x":1}', True),
    ]
    assert [(part.call_id, part.name) for part in outline.parts[2:]] == [("call_0", "f"), ("call_1", "f")]
    assert [type(change).__name__ for change in changes[:5]] == ["Opened", "Grown", "Grown", "Closed", "Opened"]
    assert outline.finish == "tool_calls"


def test_a_call_that_turns_out_to_be_text_is_no_part_of_the_answer() -> None:
    outline = Outline()
    void = CallStart(0, "call_0", "f"), CallArguments(0, '{"x')
    changes = walk(outline, [Piece(0, calls=void), Piece(0, content='<tool_call>{"x'), Piece(0, finish="stop")])
    assert shape(outline.told) == [("text", '<tool_call>{"x', True)]
    assert shape(outline.parts)[0] == ("call", '{"x', False)
    assert [change.part.index for change in changes if isinstance(change, Closed)] == [0, 1]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_no_text_at_all_is_one_empty_text(finish: str) -> None:
    outline = Outline()
    changes = walk(outline, [Piece(0, finish=finish)])
    assert shape(outline.told) == [("text", "", finish == "stop")]
    assert [type(change) for change in changes] == [Opened, Closed]


def test_what_the_limit_cuts_is_not_complete() -> None:
    outline = Outline()
    walk(outline, [Piece(0, reasoning="hm"), Piece(0, content="So", finish="length")])
    assert shape(outline.told) == [("reasoning", "hm", True), ("text", "So", False)]


texts = st.text("ab", min_size=1, max_size=3)
steps = st.one_of(
    st.tuples(st.just("reasoning"), texts), st.tuples(st.just("text"), texts), st.tuples(st.just("call"), st.just(""))
)


@given(st.lists(steps, max_size=12))
def test_changes_spell_the_parts(script: list[tuple[str, str]]) -> None:
    outline = Outline()
    pieces: list[Piece] = []
    for number, (kind, text) in enumerate(script):
        pieces.append(
            Piece(0, reasoning=text)
            if kind == "reasoning"
            else Piece(0, content=text)
            if kind == "text"
            else Piece(0, calls=call(number))
        )
    changes = walk(outline, [*pieces, Piece(0, finish="stop")])
    opened: Part | None = None
    told: list[tuple[str, str]] = []
    grown = ""
    for change in changes:
        match change:
            case Opened():
                assert opened is None
                assert change.part.index == len(told)
                opened, grown = change.part, ""
            case Grown():
                assert change.part is opened
                grown += change.text
            case Closed():
                assert change.part is opened
                told.append((change.part.kind, grown))
                opened = None
    assert opened is None
    assert told == [(part.kind, part.text) for part in outline.parts]
    for kind in ("reasoning", "text"):
        assert "".join(text for one, text in told if one == kind) == "".join(
            text for one, text in script if one == kind
        )
    assert sum(one == "call" for one, _ in told) == sum(one == "call" for one, _ in script)
