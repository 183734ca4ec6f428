"""From a scheme of keys and values to the codecs of a loaded model's layers, tried out before any request comes."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from gnomon.config.kv import KvScheme
from gnomon.engine.api import Tier
from gnomon.kernels import coded
from gnomon.models.kv import read_kv_config
from gnomon.models.load import LoadedModel
from gnomon.state.batch_state import BatchState, UnsupportedCache
from gnomon.state.codecs import Affine, Codec, Coding, Turbo

log = logging.getLogger(__name__)


class UnsupportedScheme(ValueError):
    """A scheme of keys and values that the loaded model can't run under; the message says why."""


def coding_for(loaded: LoadedModel, scheme: KvScheme) -> Coding | None:
    """The model's codecs, None for the plain scheme. Must run on the engine's thread.

    Layers of recurrent state have none. Sliding layers have those that kv_config.json names; under the other schemes they stay plain,
    which is logged. Raises `UnsupportedScheme` for a head width that can't be coded, for attention that doesn't take views of its keys,
    and where no layer is left to code.
    """
    if scheme.mode == "off":
        return None
    caches = loaded.binding.make_caches()
    codecs = _codecs(loaded, scheme, caches)
    if not any(codecs):
        raise UnsupportedScheme(
            f"--kv-quant {scheme.name} changes nothing: {loaded.model_type} models have no layer that it codes"
        )
    num_plain = sum(
        type(cache) is RotatingKVCache and codec is None for cache, codec in zip(caches, codecs, strict=True)
    )
    if num_plain and scheme.mode != "config":
        log.warning(
            "--kv-quant %s codes layers of full attention: the %d sliding layers of this model stay plain",
            scheme.name,
            num_plain,
        )
    coding = Coding(codecs, scheme.start)
    coded.install()
    _try(loaded, scheme, Coding(codecs))
    return coding


def tier_of(scheme: KvScheme, coding: Coding | None, loaded: LoadedModel) -> Tier:
    """What the scheme's bits can be held against: mlx-lm's quantised caches, mlx-optiq's, or nothing."""
    if coding is None:
        return "L1"
    if scheme.mode == "turbo":
        return "Lab"
    if scheme.mode == "config":
        return "L2"
    # mlx-lm doesn't quantise beside sliding layers, and tiles nothing.
    return "Lab" if scheme.fused or "sliding" in loaded.binding.layer_kinds else "L1"


def stats_of(scheme: KvScheme, coding: Coding | None, loaded: LoadedModel) -> dict[str, Any]:
    """For `/stats`: the scheme, how many layers are coded, and what layers of each kind hold."""
    codecs = coding.codecs if coding is not None else ()
    caches = loaded.binding.make_caches()
    attention: dict[str, dict[str, int]] = {}
    for kind, key in ((KVCache, "global"), (RotatingKVCache, "sliding_window")):
        counts = attention[key] = {}
        for place, cache in enumerate(caches):
            if type(cache) is kind:
                codec = codecs[place] if codecs else None
                name = codec.name if codec is not None else "plain"
                counts[name] = counts.get(name, 0) + 1
    return {
        "mode": scheme.name,
        "layers": sum(codec is not None for codec in codecs),
        "start": scheme.start,
        "fused": scheme.fused,
        "attention": attention,
    }


def _codecs(loaded: LoadedModel, scheme: KvScheme, caches: list[Any]) -> tuple[Codec | None, ...]:
    if scheme.mode == "config":
        try:
            layers = read_kv_config(loaded.path)
        except ValueError as error:
            raise UnsupportedScheme(str(error)) from error
        for index in layers:
            if index >= len(caches) or type(caches[index]) not in (KVCache, RotatingKVCache):
                raise UnsupportedScheme(
                    f"kv_config.json gives layer {index} bits, but of this model's {len(caches)} caches that is none of attention"
                )
        return tuple(
            Affine(layers[place].bits, layers[place].group, scheme.fused) if place in layers else None
            for place in range(len(caches))
        )
    codec = (
        Turbo(scheme.key_bits, scheme.value_bits)
        if scheme.mode == "turbo"
        else Affine(scheme.bits, scheme.group, scheme.fused)
    )
    return tuple(codec if type(cache) is KVCache else None for cache in caches)


def _try(loaded: LoadedModel, scheme: KvScheme, coding: Coding) -> None:
    """Build, but don't compute, a plain window, a coded one and a coded step."""
    binding = loaded.binding
    try:
        state = BatchState(
            loaded.model, binding.make_caches(), pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim, coding=coding
        )
        for width in (2, 2, 1):
            state.begin(width)
            loaded.model(mx.zeros((1, width), mx.int32), cache=state.caches)
            state.commit()
    except UnsupportedCache as error:
        raise UnsupportedScheme(str(error)) from error
    except ValueError as error:
        raise UnsupportedScheme(
            f"{loaded.model_type} models can't run with --kv-quant {scheme.name}: {error}"
        ) from error
    except (TypeError, AttributeError) as error:
        raise UnsupportedScheme(
            f"{loaded.model_type} models can't run with --kv-quant {scheme.name}: their attention works on keys and values "
            f"itself ({error})"
        ) from error
