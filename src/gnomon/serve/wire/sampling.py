"""Fields that every generating route shares, and how they become the engine's sampling parameters."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from gnomon.chat.constraint import FORMATS
from gnomon.config import SamplingDefaults
from gnomon.engine.api import HLG, SamplingParams
from gnomon.serve.errors import invalid, show
from gnomon.serve.sessions import MAX_CHARACTERS

MAX_TOKENS = 10_000_000
MAX_TOP_K = 1_000_000
MAX_CONTEXT = 10_000_000
MAX_CHOICES = 8
MAX_LOGPROBS = 20
MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024
LOGIT_BIAS = "logit_bias must be a dict of int to float"

Unit = Annotated[float, Field(ge=0, le=1)]
Nats = Annotated[float, Field(ge=0, le=100)]
Window = Annotated[int, Field(ge=0, le=MAX_CONTEXT)]
Cap = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Stop = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS}]}
    ),
]
SessionId = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
LogitBias = Annotated[Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]

_JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {},
        "schema": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "strict": {"type": ["boolean", "null"]},
        "any_whitespace": {"type": ["boolean", "null"]},
    },
    "required": ["schema"],
}
ResponseFormat = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"type": {"const": "json_schema"}, "json_schema": _JSON_SCHEMA},
                    "required": ["type", "json_schema"],
                },
                {
                    "type": "object",
                    "properties": {"type": {"enum": [name for name in FORMATS if name != "json_schema"]}},
                    "required": ["type"],
                },
            ]
        }
    ),
]
Schema = Annotated[Any, WithJsonSchema({"type": "object"})]
GrammarText = Annotated[Any, WithJsonSchema({"type": "string"})]
Choices = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1})]


class Fields(BaseModel):
    """A request body: JSON types are taken as they are, unknown fields are ignored, null means absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class HLGFields(Fields):
    """Tone-curve sampling (Lab). What is left out comes from the server; sending the object switches it on unless `enabled` is false."""

    enabled: bool | None = None
    width: Nats | None = None
    shoulder: Nats | None = None
    toe: Nats | None = None
    pivot: Literal["top", "entropy", "median"] | None = None
    pivot_offset: Nats | None = None


class StreamOptions(Fields):
    """`include_usage` asks for a last chunk without choices that carries the usage."""

    include_usage: bool | None = None


class SamplingFields(Fields):
    """How to draw tokens, when to stop, and how to deliver."""

    model: Any = None
    session_id: SessionId | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Cap | None = None
    stop: Stop = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] | None = None
    min_p: Unit | None = None
    xtc_probability: Unit | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    logit_bias: LogitBias = None
    repetition_penalty: Annotated[float, Field(ge=0)] | None = None
    repetition_context_size: Window | None = None
    presence_penalty: float | None = None
    presence_context_size: Window | None = None
    frequency_penalty: float | None = None
    frequency_context_size: Window | None = None
    hlg: HLGFields | None = None
    # Of these the first that is there counts; `gnomon.chat.constraint` reads them.
    guided_grammar: GrammarText = None
    response_format: ResponseFormat = None
    guided_json: Schema = None
    structured_outputs: Schema = None
    guided_regex: GrammarText = None
    guided_choice: Choices = None
    # Refused by name, below.
    adapter: Any = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Raise APIError 400 for a field that asks for what this server can't do: nothing asked for is dropped."""
        if self.adapter not in (None, "none"):
            raise invalid(f"adapter {show(self.adapter)} is not mounted", "adapter", "unknown_adapter")

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises APIError 400."""
        return stop_strings(self.stop, "stop")

    def biases(self, vocab_size: int) -> tuple[tuple[int, float], ...]:
        """`logit_bias` by token id. Raises APIError 400."""
        given: Any = self.logit_bias
        if given is None:
            return ()
        if not isinstance(given, dict):
            raise invalid(f"{LOGIT_BIAS}, got {show(given)}", "logit_bias")
        biases: dict[int, float] = {}
        for key, value in cast("dict[str, Any]", given).items():
            # int() takes blanks, underscores and digits of other scripts; an id has none of them.
            if not (key.isascii() and key.isdecimal() and len(key) < 12) or type(value) not in (int, float):
                raise invalid(f"{LOGIT_BIAS}, got {show({key: value})}", "logit_bias")
            try:
                bias = float(value)
            except OverflowError:
                bias = math.inf
            if not math.isfinite(bias):
                raise invalid(f"{LOGIT_BIAS}: {show(value)} is not finite", "logit_bias")
            if int(key) >= vocab_size:
                raise invalid(f"logit_bias: token id {key} must be at most {vocab_size - 1}", "logit_bias")
            biases[int(key)] = bias
        return tuple(biases.items())

    def tone_curve(self, defaults: SamplingDefaults) -> HLG | None:
        sent, base = self.hlg, defaults.hlg
        if sent is None:
            return base if defaults.hlg_sampling else None
        if sent.enabled is False:
            return None
        return HLG(
            width=_or(sent.width, base.width),
            shoulder=_or(sent.shoulder, base.shoulder),
            toe=_or(sent.toe, base.toe),
            pivot=sent.pivot or base.pivot,
            pivot_offset=_or(sent.pivot_offset, base.pivot_offset),
        )

    def sampling(
        self, defaults: SamplingDefaults, vocab_size: int, logprobs: int | None, thinking: bool
    ) -> SamplingParams:
        """The parameters after request > flag > generation_config > built-in. Raises APIError 400."""
        temperature = self.temperature if self.temperature is not None else defaults.temperature_for(thinking)
        return SamplingParams(
            temperature=float(temperature),
            top_p=_or(self.top_p, defaults.top_p or 0.0),
            top_k=self.top_k if self.top_k is not None else defaults.top_k or 0,
            min_p=_or(self.min_p, defaults.min_p or 0.0),
            xtc_probability=_or(self.xtc_probability, 0.0),
            xtc_threshold=_or(self.xtc_threshold, 0.0),
            seed=self.seed,
            logit_bias=self.biases(vocab_size),
            # mlx-lm takes 0 for off as well as 1.
            repetition_penalty=_or(self.repetition_penalty, 1.0) or 1.0,
            repetition_context_size=_window(self.repetition_context_size),
            presence_penalty=_or(self.presence_penalty, 0.0),
            presence_context_size=_window(self.presence_context_size),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            frequency_context_size=_window(self.frequency_context_size),
            logprobs=logprobs,
            hlg=self.tone_curve(defaults),
        )


def stop_strings(given: Any, name: str) -> tuple[str, ...]:
    """The stop strings in the field `name`. Raises APIError 400."""
    if given is None:
        return ()
    values: list[Any] = [given] if isinstance(given, str) else given if isinstance(given, list) else [None]
    if len(values) > MAX_STOPS:
        raise invalid(f"{name} must have at most {MAX_STOPS} strings, got {len(values)}", name)
    for value in values:
        if not isinstance(value, str):
            raise invalid(f"{name} must be a str or a list of str, got {show(given)}", name)
        if not value:
            raise invalid(f"{name} must not hold an empty string", name)
        if len(value) > MAX_STOP_CHARACTERS:
            raise invalid(
                f"{name} strings must have at most {MAX_STOP_CHARACTERS} characters, got one of {len(value)}", name
            )
    return tuple(values)


def _or(value: float | None, default: float) -> float:
    return float(default if value is None else value)


def _window(value: int | None) -> int:
    return 20 if value is None else value
