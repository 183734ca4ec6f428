"""What is measured: cells, their frozen token ids, and what one measurement gives back. No model is needed here."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import JsonValue

from gnomon.bench.schema import Arm, Work

Task = Literal[
    "prompt", "decode", "batch", "stream", "start", "command", "parity", "ttft", "prefill", "depth", "restart", "loop", "schedule",
    "cancel", "turns", "memory",
]  # fmt: skip
_NUMBER = r"\d+(?:\.\d+)?"
_CELL = re.compile(
    r"prompt:(?P<prompt>\d+)|decode:(?P<steps>\d+)@(?P<depth>\d+)|batch:(?P<rows>\d+)x(?P<each>\d+)"
    r"|stream:(?P<streams>\d+)x(?P<length>\d+)|start:(?P<answer>\d+)|command"
    r"|(?P<fixed>parity|cancel):(?P<tokens>\d+)|(?P<read>ttft|prefill|restart):(?P<words>\d+)"
    r"|(?P<after>depth|memory):(?P<then>\d+)@(?P<before>\d+)|loop:(?P<clients>\d+)x(?P<calls>\d+)x(?P<each_call>\d+)"
    rf"|(?P<law>poisson|constant):(?P<offered>\d+)x(?P<wanted>\d+)@(?P<rate>{_NUMBER}):(?P<first>{_NUMBER}):(?P<pace>{_NUMBER})"
    r"|turns:(?P<talks>\d+)x(?P<rounds>\d+)@(?P<said>\d+)"
)
FORMS = (
    "prompt:TOKENS, decode:TOKENS@DEPTH, batch:ROWSxTOKENS, stream:REQUESTSxTOKENS, start:TOKENS, command, parity:TOKENS, ttft:WORDS, "
    "prefill:WORDS, depth:TOKENS@WORDS, restart:WORDS, loop:CLIENTSxREQUESTSxTOKENS, poisson:REQUESTSxTOKENS@RATE:FIRST:PACE, "
    "constant:REQUESTSxTOKENS@RATE:FIRST:PACE, cancel:TOKENS, turns:CONVERSATIONSxTURNS@WORDS, memory:TOKENS@WORDS"
)
STORY = "Once upon a time, in a small village by the sea, there lived an old clockmaker who"
WORDS = (
    "the of and to in that was his he it with is for as had you not be her on at by which have or from this him but all she they were my "
    "are me one their so an said them we who would been will no when there if more out up into do any your what has man could other than"
)
"""Short words, each a token of its own in most vocabularies: of these long prompts are made."""
BATCH_PROMPT = 16
"""Prompt tokens of each row of a batch cell."""
FIRST_TOKENS = 2
"""Tokens of an answer of which only the first matters."""
TURN_TOKENS = 4
"""Tokens of the answer to each turn of a conversation."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests that arrive by a law at `rate` per second, however slow the server is, with two objectives in seconds: the first output
    within `first` of its scheduled arrival, and each further token within `pace` on average."""

    law: Literal["poisson", "constant"]
    rate: float
    first: float
    pace: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of work. Counts are in tokens; `depth` tokens stand in the cache before the prompt; `rows` requests run at once.

    Written `prompt:700` (prefill and first token), `decode:64@2048` (64 tokens from a synthetic state of 2,048), `batch:4x32` (4 requests
    of 32 tokens), `stream:8x24` (8 streamed requests with text prompts, 24 tokens each), `start:8` (from nothing to an answer of 8
    tokens) or `command` (whatever the command does). The other forms are the legs of the serving suite (`gnomon.bench.legs`); their
    prompts are counted in `words`, and how many tokens those are the server's usage tells. `calls` are requests of each client or
    turns of each conversation, one after the other.
    """

    task: Task
    prompt_tokens: int = 1
    output_tokens: int = 1
    depth: int = 0
    rows: int = 1
    words: int = 0
    calls: int = 1
    schedule: Schedule | None = None

    @classmethod
    def parse(cls, text: str) -> Cell:
        """The cell that `text` names. Raises `ValueError` with the forms that are known."""
        match = _CELL.fullmatch(text)
        if match is None:
            raise ValueError(f"cell {text!r} is none of {FORMS}")
        texts = {name: value for name, value in match.groupdict().items() if value is not None}
        found = {name: int(value) for name, value in texts.items() if value.isdecimal()}
        if "prompt" in found:
            cell = cls("prompt", prompt_tokens=found["prompt"])
        elif "steps" in found:
            cell = cls("decode", output_tokens=found["steps"], depth=found["depth"])
        elif "rows" in found:
            cell = cls("batch", prompt_tokens=BATCH_PROMPT, output_tokens=found["each"], rows=found["rows"])
        elif not found:
            return cls("command")
        else:
            cell = cls._through_http(texts, found)
        counted = cell.task in ("prompt", "decode", "batch")
        if (
            (counted and cell.prompt_tokens < 1)
            or min(cell.rows, cell.calls) < 1
            or cell.output_tokens < (2 if cell.task != "prompt" else 1)
            or (cell.task in ("ttft", "prefill", "restart", "depth", "turns", "memory") and cell.words < 1)
            or (cell.schedule is not None and cell.schedule.rate <= 0)
        ):
            raise ValueError(
                f"cell {text!r} is too small: prompts, rows, calls and rates need to be above 0, a decode 2 or more tokens"
            )
        return cell

    @classmethod
    def _through_http(cls, texts: Mapping[str, str], found: Mapping[str, int]) -> Cell:
        """Cells that only servers know; their prompts are text."""
        if "streams" in found:
            return cls("stream", 0, found["length"], rows=found["streams"])
        if "answer" in found:
            return cls("start", 0, found["answer"])
        if "fixed" in texts:
            return cls("parity" if texts["fixed"] == "parity" else "cancel", 0, found["tokens"])
        if "read" in texts:
            # One of the known names: the pattern admits no other.
            task: Task = "ttft" if texts["read"] == "ttft" else "prefill" if texts["read"] == "prefill" else "restart"
            return cls(task, 0, FIRST_TOKENS, words=found["words"])
        if "after" in texts:
            return cls("depth" if texts["after"] == "depth" else "memory", 0, found["then"], words=found["before"])
        if "clients" in found:
            return cls("loop", 0, found["each_call"], rows=found["clients"], calls=found["calls"])
        if "talks" in found:
            return cls("turns", 0, TURN_TOKENS, rows=found["talks"], calls=found["rounds"], words=found["said"])
        law: Literal["poisson", "constant"] = "poisson" if texts["law"] == "poisson" else "constant"
        wanted = Schedule(law, float(texts["rate"]), float(texts["first"]), float(texts["pace"]))
        return cls("schedule", 0, found["wanted"], rows=found["offered"], schedule=wanted)

    def __str__(self) -> str:
        match self.task:
            case "prompt":
                return f"prompt:{self.prompt_tokens}"
            case "decode":
                return f"decode:{self.output_tokens}@{self.depth}"
            case "start" | "parity" | "cancel":
                return f"{self.task}:{self.output_tokens}"
            case "ttft" | "prefill" | "restart":
                return f"{self.task}:{self.words}"
            case "depth" | "memory":
                return f"{self.task}:{self.output_tokens}@{self.words}"
            case "loop":
                return f"loop:{self.rows}x{self.calls}x{self.output_tokens}"
            case "turns":
                return f"turns:{self.rows}x{self.calls}@{self.words}"
            case "command":
                return "command"
            case "batch" | "stream":
                return f"{self.task}:{self.rows}x{self.output_tokens}"
            case "schedule":
                if self.schedule is None:
                    raise ValueError("a cell of scheduled requests has no schedule")
                s = self.schedule
                return f"{s.law}:{self.rows}x{self.output_tokens}@{s.rate:g}:{s.first:g}:{s.pace:g}"

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
            "parity": "total_seconds",
            "ttft": "cold_first_output_seconds",
            "prefill": "prefill_tokens_per_second",
            "depth": "decode_tokens_per_second",
            "restart": "restarted_first_output_seconds",
            "loop": "aggregate_tokens_per_second",
            "schedule": "goodput_requests_per_second",
            "cancel": "freed_seconds",
            "turns": "later_first_output_median_seconds",
            "memory": "peak_resident_bytes",
        }[self.task]

    @property
    def total_output(self) -> int | None:
        """Output tokens that a measurement must come to; None where an answer may end by itself or is cut off."""
        if self.task in ("parity", "cancel"):
            return None
        requests = {"ttft": 3, "restart": 2}.get(self.task, self.rows * self.calls)
        return self.output_tokens * requests


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

    def long_text(self, words: int, row: int = 0) -> str:
        """A prompt of `words` short words after a nonce, ending so that a story goes on; no two begin alike."""
        start = self.text(row)
        source = random.Random(start)
        nonce, known = start.split(" ", 1)[0], WORDS.split()
        return f"{nonce} {' '.join(source.choice(known) for _ in range(words))}. {STORY}"

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
