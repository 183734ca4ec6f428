"""Predicted memory and speed: against hand-worked cases and the caches mlx-lm really makes."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

import tiny_models
from gnomon.config import KvScheme
from gnomon.hub.headers import Tensor, read_header
from gnomon.models import fit, machine
from gnomon.models.fit import MATRIX_CONTEXT, SKUS, Needs, measure_needs, needs_of, sku, usable
from gnomon.models.kv import LayerBits

BF16 = {"model.norm.weight": Tensor("BF16", (4,), 8)}
LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def test_the_contract_by_hand() -> None:
    # Llama 3 8B in 4 bits on an M4 Pro with 24 GiB.
    needs = Needs(weights=4_500_000_000, full=2 * 32 * 8 * 128 * 2, sliding=0, window=0, max_positions=131_072)
    assert needs.kv(8192) == 1_073_741_824
    assert needs.total(8192) == 4_500_000_000 + 1_073_741_824 + 2048 * 0.55e6
    room = usable(24 << 30, None)
    assert room == 0.75 * 24 * 2**30
    assert needs.fits(8192, room)
    # (0.75 * 24 GiB - weights - transient) / 131072 bytes a token
    assert needs.max_context(room) == int((room - 4_500_000_000 - 2048 * 0.55e6) / 131_072)
    assert needs.decode(8192, 273) == pytest.approx(273e9 / (4_500_000_000 + 1_073_741_824) * 0.82)


def test_experts_are_read_by_their_share() -> None:
    needs = Needs(10_000_000_000, 0, 0, 0, None, experts=8_000_000_000, expert_share=8 / 128)
    assert needs.decode(1, 400) == pytest.approx(400e9 / (10e9 - 8e9 * (1 - 8 / 128)) * 0.76)


def test_a_window_saturates() -> None:
    needs = Needs(0, full=10, sliding=100, window=512, max_positions=None)
    assert needs.kv(512) == 110 * 512
    assert needs.kv(1000) == 10 * 1000 + 100 * 512


def test_a_budget_takes_the_place_of_the_share() -> None:
    assert usable(64 << 30, 8_000_000_000) == 8e9


@given(
    st.integers(0, 10**10), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 4096), st.integers(1, 10**6),
    st.floats(0, 2e10),
)  # fmt: skip
def test_the_longest_context_is_the_longest(
    weights: int, full: int, sliding: int, window: int, limit: int, room: float
) -> None:
    needs = Needs(weights, full, sliding, window, limit)
    longest = needs.max_context(room)
    assert 0 <= longest <= limit
    assert longest == 0 or needs.fits(longest, room)
    assert longest == limit or not needs.fits(longest + 1, room)


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen3", "qwen3_5", "gemma2", "gemma3", "gemma4", "mixtral", "deepseek_v3", "glm_moe_dsa", "gpt_oss", "mamba2"],
)  # fmt: skip
def test_kv_is_what_the_caches_take(model_type: str) -> None:
    model = tiny_models.make(model_type)
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 256), mx.int32), cache=caches)
    tensors = {name: Tensor("F32", value.shape, value.nbytes) for name, value in tree_flatten(model.parameters())}
    needs = needs_of(tiny_models.config(model_type), tensors)
    assert needs.weights == sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    flat = [c for cache in caches for c in getattr(cache, "caches", [cache])]
    full = sum(c.nbytes for c in flat if type(c).__name__ == "KVCache")
    sliding = [c for c in flat if isinstance(c, RotatingKVCache)]
    assert needs.full * 256 == full
    # A window's buffer grows in steps; per token it is the keys and values of one position.
    assert needs.sliding == sum((c.keys.nbytes + c.values.nbytes) / c.keys.shape[2] for c in sliding)
    assert needs.window == (sliding[0].max_size if sliding else 0)


def test_experts_are_told_from_the_rest() -> None:
    model = tiny_models.make("mixtral")
    tensors = {name: Tensor("F32", value.shape, value.nbytes) for name, value in tree_flatten(model.parameters())}
    needs = needs_of(tiny_models.config("mixtral"), tensors)
    stacked = [value.nbytes for _, value in tree_flatten(model.parameters()) if value.ndim == 3]
    assert needs.experts == sum(stacked) > 0
    assert needs.expert_share == 2 / 4


def test_kv_elements() -> None:
    assert needs_of(LLAMA, BF16).full == 2 * 32 * 8 * 128 * 2
    assert needs_of(LLAMA, {"model.norm.weight": Tensor("F32", (4,), 16)}).full == 2 * 32 * 8 * 128 * 4
    # Affine: bits / 8 + 4 / group bytes, scales and biases in 16 bits.
    assert needs_of(LLAMA, BF16, KvScheme("affine", bits=4)).full == 2 * 32 * 8 * 128 * (0.5 + 4 / 64)


def test_a_directory_is_read_by_its_headers(starter_path: Path) -> None:
    needs = measure_needs(starter_path)
    assert needs.weights == sum(t.nbytes for t in read_header(starter_path / "model.safetensors").values())
    # 30 layers, 3 KV heads of 64; it computes in float32.
    assert needs.full == 2 * 30 * 3 * 64 * 4
    assert needs.max_positions == 8192
    assert needs.max_context(24e9) == 8192


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no readable config\.json"):
        measure_needs(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no model"):
        measure_needs(tmp_path)
    for content in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b'\x0d\0\0\0\0\0\0\0{"a": "short"'):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            measure_needs(tmp_path)


def test_the_table_of_chips() -> None:
    # Figures from Apple's technical specifications.
    assert sku("Apple M4 Pro") == next(row for row in SKUS if row.name == "M4 Pro")
    assert {row.name: row.gbps for row in SKUS}["M3 Ultra"] == 819
    assert sku("Apple M9 Giga") is None
    assert len(SKUS) == 15
    assert MATRIX_CONTEXT == 32_768


def test_bandwidth_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([12.3456, 99.0])
    monkeypatch.setattr(machine, "cpu_bandwidth", lambda: next(measured))
    monkeypatch.setattr(machine, "_cuda", lambda: None)
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    first = machine.this_machine(tmp_path)
    assert (first.gbps, first.device, first.origin) == (12.35, "cpu", "measured")
    assert machine.this_machine(tmp_path) == first
    # A file of another format is not believed.
    (tmp_path / machine.FILE).write_text(json.dumps({"format": 2, "gbps": {}}))
    assert machine.this_machine(tmp_path).gbps == 99.0


def test_bandwidth_that_cannot_be_kept_is_still_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "cpu_bandwidth", lambda: 7.0)
    monkeypatch.setattr(machine, "_cuda", lambda: None)
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    (tmp_path / "file").touch()
    assert machine.this_machine(tmp_path / "file" / "cache").gbps == 7.0
    assert "can't be kept" in caplog.text


def test_an_apple_chip_needs_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    for chip, gbps, origin in (("Apple M2 Max", 400, "table"), ("Apple M9", fit.UNKNOWN_CHIP_GBPS, "assumed")):
        monkeypatch.setattr(machine, "_output", lambda *_, chip=chip: chip)
        found = machine.this_machine(tmp_path)
        assert (found.name, found.gbps, found.origin, found.device) == (chip, gbps, origin, "metal")


def test_measured_bandwidth_is_of_this_world() -> None:
    assert 0.1 < machine.cpu_bandwidth(8 << 20) < 5000


@pytest.mark.parametrize(
    ("scheme", "per_element"),
    [
        # Of 64 elements: codes, and a scale and a bias of 2 bytes.
        (KvScheme("affine", bits=8), (64 + 4) / 64),
        (KvScheme("affine", bits=4), (32 + 4) / 64),
        # Of 128 elements of a key and of a value: codes, 4 scales and 4 zeros, 4 scales; 200 bytes in all.
        (KvScheme("turbo"), 200 / 256),
        (KvScheme(), 2),
    ],
)
def test_schemes_take_what_their_arrays_take(scheme: KvScheme, per_element: float) -> None:
    assert needs_of(LLAMA, BF16, scheme).full == pytest.approx(32 * 2 * 8 * 128 * per_element)


def test_schemes_leave_sliding_layers_plain_unless_named() -> None:
    config = LLAMA | {"num_hidden_layers": 4, "sliding_window": 512, "sliding_window_pattern": 2}
    plain, per_layer = needs_of(config, BF16), 2 * 8 * 128
    four = needs_of(config, BF16, KvScheme("affine", bits=4))
    assert (four.full, four.sliding) == (2 * per_layer * 36 / 64, plain.sliding)
    # Layers 0 and 2 slide; the last one isn't named.
    mixed = needs_of(config, BF16, KvScheme("config"), {0: LayerBits(4), 1: LayerBits(8)})
    assert mixed.sliding == per_layer * (36 / 64 + 2)
    assert mixed.full == per_layer * (68 / 64 + 2)
