"""Splitting reasoning from content: every format, every seed, and the same result however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gnomon.chat.reasoning import HarmonyFormat, TagFormat, detect, partial_suffix, split, splitter

THINK = TagFormat("<think>", "</think>")
GEMMA = TagFormat("<|channel>", "<channel|>", named=True, again=True)
HARMONY = HarmonyFormat()
OPEN_PROMPT = "<|Assistant|><think>\n"
SHUT_PROMPT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
SHUT_ONLY = "<|Assistant|></think>"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
TURN = "<|start|>assistant"


@pytest.mark.parametrize(
    ("format", "prompt", "text", "reasoning", "content"),
    [
        # Tags the model writes.
        (THINK, "", "<think>\nwhy\n</think>\n\nyes", "why", "yes"),
        (THINK, "", "\n <think>why</think>yes", "why", "yes"),
        (THINK, "", "<think>\n\n</think>\n\nyes\n", "", "yes\n"),
        (THINK, "", "a\n\nb\n</think>", "", "a\n\nb\n</think>"),
        (THINK, "", "<think>a\n\nb", "a\n\nb", ""),
        (THINK, "", "<think>a</think>", "a", ""),
        (THINK, "", "  hello <think>x</think>", "", "  hello <think>x</think>"),
        (THINK, "", "<thin", "", "<thin"),
        (THINK, "", "", "", ""),
        # Tags the template opened or closed.
        (THINK, OPEN_PROMPT, "why\n</think>\n\nyes", "why", "yes"),
        (THINK, OPEN_PROMPT, "<think>\nwhy</think>yes", "why", "yes"),
        (THINK, OPEN_PROMPT, "never closed </thi", "never closed </thi", ""),
        (THINK, OPEN_PROMPT, "</think>yes", "", "yes"),
        (THINK, SHUT_PROMPT, "yes <think>no</think>", "", "yes <think>no</think>"),
        (THINK, SHUT_ONLY, "<think>no</think>", "", "<think>no</think>"),
        # After thinking has ended tags are text.
        (THINK, OPEN_PROMPT, "a</think>Use <think> and </think> so.", "a", "Use <think> and </think> so."),
        (THINK, "", "<think>a <think> b</think>c", "a <think> b", "c"),
        (TagFormat("[THINK]", "[/THINK]"), "", "[THINK]hm[/THINK]ok", "hm", "ok"),
        # Channels: the line with the channel's name is dropped.
        (GEMMA, "<|turn>model\n", "<|channel>thought\nwhy\n<channel|>yes", "why", "yes"),
        (GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", "yes", "", "yes"),
        (GEMMA, "<|turn>model\n<|channel>thought\n", "why<channel|>yes", "why", "yes"),
        (GEMMA, "", "<|channel>thought<channel|>yes", "", "yes"),
        (GEMMA, "", "a<|channel>thought\nb<channel|>c", "b", "ac"),
        (GEMMA, "", "<|channel>thou", "", ""),
        # Markup around the answer itself.
        (
            TagFormat(
                "<|open|>think<|sep|>",
                "<|close|>think<|sep|>",
                dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
            ),
            "",
            "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>",
            "a",
            "b",
        ),
        # Harmony.
        (HARMONY, TURN, f"{ANALYSIS}why<|end|>{TURN}{FINAL}yes<|return|>", "why", "yes"),
        (HARMONY, TURN, f"{FINAL}yes", "", "yes"),
        (HARMONY, TURN, f"{ANALYSIS}never ended", "never ended", ""),
        (HARMONY, TURN, "plain words", "", "plain words"),
        (HARMONY, TURN + FINAL, "yes", "", "yes"),
        (HARMONY, TURN + ANALYSIS, f"why<|end|>{TURN}{FINAL}yes", "why", "yes"),
        (HARMONY, TURN, f"{ANALYSIS}a<|end|>{TURN}{ANALYSIS}b<|end|>{TURN}{FINAL}c", "a\nb", "c"),
        (HARMONY, TURN, f"<|channel|>commentary<|message|>first<|end|>{TURN}{FINAL}then", "", "first\nthen"),
        (
            HARMONY,
            TURN,
            f"{ANALYSIS}a<|end|>{TURN} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
            "a",
            f"{TURN} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
        ),
        # No format: nothing is looked for.
        (None, "", "<think>a</think>b", "", "<think>a</think>b"),
    ],
)
def test_split(format, prompt, text, reasoning, content):
    assert split(format, text, prompt) == (reasoning, content)


MARKUP = (
    "<|start|>",
    "assistant",
    "<|channel|>",
    "analysis",
    "final",
    "<|message|>",
    "<|end|>",
    " to=f",
    "<|call|>",
    "<|return|>",
)
TEXT = ("<think>", "</think>", "<|channel>", "<channel|>", "thought", "\n", " ", "a", "<", "</", "think>", "<|", "é")
PIECES = st.lists(st.sampled_from(TEXT + MARKUP), max_size=14)
FORMATS = st.sampled_from([THINK, GEMMA, HARMONY, None])
PROMPTS = st.sampled_from(["", OPEN_PROMPT, SHUT_PROMPT, SHUT_ONLY, "<|channel>thought\n", TURN, TURN + ANALYSIS])


@settings(max_examples=400, deadline=None)
@given(FORMATS, PROMPTS, PIECES, st.data())
def test_any_cutting_gives_the_same(format, prompt, pieces, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    made = splitter(format, prompt)
    segments = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        segments += made.feed(text[start:end])
    segments += made.finish()
    assert all(segment.text for segment in segments)
    whole = tuple("".join(s.text for s in segments if s.kind == kind) for kind in ("reasoning", "content"))
    assert whole == split(format, text, prompt)


@settings(max_examples=200, deadline=None)
@given(st.text("ab<>/think\n ", max_size=40), st.text("ab<>/think\n ", max_size=40))
def test_nothing_but_tags_and_newlines_at_the_borders_is_lost(thought, answer):
    assume((thought + "</think>").index("</think>") == len(thought) and not thought.lstrip("\n").startswith("<think>"))
    assert split(THINK, f"<think>{thought}</think>{answer}") == (thought.strip("\n"), answer.lstrip("\n"))


def test_text_streams_as_soon_as_it_is_decided():
    made = splitter(THINK, OPEN_PROMPT)
    assert [s.text for s in made.feed("abc")] == ["abc"]
    assert made.feed("\n</thi") == []
    assert [(s.kind, s.text) for s in made.feed("s")] == [("reasoning", "\n</this")]
    assert [(s.kind, s.text) for s in made.feed("</think>\nx")] == [("content", "x")]
    assert [(s.kind, s.text) for s in made.feed(" <")] == [("content", " <")]


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("... '<think>\\n\\n</think>' ...", set(), THINK),
        (None, {"<think>", "</think>"}, THINK),
        ("plain", {"<think>"}, None),
        ("plain", set(), None),
        ("<think>", {"<thinking>", "</thinking>"}, THINK),
        ("x", {"<|START_THINKING|>", "<|END_THINKING|>"}, TagFormat("<|START_THINKING|>", "<|END_THINKING|>")),
        ("<seed:think>", set(), TagFormat("<seed:think>", "</seed:think>")),
        ("x", {"<|channel>", "<channel|>"}, GEMMA),
        ("x", {"<|start|>", "<|channel|>", "<|message|>"}, HARMONY),
    ],
)
def test_detection(template, tokens, expected):
    assert detect(template, tokens.__contains__) == expected


@given(st.text("ab", max_size=6), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_partial_suffix_is_the_longest_proper_beginning(text, markers):
    fitting = [n for m in markers for n in range(1, len(m)) if text.endswith(m[:n])]
    assert partial_suffix(text, markers) == max(fitting, default=0)
