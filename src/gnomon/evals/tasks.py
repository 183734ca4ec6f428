"""Task files: questions with choices, or with answers that are compared word for word. JSON lines, described in docs/measuring.md."""

from __future__ import annotations

import hashlib
import json
import re
import string
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

LETTERS: Final = string.ascii_uppercase
Mode = Literal["logprobs", "letter", "answer"]
"""How an item is asked: by the log-probabilities of its choices, by the letter of one, or by an answer in words."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Head(_Line):
    """The first line, if it has `task`. `prompt` is what a question becomes, `delimiter` stands before its answer, `separator` between
    worked examples; `chat` is added to a question that goes through a chat template."""

    task: str
    prompt: str = "{question}"
    delimiter: str = " "
    separator: str = "\n\n"
    chat: str = ""
    shots: int = 0
    max_tokens: int = 16
    stop: tuple[str, ...] = ("\n",)


class Item(_Line):
    """A question. Either `choices` with the index of the right one in `answer`, or all accepted `answers`. A `shot` is a worked example."""

    id: str = ""
    question: str
    choices: tuple[str, ...] = ()
    answer: int | None = None
    answers: tuple[str, ...] = ()
    shot: bool = False

    @property
    def digest(self) -> str:
        """Of everything but the id."""
        said = (self.question, self.choices, self.answer, self.answers)
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    @property
    def expected(self) -> str:
        return self.answers[0] if self.answer is None else self.choices[self.answer]


@dataclass(frozen=True, slots=True)
class Task:
    """A file's head, its items and its worked examples, and the digest of its bytes."""

    head: Head
    items: tuple[Item, ...]
    shots: tuple[Item, ...]
    digest: str

    @property
    def has_choices(self) -> bool:
        return bool(self.items[0].choices)


def built_in() -> list[str]:
    """Names of the tasks that come with the package."""
    folder = resources.files("gnomon.evals") / "data"
    return sorted(file.name.removesuffix(".jsonl") for file in folder.iterdir() if file.name.endswith(".jsonl"))


def load(where: str) -> Task:
    """A built-in task, or a file. Raises OSError, and ValueError naming file, line and what is wrong with it."""
    shipped = resources.files("gnomon.evals") / "data" / f"{where}.jsonl"
    file = shipped if where in built_in() else Path(where)
    return parse(file.read_bytes(), Path(where).name.removesuffix(".jsonl"))


def parse(data: bytes, name: str) -> Task:
    """A task from a file's bytes. Raises ValueError."""
    head, items = Head(task=name), list[Item]()
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if isinstance(found, dict) and "task" in found and not items:
                head = Head.model_validate(found)
            else:
                item = Item.model_validate(found)
                items.append(item if item.id else item.model_copy(update={"id": str(number)}))
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{name}, line {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from error
    _check(name, head, items)
    asked = tuple(item for item in items if not item.shot)
    return Task(head, asked, tuple(item for item in items if item.shot), hashlib.sha256(data).hexdigest())


def _check(name: str, head: Head, items: list[Item]) -> None:
    asked = [item for item in items if not item.shot]
    if not asked:
        raise ValueError(f"{name} has no items to ask")
    if "{question}" not in head.prompt:
        raise ValueError(f"{name}: prompt is {head.prompt!r}, but must hold {{question}}")
    seen = set[str]()
    for item in items:
        if item.id in seen:
            raise ValueError(f"{name}: two items have the id {item.id!r}")
        seen.add(item.id)
        if item.choices and not (2 <= len(item.choices) <= len(LETTERS) and item.answer is not None):
            raise ValueError(
                f"{name}, item {item.id}: choices are 2 to {len(LETTERS)}, with the index of the right one"
            )
        if item.answer is not None and not 0 <= item.answer < len(item.choices):
            raise ValueError(f"{name}, item {item.id}: answer is {item.answer}, of {len(item.choices)} choices")
        if bool(item.choices) == bool(item.answers):
            raise ValueError(f"{name}, item {item.id}: either choices or answers are needed")
        if bool(item.choices) != bool(items[0].choices):
            raise ValueError(f"{name}, item {item.id}: some items have choices, some answers")


@dataclass(frozen=True, slots=True)
class Form:
    """How items of a task are put: by `mode`, with the first `shots` worked examples, as text or, with `chat`, as messages."""

    task: Task
    mode: Mode
    shots: int
    chat: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a form that the task can't take."""
        if (self.mode == "answer") == self.task.has_choices:
            kind = "choices" if self.task.has_choices else "answers in words"
            raise ValueError(f"{self.task.head.task} has {kind}: it can't be asked for {self.mode!r}")
        if not 0 <= self.shots <= len(self.task.shots):
            raise ValueError(
                f"--shots is {self.shots}, {self.task.head.task} has {len(self.task.shots)} worked examples"
            )
        if self.chat and self.mode == "logprobs":
            raise ValueError("log-probabilities of a prompt come from completions, not from chat: ask by letter")

    def question(self, item: Item) -> str:
        """An item's own text, without its answer."""
        text = item.question
        if self.mode == "letter":
            text += "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, item.choices, strict=False))
        if self.chat:
            how = "Answer with the letter alone." if self.mode == "letter" else self.task.head.chat
            return f"{text}\n{how}" if how else text
        made = self.task.head.prompt.replace("{question}", text)
        return f"{made}\nAnswer:" if self.mode == "letter" else made

    def solution(self, item: Item) -> str:
        """What a worked example answers."""
        return LETTERS[item.answer] if self.mode == "letter" and item.answer is not None else item.expected

    def prompt(self, item: Item) -> str:
        """The text to go on from."""
        head = self.task.head
        shown = [self.question(shot) + head.delimiter + self.solution(shot) for shot in self.task.shots[: self.shots]]
        return head.separator.join([*shown, self.question(item)])

    def messages(self, item: Item) -> list[Mapping[str, str]]:
        """The same as turns of a chat."""
        found: list[Mapping[str, str]] = []
        for shot in self.task.shots[: self.shots]:
            found.append({"role": "user", "content": self.question(shot)})
            found.append({"role": "assistant", "content": self.solution(shot)})
        return [*found, {"role": "user", "content": self.question(item)}]


_END: Final = re.compile(r"[.!?;](?=\s|$)|,(?=\s)|\n")
_ARTICLE: Final = re.compile(r"^(?:a|an|the) ")


def normalised(text: str) -> str:
    """What of an answer counts: its first clause in compatibility form and lower case, without article, quotes and punctuation around it,
    commas between digits, and space but single blanks."""
    first = _END.split(unicodedata.normalize("NFKC", text).strip(), maxsplit=1)[0]
    first = re.sub(r"(?<=\d),(?=\d{3})", "", " ".join(first.casefold().split()))
    first = first.strip(string.punctuation.replace("-", "").replace("$", "") + " ")
    return _ARTICLE.sub("", first)


def letter_of(text: str, choices: int) -> int | None:
    """The first letter of a choice that stands alone in an answer."""
    found = re.search(rf"(?<![A-Za-z0-9])([A-{LETTERS[choices - 1]}])(?![A-Za-z0-9])", text)
    return None if found is None else LETTERS.index(found[1])
