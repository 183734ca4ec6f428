"""Whole GGUF files become model directories that mlx-lm loads and that compute what the original model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from ggufs import HEADS, architecture, permute, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.utils import load, load_model

from gnomon.models.gguf import UnsupportedGGUF, convert
from gnomon.models.gguf.architectures import llama3_factors, unpermute

TOKENS = mx.array([[5, 17, 200, 3, 3, 41, 99, 256, 258, 7, 11, 13]])


def logits(model: nn.Module) -> np.ndarray:
    return np.array(model(TOKENS).astype(mx.float32))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_f32_file_computes_the_same_bits(name: str, tied: bool, tmp_path: Path) -> None:
    model, config = architecture(name, tied=tied)
    write_gguf(tmp_path / "m.gguf", name, model, config)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    loaded, said = load_model(tmp_path / "out")
    np.testing.assert_allclose(logits(loaded), logits(model), rtol=0, atol=0 if name != "gemma3" else 2e-5)
    for key, value in config.items():
        assert said[key] == value, key


@pytest.mark.parametrize(
    "kind",
    [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0],
    ids=lambda kind: kind.name,
)
def test_quantised_files_compute_with_the_stored_values(kind: Kind, tmp_path: Path) -> None:
    model, config = architecture("llama")
    write_gguf(tmp_path / "m.gguf", "llama", model, config, lambda name: kind)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    loaded, said = load_model(tmp_path / "out")
    # The oracle: the same model on what the gguf package dequantises.
    exact, _ = architecture("llama")
    values = {key: _through(value, kind) for key, value in _flat(model).items()}
    exact.load_weights(list(values.items()))
    computed = loaded.model.norm.weight.dtype
    assert computed == {Kind.F16: mx.float16, Kind.BF16: mx.bfloat16}.get(kind, mx.float32)
    tolerance = {Kind.F16: 2e-2, Kind.BF16: 1e-1}.get(kind, 1e-5)
    np.testing.assert_allclose(logits(loaded), logits(exact), rtol=0, atol=tolerance)
    assert said["torch_dtype"] == str(computed).removeprefix("mlx.core.")
    assert ("quantization" in said) == kind.name.startswith("Q")


def _flat(model: nn.Module) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(model.parameters()))


def _through(value: mx.array, kind: Kind) -> mx.array:
    if value.ndim != 2:
        return value
    raw = quantize(np.array(value), kind)
    return mx.array(dequantize(raw, kind))


def test_kinds_mix_by_layer(tmp_path: Path) -> None:
    model, config = architecture("qwen3")
    kinds = {
        "v_proj": Kind.Q8_0,
        "down_proj": Kind.F16,
        "gate_proj": Kind.Q5_1,
        "embed": Kind.Q8_0,
        "lm_head": Kind.F32,
    }

    def kind(name: str) -> Kind:
        return next((found for part, found in kinds.items() if part in name), Kind.Q4_0)

    write_gguf(tmp_path / "m.gguf", "qwen3", model, config, kind)
    made = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert (made.affine, made.widened) == (3 * 6 + 1, 0)
    assert made.weight_bytes <= (tmp_path / "out" / "model.safetensors").stat().st_size
    loaded, said = load_model(tmp_path / "out")
    quantization = said["quantization"]
    assert quantization["model.layers.1.self_attn.v_proj"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert quantization["model.layers.1.mlp.gate_proj"]["bits"] == 5
    assert quantization["bits"] == 4
    assert isinstance(loaded.model.embed_tokens, nn.QuantizedEmbedding)
    assert not isinstance(loaded.lm_head, nn.QuantizedLinear)
    exact, _ = architecture("qwen3")
    exact.load_weights([(key, _through(value, kind(key))) for key, value in _flat(model).items()])
    np.testing.assert_allclose(logits(loaded), logits(exact), rtol=0, atol=1e-5)


class _KQuant:
    """Random Q6_K blocks: the gguf package reads that format but doesn't write it."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(3)

    def raw(self, rows: int, cols: int) -> np.ndarray:
        blocks = self.random.integers(0, 256, (rows, cols // 256, 210), dtype=np.uint8)
        scales = self.random.uniform(0.0005, 0.001, (rows, cols // 256, 1)).astype(np.float16)
        blocks[:, :, 208:] = scales.view(np.uint8)
        return blocks.reshape(rows, -1)


@pytest.mark.parametrize(("widen", "dtype"), [("bfloat16", mx.bfloat16), ("float32", mx.float32)])
def test_k_quants_become_plain(widen: Any, dtype: mx.Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ggufs

    monkeypatch.setattr(ggufs, "HIDDEN", 256)
    monkeypatch.setattr(ggufs, "MLP", 256)
    model, config = architecture("llama", head_dim=64)
    raw = _KQuant()
    stored: dict[str, np.ndarray] = {}

    def fake_quantize(array: np.ndarray, kind: Kind) -> np.ndarray:
        return raw.raw(*array.shape) if kind == Kind.Q6_K else quantize(array, kind)

    monkeypatch.setattr(ggufs, "quantize", fake_quantize)
    write_gguf(tmp_path / "m.gguf", "llama", model, config, lambda name: Kind.Q6_K)
    from gguf import GGUFReader

    for tensor in GGUFReader(tmp_path / "m.gguf").tensors:
        stored[tensor.name] = dequantize(tensor.data, tensor.tensor_type)
    made = convert(tmp_path / "m.gguf", tmp_path / "out", widen=widen)
    assert made.affine == 0
    loaded, said = load_model(tmp_path / "out")
    assert "quantization" not in said
    assert said["torch_dtype"] == widen
    layer = loaded.layers[1]
    assert layer.mlp.up_proj.weight.dtype == dtype
    assert layer.input_layernorm.weight.dtype == dtype
    expected = mx.array(stored["blk.1.ffn_up.weight"]).astype(dtype)
    assert mx.array_equal(layer.mlp.up_proj.weight, expected)
    # Undone permutation: storing again what was read gives the file's rows.
    queries = np.array(layer.self_attn.q_proj.weight.astype(mx.float32))
    again = permute(queries, HEADS)
    np.testing.assert_array_equal(
        again, np.array(mx.array(stored["blk.1.attn_q.weight"]).astype(dtype).astype(mx.float32))
    )


@given(st.integers(1, 5), st.integers(1, 8))
def test_unpermute_undoes_the_converter(heads: int, half: int) -> None:
    rows = np.arange(heads * half * 2)
    np.testing.assert_array_equal(permute(rows, heads)[unpermute(heads, half * 2)], rows)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192)])
def test_llama3_rope_scaling_is_recognised(factor: float, original: int, tmp_path: Path) -> None:
    model, config = architecture("llama", head_dim=64)
    config["rope_theta"] = 500_000.0
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": original}
    # mlx-lm's own rope gives the scaled frequencies; the file stores by what each was divided.
    rope = Llama3RoPE(dims=64, base=config["rope_theta"], scaling_config=scaling)
    plain = config["rope_theta"] ** (np.arange(0, 64, 2) / 64)
    factors = (np.array(rope._freqs) / plain).astype(np.float32)
    np.testing.assert_allclose(llama3_factors(500_000.0, 64, factor, original), factors, rtol=1e-4)
    write_gguf(
        tmp_path / "m.gguf", "llama", model, config,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )  # fmt: skip
    convert(tmp_path / "m.gguf", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]
    assert said == {"rope_type": "llama3", **scaling}
    load_model(tmp_path / "out")


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    model, config = architecture("llama")
    factors = np.linspace(1, 3, 16, dtype=np.float32)
    write_gguf(
        tmp_path / "m.gguf", "llama", model, config,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )  # fmt: skip
    with pytest.raises(UnsupportedGGUF, match=r"rope_freqs.weight holds frequency factors that are not Llama 3.1's"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    from gguf import RopeScalingType

    model, config = architecture("qwen3")

    def yarn(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    write_gguf(tmp_path / "m.gguf", "qwen3", model, config, extra=yarn)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    loaded, said = load_model(tmp_path / "out")
    assert said["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert type(loaded.layers[0].self_attn.rope).__name__ == "YarnRoPE"


def _with(path: Path, name: str = "llama", extra: Any = lambda writer: None, **changes: Any) -> Path:
    model, config = architecture("llama")
    write_gguf(path, name, model, config | changes, extra=extra)
    return path


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("mamba", None, "general.architecture 'mamba' is not supported; supported: gemma3, llama, qwen2, qwen3"),
        ("llama", lambda w: w.add_expert_count(8), "llama.expert_count is 8: mixture-of-experts"),
        ("llama", lambda w: w.add_tensor("blk.0.odd.weight", np.zeros(4, np.float32)), "tensor blk.0.odd.weight is unknown to llama"),
        ("llama", lambda w: w.add_uint16("split.count", 3), r"m.gguf is one of 3 parts \(split.count\): join them first"),
        ("llama", lambda w: w.add_rope_dimension_count(8), "llama.rope.dimension_count 8 is not the head width 32"),
    ],
    ids=["architecture", "experts", "tensor", "split", "rope"],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_name(name: str, extra: Any, message: str, tmp_path: Path) -> None:
    path = _with(tmp_path / "m.gguf", name, extra or (lambda writer: None))
    with pytest.raises(UnsupportedGGUF, match=message):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"not a gguf file at all, but long enough to look at"])
def test_files_that_are_not_gguf(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UnsupportedGGUF, match=r"m.gguf is not a whole GGUF file"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_a_truncated_file(tmp_path: Path) -> None:
    path = _with(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UnsupportedGGUF, match=r"m.gguf is not a whole GGUF file"):
        convert(path, tmp_path / "out")


def test_an_interrupted_conversion_is_not_seen_and_not_in_the_way(tmp_path: Path) -> None:
    path = _with(tmp_path / "m.gguf")

    def interrupted(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "out", interrupted)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
    # A killed one leaves its directory.
    (tmp_path / ".out.partial").mkdir()
    seen: list[tuple[int, int]] = []
    convert(path, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf", "out"]
    with pytest.raises(FileExistsError):
        convert(path, tmp_path / "out")


def test_the_directory_is_whole(tmp_path: Path) -> None:
    model, config = architecture("llama")
    write_gguf(tmp_path / "m.gguf", "llama", model, config, extra=lambda w: w.add_chat_template("{{ messages }}"))
    convert(tmp_path / "m.gguf", tmp_path / "out", provenance={"format": 1, "id": "x"})
    _, tokenizer = load(str(tmp_path / "out"))
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.decode(tokenizer.encode("the inn, the end")) == "the inn, the end"
    # eos is bos here, and the end of a turn is known by its name.
    ids = {tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|im_end|>")}
    assert tokenizer.eos_token_ids == ids
    provenance = json.loads((tmp_path / "out" / "gnomon.json").read_text())
    assert provenance == {"format": 1, "id": "x", "source": "m.gguf", "widen": "bfloat16"}
