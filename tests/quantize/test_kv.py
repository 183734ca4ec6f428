"""Bits of keys and values per layer: measured on a tiny model, allocated against exhaustive search."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from engine_fixtures import tiny_loaded
from gnomon.cli import main
from gnomon.kernels import dispatch
from gnomon.quantize.kv import PLAIN, Sensitivity, allocate, divergence, logits, measure, sample


def layer_of(number: int, four: float, eight: float) -> Sensitivity:
    return Sensitivity(number, {4: 1.0, 8: 2.0, PLAIN: 4.0}, {4: four, 8: eight, PLAIN: 0.0})


def test_divergence_by_hand() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    want = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert float(divergence(mx.array(np.log(p)), mx.array(np.log(q) + 3)).item()) == pytest.approx(want, abs=1e-6)


def test_the_layer_that_suffers_most_gets_the_bits() -> None:
    layers = [layer_of(0, 0.9, 0.1), layer_of(1, 0.2, 0.1), layer_of(2, 0.3, 0.1)]
    assert allocate(layers, 3.5) == {0: 4, 1: 4, 2: 4}
    assert allocate(layers, 4) == {0: 8, 1: 4, 2: 4}
    assert allocate(layers, 5) == {0: 8, 1: 4, 2: 8}
    assert allocate(layers, 12) == {0: PLAIN, 1: PLAIN, 2: PLAIN}
    with pytest.raises(ValueError, match="the budget is 2 bytes per token, but the fewest bits of all layers take 3"):
        allocate(layers, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=5), st.floats(0, 20))
def test_an_allocation_keeps_the_budget_and_is_no_worse_than_uniform(
    pairs: list[tuple[float, float]], extra: float
) -> None:
    layers = [layer_of(i, four, four * share) for i, (four, share) in enumerate(pairs)]
    budget = len(layers) + extra
    chosen = allocate(layers, budget)

    def cost(bits: tuple[int, ...]) -> float:
        return sum(one.num_bytes[b] for one, b in zip(layers, bits, strict=True))

    def loss(bits: tuple[int, ...]) -> float:
        return sum(one.kl[b] for one, b in zip(layers, bits, strict=True))

    mine = tuple(chosen[i] for i in range(len(layers)))
    assert cost(mine) <= budget
    # Greedy by gain per byte misses the optimum by one step at most.
    best = min(loss(bits) for bits in itertools.product((4, 8, PLAIN), repeat=len(layers)) if cost(bits) <= budget)
    assert loss(mine) <= best + max(one.kl[4] for one in layers)
    assert loss(mine) <= loss((4,) * len(layers))


def test_a_tiny_models_layers_are_measured() -> None:
    model = tiny_models.make("llama", head_dim=64, num_hidden_layers=3)
    # The middle layer's attention has no say, so its bits can't matter.
    model.layers[1].self_attn.o_proj.weight = mx.zeros_like(model.layers[1].self_attn.o_proj.weight)
    loaded = tiny_loaded("llama", model=model)
    rows = sample(loaded, 2, 24)
    assert [len(row) for row in rows] == [24, 24]
    assert rows[0] != rows[1]
    measured = list(measure(loaded, rows))
    assert [one.layer for one in measured] == [0, 1, 2]
    # 2 heads of 64, float32 scales and biases.
    assert measured[0].num_bytes == {PLAIN: 1024, 8: 2 * 2 * 72, 4: 2 * 2 * 40}
    assert measured[1].kl == {PLAIN: 0, 8: 0, 4: 0}
    for one in (measured[0], measured[2]):
        assert 0 < one.kl[8] < one.kl[4]
    assert allocate(measured, 3 * 160 + 128)[1] == 4
    plain = logits(loaded, rows)
    assert plain[0].shape == (1, 23, tiny_models.VOCAB_SIZE)


def test_widths_that_cant_be_coded_are_left_out() -> None:
    assert not list(measure(tiny_loaded("llama"), [[3, 4, 5]]))
    with pytest.raises(ValueError, match="2 tokens"):
        list(measure(tiny_loaded("llama"), [[3]]))


def test_the_verb_writes_what_the_server_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from gnomon.models.kv import LayerBits, read_kv_config

    shape = tiny_models.CONFIGS["llama"] | {"head_dim": 64, "num_hidden_layers": 2}
    monkeypatch.setitem(tiny_models.CONFIGS, "llama", shape)
    directory = tiny_models.save("llama", tmp_path / "model")
    arguments = ["kv-config", str(directory), "--rows", "1", "--length", "16", "--bytes-per-token", "448"]
    assert main.main(arguments) == 0
    assert "budget 448" in capsys.readouterr().out
    entries = json.loads((directory / "kv_config.json").read_text())
    assert sorted(entry["bits"] for entry in entries) == [4, 8]
    assert read_kv_config(directory) == {
        entry["layer_idx"]: LayerBits(entry["bits"], entry["group_size"]) for entry in entries
    }
    assert main.main(arguments) == 1
    assert "is there already: --force" in capsys.readouterr().err
    assert main.main([*arguments[:-1], "10", "--force"]) == 2
    assert "the fewest bits of all layers take 320" in capsys.readouterr().err


def test_what_else_a_kv_config_may_say_is_refused(tmp_path: Path) -> None:
    from gnomon.models.kv import read_kv_config

    file = tmp_path / "kv_config.json"
    with pytest.raises(ValueError, match="gnomon kv-config writes one"):
        read_kv_config(tmp_path)
    for text, why in (
        ("{}", "holds no JSON list"),
        ("[3]", "entry 0 is no object"),
        ('[{"layer_idx": -1, "bits": 4}]', "layer_idx -1"),
        ('[{"layer_idx": 1, "bits": 4}, {"layer_idx": 1, "bits": 8}]', "entry 1 has layer_idx 1"),
        ('[{"layer_idx": 1, "bits": 7}]', "asks for 7 bits in groups of 64"),
        ("[", "can't be read"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_kv_config(tmp_path)
    file.write_text('[{"layer_idx": 1, "bits": 0}]')
    assert read_kv_config(tmp_path) == {}


def test_the_model_runs_in_steps_so_that_native_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, inside = tiny_loaded("llama"), list[bool]()
    kind = type(loaded.model)
    plain = kind.__call__

    def call(self: object, *args: object, **named: object) -> mx.array:
        inside.append(dispatch.in_step())
        return plain(self, *args, **named)

    monkeypatch.setattr(kind, "__call__", call)
    logits(loaded, sample(loaded, 1, 4))
    assert inside == [True] * 5
    assert not dispatch.in_step()
