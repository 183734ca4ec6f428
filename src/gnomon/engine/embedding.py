"""Vectors of texts: the hidden state at a prompt's last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import mlx.core as mx
import numpy as np

from gnomon.engine.aside import SideJob
from gnomon.engine.runner import Runner
from gnomon.models.load import LoadedModel
from gnomon.state.batch_state import BatchState

MODEL_TYPES = frozenset({"qwen3"})
"""Types whose trunk gives what their embedding models were trained to give."""


def embeds(model_type: str) -> bool:
    """Whether models of this type give embeddings."""
    return model_type in MODEL_TYPES


def trunk(loaded: LoadedModel) -> Callable[..., mx.array]:
    """The model without its head: ids (1, tokens) to hidden states (1, tokens, width), after the last norm."""
    inner: Any = loaded.model
    return cast("Callable[..., mx.array]", inner.model)


class EmbeddingJob(SideJob[list[float]]):
    """A vector of length 1 for each prompt."""

    what: ClassVar[str] = "embedding"

    def forward(self, runner: Runner, window: mx.array, state: BatchState) -> mx.array:
        return trunk(runner.loaded)(window, cache=state.caches)

    def take(self, prompt: Sequence[int], start: int, made: mx.array | None) -> list[float] | None:
        if made is None or start + made.shape[1] < len(prompt):
            return None
        return unit(np.array(made[0, -1].astype(mx.float32)))


def unit(vector: np.ndarray) -> list[float]:
    """The vector with length 1 (float32)."""
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32).tolist()
