"""What a loaded model needs of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from gnomon.models.backend import backend
from gnomon.models.traits import TRAITS, Traits

LayerKind = Literal["full", "sliding", "recurrent"]

_KINDS: dict[type, LayerKind] = {KVCache: "full", RotatingKVCache: "sliding", ArraysCache: "recurrent"}


class UnsupportedModel(ValueError):
    """A model that Gnomon can't run; the message says why."""


@dataclass(frozen=True)
class Binding:
    """What a model needs of the engine.

    `batchable`: its rows may share a forward; if not, `why_not` says why. `pad_safe`: windows may be padded at their ends, so rows may take
    different counts of tokens. `make_caches` makes mlx-lm's caches for one row, the templates of a `BatchState`. `layer_kinds` are those
    of the caches, composites' parts one by one. `mask_ndim` is what ragged masks need. `window_safe`: a window of several tokens
    gives what single steps give, so tokens may be proposed.
    """

    batchable: bool
    why_not: str | None
    pad_safe: bool
    make_caches: Callable[[], list[Any]]
    layer_kinds: tuple[LayerKind, ...] = ()
    mask_ndim: int = 4
    window_safe: bool = True


def refuse(model_type: str) -> None:
    """Raise `UnsupportedModel` if this type (a module name of mlx-lm's) is known not to run here; costs no weights."""
    traits = TRAITS.get(model_type)
    if traits is not None and traits.refused is not None and backend() in traits.refused_on:
        raise UnsupportedModel(f"models of type {model_type} can't run on {backend()}: {traits.refused}")


def bind(model: nn.Module) -> Binding:
    """Look at a model's modules and caches.

    What is known of its type, and of the types whose modules it is built from, comes from `traits`; the rest from its structure.
    Raises `UnsupportedModel`.
    """
    types = _model_types(model)
    for model_type in types:
        refuse(model_type)
    known = [TRAITS[model_type] for model_type in types if model_type in TRAITS]
    why_not = _why_not_batchable(model, known)
    return Binding(
        batchable=why_not is None,
        why_not=why_not,
        pad_safe=all(traits.pads for traits in known),
        make_caches=lambda: make_prompt_cache(model),
        layer_kinds=tuple(_kinds(make_prompt_cache(model))),
        mask_ndim=5 if "gemma2" in types and _has_groups(model) else 4,
        window_safe=all(traits.windows for traits in known),
    )


def _model_types(model: nn.Module) -> set[str]:
    """Names of the mlx-lm model files that the model's modules come from."""
    prefix = "mlx_lm.models."
    names = {type(module).__module__ for module in [model, *model.modules()]}
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _kinds(caches: Iterable[object]) -> Iterable[LayerKind]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _kinds(cache.caches)
        elif type(cache) in _KINDS:
            if isinstance(cache, RotatingKVCache) and cache.keep:
                raise UnsupportedModel(
                    f"it keeps the first {cache.keep} tokens of a sliding window, which no layer state does"
                )
            yield _KINDS[type(cache)]
        else:
            raise UnsupportedModel(
                f"its layers keep their state in caches of type {type(cache).__name__}, which no layer state stands for"
            )


def _why_not_batchable(model: nn.Module, known: Iterable[Traits]) -> str | None:
    modules = model.modules()
    if any(isinstance(module, DynamicNTKScalingRoPE) for module in modules):
        return "its dynamic rotary embedding takes one offset for all rows"
    is_sparse = any(getattr(module, "is_sparse_attn", False) for module in modules)
    for traits in known:
        if traits.alone is not None:
            return traits.alone
        if traits.sparse_alone is not None and is_sparse:
            return traits.sparse_alone
    return None


def _has_groups(model: nn.Module) -> bool:
    """Several query heads share a key head somewhere."""
    return any(
        getattr(module, "n_kv_heads", None) is not None
        and getattr(module, "n_heads", None) != getattr(module, "n_kv_heads", None)
        for module in model.modules()
    )
