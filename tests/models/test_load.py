"""Loading a model directory: what it says, and how each kind of damage is named."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import tiny_models
from gnomon.models import load as load_module
from gnomon.models import plain
from gnomon.models.bindings import UnsupportedModel
from gnomon.models.load import LoadedModel, ModelError, load, read_config
from gnomon.models.load import _converted as converted_by_mlx_lm


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def _edit(file: Path, **changes: Any) -> None:
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_5", "mixtral"])
def test_a_saved_model_is_what_mlx_lm_loads(model_type: str, tmp_path: Path) -> None:
    path = tiny_models.save(model_type, tmp_path / model_type, "bfloat16")
    loaded = load(path)
    theirs, understood = load_model(path)
    assert loaded.config == understood
    tokens = mx.array([[5, 9, 200, 31]])
    mine = loaded.model(tokens, cache=loaded.binding.make_caches())
    assert mx.array_equal(mine, theirs(tokens, cache=make_prompt_cache(theirs)))
    assert loaded.vocab_size == mine.shape[-1] == tiny_models.VOCAB_SIZE
    assert loaded.context_length == 2048
    assert loaded.eos_token_ids == (tiny_models.EOS_ID, 0)
    assert loaded.model_type == model_type
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    assert loaded.weight_bytes == sum(x.nbytes for x in weights.values())


def _packed(path: Path, mode: str, group_size: int, named: bool) -> None:
    """Quantize a saved model, one layer at 8 bits; only where `named` does its configuration say so of each layer."""
    model, config = load_model(path)
    settings: dict[str, Any] = {"group_size": group_size, "bits": 4, "mode": mode}
    eight = {"group_size": 32, "bits": 8, "mode": "affine"}
    odd = "model.layers.1.mlp.up_proj"
    nn.quantize(
        model,
        **settings,
        class_predicate=lambda name, m: hasattr(m, "to_quantized") and (eight if name == odd else True),
    )
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    each = {name: eight if name == odd else settings for name, m in model.named_modules() if hasattr(m, "bits")}
    _edit(path / "config.json", **config, quantization={**settings, **(each if named else {})})


@pytest.mark.parametrize(
    ("mode", "group_size", "named", "converted"),
    [("affine", 32, True, False), ("affine", 32, False, False), ("mxfp4", 32, True, True), ("mxfp4", 32, False, True)],
)
def test_a_packed_model_is_what_mlx_lm_loads(
    directory: Path, mode: str, group_size: int, named: bool, converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _packed(directory, mode, group_size, named)
    calls: list[Path] = []
    monkeypatch.setattr(load_module, "_converted", lambda path: (calls.append(path), converted_by_mlx_lm(path))[1])
    loaded = load(directory)
    theirs, understood = load_model(directory)
    assert loaded.config == understood
    assert bool(calls) is converted
    mine, its = (dict(tree_flatten(one.parameters())) for one in (loaded.model, theirs))
    assert mine.keys() == its.keys()
    assert all(mx.array_equal(array, its[name]) for name, array in mine.items())
    tokens = mx.array([[5, 9, 200, 31]])
    assert mx.array_equal(loaded.model(tokens), theirs(tokens))
    shapes = {name: (m.bits, m.group_size) for name, m in loaded.model.named_modules() if hasattr(m, "bits")}
    assert shapes["model.layers.1.mlp.up_proj"] == (8, 32)
    assert shapes["model.layers.0.mlp.up_proj"] == (4, group_size)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "awq"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        {"quantize_activations": True},
        {"rope_theta": {"__float__": "Infinity"}},
        {"quantization": {"group_size": 32, "bits": 4, "mode": "nvfp4"}},
    ],
)
def test_what_must_be_converted_is_left_to_mlx_lm(directory: Path, changes: dict[str, Any]) -> None:
    assert plain.build(directory, "llama", read_config(directory), {}) is not None
    _edit(directory / "config.json", **changes)
    assert plain.build(directory, "llama", read_config(directory), {}) is None


def test_other_exporters_settings_are_left_to_mlx_lm(directory: Path) -> None:
    (directory / "hf_quant_config.json").write_text("{}")
    assert plain.build(directory, "llama", read_config(directory), {}) is None


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 7, (7,)),
        ([5, 7], 7, (5, 7)),
        (5, [7, 9], (5, 7, 9)),
        (None, None, ()),
    ],
)
def test_end_tokens_of_both_files_are_joined(
    directory: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    _edit(directory / "config.json", eos_token_id=config)
    _edit(directory / "generation_config.json", eos_token_id=generation)
    assert load(directory).eos_token_ids == expected


def test_end_tokens_and_context_are_found_in_a_nested_configuration(tmp_path: Path) -> None:
    path = tiny_models.save("gemma3", tmp_path / "gemma3")
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"eos_token_id": 11, "max_position_embeddings": 777}
    _edit(path / "config.json", eos_token_id=[1, 106], text_config=config["text_config"], max_position_embeddings=5)
    loaded = load(path)
    assert loaded.eos_token_ids == (1, 106, 11)
    assert loaded.context_length == 777


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "seq_length"])
def test_context_goes_by_several_names(directory: Path, key: str) -> None:
    _edit(directory / "config.json", max_position_embeddings=None)
    _edit(directory / "config.json", **{key: 321})
    assert load(directory).context_length == 321


def test_no_context_is_no_error(directory: Path) -> None:
    _edit(directory / "config.json", max_position_embeddings=None)
    assert load(directory).context_length is None


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _cut_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def _garble_header(path: Path) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:12] = b"\0\0\0\0"
    file.write_bytes(data)


def _rename(path: Path) -> None:
    (path / "model.safetensors").rename(path / "weights.gguf")


def _index(path: Path) -> None:
    weight_map = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _drop_weight(path: Path) -> None:
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    del weights["model.norm.weight"]
    mx.save_safetensors(str(path / "model.safetensors"), weights)


DAMAGES = {
    "not there": (shutil.rmtree, "there is no model directory"),
    "no config": (lambda p: (p / "config.json").unlink(), r"config\.json is missing"),
    "config cut": (lambda p: (p / "config.json").write_text('{"model_type": '), r"config\.json can't be read"),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), "must hold a JSON object, not list"),
    "no type": (lambda p: _edit(p / "config.json", model_type=None), "has no model_type"),
    "generation config cut": (
        lambda p: (p / "generation_config.json").write_text("{"),
        r"generation_config\.json can't",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"no file matches model\*\.safetensors"),
    "other weights": (_rename, r"weights\.gguf, which must be converted first"),
    "shard missing": (_index, r"lacks 1 weight files .* model-00002-of-00002\.safetensors"),
    "weights cut": (_cut, r"model\.safetensors is damaged or incomplete: it has \d+ bytes, its header says \d+"),
    "header cut": (_cut_header, r"model\.safetensors is damaged or incomplete: its header"),
    "header garbled": (_garble_header, r"model\.safetensors is damaged: its header is not"),
    "weight missing": (_drop_weight, r"can't be loaded as a llama model: .*model\.norm\.weight"),
    "wrong sizes": (
        lambda p: _edit(p / "config.json", intermediate_size=100),
        "can't be loaded as a llama model: .*shape",
    ),
    "field missing": (
        lambda p: _edit(p / "config.json", hidden_size=None),
        "can't be loaded as a llama model: .*hidden_size",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(directory: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    spoil(directory)
    with pytest.raises(ModelError, match=message):
        load(directory)


def test_a_file_is_no_directory(directory: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        load(directory / "config.json")


def test_unknown_types_point_to_the_list(directory: Path) -> None:
    _edit(directory / "config.json", model_type="gpt17")
    with pytest.raises(UnsupportedModel, match=r"gpt17 is not known .* `gnomon models --supported`"):
        load(directory)


def test_many_files_may_be_open(directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Few, but more than this process has open by now.
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 128, hard))
        load(directory)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2048, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_models_own_code_is_never_run(directory: Path) -> None:
    _edit(directory / "config.json", model_file="evil.py")
    (directory / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModel, match=r"evil\.py"):
        load(directory)


@pytest.mark.parametrize(("model_type", "reason"), [("llama4", "ChunkedKVCache"), ("deepseek_v41_text", "LayerCache")])
def test_types_known_not_to_run_are_refused_before_reading_weights(
    directory: Path, model_type: str, reason: str
) -> None:
    _edit(directory / "config.json", model_type=model_type)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=reason):
        load(directory)


def test_aliases_load(directory: Path) -> None:
    _edit(directory / "config.json", model_type="mistral")
    loaded: LoadedModel = load(directory)
    assert loaded.model_type == "mistral"
    assert type(loaded.model).__module__ == "mlx_lm.models.llama"
