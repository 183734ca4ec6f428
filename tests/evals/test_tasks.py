"""Task files, normalisation, proportions against published values, and runs against a server that fails on order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.bench.page import render
from gnomon.bench.schema import Run
from gnomon.bench.store import Store, load
from gnomon.evals import tasks
from gnomon.evals.asking import Asker, continuation_nats
from gnomon.evals.proportions import mcnemar, wilson
from gnomon.evals.task_run import Served, TaskRun, paired, result
from gnomon.evals.tasks import Form, letter_of, normalised, parse

CHOICES = b"""{"task": "t", "prompt": "Q: {question}\\nA:", "shots": 1}
{"id": "s", "question": "ice is", "choices": ["hot", "cold"], "answer": 1, "shot": true}
{"id": "a", "question": "fire is", "choices": ["hot", "cold"], "answer": 0}
{"id": "b", "question": "snow is", "choices": ["black", "white", "pink"], "answer": 1}
"""
ANSWERS = b"""{"task": "w", "prompt": "{question}"}
{"question": "1+1?", "answers": ["2", "two"]}
{"question": "2+2?", "answers": ["4", "four"]}
{"question": "3+3?", "answers": ["6", "six"]}
"""


def test_wilson_is_the_published_one() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score, no continuity correction).
    for right, number, lower, upper in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(right, number) == (pytest.approx(lower, abs=5e-5), pytest.approx(upper, abs=5e-5))
    assert wilson(20, 20)[1] == 1.0
    for right, number in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="is no proportion"):
            wilson(right, number)


def test_mcnemar_by_hand() -> None:
    # Of 10 coins at most 1 shows the rarer side, or at most 1 the other: 2 (1 + 10) / 1024.
    assert mcnemar(1, 9) == mcnemar(9, 1) == 22 / 1024
    assert mcnemar(0, 5) == 2 / 32
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert 0 < mcnemar(1000, 1300) < 1e-9


def test_a_file_and_its_forms() -> None:
    task = parse(CHOICES, "x")
    assert [item.id for item in task.items] == ["a", "b"]
    assert Form(task, "logprobs", 1).prompt(task.items[0]) == "Q: ice is\nA: cold\n\nQ: fire is\nA:"
    assert Form(task, "letter", 1).prompt(task.items[0]) == (
        "Q: ice is\nA. hot\nB. cold\nA:\nAnswer: B\n\nQ: fire is\nA. hot\nB. cold\nA:\nAnswer:"
    )
    assert Form(task, "letter", 1, chat=True).messages(task.items[1]) == [
        {"role": "user", "content": "ice is\nA. hot\nB. cold\nAnswer with the letter alone."},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "snow is\nA. black\nB. white\nC. pink\nAnswer with the letter alone."},
    ]
    for mode, shots, chat, message in (
        ("answer", 0, False, "t has choices"),
        ("letter", 2, False, "--shots is 2, t has 1"),
        ("logprobs", 0, True, "ask by letter"),
    ):
        with pytest.raises(ValueError, match=message):
            Form(task, mode, shots, chat)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "choices": ["a"], "answer": 0}', "choices are 2 to 26"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "answer is 2, of 2 choices"),
        ('{"question": "q", "choices": ["a", "b"]}', "with the index of the right one"),
        ('{"question": "q"}', "either choices or answers"),
        ('{"question": "q", "answers": ["a"], "wrong": 1}', "line 1: wrong: Extra inputs"),
        ('{"question": "q", "answers": ["a"]}\n{"id": "1", "question": "q", "answers": ["a"]}', "two items have the id '1'"),
        ('{"question": "q", "answers": ["a"]}\n{"question": "q", "choices": ["a", "b"], "answer": 0}', "some items have choices"),
        ('{"task": "t", "prompt": "no hole"}\n{"question": "q", "answers": ["a"]}', "must hold {question}"),
        ('{"question"', "line 1: "),
        ("", "no items to ask"),
    ],
)  # fmt: skip
def test_a_bad_file_is_told(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("}", r"\}")):
        parse(line.encode(), "f")


def test_what_ships() -> None:
    assert tasks.built_in() == ["everyday-answers", "everyday-choices"]
    choices, answers = tasks.load("everyday-choices"), tasks.load("everyday-answers")
    assert (len(choices.items), len(answers.items)) == (60, 40)
    right = [item.answer for item in choices.items]
    # Whoever always takes the same place is near chance.
    assert all(9 <= right.count(place) <= 22 for place in range(4))
    for item in answers.items:
        assert all(normalised(answer) for answer in item.answers)


def test_normalisation() -> None:
    for text, wanted in (
        (" Paris.", "paris"), ("The Sun, of course", "sun"), ("\n\n 1,000\nQuestion:", "1000"), ("\u201cIce\u201d!", "\u201cice\u201d"),
        ('"Ice"', "ice"), ("3.5 metres", "3.5 metres"), ("a  Cow", "cow"), ("-4", "-4"), ("ＡＢＣ", "abc"), ("", ""),
    ):  # fmt: skip
        assert normalised(text) == wanted
    assert [letter_of(t, 3) for t in (" B", "The answer is C.", "(A)", "D", "Because", "")] == [
        1,
        2,
        0,
        None,
        None,
        None,
    ]


@settings(max_examples=50)
@given(st.text(max_size=20))
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    once = normalised(text)
    assert "\n" not in once
    assert once == once.strip()


def test_which_tokens_continue() -> None:
    # "ab cd" after "ab": a token over the border counts; what was generated after it, and the first, which has no score, don't.
    logprobs = {
        "tokens": ["<s>", "a", "b ", "cd", "!"],
        "token_logprobs": [None, -1.0, -2.0, -4.0, -8.0],
        "text_offset": [0, 0, 1, 3, 5],
    }
    assert continuation_nats(logprobs, 2, 5) == -6.0
    assert continuation_nats(logprobs, 3, 5) == -4.0
    with pytest.raises(TypeError):
        continuation_nats({"tokens": ["ab"], "token_logprobs": [None], "text_offset": [0]}, 0, 2)
    with pytest.raises(IndexError):
        continuation_nats(logprobs, 5, 5)


def echo(nats: Callable[[str], float]) -> Callable[[dict[str, Any]], Any]:
    """A server that gives each text one token per character; the last word's are worth `nats` of it in all."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        text = body["prompt"]
        word = text.rsplit(" ", 1)[-1]
        values = [None, *[-1.0] * (len(text) - 1 - len(word)), *[nats(word) / len(word)] * len(word)]
        return {
            "choices": [
                {"logprobs": {"tokens": list(text), "token_logprobs": values, "text_offset": list(range(len(text)))}}
            ],
            "usage": {"prompt_tokens": len(text), "completion_tokens": 0},
        }

    return answer


def asker(script: Callable[[dict[str, Any]], Any], form: Form) -> Asker:
    def handle(request: httpx.Request) -> httpx.Response:
        made = script(json.loads(request.content))
        if isinstance(made, Exception):
            raise made
        return made if isinstance(made, httpx.Response) else httpx.Response(200, json=made)

    return Asker(httpx.Client(base_url="http://x/v1", transport=httpx.MockTransport(handle)), "m", form)


def test_choices_by_log_probability() -> None:
    task = parse(CHOICES, "x")
    # " " and the word: the blank is worth -1 in all of them.
    values = {"hot": -9.0, "cold": -8.0, "black": -1.0, "white": -2.0, "pink": -3.0}
    ask = asker(echo(values.__getitem__), Form(task, "logprobs", 1))
    first, second = (ask.ask(item) for item in task.items)
    assert first.scores == (pytest.approx(-10), pytest.approx(-9))
    # -10 / 3 against -9 / 4: by length the wrong one as well.
    assert (first.correct, first.chosen, first.correct_per_length) == (False, 1, False)
    assert (second.correct, second.chosen, second.text) == (False, 0, "black")
    assert first.prompt_tokens == sum(len(f"Q: ice is\nA: cold\n\nQ: fire is\nA: {word}") for word in ("hot", "cold"))


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text}], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


def test_a_failure_is_no_wrong_answer_and_can_be_asked_again(tmp_path: Path) -> None:
    form, store = Form(parse(ANSWERS, "w"), "answer", 0), Store(tmp_path)
    broken = {
        "1+1?": lambda: said(" Two."),
        "2+2?": lambda: httpx.Response(503, json={"error": {"message": "draining"}}),
        "3+3?": lambda: httpx.ReadTimeout("late"),
    }
    run = TaskRun(store, asker(lambda body: broken[body["prompt"]](), form), Served("m", "http://x", 1000))
    path = run.finish(2)
    found = result(load(path).samples)
    assert (found.right, found.answered, found.failed, found.accuracy) == (1, 1, 2, 1.0)
    assert {(s.details.get("item"), s.status) for s in load(path).samples if s.status != "ok"} == {
        ("3", "failed"),
        ("4", "timeout"),
    }
    assert any("503" in reason and "draining" in reason for reason in found.reasons)
    summary = load(path).samples[-1]
    assert "weight_bytes" not in summary.metrics

    asked: list[str] = []

    def repaired(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body["prompt"])
        return said("4" if body["prompt"] == "2+2?" else "7")

    again = TaskRun(store, asker(repaired, form), Served("m", "http://elsewhere", 1000))
    again.resume(load(path))
    assert again.finish(1) == path
    assert asked == ["2+2?", "3+3?"]
    whole = load(path)
    found = result(whole.samples)
    assert (found.right, found.answered, found.failed) == (2, 3, 0)
    assert [(s.details["item"], s.attempt, s.status) for s in whole.samples if "item" in s.details and s.block == 1] == [
        ("3", 1, "failed"), ("3", 2, "ok"),
    ]  # fmt: skip
    assert whole.samples[-1].metrics == {"accuracy": pytest.approx(2 / 3), "weight_bytes": 1000.0}
    assert [s.index for s in whole.samples] == list(range(len(whole.samples)))
    page = render([(path, whole)], [], tmp_path)
    assert "accuracy against size of weights" in page
    assert Store(tmp_path).rebuild().runs == 1
    other = TaskRun(store, asker(repaired, Form(parse(CHOICES, "x"), "letter", 0)), Served("m", "http://x"))
    with pytest.raises(ValueError, match="mode was 'answer', and is 'letter' now"):
        other.resume(whole)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"choices": [{"text": "hot"}], "usage": {"prompt_tokens": 1}}, "no log-probabilities of its prompt"),
        ({"choices": []}, "no log-probabilities of its prompt"),
        (httpx.Response(200, text="<html>"), "no JSON: <html>"),
        (httpx.Response(200, json=[]), "no JSON object"),
        (httpx.ConnectError("refused"), "ConnectError: refused"),
    ],
)
def test_answers_that_are_none(made: Any, message: str, tmp_path: Path) -> None:
    run = TaskRun(
        Store(tmp_path), asker(lambda _: made, Form(parse(CHOICES, "x"), "logprobs", 0)), Served("m", "http://x")
    )
    found = result(load(run.finish(1)).samples)
    assert (found.answered, found.failed, found.accuracy) == (0, 2, None)
    assert all(message in reason for reason in found.reasons)


def test_usage_is_never_guessed(tmp_path: Path) -> None:
    form = Form(parse(ANSWERS, "w"), "answer", 0)
    run = TaskRun(Store(tmp_path), asker(lambda _: {"choices": [{"text": "2"}]}, form), Served("m", "http://x"))
    assert list(result(load(run.finish(1)).samples).reasons) == ["usage.prompt_tokens is None"]


def test_an_interrupt_keeps_what_was_answered(tmp_path: Path) -> None:
    form = Form(parse(ANSWERS, "w"), "answer", 0)
    run = TaskRun(Store(tmp_path), asker(lambda _: said("2"), form), Served("m", "http://x"))
    record, calls = run._record, list[int]()

    def record_one(*arguments: Any) -> None:
        record(*arguments)
        calls.append(1)
        raise KeyboardInterrupt

    run._record = record_one  # type: ignore[method-assign]
    kept = load(run.finish(1))
    assert (kept.complete, kept.interruption) == (False, "the user stopped it")
    assert len(kept.samples) == 1


def answered(tmp_path: Path, answers: dict[str, str], data: bytes = ANSWERS) -> Run:
    form = Form(parse(data, "w"), "answer", 0)
    run = TaskRun(Store(tmp_path), asker(lambda body: said(answers[body["prompt"]]), form), Served("m", "http://x"))
    return load(run.finish(1))


def test_pairs(tmp_path: Path) -> None:
    first = answered(tmp_path, {"1+1?": "2", "2+2?": "4", "3+3?": "5"})
    second = answered(tmp_path, {"1+1?": "two", "2+2?": "5", "3+3?": "7"})
    found = paired(first, second)
    assert (found.both, found.only_first, found.only_second, found.neither, found.left_out, found.p) == (
        1,
        1,
        0,
        1,
        0,
        1.0,
    )
    other = answered(tmp_path, {"1+2?": "3", "2+2?": "4", "3+3?": "6"}, ANSWERS.replace(b"1+1", b"1+2"))
    with pytest.raises(ValueError, match="item 2 is another question"):
        paired(first, other)
