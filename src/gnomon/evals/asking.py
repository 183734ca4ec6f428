"""One item to an OpenAI-compatible server, and what came back."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import httpx

from gnomon.evals.tasks import Form, Item, letter_of, normalised


class RequestFailed(Exception):
    """A request without a usable answer: that says nothing of the model. The message tells why."""


class RequestTimedOut(RequestFailed):
    """No answer in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an item. `chosen` is the index of a choice, None if no letter was named; `scores` are the choices' summed
    log-probabilities in nats, `correct_per_length` whether the right one is first by these per character."""

    text: str
    correct: bool
    prompt_sha256: str
    prompt_tokens: int
    output_tokens: int
    seconds: float
    chosen: int | None = None
    scores: tuple[float, ...] = ()
    correct_per_length: bool | None = None


class Client(Protocol):
    """What is needed of `httpx.Client`."""

    def post(self, url: str, *, json: Any) -> httpx.Response: ...


@dataclass(slots=True)
class Asker:
    """Asks items of a task in one form."""

    client: Client
    model: str
    form: Form
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of every request."""

    def ask(self, item: Item) -> Answer:
        """Raises `RequestFailed`."""
        begun = time.perf_counter()
        found = self._by_logprobs(item) if self.form.mode == "logprobs" else self._by_text(item)
        return replace(found, seconds=time.perf_counter() - begun)

    def _by_logprobs(self, item: Item) -> Answer:
        prompt, delimiter = self.form.prompt(item), self.form.task.head.delimiter
        scores, tokens = list[float](), 0
        for choice in item.choices:
            text = prompt + delimiter + choice
            body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
            answer = self._post("completions", body)
            try:
                scores.append(continuation_nats(answer["choices"][0]["logprobs"], len(prompt), len(text)))
            except (KeyError, IndexError, TypeError) as error:
                raise RequestFailed(
                    f"the answer has no log-probabilities of its prompt ({type(error).__name__}: {error}): ask by letter"
                ) from error
            tokens += _usage(answer, "prompt_tokens")
        chosen = _best(scores)
        by_length = _best([score / max(1, len(choice)) for score, choice in zip(scores, item.choices, strict=True)])
        return Answer(
            item.choices[chosen],
            chosen == item.answer,
            _sha256(json.dumps([prompt, delimiter, item.choices])),
            tokens,
            0,
            0.0,
            chosen,
            tuple(scores),
            by_length == item.answer,
        )

    def _by_text(self, item: Item) -> Answer:
        head = self.form.task.head
        body: dict[str, Any] = {"max_tokens": head.max_tokens, "temperature": 0}
        if self.form.chat:
            asked: Any = self.form.messages(item)
            answer = self._post("chat/completions", {**body, "messages": asked})
        else:
            asked = self.form.prompt(item)
            stop = [head.separator] if self.form.mode == "letter" else list(head.stop)
            answer = self._post("completions", {**body, "prompt": asked, "stop": stop})
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if self.form.chat else choice["text"]
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed(f"the answer has no text ({type(error).__name__}: {error})") from error
        text = str(text or "")
        chosen = letter_of(text, len(item.choices)) if item.choices else None
        right = chosen == item.answer if item.choices else normalised(text) in map(normalised, item.answers)
        sent = _sha256(asked if isinstance(asked, str) else json.dumps(asked))
        return Answer(
            text, right, sent, _usage(answer, "prompt_tokens"), _usage(answer, "completion_tokens"), 0.0, chosen
        )

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = self.client.post(path, json={"model": self.model, **body, **self.extra})
        except httpx.TimeoutException as error:
            raise RequestTimedOut(f"no answer in time: {type(error).__name__}") from error
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise RequestFailed(f"status {response.status_code}: {response.text[:300]}")
        try:
            found = response.json()
        except ValueError as error:
            raise RequestFailed(f"the answer is no JSON: {response.text[:200]}") from error
        if not isinstance(found, dict):
            raise RequestFailed(f"the answer is no JSON object: {response.text[:200]}")
        return found


def continuation_nats(logprobs: Mapping[str, Sequence[Any]], start: int, end: int) -> float:
    """Summed log-probabilities of an echoed prompt's tokens that reach into its characters `start` to `end`; what a server generated in
    spite of `max_tokens` 0 lies behind them.

    Raises TypeError if one of them has none, KeyError for a shape that isn't OpenAI's, and IndexError if no token reaches there.
    """
    offsets, values = list(logprobs["text_offset"]), list(logprobs["token_logprobs"])
    ends = [*offsets[1:], max(end, offsets[-1] + 1)]
    found = [float(v) for v, at, to in zip(values, offsets, ends, strict=True) if at < end and to > start]
    if not found:
        raise IndexError("no token of the continuation")
    return sum(found)


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _usage(answer: Mapping[str, Any], name: str) -> int:
    """Tokens by the server's own count. Raises `RequestFailed` if it doesn't tell."""
    count = (answer.get("usage") or {}).get(name)
    if not isinstance(count, int) or count < 0:
        raise RequestFailed(f"usage.{name} is {count!r}")
    return count


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
