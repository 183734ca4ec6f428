"""What is measured: cells, their frozen token ids, and what one measurement gives back. No model is needed here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import JsonValue

from gnomon.bench.schema import Arm, Work

Task = Literal["prompt", "decode", "batch", "stream", "start", "command"]
_CELL = re.compile(
    r"prompt:(?P<prompt>\d+)|decode:(?P<steps>\d+)@(?P<depth>\d+)|batch:(?P<rows>\d+)x(?P<each>\d+)"
    r"|stream:(?P<streams>\d+)x(?P<length>\d+)|start:(?P<answer>\d+)|command"
)
FORMS = "prompt:TOKENS, decode:TOKENS@DEPTH, batch:ROWSxTOKENS, stream:REQUESTSxTOKENS, start:TOKENS, command"
STORY = "Once upon a time, in a small village by the sea, there lived an old clockmaker who"
BATCH_PROMPT = 16
"""Prompt tokens of each row of a batch cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of work. Counts are in tokens; `depth` tokens stand in the cache before the prompt; `rows` requests run at once.

    Written `prompt:700` (prefill and first token), `decode:64@2048` (64 tokens from a synthetic state of 2,048), `batch:4x32` (4 requests
    of 32 tokens), `stream:8x24` (8 streamed requests with text prompts, 24 tokens each), `start:8` (from nothing to an answer of 8
    tokens) or `command` (whatever the command does).
    """

    task: Task
    prompt_tokens: int = 1
    output_tokens: int = 1
    depth: int = 0
    rows: int = 1

    @classmethod
    def parse(cls, text: str) -> Cell:
        """The cell that `text` names. Raises `ValueError` with the forms that are known."""
        match = _CELL.fullmatch(text)
        if match is None:
            raise ValueError(f"cell {text!r} is none of {FORMS}")
        found = {name: int(value) for name, value in match.groupdict().items() if value is not None}
        if "prompt" in found:
            cell = cls("prompt", prompt_tokens=found["prompt"])
        elif "steps" in found:
            cell = cls("decode", output_tokens=found["steps"], depth=found["depth"])
        elif "rows" in found:
            cell = cls("batch", prompt_tokens=BATCH_PROMPT, output_tokens=found["each"], rows=found["rows"])
        elif "streams" in found:
            cell = cls("stream", prompt_tokens=0, output_tokens=found["length"], rows=found["streams"])
        elif "answer" in found:
            cell = cls("start", prompt_tokens=0, output_tokens=found["answer"])
        else:
            return cls("command")
        counted = cell.task in ("prompt", "decode", "batch")
        if (
            (counted and cell.prompt_tokens < 1)
            or cell.rows < 1
            or cell.output_tokens < (2 if cell.task != "prompt" else 1)
        ):
            raise ValueError(f"cell {text!r} is too small: a prompt and rows need 1 or more, a decode 2 or more tokens")
        return cell

    def __str__(self) -> str:
        if self.task == "prompt":
            return f"prompt:{self.prompt_tokens}"
        if self.task == "decode":
            return f"decode:{self.output_tokens}@{self.depth}"
        if self.task == "start":
            return f"start:{self.output_tokens}"
        return self.task if self.task == "command" else f"{self.task}:{self.rows}x{self.output_tokens}"

    @property
    def primary(self) -> str:
        """The metric that decides this cell, declared before any measurement."""
        return {
            "prompt": "prefill_tokens_per_second",
            "decode": "decode_tokens_per_second",
            "batch": "aggregate_tokens_per_second",
            "stream": "decode_tokens_per_second" if self.rows == 1 else "aggregate_tokens_per_second",
            "start": "first_answer_seconds",
            "command": "seconds",
        }[self.task]

    @property
    def total_output(self) -> int:
        return self.output_tokens * self.rows


@dataclass(frozen=True, slots=True)
class Workload:
    """One cell with one seed: both arms of a block get exactly this. `timeout` is in seconds."""

    cell: Cell
    seed: int
    block: int
    attempt: int = 1
    timeout: float = 120.0

    @property
    def nonce(self) -> str:
        """Twelve hexadecimal digits that differ between seeds, cells, attempts and blocks, and are equal for the arms of a pair."""
        key = f"{self.seed}:{self.cell}:{self.attempt}:{self.block}"
        return hashlib.sha256(key.encode()).hexdigest()[:12]

    def text(self, row: int = 0) -> str:
        """The prompt of a streamed request: a story after a nonce that differs between rows, blocks and seeds: no cache knows it."""
        nonce = hashlib.sha256(f"{self.nonce}:{row}".encode()).hexdigest()[:12]
        return f"{nonce} {STORY}"

    def ids(self, vocabulary: int, row: int = 0, avoid: Iterable[int] = ()) -> tuple[int, ...]:
        """The frozen prompt of a row: token ids in [0, vocabulary) from SHA-256 of seed, row and position, without those in `avoid`."""
        taboo = set(avoid)
        found: list[int] = []
        counter = 0
        while len(found) < self.cell.prompt_tokens:
            digest = hashlib.sha256(f"{self.seed}:{row}:{counter}".encode()).digest()
            token = int.from_bytes(digest[:8]) % vocabulary
            if token not in taboo:
                found.append(token)
            counter += 1
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What an arm reports of one workload: values of known metrics, the work it really did, and anything worth keeping."""

    metrics: dict[str, float]
    work: Work
    details: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])


class ArmFailed(RuntimeError):
    """An arm broke: it crashed, raised or answered nonsense."""


class ArmTimedOut(ArmFailed):
    """An arm gave no answer within the workload's time."""


class Unsupported(RuntimeError):
    """An arm says that it can't do this work here, and why."""


class Contender(Protocol):
    """One arm while it is measured."""

    @property
    def arm(self) -> Arm: ...

    def start(self) -> None:
        """Make ready for measuring; does nothing if already started."""
        ...

    def measure(self, workload: Workload) -> Measurement:
        """Do the work once. Raises `ArmFailed`, `ArmTimedOut` or `Unsupported`."""
        ...

    def stop(self) -> None:
        """Release everything; the next `start` begins afresh."""
        ...
