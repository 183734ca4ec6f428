"""Inventories, costs and rooflines: against safetensors, mlx and hand-computed cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from safetensors import safe_open

from gnomon.bench.cost import Cost, CostModel
from gnomon.bench.inventory import Inventory, Weight, inventory, layer_of, read_header, role_of
from gnomon.bench.model import cost_of, describe
from gnomon.bench.roofline import Roofline, roofline
from gnomon.bench.store import Store
from gnomon.bench.workload import Cell

from . import records, tiny_directory


@pytest.fixture(scope="module", params=[False, True], ids=["f16", "4bit"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory.write(tmp_path_factory.mktemp("m") / "tiny", quantized=request.param)


def test_headers_as_safetensors_reads_them(directory: Path) -> None:
    ours = {t.name: (t.dtype, t.shape) for t in read_header(directory / "model.safetensors")}
    with safe_open(directory / "model.safetensors", "numpy") as file:
        theirs = {}
        for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
            piece = file.get_slice(name)
            theirs[name] = (piece.get_dtype(), tuple(piece.get_shape()))
    assert ours == theirs


def test_totals_as_mlx_counts_them(directory: Path) -> None:
    model, _ = load_model(directory)
    found = inventory(directory)
    parameters = tree_flatten(model.parameters())
    assert found.num_tensors == len(parameters)
    assert found.size == sum(value.nbytes for _, value in parameters)
    # 2 layers of q (128x64), k, v (64x64), o (64x128), gate, up, down (96x64), two norms; embedding, head, last norm.
    layer = 128 * 64 + 2 * 64 * 64 + 64 * 128 + 3 * 96 * 64 + 2 * 64
    assert found.parameters == 2 * layer + 2 * 258 * 64 + 64
    roles = {w.role for w in found.weights}
    assert roles == {"embedding", "head", "attention", "mlp", "norm"}


def test_bits_count_scales(directory: Path) -> None:
    found = inventory(directory)
    packed = any(w.group for w in found.weights)
    # 4 bits and, per group of 32, a 16-bit scale and bias each.
    assert found.matrix_bpw == pytest.approx(4 + 2 * 16 / 32 if packed else 16)
    q = next(g for g in found.groups() if g.shape == (128, 64))
    assert (q.bits, q.group, q.count) == ((4, 32, 2) if packed else (16, 0, 2))


@pytest.mark.parametrize(
    ("name", "role", "layer"),
    [
        ("model.embed_tokens", "embedding", None), ("lm_head", "head", None), ("model.norm", "norm", None),
        ("model.layers.12.self_attn.q_proj", "attention", 12), ("model.layers.3.mlp.down_proj", "mlp", 3),
        ("model.layers.3.mlp.switch_mlp.gate_proj", "expert", 3), ("model.layers.3.mlp.gate", "router", 3),
        ("model.layers.3.mlp.shared_expert.up_proj", "mlp", 3), ("model.layers.0.linear_attn.in_proj_qkv", "recurrent", 0),
        ("backbone.layers.0.mixer.conv1d", "recurrent", 0), ("model.layers.1.self_attn.kv_a_proj_with_mqa", "attention", 1),
        ("model.layers.1.self_attn.q_norm", "norm", 1), ("vision.patch", "other", None),
    ],
)  # fmt: skip
def test_roles(name: str, role: str, layer: int | None) -> None:
    assert (role_of(name), layer_of(name)) == (role, layer)


def _shard(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "no JSON"),
        (b"[]", b"", "not an object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "malformed entry"),
        ({"a": {"dtype": "F12", "shape": [2], "data_offsets": [0, 8]}}, bytes(8), "unknown dtype 'F12'"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8), "its shape needs 12"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4), "of 4"),
    ],
)
def test_wrong_headers_are_named(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    _shard(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as raised:
        read_header(tmp_path / "x.safetensors")
    assert "x.safetensors" in str(raised.value)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="a header of 1099511627776 bytes in a file of 10"):
        read_header(tmp_path / "x.safetensors")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    entry = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    for name in ("x", "y"):
        _shard(tmp_path / f"{name}.safetensors", entry, b"1")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"'a' is in x.safetensors and in y.safetensors"):
        inventory(tmp_path)


def test_packed_weights_that_contradict_the_config(tmp_path: Path) -> None:
    tiny_directory.write(tmp_path, quantized=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"]["bits"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="words of 8 bits are 32 wide, 2 scales of groups of 32 are 64"):
        inventory(tmp_path)


def test_per_module_bits(tmp_path: Path) -> None:
    shapes = {
        "a.weight": ("U32", [2, 8], 64),
        "a.scales": ("F16", [2, 1], 4),
        "b.weight": ("U32", [2, 16], 128),
        "b.scales": ("F16", [2, 1], 4),
    }
    header, at = {}, 0
    for name, (dtype, shape, size) in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    _shard(tmp_path / "m.safetensors", header, bytes(at))
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization": {"bits": 4, "group_size": 64, "b": {"bits": 8, "group_size": 64}}})
    )
    found = {w.name: (w.bits, w.shape, w.size) for w in inventory(tmp_path).weights}
    assert found == {"a": (4, (2, 64), 68), "b": (8, (2, 64), 132)}


# Costs, by hand: hidden 4, one layer with q 8x4, k and v 4x4, o 4x8, one MLP matrix 6x4, a head 10x4, an embedding 10x4; 16 bits.


def _weight(name: str, *shape: int) -> Weight:
    size = 2
    for n in shape:
        size *= n
    return Weight(name, role_of(name), layer_of(name), shape, 16, 0, "F16", size)


def _by_hand(config: dict[str, Any], *more: Weight, head: bool = True) -> CostModel:
    layer = "model.layers.0"
    weights = [
        _weight("model.embed_tokens", 10, 4), _weight(f"{layer}.self_attn.q_proj", 8, 4), _weight(f"{layer}.self_attn.k_proj", 4, 4),
        _weight(f"{layer}.self_attn.v_proj", 4, 4), _weight(f"{layer}.self_attn.o_proj", 4, 8), *more,
    ]  # fmt: skip
    if head:
        weights.append(_weight("lm_head", 10, 4))
    return CostModel(Inventory(Path("x"), config, tuple(weights), len(weights), sum(w.size for w in weights)))


MLP = _weight("model.layers.0.mlp.up_proj", 6, 4)


def test_decode_cost_by_hand() -> None:
    cost = _by_hand({"num_attention_heads": 2}, MLP).decode(100)
    matrices = 8 * 4 + 4 * 4 + 4 * 4 + 4 * 8 + 6 * 4
    assert cost.weight_bytes == 2 * (matrices + 10 * 4) + 2 * 4
    assert cost.state_bytes == (4 + 4) * 101 * 2
    assert cost.operations == 2 * (matrices + 40) + 4 * 8 * 100


def test_a_tied_head_reads_the_embedding() -> None:
    tied = _by_hand({"num_attention_heads": 2}, MLP, head=False).decode(0)
    own = _by_hand({"num_attention_heads": 2}, MLP).decode(0)
    assert (tied.weight_bytes, tied.operations) == (own.weight_bytes, own.operations)


def test_rows_share_the_weights_but_not_the_state() -> None:
    costs = _by_hand({"num_attention_heads": 2}, MLP)
    one, eight = costs.decode(64), costs.decode(64, 8)
    assert eight.state_bytes == 8 * one.state_bytes
    assert eight.operations == 8 * one.operations
    assert eight.weight_bytes == one.weight_bytes + 7 * 2 * 4


def test_windows_bound_the_state() -> None:
    config = {"num_attention_heads": 2, "sliding_window": 16, "layer_types": ["sliding_attention"]}
    assert _by_hand(config, MLP).decode(1000).state_bytes == (4 + 4) * 16 * 2
    pattern = {"num_attention_heads": 2, "sliding_window": 16, "sliding_window_pattern": 1}
    assert _by_hand(pattern, MLP).decode(1000).state_bytes == (4 + 4) * 1001 * 2


def test_experts_are_read_as_far_as_used() -> None:
    config = {"num_attention_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    experts = _weight("model.layers.0.mlp.switch_mlp.up_proj", 8, 6, 4)
    costs, without = _by_hand(config, experts), _by_hand(config)
    assert costs.decode(0).weight_bytes - without.decode(0).weight_bytes == experts.size / 4
    assert costs.decode(0).operations - without.decode(0).operations == 2 * experts.parameters / 4
    # Three tokens may need six of the eight; five need all.
    assert costs.decode(0, 3).weight_bytes - without.decode(0, 3).weight_bytes == experts.size * 6 / 8
    assert costs.decode(0, 5).weight_bytes - without.decode(0, 5).weight_bytes == experts.size


def test_prefill_reads_the_weights_per_chunk_and_the_head_once() -> None:
    costs = _by_hand({"num_attention_heads": 2}, MLP)
    # 101 tokens in chunks of 50: two chunks without the head, and the last token with it.
    cost = costs.prefill(101, 50)
    assert cost.tokens == 101
    body = 2 * (8 * 4 + 4 * 4 + 4 * 4 + 4 * 8 + 6 * 4)
    assert cost.weight_bytes == 3 * body + 2 * 10 * 4 + 101 * 2 * 4


LIMITS = Roofline("d", "m1", "0", 100.0, 1000.0, "float32", True, "2026-01-01T00:00")


def test_roofline_takes_the_harder_limit() -> None:
    reading, computing = Cost(1, 150.0, 50.0, 100.0), Cost(1, 10.0, 0.0, 4000.0)
    assert (LIMITS.seconds(reading), LIMITS.bound(reading)) == (2.0, "bandwidth")
    assert (LIMITS.seconds(computing), LIMITS.bound(computing)) == (4.0, "arithmetic")
    assert LIMITS.fraction(reading, 8.0) == 0.25
    with pytest.raises(ValueError, match="positive"):
        LIMITS.fraction(reading, 0.0)


def test_the_roofline_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real measurement in a child; the second call must not start one."""
    cache = tmp_path / "roofline.json"
    found = roofline(cache)
    # Any machine that runs this reads between 0.1 GB/s and 100 TB/s.
    assert 1e8 < found.bytes_per_second < 1e14
    assert 1e8 < found.operations_per_second < 1e17
    monkeypatch.setattr("subprocess.run", lambda *a, **k: pytest.fail("measured again"))
    assert roofline(cache) == found
    stored = json.loads(cache.read_text())
    stored["roofline"]["mlx"] = "0.1"
    cache.write_text(json.dumps(stored))
    with pytest.raises(pytest.fail.Exception):
        roofline(cache)


def test_the_share_of_the_limit_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_directory.write(tmp_path / "tiny")
    from gnomon.bench.provenance import model_content

    sha, _ = model_content(path)
    cell = Cell.parse("decode:32@0")
    costs = CostModel(inventory(path))
    expected = cost_of(costs, cell)
    assert expected is not None
    cost, metric = expected
    monkeypatch.setattr("gnomon.bench.model.roofline", lambda cache, remeasure: LIMITS)
    rate = 0.5 / LIMITS.seconds(cost)
    samples = [records.sample(n, n, "A", rate) for n in range(5)]
    saved = Store(tmp_path).save(records.run(samples, provenance=records.provenance(model_sha256=sha)))
    text = describe(path, tmp_path / "r", 10, 10, saved, False)
    assert metric == records.RATE
    assert "| decode:32@0 | A |" in text
    assert "| 50.0% |" in text
    other = Store(tmp_path).save(records.run(samples, provenance=records.provenance(model_sha256="0" * 64)))
    with pytest.raises(ValueError, match="another model"):
        describe(path, tmp_path / "r", 10, 10, other, False)
    foreign = Store(tmp_path).save(records.run(samples, provenance=records.provenance(machine="m2")))
    with pytest.raises(ValueError, match="another machine"):
        describe(path, tmp_path / "r", 10, 10, foreign, False)


def test_bf16_models_load_too(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "m.safetensors"), {"w.weight": mx.zeros((3, 5), dtype=mx.bfloat16)})
    (tmp_path / "config.json").write_text("{}")
    (weight,) = inventory(tmp_path).weights
    assert (weight.bits, weight.dtype, weight.size) == (16, "BF16", 30)
