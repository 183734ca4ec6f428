"""What `generate` and `chat` talk to: a model in this process, or a server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gnomon.chat.reasoning import PlainSplitter, Segment, Splitter
from gnomon.cli._verbs import CommandError
from gnomon.config import ClientConfig, Config, SamplingDefaults

if TYPE_CHECKING:
    import httpx

    from gnomon.chat.template import ChatTemplate
    from gnomon.chat.tokenizer import Tokenizer
    from gnomon.engine.engine import Engine

Message = Mapping[str, Any]
SENT = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompt is being read: `processed` of `total` tokens."""

    processed: int
    total: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer's end: why, and its counts of tokens."""

    reason: str
    prompt_tokens: int
    completion_tokens: int


Event = Reading | Segment | Ended


@dataclass(frozen=True, slots=True)
class Ask:
    """How an answer is asked for, beside the defaults of sampling."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


class Partner(Protocol):
    """Answers conversations and continues texts. Closing a generator early cancels the answer."""

    @property
    def model(self) -> str: ...

    def chat(self, messages: Sequence[Message], ask: Ask) -> Generator[Event]: ...

    def complete(self, prompt: str, ask: Ask) -> Generator[Event]: ...

    def close(self) -> None: ...


@dataclass
class InProcess:
    """A model loaded here. Close it: the engine thread ends."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: SamplingDefaults

    @property
    def model(self) -> str:
        return self.engine.model.id

    def chat(self, messages: Sequence[Message], ask: Ask) -> Generator[Event]:
        from gnomon.chat.messages import ChatError

        try:
            kwargs = self.template.thinking_kwargs(None, None, self.sampling.thinking)
            rendered = self.template.render(messages, **kwargs)
        except ChatError as e:
            hint = "; use generate --raw" if e.code == "no_chat_template" else ""
            raise CommandError(f"{e}{hint}") from e
        yield from self._stream(
            rendered.ids, rendered.thinking, self.template.splitter(rendered.generation_prompt), ask
        )

    def complete(self, prompt: str, ask: Ask) -> Generator[Event]:
        yield from self._stream(tuple(self.tokenizer.encode(prompt, special=True)), False, PlainSplitter(), ask)

    def _stream(self, ids: tuple[int, ...], thinking: bool, splitter: Splitter, ask: Ask) -> Generator[Event]:
        from gnomon.engine.api import ChoiceFinished, Delta, EngineError, Failed, Progress, Replayed, Request

        request = Request(
            id=f"cli-{uuid.uuid4().hex}",
            prompt=ids,
            sampling=self.sampling.params(thinking, ask.seed),
            max_tokens=ask.max_tokens,
            stop=ask.stop,
        )
        reason = "stop"
        try:
            events = self.engine.stream(request)
        except EngineError as e:
            raise CommandError(str(e)) from e
        try:
            for event in events:
                if isinstance(event, Delta | Replayed):
                    for delta in event.deltas if isinstance(event, Replayed) else (event,):
                        yield from splitter.feed(delta.text)
                elif isinstance(event, Progress):
                    yield Reading(event.processed, event.total)
                elif isinstance(event, ChoiceFinished):
                    reason = event.reason
                    yield from splitter.finish()
                elif isinstance(event, Failed):
                    raise CommandError(event.message)
                else:
                    yield Ended(reason, event.usage.prompt_tokens, event.usage.completion_tokens)
        finally:
            self.engine.cancel(request.id)

    def close(self) -> None:
        self.engine.stop()


@dataclass
class Remote:
    """A server that speaks OpenAI's API. Only what a flag or variable set is sent: the rest is the server's to decide."""

    client: httpx.Client
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def chat(self, messages: Sequence[Message], ask: Ask) -> Generator[Event]:
        yield from self._stream("chat/completions", {"messages": list(messages), **self.fields}, ask)

    def complete(self, prompt: str, ask: Ask) -> Generator[Event]:
        fields = {key: value for key, value in self.fields.items() if key != "chat_template_kwargs"}
        yield from self._stream("completions", {"prompt": prompt, **fields}, ask)

    def _stream(self, path: str, body: dict[str, Any], ask: Ask) -> Generator[Event]:
        asked = {"max_tokens": ask.max_tokens, "stop": list(ask.stop) or None, "seed": ask.seed}
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {key: value for key, value in asked.items() if value is not None}
        reason, usage, done = "stop", dict[str, Any](), False
        with _told(self.client), self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise CommandError(_refusal(response))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    done = True
                    break
                chunk = _object(data)
                if chunk.get("error"):
                    raise CommandError(f"the server broke off: {_message(chunk['error'])}")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    yield from _segments(choice)
                    reason = choice.get("finish_reason") or reason
        if not done:
            raise CommandError("the server closed the stream before its end")
        yield Ended(reason, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))

    def close(self) -> None:
        self.client.close()


def _segments(choice: Mapping[str, Any]) -> Iterator[Segment]:
    delta = choice.get("delta") or {}
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Segment("reasoning", thought)
    if text := delta.get("content") or choice.get("text"):
        yield Segment("content", text)


def _object(data: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise CommandError(f"the server sent {data[:80]!r} where a JSON object was due")
    return parsed


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _refusal(response: httpx.Response) -> str:
    text = response.read().decode("utf-8", "replace")
    try:
        said = _message(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        said = text[:200]
    return f"{response.request.url} answered {response.status_code}: {said}"


class _told:
    """Turns what httpx raises into a CommandError that names the server."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import httpx

        if isinstance(error, httpx.HTTPError):
            raise CommandError(f"{self.client.base_url}: {error or type(error).__name__}") from error


def connect(config: ClientConfig, sampling: SamplingDefaults, wanted: str | None) -> Remote:
    """A server at `config.server`: an http URL with or without `/v1`, or `unix:PATH`. Raises CommandError when none answers there."""
    import httpx

    url = config.server or ""
    transport = None
    if url.startswith("unix:"):
        transport, url = httpx.HTTPTransport(uds=url.removeprefix("unix:").removeprefix("//")), "http://localhost"
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--server: {url!r} is no http:// or https:// URL and no unix:PATH", 2)
    root = url.rstrip("/")
    headers = {"authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
    # Reading a prompt may take minutes before the first byte comes.
    patience = httpx.Timeout(10.0, read=None)
    client = httpx.Client(
        base_url=root if root.endswith("/v1") else f"{root}/v1", headers=headers, timeout=patience, transport=transport
    )
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in SENT if getattr(sampling, name) is not None}
    if sampling.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": sampling.thinking}
    if sampling.hlg_sampling:
        curve = sampling.hlg
        fields["hlg"] = {
            "enabled": True,
            **{name: getattr(curve, name) for name in ("width", "shoulder", "toe", "pivot", "pivot_offset")},
        }
    try:
        return Remote(client, wanted or _served(client), fields)
    except BaseException:
        client.close()
        raise


def _served(client: httpx.Client) -> str:
    with _told(client):
        response = client.get("models", timeout=10.0)
        if response.status_code != 200:
            raise CommandError(_refusal(response))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise CommandError(f"{response.request.url} names no model") from e


def open_partner(config: Config) -> Partner:
    """What the flags ask for: the server at `--server`, or a model loaded here."""
    if config.client.server is not None:
        return connect(config.client, config.sampling, config.model.wanted)
    from gnomon.cli._model import load

    return load(config)
