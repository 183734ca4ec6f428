"""How wide windows of a prompt may be where attention holds all their scores at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from gnomon.kernels import codes
from gnomon.models.load import LoadedModel
from gnomon.state.codecs import Affine, Coding

LIMIT: Final = 1 << 30
"""Bytes of one layer's scores."""
FEWEST: Final = 8
"""Queries of a window, however long the context."""
_WIDEST_FUSED: Final = 128
"""Elements of a head up to which MLX's fused attention takes windows of several tokens."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that one query's score against one key takes in a layer, all heads together; 0 if scores are never held whole."""

    pair_bytes: int = 0

    def chunk(self, chunk: int, context: int) -> int:
        """`chunk`, halved until a window's scores against `context` keys stay within `LIMIT`, but not below `FEWEST`."""
        while chunk > FEWEST and chunk * context * self.pair_bytes > LIMIT:
            chunk = max(FEWEST, chunk // 2)
        return chunk

    def nbytes(self, chunk: int, context: int) -> int:
        """Bytes of a layer's scores in the widest window of a prompt that comes to `context` tokens."""
        return self.chunk(chunk, context) * context * self.pair_bytes

    def has_room(self, windows: Iterable[tuple[int, int]]) -> bool:
        """Whether prompts of (tokens to compute, context) may share a window."""
        windows = list(windows)
        width, context = max(tokens for tokens, _ in windows), max(context for _, context in windows)
        return len(windows) * width * context * self.pair_bytes <= LIMIT


def workspace_of(loaded: LoadedModel, coding: Coding | None) -> Workspace:
    """What attention holds: scores of the model's type where keys are in 4 or 8 bits, not tiled and not read by a native kernel of the
    calling thread's, and in models of recurrent layers whose attention has heads too wide for a fused kernel."""
    text = _text(loaded.config)
    heads, width = int(text.get("num_attention_heads") or 0), int(text.get("head_dim") or 0)
    is_whole = not codes.reads_codes() and any(
        isinstance(codec, Affine) and not codec.fused for codec in (coding.codecs if coding else ())
    )
    is_wide = "recurrent" in loaded.binding.layer_kinds and width > _WIDEST_FUSED
    if not is_whole and not is_wide:
        return Workspace()
    return Workspace(heads * _element(loaded))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else config


def _element(loaded: LoadedModel) -> int:
    """Bytes of an activation: norms have the type that the model computes in."""
    named = cast("list[tuple[str, mx.array]]", tree_flatten(loaded.model.parameters()))
    return max((array.itemsize for name, array in named if name.endswith("norm.weight")), default=2)
