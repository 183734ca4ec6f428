"""What the rest of Gnomon may know of the engine: requests in, events out. Imports nothing heavier than the standard library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gnomon.chat.constraint import Constraint
from gnomon.chat.reasoning import Thinking

if TYPE_CHECKING:
    # It brings a template engine with it.
    from gnomon.chat.spans import ToolSpans

FinishReason = Literal["stop", "length", "cancelled", "error"]
HLGPivot = Literal["top", "entropy", "median"]


@dataclass(frozen=True, slots=True)
class HLG:
    """Parameters of HLG tone-curve sampling; widths and offsets are in nats."""

    width: float = 4.0
    shoulder: float = 4.0
    toe: float = 6.0
    pivot: HLGPivot = "top"
    pivot_offset: float = 6.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row's next token is drawn. Values are resolved and validated before the engine sees them.

    `temperature` 0 is greedy. `top_p` 0 or 1, `top_k` 0 and `min_p` 0 switch that filter off. `repetition_penalty` 1 and the other
    penalties 0 are off; a context size of 0 means the whole history. `seed` None lets the engine choose one.
    `logprobs` None returns none, 0 the sampled token's, k > 0 also the k most likely ones.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logprobs: int | None = None
    hlg: HLG | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. `n` choices share one prefill and are cancelled and accounted for as one unit.

    A `constraint` holds from where the answer's content begins, which `thinking` tells of models that think first.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    trace_id: str | None = None
    boundary: int | None = None
    """Position in the prompt at which its template opens the answer: the next turn has the same tokens up to there."""
    session: str | None = None
    """What the session is called whose turn this is: its states are kept longest."""
    namespace: str = ""
    """States are reused only within one: whatever else than the tokens changes a forward belongs into its name."""
    constraint: Constraint | None = None
    thinking: Thinking | None = None
    spans: ToolSpans | None = None
    """What tools and template settle of its tool calls: asserted where the engine does that."""
    text: str | None = None
    """The text that the prompt was made of, where it was: the same text may come as other ids another time."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    id: int
    token: str
    logprob: float
    bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token with log-softmax after the processors and before the filters."""

    id: int
    token: str
    logprob: float
    bytes: bytes
    top: tuple[TopLogprob, ...] = ()


Tier = Literal["L1", "L2", "Lab"]
"""What a result promises: mlx-lm's bits, mixed KV's, or a stated tolerance."""
CacheTier = Literal["none", "ram", "ssd"]


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Why no more of a prompt was reused: the kind, and the position of the token that had to be computed."""

    kind: str
    position: int


@dataclass(frozen=True, slots=True)
class Speculated:
    """Guessed tokens of one request, its choices together. `target_calls` are forwards of the model that gave it tokens, `lengths` how many
    guesses each window got accepted; `drafted_at` and `accepted_at` count guesses by their place in the window."""

    drafted: int
    accepted: int
    target_calls: int
    lengths: tuple[int, ...] = ()
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @property
    def rounds(self) -> int:
        """Forwards that verified guesses."""
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class Filled:
    """Tokens that a grammar, the session or the tools foretold, of one request's choices together.

    `strict` were asserted: the model's own draws for them, `wasted_samples`, were thrown away; `spans` are their lengths, window by
    window. `echo` and `grammar` were verified and accepted, of `verify_drafted` in `verify_events` windows. `parse_fallback` counts
    choices whose calls couldn't be read, after which nothing was asserted; `branch_stops` passages that ended where their sources part;
    `index_truncated` tells of a session longer than its index; `decode_steps` are forwards of the model.
    """

    strict: int = 0
    echo: int = 0
    grammar: int = 0
    spans: tuple[int, ...] = ()
    wasted_samples: int = 0
    parse_fallback: int = 0
    index_truncated: bool = False
    decode_steps: int = 0
    verify_events: int = 0
    verify_drafted: int = 0
    branch_stops: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one request. `completion_tokens` sums over its choices and counts an end-of-sequence token."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tier: Tier = "L1"
    lane: Literal["serial", "serial+spec", "batched"] = "serial"
    cache_tier: CacheTier = "none"
    """Where the reused tokens' state came from."""
    cache_miss: CacheMiss | None = None
    speculation: Speculated | None = None
    """None if nothing could be guessed for it."""
    fill: Filled | None = None
    """None if nothing could be filled in."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill of a request has reached `processed` of `total` prompt tokens."""

    request_id: str
    processed: int
    total: int


@dataclass(slots=True)
class Delta:
    """New text of a choice. `ids` are the tokens behind it so far undelivered; a token whose text is held back comes with a later delta.

    Never changed, though not frozen: that makes it cost four times as much, for every token.
    """

    request_id: str
    index: int
    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """What an interrupted generation had delivered, once more, when the identical request goes on with it: one delta per token or so."""

    request_id: str
    index: int
    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice ended. `stop` is the stop string that matched, if one did."""

    request_id: str
    index: int
    reason: FinishReason
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a request that ran to its end or was cancelled."""

    request_id: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """Last event of a request that failed. `fatal` tells that the engine itself can't go on, `refusal` what `submit` would have raised
    had the engine been there to ask."""

    request_id: str
    message: str
    code: str = "engine_error"
    fatal: bool = False
    refusal: EngineError | None = None


Event = Progress | Delta | Replayed | ChoiceFinished | Finished | Failed
Sink = Callable[[Event], None]
"""Called on the engine thread: it must not block and must not raise."""


class EngineError(Exception):
    """A request the engine will not take; nothing was started."""


class QueueFull(EngineError):
    """As many requests wait as may. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailable(EngineError):
    """The engine is draining, or its device failed."""


class ModelUnavailable(EngineUnavailable):
    """One of several models can't be had now; others may."""


class UnknownModel(EngineError):
    """There is no model of this id here."""


class InvalidRequest(EngineError):
    """A field the engine can't honour. `param` names it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def overflow(tokens: int, context: int) -> str:
    """What is said of a prompt that is too long for a context of so many tokens. Agents shorten a conversation when they read it: Claude
    Code knows the first half (https://docs.anthropic.com/en/api/errors), clients of OpenAI the second."""
    return f"prompt is too long: {tokens} tokens > {context - 1} maximum; this model's maximum context length is {context} tokens"


class Unenforceable(InvalidRequest):
    """A constraint the engine can't enforce. `code` is `grammar_off` when it was told to enforce none."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. Sizes are in tokens or bytes; `context_length` is the model's, or the operator's limit where that is less."""

    id: str
    path: str
    model_type: str
    context_length: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    created: int
    batchable: bool = True
    why_not_batchable: str | None = None
    tier: Tier = "L1"
    """What requests run in whose own fields don't lower it."""
    asserts_calls: bool = False
    """Whether settled text of tool calls is written without asking the model."""


@dataclass(frozen=True, slots=True)
class Health:
    """The engine's heartbeat. `state` is `ok` only while the engine thread is alive and turned its loop `beat_age` seconds ago."""

    state: Literal["loading", "ok", "draining", "stalled", "failed", "stopped"]
    beat_age: float = 0.0
    message: str | None = None


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What became durable. `durable` only if every state in memory is on disk and none was dropped or failed meanwhile."""

    durable: bool
    flushed: int = 0
    """States that memory alone held when the flush began, and are on disk now."""
    pending: int = 0
    """States not handed to the writer yet."""
    pending_spills: int = 0
    pending_spill_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    missing: int = 0
    """States that memory alone holds at the end."""
    seconds: float = 0.0
    entries: int = 0
    """Files in the directory."""
    longest: int = 0
    """Tokens of the longest state on disk."""


class Supervised(Protocol):
    """What is watched over and ended: one engine, or several behind one server."""

    @property
    def model(self) -> ModelInfo: ...

    def health(self) -> Health: ...

    def stats(self) -> Mapping[str, Any]:
        """Counters and gauges by section, as plain JSON values."""
        ...

    def flush(self, timeout: float) -> FlushReport:
        """Write every state that only memory holds, waiting up to `timeout` seconds."""
        ...

    def close_session(self, session: str) -> bool:
        """Hold on to a session's states no longer; False if there is no such session."""
        ...

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait up to `timeout` seconds for the open ones; True if all ended by themselves."""
        ...

    def stop(self) -> None:
        """End the engine thread. Open requests get `Failed`."""
        ...


class Engine(Supervised, Protocol):
    """Thread-safe front of the engine thread."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its events reach `sink`, ending with `Finished` or `Failed`. Raises an `EngineError`."""
        ...

    def embed(self, prompts: Sequence[tuple[int, ...]]) -> Future[list[list[float]]]:
        """Vectors of length 1, one for each prompt. Raises an `EngineError`, as may the future, which may be cancelled."""
        ...

    def score(self, prompts: Sequence[tuple[int, ...]], top: int) -> Future[list[tuple[TokenLogprob, ...]]]:
        """Scores of every prompt's tokens but the first, each with the `top` likeliest ones. Raises as `embed` does."""
        ...

    def compile(self, constraint: Constraint) -> Sequence[str]:
        """Make ready to enforce a constraint, on the caller's thread; what of it would not be enforced. Raises `Unenforceable`."""
        ...

    def cancel(self, request_id: str, *, answered: bool = False) -> None:
        """Stop a request at the next chunk or step. Unknown ids are ignored. The sink still gets its last event.

        `answered` tells that the client has all it wants: nothing is kept to go on with.
        """
        ...
