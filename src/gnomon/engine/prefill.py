"""Prompts on their way into layer states: all but the last token, in chunks, one prompt or a group of short ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx import nn

from gnomon.kernels import dispatch
from gnomon.state.batch_state import BatchState


class Prefill:
    """Drains prompts to their last token, which runs as the row's first step.

    A lone prompt takes chunks of at most `chunk` tokens, mlx-lm's schedule. Several prompts take one ragged window, so each may
    have at most `chunk` + 1 tokens. `state` has a row per prompt.
    """

    def __init__(
        self, model: nn.Module, new_state: Callable[[], BatchState], prompts: Sequence[Sequence[int]], chunk: int
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.chunk = chunk
        self.state = new_state()
        for _ in prompts[1:]:
            self.state.join(new_state())
        self.done = 0
        self.drain = max(map(len, prompts)) - 1

    @property
    def finished(self) -> bool:
        return self.done >= self.drain

    @property
    def width(self) -> int:
        """Tokens per row of the next window."""
        return min(self.chunk, self.drain - self.done)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the next window."""
        if len(self.prompts) == 1:
            return self.width
        return sum(len(prompt) - 1 for prompt in self.prompts)

    def advance(self) -> None:
        """Run the next window and evaluate the states."""
        width = self.width
        if len(self.prompts) == 1:
            window = [self.prompts[0][self.done : self.done + width]]
            counts = None
        else:
            window = [[*prompt[:-1], *[0] * (width - len(prompt) + 1)] for prompt in self.prompts]
            counts = [len(prompt) - 1 for prompt in self.prompts]
        with dispatch.step():
            self.state.begin(width, counts)
            self.model(mx.array(window, dtype=mx.int32), cache=self.state.caches)
            self.state.commit()
        mx.eval(self.state.arrays())
        mx.clear_cache()
        self.done += width
