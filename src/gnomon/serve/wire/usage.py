"""Usage as OpenAI counts it, with the lane and tier a request ran in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from gnomon.engine.api import Usage


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class UsageBody(TypedDict):
    """`lane` is `batched` if the request ever shared a step; `tier` is the weakest of its parts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]
    lane: str
    tier: str


_TIERS = ("L1", "L2", "Lab")


def weakest(tiers: Sequence[str]) -> str:
    """The tier of a whole: that of its least exact part."""
    return max(tiers, key=_TIERS.index)


def usage_body(usages: Sequence[Usage], tier: str, reasoning_tokens: int | None = None) -> UsageBody:
    """The usage of the requests behind one response, summed.

    `tier` is what the request's fields allow at best; `reasoning_tokens` None leaves the details out.
    """
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    body: UsageBody = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "lane": "batched" if any(usage.lane == "batched" for usage in usages) else "serial",
        "tier": weakest([tier, *(usage.tier for usage in usages)]),
    }
    if reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return body
