"""The three shapes of log-probabilities: OpenAI's chat, OpenAI's legacy completions, and mlx_lm.server's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from gnomon.engine.api import TokenLogprob

FLOOR = -9999.0
"""What OpenAI writes for a probability of zero; JSON has no infinity."""


class TopLogprobBody(TypedDict):
    id: int
    token: str
    logprob: float
    bytes: list[int]


class LogprobBody(TypedDict):
    """OpenAI's shape, plus the token's `id`."""

    id: int
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobBody]


class ChatLogprobs(TypedDict):
    content: list[LogprobBody]
    refusal: None


class LegacyLogprobs(TypedDict):
    """OpenAI's completions shape. `text_offset` counts characters of the text that the choice holds; nothing precedes an echoed prompt's
    first token, which has null for its log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class MLXTop(TypedDict):
    id: int
    token: str
    logprob: float


class MLXLogprob(TypedDict):
    id: int
    logprob: float
    token: NotRequired[str]
    top_logprobs: NotRequired[list[MLXTop]]


class MLXLogprobs(TypedDict):
    """mlx_lm.server's shape; with k most likely tokens asked for, each is named by its vocabulary piece."""

    content: list[MLXLogprob]


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    return {
        "content": [
            {
                "id": one.id,
                "token": one.token,
                "logprob": finite(one.logprob),
                "bytes": list(one.bytes),
                "top_logprobs": [
                    {"id": top.id, "token": top.token, "logprob": finite(top.logprob), "bytes": list(top.bytes)}
                    for top in one.top
                ],
            }
            for one in tokens
        ],
        "refusal": None,
    }


def legacy_logprobs(tokens: Sequence[TokenLogprob], top: int, offset: int) -> LegacyLogprobs:
    """`offset` is the number of characters before the first of `tokens`.

    As with OpenAI, the entries of `top_logprobs` hold the sampled token too, and equal texts of different tokens fall together:
    the likelier is kept.
    """
    offsets: list[int] = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.token)
    tops: list[dict[str, float] | None] = []
    for one in tokens if top else ():
        entry: dict[str, float] = {}
        for other in one.top:
            entry.setdefault(other.token, finite(other.logprob))
        entry.setdefault(one.token, finite(one.logprob))
        tops.append(entry)
    return {
        "tokens": [one.token for one in tokens],
        "token_logprobs": [finite(one.logprob) for one in tokens],
        "top_logprobs": tops if top else None,
        "text_offset": offsets,
    }


def mlx_logprobs(tokens: Sequence[TokenLogprob], top: int, pieces: Sequence[Sequence[str]]) -> MLXLogprobs:
    """`pieces[i]` names the i-th token and then its most likely ones; empty when `top` is 0."""
    if not top:
        return {"content": [{"id": one.id, "logprob": finite(one.logprob)} for one in tokens]}
    return {
        "content": [
            {
                "id": one.id,
                "token": names[0],
                "logprob": finite(one.logprob),
                "top_logprobs": [
                    {"id": other.id, "token": name, "logprob": finite(other.logprob)}
                    for other, name in zip(one.top, names[1:], strict=True)
                ],
            }
            for one, names in zip(tokens, pieces, strict=True)
        ]
    }
