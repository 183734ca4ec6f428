"""Usage as OpenAI counts it, with the lane and tier a request ran in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from gnomon.engine.api import CacheTier, Usage


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class MissBody(TypedDict):
    """Why no more was reused: what kind of difference, and the position of the first token that had to be computed for it."""

    kind: str
    position: int


class CacheBody(TypedDict):
    """What of the prompt was reused, and from where. `miss` is None when nothing was amiss."""

    tier: CacheTier
    tokens: int
    miss: MissBody | None


class UsageBody(TypedDict):
    """`lane` is `batched` if the request ever shared a step; `tier` is the weakest of its parts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]
    cache: CacheBody
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
    cached = sum(usage.cached_tokens for usage in usages)
    body: UsageBody = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "cache": _cache_body(usages, cached),
        "lane": "batched" if any(usage.lane == "batched" for usage in usages) else "serial",
        "tier": weakest([tier, *(usage.tier for usage in usages)]),
    }
    if reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return body


def _cache_body(usages: Sequence[Usage], tokens: int) -> CacheBody:
    tiers: list[CacheTier] = [usage.cache_tier for usage in usages if usage.cache_tier != "none"]
    miss = next((usage.cache_miss for usage in usages if usage.cache_miss is not None), None)
    return {
        "tier": tiers[0] if tiers else "none",
        "tokens": tokens,
        "miss": None if miss is None else {"kind": miss.kind, "position": miss.position},
    }
