"""Usage as OpenAI counts it, with the lane and tier a request ran in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NotRequired

from typing_extensions import TypedDict

from gnomon.engine.api import CacheTier, Speculated, Usage


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


class SpeculationBody(TypedDict):
    """Guessed tokens. A round is a forward that verified some; `acceptanceLengths` has one entry for each, the lists by position one for
    each place in a window."""

    drafted: int
    accepted: int
    rejected: int
    targetCalls: int
    rounds: int
    acceptanceLengths: list[int]
    tokensPerForward: float | None
    forwardsSaved: int
    draftedByPos: list[int]
    acceptedByPos: list[int]


class UsageBody(TypedDict):
    """`lane` is `batched` if the request ever shared a step, `serial+spec` if alone and tokens were guessed; `tier` is the weakest of its
    parts; `speculation` is there if tokens could be guessed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]
    cache: CacheBody
    speculation: NotRequired[SpeculationBody]
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
        "lane": _lane(usages),
        "tier": weakest([tier, *(usage.tier for usage in usages)]),
    }
    speculated = [usage.speculation for usage in usages if usage.speculation is not None]
    if speculated:
        body["speculation"] = _speculation_body(speculated, completion)
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


def _lane(usages: Sequence[Usage]) -> str:
    lanes = {usage.lane for usage in usages}
    return next((lane for lane in ("batched", "serial+spec") if lane in lanes), "serial")


def _speculation_body(all_of: Sequence[Speculated], tokens: int) -> SpeculationBody:
    drafted, accepted = sum(one.drafted for one in all_of), sum(one.accepted for one in all_of)
    calls = sum(one.target_calls for one in all_of)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "rejected": drafted - accepted,
        "targetCalls": calls,
        "rounds": sum(one.rounds for one in all_of),
        "acceptanceLengths": [length for one in all_of for length in one.lengths],
        "tokensPerForward": tokens / calls if calls else None,
        "forwardsSaved": max(0, tokens - calls),
        "draftedByPos": _summed([one.drafted_at for one in all_of]),
        "acceptedByPos": _summed([one.accepted_at for one in all_of]),
    }


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    """Sums by position; shorter ones have none there."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
