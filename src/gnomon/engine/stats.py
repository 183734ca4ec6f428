"""The engine's numbers as plain JSON values, read on any thread from counters and gauges that its own thread keeps."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from gnomon.config import EngineConfig
from gnomon.engine.api import ModelInfo
from gnomon.engine.budget import Budget
from gnomon.engine.counters import Counters
from gnomon.engine.row import Job


def _row(job: Job) -> dict[str, Any]:
    """A request under way, without a word of what it says."""
    return {
        "id": job.request.id,
        "state": "waiting" if not job.admitted else "decoding" if job.first_token else "prefill",
        "choices": job.request.n,
        "prompt_tokens": len(job.prompt),
        "cached_tokens": job.num_cached,
        "processed_tokens": job.num_processed,
        "generated_tokens": job.num_generated,
        "seconds": time.monotonic() - job.submitted,
    }


def snapshot(
    counters: Counters, config: EngineConfig, model: ModelInfo | None, budget: Budget | None, open_jobs: Iterable[Job]
) -> dict[str, Any]:
    """Sections by subject. Bytes, seconds and tokens; rates in tokens per second, None before the first token."""
    batchable = model is not None and model.batchable
    jobs = list(open_jobs)
    waiting = sum(not job.admitted for job in jobs)
    context = model.context_length if model is not None else None
    in_memory = budget.max_context(1) if budget is not None else None
    limits = [limit for limit in (context, config.context_limit, in_memory) if limit is not None]
    c = counters
    return {
        "batch": {
            "configured": config.batch,
            "mode": "off" if config.batch == 1 else "batch" if batchable else "serial",
            "batched": c.active_rows > 1,
            "active_rows": c.active_rows,
            "pending_rows": waiting,
            "submitted_rows": c.submitted_rows,
            "kv_bytes": c.kv_bytes,
            "kv_budget_bytes": config.kv_budget,
            "kv_projected_bytes": budget.projected_kv(job for job in jobs if job.admitted)
            if budget is not None
            else None,
            "why_not_batchable": model.why_not_batchable if model is not None else None,
        },
        "admission": {
            "max_safe_context": budget.max_safe_context if budget is not None else None,
            "enforced_context_tokens": min(limits) if limits else None,
            "memory_budget_bytes": config.memory_budget,
            "usable_bytes": budget.usable if budget is not None else None,
            "weights_bytes": model.weight_bytes if model is not None else None,
            "queue_limit": config.queue,
            "waiting_requests": waiting,
        },
        "rows": [_row(job) for job in jobs],
        "requests": {
            "submitted": c.submitted_requests,
            "finished": c.finished_requests,
            "cancelled": c.cancelled_requests,
            "failed": c.failed_requests,
            "refused": c.refused_requests,
            "mean_seconds": c.request_seconds,
        },
        "tokens": {
            "prompt": c.prompt_tokens,
            "prefilled": c.prefill.tokens,
            "generated": c.generated_tokens,
            "discarded": c.discarded_tokens,
        },
        "rates": {
            "prefill_tokens_per_second": c.prefill.recent,
            "prefill_tokens_per_second_mean": c.prefill.mean,
            "decode_tokens_per_second": c.decode.recent,
            "decode_tokens_per_second_mean": c.decode.mean,
        },
        "steps": {
            "decode": c.steps,
            "batched": c.batched_steps,
            "windows": c.window_steps,
            "rows": c.step_rows,
            "prefill_chunks": c.prefill_chunks,
            "recoveries": c.recoveries,
            "seconds": c.histogram(),
        },
        "proposals": {
            "proposed": c.proposed_tokens,
            "accepted": c.accepted_tokens,
            "acceptance": c.accepted_tokens / c.proposed_tokens if c.proposed_tokens else None,
            "proposed_by_position": list(c.proposed_at),
            "accepted_by_position": list(c.accepted_at),
        },
        "grammar": {
            "enabled": config.grammar,
            "masks": c.masks,
            "mask_seconds": c.mask_seconds,
        },
        "memory": dict(c.memory),
    }
