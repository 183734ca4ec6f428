"""What a request must satisfy before it may wait. Pure arithmetic, on the caller's thread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gnomon.engine.api import InvalidRequest, ModelInfo, Request, overflow
from gnomon.engine.budget import Budget
from gnomon.engine.sampling import check as check_sampling

MAX_CHOICES = 8
MAX_TOP_LOGPROBS = 20


def token_limit(
    request: Request, model: ModelInfo, context_limit: int | None, budget_context: int | None = None
) -> int:
    """The most tokens each choice may get: `max_tokens`, or less where the context or the memory ends before.

    `budget_context` is how many tokens of context the operator's memory budget allows each choice of this request.
    Raises `InvalidRequest` naming the field, its value and the limit.
    """
    if not request.prompt:
        raise InvalidRequest("the prompt is empty: at least one token is needed", "prompt")
    low, high = min(request.prompt), max(request.prompt)
    if low < 0 or high >= model.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(
            f"prompt has token id {bad}, but ids of this model go from 0 to {model.vocab_size - 1}", "prompt"
        )
    if not 1 <= request.n <= MAX_CHOICES:
        raise InvalidRequest(f"n is {request.n}, but must be between 1 and {MAX_CHOICES}", "n")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {request.max_tokens}, but must be at least 1", "max_tokens")
    logprobs = request.sampling.logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"logprobs is {logprobs}, but must be between 0 and {MAX_TOP_LOGPROBS}", "logprobs")
    check_sampling(request.sampling, model.vocab_size)
    limits = [limit for limit in (model.context_length, context_limit, budget_context) if limit is not None]
    if not limits:
        return request.max_tokens or UNLIMITED
    context = min(limits)
    room = context - len(request.prompt)
    if room >= 1:
        return min(request.max_tokens or room, room)
    if context == budget_context:
        raise InvalidRequest(
            f"the prompt has {len(request.prompt)} tokens, but the memory budget holds {context} tokens of context for "
            f"each of {request.n} choices",
            "prompt",
            "memory_budget_exceeded",
        )
    raise InvalidRequest(
        f"{overflow(len(request.prompt), context)} and must hold the prompt and at least one token more",
        "prompt",
        "context_length_exceeded",
    )


def check_states(request: Request, limit: int, budget: Budget) -> None:
    """Raise `InvalidRequest` with the numbers when the states of a request can't come to `limit` tokens within the budget for states."""
    holds = budget.kv_context(request.n)
    length = len(request.prompt)
    if holds is None or length + limit <= holds:
        return
    taken = budget.kv(length + limit, request.n)
    each = f" for each of {request.n} choices" if request.n > 1 else ""
    room = holds - length
    what = (
        f"max_tokens {limit}"
        if request.max_tokens is not None
        else f"an answer of up to {limit} tokens, as max_tokens is unset,"
    )
    raise InvalidRequest(
        f"the prompt of {length} tokens and {what} may take {taken} bytes of state; the budget for states is {budget.kv_limit} "
        f"bytes, which is {holds} tokens of context{each}"
        + (f": set max_tokens to {room} or less" if room >= 1 else ""),
        "max_tokens" if room >= 1 else "prompt",
        "kv_budget_exceeded",
    )


def check_length(prompt: Sequence[int], where: str, model: ModelInfo, budget_context: int | None = None) -> None:
    """Raise `InvalidRequest` for a text without tokens, or with more than the context or the memory budget holds."""
    limits = [limit for limit in (model.context_length, budget_context) if limit is not None]
    most = min(limits, default=UNLIMITED)
    if not 1 <= len(prompt) <= most:
        raise InvalidRequest(
            f"{where} has {len(prompt)} tokens, but must have 1 to {most}", where, "context_length_exceeded"
        )


UNLIMITED = 1 << 62
"""Tokens of a choice that nothing limits: a model without a context length, asked without `max_tokens`."""


def retry_after(num_ahead: int, num_rows: int, seconds_per_request: float) -> int:
    """Whole seconds until a place in the queue should be free: about when the next request ends.

    Requests end every `seconds_per_request / num_rows` seconds when all rows are busy.
    """
    return max(1, min(600, math.ceil(seconds_per_request / max(1, num_rows) * max(1, num_ahead))))
