"""One response under way: its events in order, and what it looks like at any time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gnomon.serve.errors import APIError
from gnomon.serve.generation import Generation, Piece
from gnomon.serve.outline import Change, Closed, Grown, Opened, Outline, Part
from gnomon.serve.response_store import Conversation, ResponseStore, StoredResponse
from gnomon.serve.routes.chat_completions import ChatJob
from gnomon.serve.sse import Frames, event
from gnomon.serve.wire.responses import ResponseBody, response_usage
from gnomon.serve.wire.responses_items import assistant

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
UNNUMBERED = b'"sequence_number":-1'
"""In an event that was encoded before its turn came; nothing of the model's stands before it."""
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """A response ready for the engine. `echo` are the fields that repeat the request's; `input` its own items; `owner` its key's name;
    `spaces` namespace and own name of functions, by the name under which the model knows them."""

    chat: ChatJob
    echo: dict[str, Any]
    input: list[dict[str, Any]]
    conversation: Conversation
    store: bool
    owner: str | None
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


class ResponseRun:
    """Is in the store's `running` from its making to `close`."""

    def __init__(self, job: ResponseJob, generation: Generation, store: ResponseStore, model: str) -> None:
        self.job = job
        self.generation = generation
        self.status: Status = "in_progress"
        self.outline = Outline()
        self._model = model
        self._store = store
        self._events = 0
        self._growing: dict[int, Frames] = {}
        """Of each part the events that have nothing new but text."""
        self._completed_at: int | None = None
        self._error: dict[str, Any] | None = None
        store.running[self.name] = self

    @property
    def name(self) -> str:
        return self.job.chat.job.id

    @property
    def owner(self) -> str | None:
        return self.job.owner

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        job = self.job.chat.job
        done = self.status in ("completed", "incomplete")
        sampling = job.requests[0].sampling
        body: ResponseBody = {
            "id": self.name,
            "object": "response",
            "created_at": job.created,
            "completed_at": self._completed_at,
            "status": self.status,
            "model": self._model,
            "output": [self._item(part) for part in self.outline.told],
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": response_usage(self.generation.usages, self.generation.reasoning_tokens) if done else None,
        }
        return {**body, **self.job.echo}

    def begin(self) -> bytes:
        """The first events."""
        return self._tell("response.created", response=self.body()) + self._tell(
            "response.in_progress", response=self.body()
        )

    def feed(self, piece: Piece) -> bytes:
        """The events of a piece."""
        return b"".join(told for change in self.outline.feed(piece) for told in self._changes(change))

    def finish(self) -> None:
        """The generation has ended: keep the response, unless it isn't to be or was cancelled."""
        self._completed_at = int(time.time())
        if self.status == "cancelled":
            return
        self.status = "incomplete" if self.outline.finish == "length" else "completed"
        if self.job.store:
            said = self.job.conversation
            parts = self.outline.told
            calls = [
                {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
                for part in parts
                if part.kind == "call"
            ]
            text, thought = (
                "".join(part.text for part in parts if part.kind == kind) for kind in ("text", "reasoning")
            )
            answer = assistant(text, calls, thought)
            after = Conversation(said.instructions, said.system, (*said.messages, answer))
            self._store.put(self.name, StoredResponse(self.body(), self.job.input, after, self.owner))

    def fail(self, error: APIError) -> None:
        """The generation has failed, or ended because it was cancelled."""
        self._completed_at = int(time.time())
        if self.status != "cancelled":
            self.status = "failed"
            self._error = {"code": "server_error", "message": error.message}

    def failed(self, error: APIError) -> bytes:
        """The last event where the generation has failed."""
        self.fail(error)
        return self.end()

    def end(self) -> bytes:
        """The last event. No type of OpenAI's tells of a cancellation: its status does, in an incomplete response."""
        kind = "incomplete" if self.status == "cancelled" else self.status
        return self._tell(f"response.{kind}", response=self.body())

    def cancel(self) -> dict[str, Any]:
        """Stop it, and return it as it ended."""
        self.status = "cancelled"
        self.generation.cancel()
        return self.body()

    def close(self) -> None:
        self._store.running.pop(self.name, None)
        self.generation.close()

    def _tell(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event(value)

    def _item_id(self, part: Part) -> str:
        return f"{PREFIXES[part.kind]}_{self.name.removeprefix('resp_')}{part.index:04x}"

    def _item(self, part: Part, *, empty: bool = False) -> dict[str, Any]:
        """An output item; without its text where it begins."""
        ended = "in_progress" if self.status == "in_progress" else "incomplete"
        item: dict[str, Any] = {"id": self._item_id(part), "status": "completed" if part.complete else ended}
        text = "" if empty else part.text
        if part.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [] if empty else [_summary(text)]}
        if part.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": [] if empty else [_output(text)]}
        space, name = self.job.spaces.get(part.name, (None, part.name))
        call = {**item, "type": "function_call", "call_id": part.call_id, "name": name, "arguments": text}
        return call if space is None else {**call, "namespace": space}

    def _changes(self, change: Change) -> Iterator[bytes]:
        part = change.part
        whole: dict[str, Any] = {"output_index": part.index}
        where: dict[str, Any] = {**whole, "item_id": self._item_id(part)}
        match change:
            case Opened():
                yield self._tell("response.output_item.added", **whole, item=self._item(part, empty=True))
                if part.kind == "reasoning":
                    yield self._tell(
                        "response.reasoning_summary_part.added", **where, summary_index=0, part=_summary("")
                    )
                elif part.kind == "text":
                    yield self._tell("response.content_part.added", **where, content_index=0, part=_output(""))
            case Grown():
                yield self._grown(part, where, change.text)
            case Closed():
                yield from self._done(part, where)
                item = self._item(part)
                if not part.complete:
                    item["status"] = "incomplete"
                yield self._tell("response.output_item.done", **whole, item=item)

    def _grown(self, part: Part, where: dict[str, Any], text: str) -> bytes:
        if part.index not in self._growing:
            self._growing[part.index] = Frames(lambda text: _delta(part.kind, where, text), event)
        told = self._growing[part.index].frame(text).replace(UNNUMBERED, b'"sequence_number":%d' % self._events, 1)
        self._events += 1
        return told

    def _done(self, part: Part, where: dict[str, Any]) -> Iterator[bytes]:
        text = part.text
        if part.kind == "reasoning":
            yield self._tell("response.reasoning_summary_text.done", **where, summary_index=0, text=text)
            yield self._tell("response.reasoning_summary_part.done", **where, summary_index=0, part=_summary(text))
        elif part.kind == "text":
            yield self._tell("response.output_text.done", **where, content_index=0, text=text, logprobs=[])
            yield self._tell("response.content_part.done", **where, content_index=0, part=_output(text))
        else:
            _, name = self.job.spaces.get(part.name, (None, part.name))
            yield self._tell("response.function_call_arguments.done", **where, name=name, arguments=text)


def _delta(kind: str, where: dict[str, Any], text: str) -> dict[str, Any]:
    """An event of new text, without its number."""
    about = {"sequence_number": -1, **where}
    if kind == "reasoning":
        return {"type": "response.reasoning_summary_text.delta", **about, "summary_index": 0, "delta": text}
    if kind == "text":
        return {"type": "response.output_text.delta", **about, "content_index": 0, "delta": text, "logprobs": []}
    return {"type": "response.function_call_arguments.delta", **about, "delta": text}


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _output(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
