"""Log-probabilities of a prompt's own tokens: a forward over it in windows, float32 log-softmax, the entries of the next tokens.

This is what mlx-lm's `evaluate` computes of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import mlx.core as mx
from mlx import nn

from gnomon.engine.api import TokenLogprob
from gnomon.engine.aside import SideJob
from gnomon.engine.output import TextTokenizer, token_logprob
from gnomon.engine.runner import Runner
from gnomon.engine.sampling import Logprobs
from gnomon.state.batch_state import BatchState

LOGIT_BYTES: Final = 1 << 28
"""Bytes of a window's logits as float32: a vocabulary of 150,000 makes windows of 447 tokens."""


class ScoringJob(SideJob[tuple[TokenLogprob, ...]]):
    """For each prompt the scores of its tokens but the first, each with the `top` likeliest ones."""

    what: ClassVar[str] = "scoring"

    def __init__(self, prompts: Sequence[tuple[int, ...]], top: int, tokenizer: TextTokenizer) -> None:
        super().__init__(prompts)
        self.top = top
        self.tokenizer = tokenizer
        self.scores: list[TokenLogprob] = []
        """Of the current prompt."""

    def needed(self, prompt: Sequence[int]) -> int:
        # What comes after the last token is not asked for.
        return len(prompt) - 1

    def width(self, runner: Runner, prompt: Sequence[int]) -> int:
        return max(1, min(super().width(runner, prompt), LOGIT_BYTES // (4 * runner.loaded.vocab_size)))

    def forward(self, runner: Runner, window: mx.array, state: BatchState) -> mx.array:
        return runner.loaded.model(window, cache=state.caches)

    def take(self, prompt: Sequence[int], start: int, made: mx.array | None) -> tuple[TokenLogprob, ...] | None:
        if made is not None:
            self._score(prompt[start + 1 : start + 1 + made.shape[1]], made.astype(mx.float32))
        if len(self.scores) < self.needed(prompt):
            return None
        scores, self.scores = tuple(self.scores), []
        return scores

    def _score(self, targets: Sequence[int], logits: mx.array) -> None:
        read = Logprobs(nn.log_softmax(logits), mx.array([targets], dtype=mx.int32), {0: 0}, {0: self.top})
        mx.eval(read.arrays())
        for position, token in enumerate(targets):
            score = read.score(0, position)
            if score is None:
                raise RuntimeError(f"no score at position {position} of a window")
            self.scores.append(token_logprob(self.tokenizer, token, score.logprob, score.top))
