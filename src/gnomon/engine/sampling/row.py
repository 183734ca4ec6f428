"""What the sampler knows of one row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnomon.engine.api import InvalidRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class RowSampling:
    """One row's sampling state at the moment it joins a batch.

    `seed` (any integer, taken modulo 2^64), `choice` and the output step key its randomness. `history` are the prompt's ids and
    whatever was generated before joining; `step` is the number of the output token it will draw first. `exempt` ids are never
    excluded by XTC (end-of-sequence and newline ids).
    """

    params: SamplingParams
    seed: int
    choice: int = 0
    step: int = 0
    history: Sequence[int] = ()
    exempt: tuple[int, ...] = ()

    def choices(self, n: int) -> list[RowSampling]:
        """This row as the `n` choices of one request: same prompt and seed, different draws."""
        return [replace(self, choice=self.choice + i) for i in range(n)]

    @property
    def penalty_windows(self) -> tuple[int, ...]:
        """Window sizes in tokens of the penalties in force, 0 for the whole history."""
        p = self.params
        windows: list[int] = []
        if repeats(p):
            windows.append(p.repetition_context_size)
        if p.presence_penalty != 0:
            windows.append(p.presence_context_size)
        if p.frequency_penalty != 0:
            windows.append(p.frequency_context_size)
        return tuple(windows)

    def remembered(self) -> Sequence[int]:
        """The part of the history that some penalty can still see."""
        windows = self.penalty_windows
        if not windows:
            return ()
        return self.history if 0 in windows else self.history[-max(windows) :]


def repeats(params: SamplingParams) -> bool:
    """Whether the repetition penalty changes anything (mlx-lm, too, treats 0 as off)."""
    return params.repetition_penalty not in (0.0, 1.0)


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequest` for values the sampler can't honour on a model with `vocab_size` logits."""
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias has token id {token}, but ids of this model go from 0 to {vocab_size - 1}", "logit_bias"
            )
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token id {token} is {bias}, but must be finite", "logit_bias")
    for name in ("repetition_penalty", "temperature", "xtc_probability", "xtc_threshold", "min_p", "top_p"):
        value = float(getattr(params, name))
        if not (math.isfinite(value) and value >= 0):
            raise InvalidRequest(f"{name} is {value}, but must be a finite number of at least 0", name)
    for name in ("presence_penalty", "frequency_penalty"):
        value = float(getattr(params, name))
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} is {value}, but must be a finite number", name)
    for name in ("repetition_context_size", "presence_context_size", "frequency_context_size", "top_k"):
        if getattr(params, name) < 0:
            raise InvalidRequest(f"{name} is {getattr(params, name)}, but must be at least 0", name)
