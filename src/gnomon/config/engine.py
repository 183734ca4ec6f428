"""What the engine thread may do at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.config.units import GB, GiB
from gnomon.options import option


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine thread may do at once. Sizes are in tokens, rows, or bytes."""

    batch: int = option(
        8, "rows decoded at once; 1 is one request at a time", aliases=("--decode-concurrency",), low=1, high=1024
    )
    queue: int = option(64, "requests that may wait for a row; more are answered 429", low=1, high=1_000_000)
    prefill_chunk: int = option(
        2048,
        "prompt tokens per prefill step",
        low=1,
        high=1_000_000,
        unit="tokens",
        env_aliases=("GNOMON_RD_PREFILL_CHUNK",),
    )
    early_first_token: bool = option(True, "deliver the first token before the next step is built")
    pipeline: bool = option(True, "read tokens back one step behind whenever no row needs its token sooner")
    grammar: bool = option(True, "enforce structured output; off: only ask the model for it, with a warning")
    context_limit: int | None = option(
        None,
        "most tokens of prompt and answer together, below the model's own limit",
        low=1,
        high=1e9,
        unit="tokens",
        env_aliases=("GNOMON_RD_CONTEXT_LIMIT",),
    )
    memory_budget: int | None = option(
        None,
        "memory limit: work that can't fit is refused before it starts (unset: advice only)",
        low=0.05,
        high=1e6,
        unit="GB",
        scale=GB,
    )
    kv_budget: int | None = option(
        None,
        "most that the keys and values of admitted requests may come to, each grown to its max_tokens: further ones wait, and one that "
        "can't fit alone is refused",
        low=0.000001,
        high=1e6,
        unit="GB",
        scale=GB,
    )
    memory_steps: bool = option(
        True,
        "when memory runs short give up the prompt cache, then halve prefill windows, then let nobody join those who run; off: the cache "
        "alone gives way",
    )
    prompt_cache: int = option(
        8 * GiB,
        "memory for states of prompts and answers, so that none is computed twice; 0 is off, and no more than half of what "
        "the model's weights leave is taken",
        low=0,
        high=1e6,
        unit="GiB",
        scale=GiB,
    )
    checkpoint_every: int = option(
        4096,
        "prompt tokens between checkpoints of models whose state can't be cut (recurrent layers, sliding windows)",
        low=16,
        high=1e9,
        unit="tokens",
    )
    cache_retention: Literal["lru", "cost-size"] = option(
        "lru", "which states go first: those used longest ago, or those that save least work per byte"
    )
    stall_timeout: float = option(
        300.0, "the engine counts as stalled when its loop hasn't turned for so long", low=1, high=86_400, unit="s"
    )
