"""Prompts on their way into layer states: all but the last token, in chunks, one prompt or a group of short ones."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from gnomon.kernels import dispatch, native
from gnomon.state.batch_state import BatchState

SPARE = 1 << 30
"""Bytes of spare buffers that stay on an NVIDIA GPU between windows: to free them and ask for them again takes longer than a small
model's window."""


class Prefill:
    """Drains prompts to their last token, which runs as the row's first step.

    `states` are the prompts' own, one row each, which hold the first `starts[b]` tokens already; they are used up. A lone prompt takes
    chunks of at most `chunk` tokens, mlx-lm's schedule, which also end at every position of `stops`. Several prompts take one ragged
    window, so each may have at most `chunk` + 1 tokens left. `state` has a row per prompt.
    """

    def __init__(
        self,
        model: nn.Module,
        states: Sequence[BatchState],
        prompts: Sequence[Sequence[int]],
        chunk: int,
        starts: Sequence[int] | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.chunk = chunk
        self.starts = [0] * len(prompts) if starts is None else list(starts)
        self.stops = sorted(stops)
        self.state = states[0]
        for other in states[1:]:
            self.state.join(other)
        self.drain = max(map(len, prompts)) - 1
        self.done = self.starts[0] if len(prompts) == 1 else 0

    @property
    def finished(self) -> bool:
        return self.done >= self.drain

    @property
    def at_stop(self) -> bool:
        return self.done in self.stops

    @property
    def width(self) -> int:
        """Tokens per row of the next window."""
        if len(self.prompts) > 1:
            return max(self._counts())
        end = next((stop for stop in self.stops if stop > self.done), self.drain)
        return min(self.chunk, end - self.done, self.drain - self.done)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the next window."""
        return self.width if len(self.prompts) == 1 else sum(self._counts())

    def advance(self) -> None:
        """Run the next window and evaluate the states."""
        width = self.width
        if len(self.prompts) == 1:
            window = [self.prompts[0][self.done : self.done + width]]
            counts, done = None, self.done + width
        else:
            counts, done = self._counts(), self.drain
            window = [
                [*prompt[start:-1], *[0] * (width - count)]
                for prompt, start, count in zip(self.prompts, self.starts, counts, strict=True)
            ]
        with dispatch.step():
            self.state.begin(width, counts)
            self.model(mx.array(window, dtype=mx.int32), cache=self.state.caches)
            self.state.commit()
        mx.eval(self.state.arrays())
        _give_back()
        self.done = done

    def _counts(self) -> list[int]:
        return [len(prompt) - 1 - start for prompt, start in zip(self.prompts, self.starts, strict=True)]


def _give_back() -> None:
    """Let go of a window's buffers: the next one's have other sizes."""
    if not native.is_cuda() or mx.get_cache_memory() > SPARE:
        mx.clear_cache()
