"""What a model needs of the engine, from its type and its structure; the list of types."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

import tiny_models
from gnomon.models import bindings, supported
from gnomon.models.bindings import UnsupportedModel, bind, refuse
from gnomon.models.supported import aliases, code_of, model_types, runs, supported_types
from gnomon.models.traits import TRAITS, TRIED

KINDS = {KVCache: "full", RotatingKVCache: "sliding", ArraysCache: "recurrent"}


@pytest.mark.parametrize("model_type", ["llama", "gemma4", "qwen3_5", "glm_moe_dsa", "falcon_h1"])
def test_kinds_are_those_of_mlx_lms_caches(model_type: str) -> None:
    binding = bind(tiny_models.make(model_type))
    caches: list[Any] = []
    for cache in binding.make_caches():
        caches += getattr(cache, "caches", [cache])
    assert binding.layer_kinds == tuple(KINDS[type(cache)] for cache in caches)
    assert binding.batchable
    assert binding.why_not is None
    assert binding.pad_safe
    assert binding.window_safe


def test_each_state_gets_caches_of_its_own() -> None:
    binding = bind(tiny_models.make("llama"))
    assert binding.make_caches()[0] is not binding.make_caches()[0]


def test_types_that_ignore_lengths_are_not_padded() -> None:
    assert not bind(tiny_models.make("mamba")).pad_safe


def test_heads_in_groups_need_masks_of_five_dimensions() -> None:
    assert bind(tiny_models.make("gemma2")).mask_ndim == 5
    assert bind(tiny_models.make("gemma2", num_key_value_heads=4)).mask_ndim == 4
    assert bind(tiny_models.make("llama")).mask_ndim == 4


def test_dynamic_rope_keeps_rows_apart() -> None:
    scaling = {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0}
    binding = bind(tiny_models.make("llama", rope_scaling=scaling))
    assert not binding.batchable
    assert binding.why_not is not None
    assert "dynamic rotary" in binding.why_not


@pytest.mark.parametrize("name", ["ChunkedKVCache", "Sinks"])
def test_unknown_caches_are_refused_by_name(name: str) -> None:
    kind = {"ChunkedKVCache": lambda: ChunkedKVCache(8), "Sinks": type("Sinks", (KVCache,), {})}[name]

    class Odd(nn.Module):
        def make_cache(self) -> list[Any]:
            return [KVCache(), kind()]

    with pytest.raises(UnsupportedModel, match=name):
        bind(Odd())


def test_kept_prefixes_are_refused() -> None:
    class Odd(nn.Module):
        def make_cache(self) -> list[Any]:
            return [RotatingKVCache(max_size=8, keep=4)]

    with pytest.raises(UnsupportedModel, match="first 4 tokens"):
        bind(Odd())


def test_metal_only_types_are_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "backend", lambda: "cpu")
    with pytest.raises(UnsupportedModel, match=r"bitnet can't run on cpu: .*Metal"):
        refuse("bitnet")
    monkeypatch.setattr(bindings, "backend", lambda: "metal")
    refuse("bitnet")
    with pytest.raises(UnsupportedModel, match="llama4"):
        refuse("llama4")


def test_every_type_of_mlx_lm_is_listed_once() -> None:
    rows = supported_types()
    names = [row.model_type for row in rows]
    assert len(names) == len(set(names))
    assert aliases() == MODEL_REMAPPING
    assert {row.model_type for row in rows if row.runs is not False} == {name for name in names if runs(name)}
    assert not runs("gpt17")
    for (model_type, architecture), own in MODEL_ARCHITECTURE_REMAPPING.items():
        assert code_of(model_type, ["Another", architecture]) == own
        assert code_of(model_type, ["Another"]) == model_type
    assert [code_of(name, ()) for name in ("mistral", "lille-130m", "base", "../models/llama", "")] == [
        "llama",
        "lille-130m",
        None,
        None,
        None,
    ]
    assert set(MODEL_REMAPPING) <= set(names)
    assert model_types() <= set(names)
    for name in ("llama", "solar_open", "lille-130m", "qwen3_vl_moe"):  # each defines or imports a Model
        assert name in names
        assert hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "Model")
    for helper in ("base", "cache", "switch_layers", "rope_utils"):
        assert helper not in names


def test_verdicts() -> None:
    by_name = {row.model_type: row for row in supported_types()}
    assert (by_name["llama"].runs, by_name["llama"].batches, by_name["llama"].ragged) == (True, True, True)
    assert (by_name["mamba"].batches, by_name["mamba"].ragged) == (True, False)
    assert by_name["falcon_mamba"].same_as == "mamba"
    assert by_name["falcon_mamba"].ragged is False
    assert by_name["afm7"].batches is False
    assert by_name["afm7"].note
    assert by_name["llama4"].runs is False
    assert "ChunkedKVCache" in by_name["llama4"].note


def test_untried_types_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "TRIED", TRIED - {"llama"})
    row = next(row for row in supported_types() if row.model_type == "llama")
    assert (row.runs, row.batches, row.ragged, row.note) == (None, None, None, "not tried")


def test_the_table_speaks_of_types_that_exist() -> None:
    assert set(TRAITS) <= TRIED <= model_types()


def test_the_default_device_is_the_backend() -> None:
    from gnomon.models.backend import backend

    assert (backend() == "cpu") == (mx.default_device() == mx.Device(mx.cpu))
