"""`/v1/responses`: the request, as OpenAI's clients write it, and the fields that come back of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from gnomon.engine.api import Usage
from gnomon.serve.errors import invalid, show
from gnomon.serve.response_store import Conversation
from gnomon.serve.wire.chat import ChatRequest
from gnomon.serve.wire.responses_items import ITEMS, joined, namespaced
from gnomon.serve.wire.sampling import Cap, Fields, SamplingFields

InputField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "object", "properties": {"type": {"enum": list(ITEMS)}}},
                },
            ]
        }
    ),
]
ToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]})
]
LOGPROBS = "message.output_text.logprobs"


class ToolField(Fields):
    """A function, or a `namespace` of functions; of any other type but `custom` a tool of OpenAI's own servers, which this one hasn't."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ToolField] | None = None

    @property
    def left_out(self) -> int:
        """How many tools it stands for that can't be offered."""
        if self.type == "namespace":
            return sum(tool.left_out for tool in self.tools or ())
        return int(self.type != "function")


class FormatField(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[Any, WithJsonSchema({"type": "object"})] = Field(None, alias="schema")
    strict: bool | None = None


class TextField(Fields):
    format: FormatField | None = None


class ReasoningField(Fields):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(SamplingFields):
    """Items to answer. Sampling fields that OpenAI doesn't have here are those of chat completions."""

    input: InputField
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Cap | None = None
    tools: list[ToolField] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        if self.response_format is not None:
            raise invalid(
                "response_format is not a field of this route: use text.format", "response_format", "unsupported"
            )
        if self.n not in (None, 1):
            raise invalid(f"n must be 1 on this route, got {show(self.n)}", "n", "unsupported")
        for name in ("background", "conversation", "prompt", "top_logprobs"):
            value = getattr(self, name)
            if value:
                raise invalid(f"{name} is not supported on this route, got {show(value)}", name, "unsupported")
        if LOGPROBS in (self.include or ()):
            raise invalid(f"include: {LOGPROBS} is not supported on this route", "include", "unsupported")
        if self.truncation == "auto":
            raise invalid(
                'truncation must be "disabled": items are not dropped to fit the context', "truncation", "unsupported"
            )

    def offered(self) -> list[dict[str, Any]]:
        """The functions and the namespaces of functions that are offered, as they are told back. Raises APIError 400."""
        return _offered(self.tools or (), "tools")

    def functions(self) -> list[dict[str, Any]]:
        """The functions as the model is told of them, those of namespaces under the names of `namespaced`. Raises APIError 400."""
        made: list[dict[str, Any]] = []
        for tool in self.offered():
            inner = tool["tools"] if tool["type"] == "namespace" else [tool]
            space = tool["name"] if tool["type"] == "namespace" else None
            made += [{**one, "name": namespaced(space, one["name"])} for one in inner]
        counts = Counter(one["name"] for one in made)
        if twice := next((name for name in self.spaces() if counts[name] > 1), None):
            raise invalid(f"tools has {show(twice)} twice, once as a function of a namespace", "tools")
        return made

    def spaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and own name of each function that has one, by the name under which the model knows it."""
        return {
            namespaced(tool["name"], one["name"]): (tool["name"], one["name"])
            for tool in self.offered()
            if tool["type"] == "namespace"
            for one in tool["tools"]
        }

    def warnings(self) -> tuple[str, ...]:
        """What of the request is not honoured."""
        dropped = sum(tool.left_out for tool in self.tools or ())
        return (f"tools that only OpenAI's servers have were left out: {dropped}",) if dropped else ()

    def chat(self, conversation: Conversation) -> ChatRequest:
        """The same as a request for a chat completion of the whole conversation. Raises APIError 400."""
        self.refuse_unsupported()
        fields: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.model_fields}
        said = "\n\n".join(text for text in (conversation.instructions, *conversation.system) if text)
        fields["messages"] = [{"role": "system", "content": said}] if said else []
        fields["messages"] += joined(conversation.messages)
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["tools"] = [
            {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
            for tool in self.functions()
        ] or None
        choice = self.tool_choice
        if isinstance(choice, dict) and cast("dict[str, Any]", choice).get("type") == "function":
            choice = {"type": "function", "function": {"name": cast("dict[str, Any]", choice).get("name")}}
        fields["tool_choice"] = choice
        fields["parallel_tool_calls"] = self.parallel_tool_calls
        fields["chat_template_kwargs"] = self.chat_template_kwargs
        effort = self.reasoning.effort if self.reasoning is not None else None
        fields["reasoning_effort"] = "xhigh" if effort == "max" else effort
        fields["response_format"] = self._format()
        return ChatRequest.model_validate(fields)

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None:
            return None
        if form.type != "json_schema":
            return {"type": form.type}
        return {
            "type": "json_schema",
            "json_schema": {"name": form.name, "schema": form.schema_, "strict": bool(form.strict)},
        }

    def echo(self) -> dict[str, Any]:
        """The fields of a response that repeat the request's."""
        form = self.text.format.model_dump(by_alias=True, exclude_none=True) if self.text and self.text.format else None
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens if self.max_output_tokens is not None else self.max_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": self.tool_choice if self.tool_choice is not None else "auto",
            "tools": self.offered(),
            "top_logprobs": 0,
            "truncation": "disabled",
            "user": self.user,
        }


def _offered(tools: Sequence[ToolField], path: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        where = f"{path}[{index}]"
        if tool.type == "custom":
            raise invalid(f"{where} is of type custom: only functions can be called", where, "unsupported")
        if tool.type not in ("function", "namespace"):
            continue
        if not tool.name:
            raise invalid(f"{where}.name is required of a {tool.type}", f"{where}.name")
        one = {"type": tool.type, "name": tool.name, "description": tool.description}
        if tool.type == "function":
            made.append({**one, "parameters": tool.parameters, "strict": tool.strict})
        elif path != "tools":
            raise invalid(f"{where} is a namespace within a namespace", where, "unsupported")
        else:
            made.append({**one, "tools": _offered(tool.tools or (), f"{where}.tools")})
    return made


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


def response_usage(usages: Sequence[Usage], reasoning_tokens: int) -> ResponseUsage:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "cache_write_tokens": 0,
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt + completion,
    }


class ResponseBody(TypedDict):
    """The fields that say what came of a request; those of `ResponsesRequest.echo` come on top."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    temperature: float
    top_p: float
    usage: ResponseUsage | None


class Deleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
