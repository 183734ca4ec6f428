"""`/v1/completions`: raw prompts, without a template."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from gnomon.serve.errors import invalid, show
from gnomon.serve.wire.logprobs import LegacyLogprobs, MLXLogprobs
from gnomon.serve.wire.sampling import MAX_LOGPROBS, MAX_TOKENS, SamplingFields
from gnomon.serve.wire.usage import UsageBody

MAX_PROMPTS = 64

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
LogprobsField = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}, {"type": "boolean"}]})
]


class CompletionRequest(SamplingFields):
    """Prompts to continue: a string, strings, token ids, or lists of token ids.

    `logprobs` as an integer asks for OpenAI's legacy shape with so many most likely tokens; as a boolean, with `top_logprobs`, for
    mlx_lm.server's. With `echo` choices begin with the prompt, and `max_tokens` may be 0.
    """

    prompt: PromptField = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: LogprobsField = None
    top_logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, none of them empty; ids are not yet checked against the vocabulary. Raises APIError 400."""
        given: Any = self.prompt
        if given is None:
            raise invalid("prompt is required", "prompt")
        if isinstance(given, str):
            given = [given]
        if not isinstance(given, list):
            raise invalid(f"prompt must be a str, a list of str, or lists of token ids, got {show(given)}", "prompt")
        items = cast("list[Any]", given)
        if not items:
            raise invalid("prompt must not be empty", "prompt")
        if type(items[0]) is int:
            items = [items]
        if len(items) > MAX_PROMPTS:
            raise invalid(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(items)}", "prompt")
        for item in items:
            if not isinstance(item, str | list) or type(item) is not type(items[0]):
                raise invalid(
                    f"prompt must be a str, a list of str, or lists of token ids, got {show(item)} in it", "prompt"
                )
            if not item:
                raise invalid("prompt must not be empty", "prompt")
        return cast("list[str] | list[list[int]]", items)

    @property
    def legacy_logprobs(self) -> bool:
        """Whether OpenAI's legacy shape is wanted."""
        return self.logprobs is not None and not isinstance(self.logprobs, bool)

    def wanted_logprobs(self) -> int | None:
        """None for none, 0 for the sampled token's, k for the k most likely ones as well. Raises APIError 400."""
        given: Any = self.logprobs
        if given is not None and type(given) not in (bool, int):
            raise invalid(f"logprobs must be of type int or bool, got {show(given)}", "logprobs")
        name, top = ("logprobs", given) if self.legacy_logprobs else ("top_logprobs", self.top_logprobs)
        top = cast("int", -1 if top is None else top)
        if top < 0 and (top != -1 or self.legacy_logprobs):
            raise invalid(f"{name} must be at least 0, got {show(top)}", name)
        if top > MAX_LOGPROBS:
            raise invalid(f"{name} must be at most {MAX_LOGPROBS}, got {show(top)}", name)
        if self.legacy_logprobs:
            return top
        return top if top > 0 else 0 if given else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens must be at least 1, got 0", "max_tokens")
        if self.echo and self.wanted_logprobs() is not None and not self.legacy_logprobs:
            raise invalid(
                "echo: a prompt's log-probabilities come in OpenAI's legacy shape only, for which logprobs is an integer",
                "logprobs",
                "unsupported",
            )
        if self.suffix:
            raise invalid(f"suffix: infilling is not supported, got {show(self.suffix)}", "suffix", "unsupported")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(
                f"best_of must equal n ({self.n or 1}): choices are not ranked, got {show(self.best_of)}",
                "best_of",
                "unsupported",
            )


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobs | MLXLogprobs | None
    finish_reason: str | None


class Completion(TypedDict):
    """A whole answer, or one chunk of it: OpenAI gives both the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageBody | None]
