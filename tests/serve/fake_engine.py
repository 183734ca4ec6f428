"""A scripted engine behind the real interface, a byte tokenizer, and ways to run the application over them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fastapi import FastAPI

from gnomon.chat.constraint import Constraint
from gnomon.chat.template import ChatTemplate
from gnomon.config import FetchConfig, HTTPConfig, SamplingDefaults
from gnomon.engine.api import (
    ChoiceFinished,
    Delta,
    Engine,
    EngineError,
    EngineUnavailable,
    Failed,
    Finished,
    FinishReason,
    FlushReport,
    Health,
    ModelInfo,
    Progress,
    QueueFull,
    Request,
    Sink,
    TokenLogprob,
    TopLogprob,
    Unenforceable,
    Usage,
)
from gnomon.serve.app import create_app
from gnomon.serve.listen import address_of, bind
from gnomon.serve.server import Server
from gnomon.serve.services import Timing

MODEL = "tests/fake-model"
KEY = "sk-test"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = (
    TEMPLATE.replace("{% if add_generation_prompt %}<assistant>{% endif %}", "")
    + "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% else %}<think></think>{% endif %}{% endif %}"
)

CALLING = THINKING + "{# Calls are written <tool_call>JSON</tool_call>. #}"


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 begins a sequence."""

    vocab_size = 257
    longest_token = 3
    special_tokens: Mapping[str, str] = {"bos_token": "<s>"}

    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        self.chat_templates: Mapping[str, str] = {} if chat_template is None else {"default": chat_template}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [256] * special + list(text.encode())

    def decode(self, ids: Iterable[int], *, hide: bool = True) -> str:
        return b"".join(b"<s>" * (not hide) if i > 255 else bytes([i]) for i in ids).decode(errors="replace")

    def split(self, text: str) -> list[str | int]:
        return [text] if text else []

    def piece(self, token: int) -> str:
        return f"<0x{token:02X}>"

    def token_id(self, piece: str) -> int | None:
        return 256 if piece == "<s>" else None


def logprob(text: str, value: float, *top: tuple[str, float]) -> TokenLogprob:
    """A one-byte token and its alternatives."""
    others = tuple(TopLogprob(ord(t), t, p, t.encode()) for t, p in top)
    return TokenLogprob(ord(text[0]), text, value, text.encode(), others)


@dataclass
class Job:
    """A submitted request, in the hands of the test or a script."""

    request: Request
    sink: Sink
    engine: FakeEngine
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    tokens: int = 0
    ended: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def text(self) -> str:
        return bytes(i for i in self.request.prompt if i < 256).decode()

    def progress(self, processed: int) -> None:
        self.sink(Progress(self.request.id, processed, len(self.request.prompt)))

    def delta(self, text: str, index: int = 0, *logprobs: TokenLogprob, tokens: int | None = None) -> None:
        count = len(text) if tokens is None else tokens
        self.tokens += count
        self.sink(Delta(self.request.id, index, text, tuple(range(count)), logprobs))

    def finish(self, reason: FinishReason = "stop", index: int = 0, stop: str | None = None) -> None:
        self.ended.add(index)
        self.sink(ChoiceFinished(self.request.id, index, reason, stop))

    def end(self, **usage: Any) -> None:
        with self.lock:
            if not self.done.is_set():
                self.done.set()
                made = Usage(len(self.request.prompt), self.tokens, **usage)
                self.engine.forget(self)
                self.sink(Finished(self.request.id, made))

    def fail(self, message: str, code: str = "engine_error", fatal: bool = False) -> None:
        with self.lock:
            if not self.done.is_set():
                self.done.set()
                self.engine.forget(self)
                self.sink(Failed(self.request.id, message, code, fatal))

    def cancel(self) -> None:
        with self.lock:
            if not self.done.is_set():
                self.cancelled.set()
                for index in range(self.request.n):
                    if index not in self.ended:
                        self.finish("cancelled", index)
                self.end()

    def say(self, text: str, reason: FinishReason = "stop") -> None:
        """Every choice: the text a character at a time, then the end."""
        for index in range(self.request.n):
            for character in text:
                self.delta(character, index)
            self.finish(reason, index)
        self.end()


Script = Callable[[Job], None]


def hello(job: Job) -> None:
    job.say("Hello")


def _scored(prompt: tuple[int, ...], position: int, top: int) -> TokenLogprob:
    spelling, rival = bytes([prompt[position]]), bytes([prompt[position] + 1])
    text, other = spelling.decode(errors="replace"), rival.decode(errors="replace")
    rivals = (TopLogprob(rival[0], other, 0.5 - position, rival),) if top else ()
    return TokenLogprob(prompt[position], text, float(-position), spelling, rivals)


class FakeEngine:
    """Runs `script` on a thread for each request; without one, requests wait for the test to `take` them."""

    def __init__(self, script: Script | None = hello, **model: Any) -> None:
        info = ModelInfo(MODEL, "/nowhere", "llama", 512, 257, (256,), 1000, 1_700_000_000)
        self.model = replace(info, **model)
        self.script = script
        self.refusal: EngineError | None = None
        self.state = Health("ok")
        self.sections: dict[str, Any] = {"batch": {"configured": 8, "mode": "batch", "active_rows": 0}}
        self.submitted: list[Request] = []
        self.compiled: list[Constraint] = []
        self.gaps: Sequence[str] = ()
        self.unenforceable: Unenforceable | None = None
        self.open: dict[str, Job] = {}
        self.stopped = threading.Event()
        self.draining = threading.Event()
        self.report = FlushReport(False)
        self.flushes: list[float] = []
        self.sessions: set[str] = set()
        self._taken: queue.Queue[Job] = queue.Queue()
        self._idle = threading.Condition()

    def submit(self, request: Request, sink: Sink) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.draining.is_set():
            raise EngineUnavailable("the engine is draining")
        job = Job(request, sink, self)
        with self._idle:
            self.submitted.append(request)
            self.open[request.id] = job
        if self.script is None:
            self._taken.put(job)
        else:
            threading.Thread(target=self.script, args=(job,), daemon=True).start()

    def embed(self, prompts: Sequence[tuple[int, ...]]) -> Future[list[list[float]]]:
        """Vectors that tell the prompts' lengths."""
        if self.refusal is not None:
            raise self.refusal
        future: Future[list[list[float]]] = Future()
        future.set_result([[0.6, 0.8, float(len(prompt))] for prompt in prompts])
        return future

    def score(self, prompts: Sequence[tuple[int, ...]], top: int) -> Future[list[tuple[TokenLogprob, ...]]]:
        """Token at position p is worth -p; the next byte is its only rival, and worth half a nat more."""
        if self.refusal is not None:
            raise self.refusal
        future: Future[list[tuple[TokenLogprob, ...]]] = Future()
        future.set_result([tuple(_scored(prompt, p, top) for p in range(1, len(prompt))) for prompt in prompts])
        return future

    def compile(self, constraint: Constraint) -> Sequence[str]:
        if self.unenforceable is not None:
            raise self.unenforceable
        self.compiled.append(constraint)
        return self.gaps

    def take(self) -> Job:
        """The next request that was submitted."""
        return self._taken.get(timeout=120)

    def forget(self, job: Job) -> None:
        with self._idle:
            self.open.pop(job.request.id, None)
            self._idle.notify_all()

    def cancel(self, request_id: str, *, answered: bool = False) -> None:
        job = self.open.get(request_id)
        if job is not None:
            job.cancel()

    def health(self) -> Health:
        return self.state

    def stats(self) -> Mapping[str, Any]:
        return self.sections

    def flush(self, timeout: float) -> FlushReport:
        self.flushes.append(timeout)
        return self.report

    def close_session(self, session: str) -> bool:
        return session in self.sessions

    def drain(self, timeout: float) -> bool:
        self.draining.set()
        with self._idle:
            return self._idle.wait_for(lambda: not self.open or self.stopped.is_set(), timeout) and not self.open

    def stop(self) -> None:
        self.draining.set()
        self.stopped.set()
        for job in list(self.open.values()):
            job.fail("the engine was stopped", "engine_stopped")
        self.state = Health("stopped")


def make_app(
    engine: FakeEngine | None = None,
    *,
    template: str | None = TEMPLATE,
    http: HTTPConfig | None = None,
    sampling: SamplingDefaults | None = None,
    timing: Timing | None = None,
    fetch: FetchConfig | None = None,
) -> FastAPI:
    tokenizer = ByteTokenizer(template)
    return create_app(
        engine or FakeEngine(),
        tokenizer,
        ChatTemplate(tokenizer),
        http or HTTPConfig(),
        sampling or SamplingDefaults(),
        timing=timing,
        fetch=fetch,
    )


E = TypeVar("E", bound=Engine)


@dataclass
class Live(Generic[E]):
    """A server on a real socket."""

    url: str
    port: int
    engine: E
    app: FastAPI
    server: Server


@contextlib.contextmanager
def serving(app: FastAPI, engine: E, http: HTTPConfig) -> Iterator[Live[E]]:
    """Serve on a free port of the loopback, in a thread of this process. The engine is stopped at the end."""
    http = replace(http, port=0, shutdown_timeout_ms=500)
    bound = bind(http)
    started = threading.Event()
    servers: list[Server] = []

    async def main() -> None:
        servers.append(Server(app, engine, http, started.set))
        await servers[0].serve([bound])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(120)
    try:
        yield Live(address_of(bound), bound.getsockname()[1], engine, app, servers[0])
    finally:
        servers[0].should_exit = True
        thread.join(120)
        assert not thread.is_alive()


@contextlib.contextmanager
def live_server(engine: FakeEngine, **made: Any) -> Iterator[Live[FakeEngine]]:
    """A server over a fake engine; the rest is for `make_app`."""
    http: HTTPConfig = made.pop("http", HTTPConfig())
    with serving(make_app(engine, http=http, **made), engine, http) as live:
        yield live


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for something another thread is about to do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def full() -> QueueFull:
    return QueueFull("the queue is full: 64 requests wait, and no more than 64 may", 3)


def parse_stream(text: str) -> list[str]:
    """The data of each event, comments left out; every frame must end with a blank line."""
    assert text.endswith("\n\n")
    data: list[str] = []
    for block in text[:-2].split("\n\n"):
        assert "\n" not in block
        if not block.startswith(":"):
            assert block.startswith("data: ")
            data.append(block.removeprefix("data: "))
    return data


def named_events(text: str) -> list[dict[str, Any]]:
    """The values of events that carry their type as their name; every frame must, and end with a blank line."""
    assert text.endswith("\n\n")
    values: list[dict[str, Any]] = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        value: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        values.append(value)
    return values


def user(text: str, **fields: Any) -> dict[str, Any]:
    """A chat request of one turn."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def prompts(engine: FakeEngine) -> Sequence[str]:
    return [bytes(i for i in request.prompt if i < 256).decode() for request in engine.submitted]
