"""From `--paged-kv` to a pool of pages for a loaded model, tried out before any request comes."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from gnomon.config.kv import KvScheme
from gnomon.engine.coding import UnsupportedScheme
from gnomon.kernels import coded
from gnomon.models.load import LoadedModel
from gnomon.state.batch_state import BatchState, UnsupportedCache
from gnomon.state.codecs import Coding
from gnomon.state.paged import PagePool

_WHY = {
    "sliding": "a sliding window goes round in a buffer of its own",
    "recurrent": "a recurrent state is not made of tokens",
    "full": "its layers keep several states each",
}


def pages_for(loaded: LoadedModel, scheme: KvScheme, coding: Coding | None) -> PagePool | None:
    """Where the model's states hold their tokens; None if in buffers of their own. Must run on the engine's thread.

    Raises `UnsupportedScheme` for models with other layers than full attention, and those that don't take what pages give them.
    """
    if not scheme.paged:
        return None
    binding = loaded.binding
    caches = binding.make_caches()
    other = [kind for kind in ("sliding", "recurrent", "full") if kind in binding.layer_kinds]
    if any(type(cache) is not KVCache for cache in caches):
        raise UnsupportedScheme(
            f"--paged-kv takes models of full attention only, {loaded.model_type} models are not: {_WHY[other[0]]}"
        )
    coded.install()
    pool = PagePool(len(caches))
    try:
        state = BatchState(
            loaded.model, caches, pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim, coding=coding, pages=pool
        )
        for width in (2, 2, 1):
            state.begin(width)
            loaded.model(mx.zeros((1, width), mx.int32), cache=state.caches)
            state.commit()
    except (UnsupportedCache, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedScheme(f"{loaded.model_type} models can't run with --paged-kv: {error}") from error
    del state
    pool.empty()
    return pool
