"""`/v1/chat/completions`: the request and what goes back, as OpenAI's clients know them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from gnomon.serve.errors import invalid, show
from gnomon.serve.wire.logprobs import ChatLogprobs
from gnomon.serve.wire.messages import Message, Tool
from gnomon.serve.wire.sampling import MAX_LOGPROBS, Cap, SamplingFields
from gnomon.serve.wire.usage import UsageBody

ToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]})
]
TEMPLATE_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "raise_exception", "strftime_now"}
)


class ChatRequest(SamplingFields):
    """A conversation to continue. Fields that OpenAI doesn't have are mlx-lm's or vLLM's of the same name, or Gnomon's."""

    messages: list[Message] = Field(min_length=0)
    max_completion_tokens: Cap | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None

    @property
    def cap(self) -> int | None:
        """The most tokens wanted; `max_completion_tokens` wins over `max_tokens`."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """None for none, 0 for the sampled token's, k for the k most likely ones as well. Raises APIError 400."""
        top = -1 if self.top_logprobs is None else self.top_logprobs
        if top < 0 and top != -1:
            raise invalid(f"top_logprobs must be at least 0, got {show(top)}", "top_logprobs")
        if top > MAX_LOGPROBS:
            raise invalid(f"top_logprobs must be at most {MAX_LOGPROBS}, got {show(top)}", "top_logprobs")
        return top if top > 0 else 0 if self.logprobs else None

    def refuse_reserved(self) -> None:
        """Raise APIError 400 for template variables that are the server's to set."""
        for name in sorted(TEMPLATE_OWN & (self.chat_template_kwargs or {}).keys()):
            raise invalid(f"chat_template_kwargs must not set {name}", f"chat_template_kwargs.{name}")

    def offered_tools(self) -> list[Tool] | None:
        """The tools to render: none when `tool_choice` is "none". Raises APIError 400 for a choice that can't be enforced."""
        choice: Any = self.tool_choice
        if choice in (None, "auto", "required") or self.named_tool is not None:
            return self.tools
        if choice == "none":
            return None
        kind: Any = cast("dict[str, Any]", choice).get("type") if isinstance(choice, dict) else None
        if kind in ("allowed_tools", "custom"):
            raise invalid(
                f'tool_choice {show(choice)} can\'t be enforced; use "auto", "required", "none" or a function',
                "tool_choice",
                "unsupported",
            )
        raise invalid(
            f'tool_choice must be "none", "auto", "required" or a function, got {show(choice)}', "tool_choice"
        )

    @property
    def named_tool(self) -> str | None:
        """The function that `tool_choice` insists on."""
        choice: Any = self.tool_choice
        if not isinstance(choice, dict):
            return None
        choice = cast("dict[str, Any]", choice)
        function: Any = choice.get("function")
        name: Any = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
        return name if choice.get("type") == "function" and isinstance(name, str) else None

    @property
    def demands_call(self) -> bool:
        return self.tool_choice == "required" or self.named_tool is not None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        self.refuse_reserved()
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise invalid(f"{name} is not supported: use tools", name, "unsupported")
        if self.modalities not in (None, ["text"]):
            raise invalid(f'modalities must be ["text"], got {show(self.modalities)}', "modalities", "unsupported")
        for name in ("audio", "web_search_options"):
            if getattr(self, name) is not None:
                raise invalid(f"{name} is not supported", name, "unsupported")


class CalledFunction(TypedDict):
    """`arguments` is the text of a JSON object; the model wrote it, so that it need not fit the tool's schema."""

    name: str
    arguments: str


class MadeCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class MadeCallDelta(TypedDict):
    """The first of a call carries `id`, `type` and the function's name, the others more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class ChatMessage(TypedDict):
    """`reasoning` repeats `reasoning_content`: clients look for either. `content` is null when there are only tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[MadeCall]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[MadeCallDelta]]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(TypedDict):
    """`usage` is there only when the client asked for it: null, until the last chunk, whose choices are empty."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[UsageBody | None]
