"""What mlx-lm says about a prompt on its own, and the tie rule by which other schedules are measured against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.generate import generate_step

GAP_BOUNDS = {"float32": 5e-5, "bfloat16": 0.13}
"""Two scores nearer than this are a tie, by type of the logits: batches and windows may sum in another order than a lone row.
Twice the largest difference of a log-probability that tiny models of all kinds were seen to have (1e-5, 0.0625), and some more."""


@dataclass(frozen=True)
class Solo:
    """A greedy run alone: ids, their log-probabilities, and how far each was ahead of the next best."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def solo(model: nn.Module, prompt: Sequence[int], tokens: int, chunk: int = 2048) -> Solo:
    run = Solo()
    for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=tokens, prefill_step_size=chunk):
        scores = np.array(logprobs.astype(mx.float32))
        top = np.sort(scores)[-2:]
        run.ids.append(int(token))
        run.logprobs.append(scores)
        run.gaps.append(float(top[1] - top[0]))
    return run


def ties_until_equal(got: Sequence[int], expected: Solo, bound: float) -> int:
    """Check `got` against a solo run: equal, or equal up to a step whose top-2 gap is below `bound`. Gives the deciding ties: 0 or 1."""
    for step, (token, own) in enumerate(zip(got, expected.ids, strict=False)):
        if token != own:
            assert expected.gaps[step] < bound, (
                f"step {step}: {token} where alone it is {own}, {expected.gaps[step]} ahead; the bound is {bound}"
            )
            return 1
    return 0
