"""Prompts given back in front of their completions, with the scores of their tokens, in OpenAI's legacy shape."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.engine.api import EngineError, TokenLogprob
from gnomon.serve.errors import from_engine
from gnomon.serve.services import Services
from gnomon.serve.wire.logprobs import LegacyLogprobs, legacy_logprobs


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt's text, and its tokens' scores if they were asked for."""

    text: str
    logprobs: LegacyLogprobs | None = None


async def echoes(
    prompts: Sequence[tuple[int, ...]], texts: Sequence[str | None], top: int | None, services: Services
) -> list[PromptEcho]:
    """What to give back of each prompt; a text of None is that of its ids. `top` None asks for no scores. Raises APIError."""
    shown = [
        services.vocabulary.decode(ids, hide=False) if text is None else text
        for ids, text in zip(prompts, texts, strict=True)
    ]
    if top is None:
        return [PromptEcho(text) for text in shown]
    try:
        scores = await asyncio.wrap_future(services.engine.score(prompts, top))
    except EngineError as error:
        raise from_engine(error) from error
    firsts = [services.vocabulary.decode(ids[:1], hide=False) for ids in prompts]
    return [
        PromptEcho(text, _legacy(text, first, own, top)) for text, first, own in zip(shown, firsts, scores, strict=True)
    ]


def _legacy(text: str, first: str, scores: Sequence[TokenLogprob], top: int) -> LegacyLogprobs:
    rest = legacy_logprobs(scores, top, 0)
    return {
        "tokens": [first, *rest["tokens"]],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": None if rest["top_logprobs"] is None else [None, *rest["top_logprobs"]],
        "text_offset": offsets(text, [first.encode(), *(one.bytes for one in scores)]),
    }


def offsets(text: str, spellings: Sequence[bytes]) -> list[int]:
    """Where in `text` each token begins, in characters.

    A token that the text doesn't have there, such as one that the tokenizer put before it, has no width; a blank that it put before
    a word has none either. A token within a character begins where that does.
    """
    data = text.encode()
    found: list[int] = []
    position = characters = 0
    for spelling in spellings:
        inside = position < len(data) and data[position] & 0xC0 == 0x80
        found.append(characters - 1 if inside else characters)
        if not data.startswith(spelling, position):
            spelling = spelling.removeprefix(b" ")
        if data.startswith(spelling, position):
            characters += sum(byte & 0xC0 != 0x80 for byte in spelling)
            position += len(spelling)
    return found


def joined(echo: LegacyLogprobs, made: LegacyLogprobs) -> LegacyLogprobs:
    """Both, one after the other; the offsets of `made` count from the echo's beginning already."""
    tops = None
    if echo["top_logprobs"] is not None and made["top_logprobs"] is not None:
        tops = [*echo["top_logprobs"], *made["top_logprobs"]]
    return {
        "tokens": [*echo["tokens"], *made["tokens"]],
        "token_logprobs": [*echo["token_logprobs"], *made["token_logprobs"]],
        "top_logprobs": tops,
        "text_offset": [*echo["text_offset"], *made["text_offset"]],
    }
