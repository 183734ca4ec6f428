"""`/v1/embeddings`: the request and what goes back, as OpenAI's clients know them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from gnomon.serve.errors import invalid, show
from gnomon.serve.wire.sampling import Fields

MAX_INPUTS = 2048

Input = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_INPUTS},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_INPUTS,
                },
            ]
        }
    ),
]


class EmbeddingRequest(Fields):
    """Texts, or their token ids, to be turned into vectors. `instruction` says what the texts are queries for."""

    input: Input
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    instruction: str | None = None
    user: str | None = None

    def inputs(self) -> list[str | list[Any]]:
        """One entry for each vector. Raises APIError 400."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if not isinstance(given, list) or not given:
            raise invalid(f"input must be a str or a list that is not empty, got {show(given)}", "input")
        several = cast("list[Any]", given)
        if all(type(one) is int for one in several):
            return [several]
        if len(several) > MAX_INPUTS:
            raise invalid(f"input must have at most {MAX_INPUTS} texts, got {len(several)}", "input")
        for index, one in enumerate(several):
            if not isinstance(one, str | list):
                raise invalid(
                    f"input[{index}] must be a str or a list of token ids, got {show(one)}", f"input[{index}]"
                )
        return several


class EmbeddingBody(TypedDict):
    """`embedding` is base64 of little-endian float32 where the request asks for it."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingUsage
