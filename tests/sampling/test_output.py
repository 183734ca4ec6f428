"""Text output: whatever the token borders, the text is the decoded whole cut where the first stop string begins."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import as_loaded, byte_level

from gnomon.chat.detokenizer import ByteDetokenizer
from gnomon.engine.api import TokenLogprob, TopLogprob
from gnomon.engine.output import Piece, TextOutput, token_logprob

EOS = 1_000_000


class Chunks:
    """A tokenizer whose id i stands for the i-th of the given byte strings."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks

    def stream(self) -> ByteDetokenizer:
        return ByteDetokenizer(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == EOS else self.chunks[token]


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, f"token {token}", -float(token), b"")


def run(chunks: list[bytes], stops: list[str]) -> tuple[TextOutput, list[Piece]]:
    output = TextOutput(Chunks(chunks), stops, eos=[EOS])
    pieces: list[Piece] = []
    for token in range(len(chunks)):
        pieces.append(output.push(token, logprob(token)))
        if output.finished:
            return output, pieces
    pieces.append(output.finish())
    return output, pieces


def cut(text: str, stops: list[str]) -> int:
    return min([at for s in stops if (at := text.find(s)) >= 0], default=len(text))


@st.composite
def split_bytes(draw: st.DrawFn) -> list[bytes]:
    data = draw(st.text(st.sampled_from("abab你é🎉\n"), max_size=30)).encode()
    borders = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data))))
    return [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]


stop_lists = st.lists(st.text(st.sampled_from("ab你é\n"), min_size=1, max_size=5), max_size=4)


@settings(max_examples=600, deadline=None)
@given(split_bytes(), stop_lists)
@example([b"abc", b"d"], ["abcd", "bc"])
@example([b"a", b"b", b"c", b"e"], ["abcd", "bc"])
@example([b"xab"], ["abc"])
@example([b"\xe4\xbd", b"\xa0\nST", b"OP"], ["\nSTOP"])
def test_pieces_join_to_the_text_cut_at_the_first_stop(chunks: list[bytes], stops: list[str]) -> None:
    text = b"".join(chunks).decode()
    output, pieces = run(chunks, stops)
    at = cut(text, stops)
    assert "".join(p.text for p in pieces) == text[:at]
    assert output.finished
    assert output.ended == (at < len(text))
    if output.ended:
        # Of the stop strings that begin there the first to come true.
        assert output.stop == min((s for s in stops if text.startswith(s, at)), key=len)
    else:
        assert output.stop is None


@settings(max_examples=300, deadline=None)
@given(split_bytes(), stop_lists)
def test_tokens_come_in_order_with_the_text_they_contribute_to(chunks: list[bytes], stops: list[str]) -> None:
    output, pieces = run(chunks, stops)
    ids = [i for p in pieces for i in p.ids]
    assert ids == list(range(len(ids)))
    assert [lp.id for p in pieces for lp in p.logprobs] == ids
    text = "".join(p.text for p in pieces)
    # Delivered tokens hold the delivered text, and none that has text lies behind it.
    assert b"".join(chunks[: len(ids)]).startswith(text.encode())
    if output.ended:
        assert all(len(b"".join(chunks[:i])) < len(text.encode()) for i in ids if chunks[i])
    else:
        assert len(ids) == len(chunks)
    # No token waits for text that is out: after every push what is delivered is complete up to the last whole token.
    seen, given_ids = "", 0
    for pushed, piece in enumerate(pieces[: len(chunks)], 1):
        seen, given_ids = seen + piece.text, given_ids + len(piece.ids)
        if not output.ended and b"".join(chunks[:pushed]) == seen.encode():
            assert given_ids == pushed


@settings(max_examples=300, deadline=None)
@given(split_bytes(), stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(chunks: list[bytes], stops: list[str]) -> None:
    output = TextOutput(Chunks(chunks), stops)
    taken, out = b"", ""
    for token, chunk in enumerate(chunks):
        out += output.push(token).text
        if output.finished:
            return
        taken += chunk
        held = taken.decode(errors="ignore").removeprefix(out)
        assert held == "" or any(s.startswith(held[:n]) for s in stops for n in [min(len(s), len(held))])


def test_end_of_sequence_ends_the_text_and_is_not_part_of_it() -> None:
    output = TextOutput(Chunks([b"hi", b" ST"]), ["STOP"], eos=[EOS])
    assert output.push(0) == Piece("hi", (0,))
    assert output.push(1) == Piece(" ")
    assert output.push(EOS) == Piece("ST", (1,))
    assert output.finished
    assert output.ended
    assert output.stop is None
    assert not output.finish()
    with pytest.raises(RuntimeError):
        output.push(0)


def test_a_match_that_waited_for_an_earlier_one_counts_at_the_end() -> None:
    output = TextOutput(Chunks([b"xabc"]), ["abcd", "bc"])
    assert output.push(0).text == "x"
    assert not output.finished
    assert output.finish().text == "a"
    assert output.ended
    assert output.stop == "bc"


def test_a_cut_off_character_shows_only_at_the_end() -> None:
    output = TextOutput(Chunks([b"a\xe4\xbd"]))
    assert output.push(0) == Piece("a")
    assert output.finish() == Piece("\ufffd", (0,))
    assert not output.ended


def test_stop_strings_that_are_empty_or_given_twice_do_no_harm() -> None:
    output, pieces = run([b"ab", b"STOP"], ["", "STOP", "STOP"])
    assert "".join(p.text for p in pieces) == "ab"
    assert output.stop == "STOP"


def test_hidden_tokens_are_delivered_without_text() -> None:
    tokenizer = as_loaded(byte_level())
    output = TextOutput(tokenizer, eos=[])
    ids = tokenizer.encode("ab</s>c")
    pieces = [output.push(i) for i in ids]
    assert "".join(p.text for p in pieces) == "abc"
    assert [i for p in pieces for i in p.ids] == ids


def test_scores_carry_the_text_and_bytes_of_each_token() -> None:
    ab, part = TopLogprob(1, "ab", -0.5, b"ab"), TopLogprob(0, "\ufffd", -2.0, b"\xe4")
    assert token_logprob(Chunks([b"\xe4", b"ab"]), 1, -0.5, [(1, -0.5), (0, -2.0)]) == TokenLogprob(
        1, "ab", -0.5, b"ab", (ab, part)
    )
