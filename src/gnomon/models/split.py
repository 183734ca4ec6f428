"""A model's layers split over several processes, each of which holds some of the heads and of the hidden units (tensor parallelism,
Shoeybi et al., 2019), by mlx-lm's own `shard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from gnomon.models.bindings import UnsupportedModel

_HEADS = ("num_attention_heads", "num_key_value_heads")


def splitter(group: mx.distributed.Group) -> Callable[[nn.Module, Mapping[str, Any]], None]:
    """What splits a model, whose weights were not read yet, and its configuration over a group."""

    def split(model: nn.Module, config: Mapping[str, Any]) -> None:
        """Raises `UnsupportedModel` for a model that mlx-lm doesn't split, or whose sizes the number of processes doesn't divide."""
        kind, size = config.get("model_type"), group.size()
        shard = cast("Callable[[mx.distributed.Group], None] | None", getattr(model, "shard", None))
        if shard is None:
            raise UnsupportedModel(f"{kind} models can't be split over processes: mlx-lm has no way to")
        inner = config.get("text_config")
        text = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else config
        for name in _HEADS:
            heads = text.get(name)
            if isinstance(heads, int) and heads % size:
                raise UnsupportedModel(f"{name} is {heads}, which {size} processes can't share equally")
        try:
            shard(group)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise UnsupportedModel(f"this {kind} model can't be split over {size} processes: {error}") from error

    return split
