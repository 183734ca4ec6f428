"""Vectors of texts: the hidden state at a prompt's last token, on the engine thread, one window at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np

from gnomon.engine.api import EngineError, EngineUnavailable
from gnomon.engine.runner import Runner
from gnomon.kernels import dispatch
from gnomon.models.load import LoadedModel
from gnomon.state.batch_state import BatchState

MODEL_TYPES = frozenset({"qwen3"})
"""Types whose trunk gives what their embedding models were trained to give."""

Vectors = list[list[float]]


def embeds(model_type: str) -> bool:
    """Whether models of this type give embeddings."""
    return model_type in MODEL_TYPES


def trunk(loaded: LoadedModel) -> Callable[..., mx.array]:
    """The model without its head: ids (1, tokens) to hidden states (1, tokens, width), after the last norm."""
    inner: Any = loaded.model
    return cast("Callable[..., mx.array]", inner.model)


@dataclass(slots=True)
class EmbeddingJob:
    """Prompts under way; whoever loses interest cancels the future."""

    prompts: Sequence[tuple[int, ...]]
    future: Future[Vectors]
    vectors: Vectors = field(default_factory=list[list[float]])
    state: BatchState | None = None
    done: int = 0
    """Tokens of the current prompt that are in its state."""


class Embedder:
    """The embeddings that wait for the engine thread. Every prompt is computed alone, so that its vector depends on nothing else."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.waiting: deque[EmbeddingJob] = deque()

    def turn(self) -> None:
        """Run one window of the first prompt that waits. Raises `DeviceFailed` when that fails and nothing else works either."""
        while self.waiting and self.waiting[0].future.cancelled():
            self.waiting.popleft()
        if not self.waiting:
            return
        job = self.waiting[0]
        try:
            self._window(job)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this job's, or the device is gone)
            self.waiting.popleft()
            _settle(job, EngineError(f"embedding failed: {error}"))
            self.runner.probe()
            return
        if len(job.vectors) == len(job.prompts):
            self.waiting.popleft()
            _settle(job, None)

    def fail_all(self, error: Exception) -> None:
        for job in self.waiting:
            _settle(job, EngineUnavailable(str(error)))
        self.waiting.clear()

    def _window(self, job: EmbeddingJob) -> None:
        runner, prompt = self.runner, job.prompts[len(job.vectors)]
        state = job.state = job.state or runner.new_state()
        window = prompt[job.done : job.done + runner.config.prefill_chunk]
        runner.heart.beat(f"embedding {len(window)} tokens", len(window))
        with dispatch.step():
            state.begin(len(window))
            hidden = trunk(runner.loaded)(mx.array([window], dtype=mx.int32), cache=state.caches)
            state.commit()
        job.done += len(window)
        if job.done < len(prompt):
            mx.eval(state.arrays())
            return
        job.vectors.append(unit(np.array(hidden[0, -1].astype(mx.float32))))
        job.state, job.done = None, 0
        mx.clear_cache()


def unit(vector: np.ndarray) -> list[float]:
    """The vector with length 1 (float32)."""
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32).tolist()


def _settle(job: EmbeddingJob, error: Exception | None) -> None:
    # Cancelled in the meantime: nobody waits.
    with suppress(InvalidStateError):
        if error is None:
            job.future.set_result(job.vectors)
        else:
            job.future.set_exception(error)
