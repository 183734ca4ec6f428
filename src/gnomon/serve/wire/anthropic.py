"""`/v1/messages`: the request and what goes back, as Anthropic's clients know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from gnomon.engine.api import Usage
from gnomon.serve.errors import invalid, show
from gnomon.serve.wire.anthropic_history import Turn, chat_messages
from gnomon.serve.wire.chat import ChatRequest
from gnomon.serve.wire.sampling import Fields, SamplingFields, stop_strings

SystemField = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]
BUDGET_WARNING = "thinking.budget_tokens is not enforced: max_tokens limits thinking and answer together"


class ThinkingField(Fields):
    """`enabled` and `disabled` switch thinking; the others leave it as the server has it. `omitted` keeps its text back, any other
    `display` (Claude Code asks for `updates`) shows it as it comes."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: str | None = None


class ToolField(Fields):
    """A client's tool; with a `type` other than `custom` one of Anthropic's own, which this server doesn't have."""

    name: Annotated[str, Field(min_length=1)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def own(self) -> bool:
        return self.type not in (None, "custom")


class ToolChoiceField(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class FormatField(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: FormatField | None = None


class MessagesRequest(SamplingFields):
    """A conversation to continue. Sampling fields that Anthropic doesn't have are those of chat completions."""

    messages: list[Turn]
    system: SystemField = None
    stop_sequences: list[str] | None = None
    tools: list[ToolField] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    output_format: FormatField | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None

    def refuse_unsupported(self) -> None:
        for name, instead in (("stop", "stop_sequences"), ("response_format", "output_config.format")):
            if getattr(self, name) is not None:
                raise invalid(f"{name} is not a field of this route: use {instead}", name, "unsupported")
        for name in ("logit_bias", "container", "mcp_servers"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported on this route", name, "unsupported")
        if self.n not in (None, 1):
            raise invalid(f"n must be 1 on this route, got {show(self.n)}", "n", "unsupported")

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def warnings(self) -> list[str]:
        """What of the request is not honoured."""
        dropped = [tool.name for tool in self.tools or () if tool.own]
        warnings = [f"tools that only Anthropic's servers have were left out: {len(dropped)}"] if dropped else []
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            warnings.append(BUDGET_WARNING)
        return warnings

    def chat(self, model: str) -> ChatRequest:
        """The same as a request for a chat completion. Raises APIError 400 naming what can't be honoured."""
        self.refuse_unsupported()
        fields: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.model_fields}
        fields["stop"] = list(stop_strings(self.stop_sequences, "stop_sequences")) or None
        fields["messages"] = chat_messages(self.system, self.messages, model)
        fields["tools"] = self._tools()
        fields["tool_choice"] = self._choice()
        if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        fields["chat_template_kwargs"] = self._template_kwargs()
        form = (self.output_config.format if self.output_config else None) or self.output_format
        if form is not None:
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": form.schema_, "strict": True},
            }
        return ChatRequest.model_validate(fields)

    def _tools(self) -> list[dict[str, Any]] | None:
        made: list[dict[str, Any]] = []
        for index, tool in enumerate(self.tools or ()):
            if tool.own:
                continue
            if tool.input_schema is None:
                raise invalid(f"tools[{index}].input_schema is required", f"tools[{index}].input_schema")
            function = {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            }
            made.append({"type": "function", "function": function})
        return made or None

    def _choice(self) -> Any:
        choice = self.tool_choice
        if choice is None:
            return None
        if choice.type == "tool":
            if not choice.name:
                raise invalid("tool_choice.name is required of type tool", "tool_choice.name")
            return {"type": "function", "function": {"name": choice.name}}
        return "required" if choice.type == "any" else choice.type

    def _template_kwargs(self) -> dict[str, Any] | None:
        made: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            made["enable_thinking"] = self.thinking.type == "enabled"
        if self.output_config is not None and self.output_config.effort is not None:
            # A chat completion's reasoning_effort would also switch thinking on.
            made["reasoning_effort"] = "xhigh" if self.output_config.effort == "max" else self.output_config.effort
        return {**made, **(self.chat_template_kwargs or {})} or None


class TokenCount(TypedDict):
    input_tokens: int


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """`signature` is empty where the text is shown; else it holds the text, for when the block is sent back."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(TypedDict):
    """The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


def message_usage(usages: Sequence[Usage]) -> MessageUsage:
    cached = sum(usage.cached_tokens for usage in usages)
    return {
        "input_tokens": sum(usage.prompt_tokens for usage in usages) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(usage.completion_tokens for usage in usages),
    }


def stop_reason(finish: str | None, stop: str | None) -> str:
    """Anthropic's word for why an answer ended."""
    if finish == "length":
        return "max_tokens"
    if finish == "tool_calls":
        return "tool_use"
    return "end_turn" if stop is None else "stop_sequence"
