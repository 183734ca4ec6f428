"""Both sides of the native benchmark on a tiny model: same work, same tokens, counts from what came; synthetic depth; the real worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gemma3_text, llama, mamba2, qwen3_5
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from gnomon.bench.compare import compare, difference
from gnomon.bench.contenders import WorkerContender, worker_command
from gnomon.bench.runner import Plan, Runner
from gnomon.bench.schema import Arm, Sample
from gnomon.bench.sides import GnomonSide, ReferenceSide, RowTimes, Side
from gnomon.bench.synthetic import fill, probed
from gnomon.bench.workload import Cell, Unsupported, Workload

from . import tiny_directory


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def sides(model_directory: Path) -> Iterator[dict[str, Side]]:
    made: dict[str, Side] = {
        "gnomon": GnomonSide(model_directory, {"l1": True}, "f" * 64),
        "mlx-lm": ReferenceSide(model_directory, {}, "f" * 64),
    }
    yield made
    for side in made.values():
        side.close()


@pytest.mark.parametrize(
    "cell",
    [
        "prompt:70",
        pytest.param("prompt:1", marks=pytest.mark.slow),
        "decode:12@0",
        "decode:12@100",
        "decode:8@5000",
        "batch:3x9",
    ],
)
def test_both_sides_do_the_same_work(sides: dict[str, Side], cell: str) -> None:
    parsed = Cell.parse(cell)
    workload = Workload(parsed, 7, 0)
    ours, theirs = (sides[name].measure(workload) for name in ("gnomon", "mlx-lm"))
    assert difference(ours.work, theirs.work) is None
    assert ours.work.output_tokens == parsed.total_output
    assert parsed.primary in ours.metrics
    assert set(ours.metrics) == set(theirs.metrics)
    if parsed.task != "batch":
        # Equal to the bit, so the same tokens; with synthetic depth this shows that both states hold the same made-up tokens.
        assert ours.details["output_sha256"] == theirs.details["output_sha256"]


def test_depth_changes_what_is_generated(sides: dict[str, Side]) -> None:
    """The made-up state is really attended to."""
    found = {
        str(sides[name].measure(Workload(Cell.parse(cell), 7, 0)).details["output_sha256"])
        for name in sides
        for cell in ("decode:12@0", "decode:12@100")
    }
    assert len(found) == 2


def test_seeds_change_the_prompt_and_nothing_is_cached(sides: dict[str, Side]) -> None:
    cell = Cell.parse("prompt:20")
    prompts = {sides["gnomon"].measure(Workload(cell, seed, 0)).work.prompt for seed in (1, 2, 3, 1)}
    assert len(prompts) == 3


@pytest.mark.parametrize("side", ["gnomon", "mlx-lm"])
def test_memory_returns_to_where_it_was(sides: dict[str, Side], side: str) -> None:
    metrics = sides[side].measure(Workload(Cell.parse("decode:8@3000"), 5, 0)).metrics
    state = 3000 * 2 * 2 * 2 * 32 * 2
    assert metrics["peak_active_bytes"] > metrics["active_bytes"] + state
    assert metrics["retained_bytes"] < state / 10


@pytest.mark.parametrize("make", [GnomonSide, ReferenceSide])
def test_unknown_settings_are_refused(make: Callable[..., Side], model_directory: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown .* setting 'colour'"):
        make(model_directory, {"colour": "red"}, None)


def test_settings_of_engine_and_kernels_are_taken_and_told(sides: dict[str, Side]) -> None:
    assert (sides["gnomon"].effective["l1"], sides["gnomon"].effective["batch"]) == (True, 8)


def test_the_reference_takes_kv_settings(model_directory: Path) -> None:
    side = ReferenceSide(model_directory, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}, None)
    stored = side.measure(Workload(Cell.parse("decode:12@64"), 7, 0))
    assert stored.work.output_tokens == 12
    with pytest.raises(Unsupported, match="batches"):
        side.measure(Workload(Cell.parse("batch:2x4"), 7, 0))


def _text(module: Any, **fields: Any) -> Any:
    return module.Model(module.ModelArgs.from_dict({**tiny_directory.CONFIG, **fields}))


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _text(llama),
    "gemma3": lambda: _text(
        gemma3_text, model_type="gemma3_text", sliding_window=24, sliding_window_pattern=2, query_pre_attn_scalar=32,
        rope_global_base_freq=1e4, rope_local_base_freq=1e4,
    ),
    "mamba2": lambda: _text(
        mamba2, model_type="mamba2", num_heads=4, state_size=16, n_groups=1, conv_kernel=4, intermediate_size=64,
        use_bias=False, use_conv_bias=True, time_step_limit=(0.0, 10.0), time_step_rank=4, layer_norm_epsilon=1e-5, head_dim=16,
    ),
    "qwen3_5": lambda: qwen3_5.Model(
        qwen3_5.ModelArgs.from_dict(
            {"model_type": "qwen3_5", "text_config": {
                **tiny_directory.CONFIG, "model_type": "qwen3_5_text", "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
            }}
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("depth", [5, 40, 4100])
def test_synthetic_states_of_all_kinds(name: str, depth: int) -> None:
    """A filled state is as long as asked, wraps its windows, and the model goes on from it with finite logits."""
    model = ARCHITECTURES[name]()
    caches = make_prompt_cache(model)
    fill(caches, probed(model, make_prompt_cache(model)), depth, seed=1)
    for cache in caches:
        if isinstance(cache, KVCache | RotatingKVCache):
            assert cache.offset == depth
        if isinstance(cache, RotatingKVCache):
            assert cache.size() == min(depth, cache.max_size)
    logits = model(mx.array([[1]]), cache=caches)
    assert mx.isfinite(logits).all().item()


def test_rates_of_rows_by_hand() -> None:
    assert RowTimes(list(range(6)), 10.0, 12.5).decode_rate == pytest.approx(2.0)
    assert RowTimes([1], 10.0, 10.0).decode_rate is None


def test_workers_measure_and_an_a_against_a_is_no_win(model_directory: Path) -> None:
    """The whole path: two real worker processes of the same side, and the samples they give."""
    contenders = [
        WorkerContender(
            Arm(name=name, kind="engine", command=tuple(worker_command("gnomon", model_directory, {"batch": 2})))
        )
        for name in "AB"
    ]
    samples: list[Sample] = []
    Runner(contenders, samples.append, Plan(2, seed=1)).run([Cell.parse("decode:8@32")])
    assert {s.status for s in samples} == {"ok"}
    assert contenders[0].arm.effective["batch"] == 2
    found = compare(samples, "decode:8@32", "A", "B", "decode_tokens_per_second", primary=True)
    assert len(found.pairs) == 2
    assert found.outcome == "inconclusive"


def test_a_worker_says_why_it_cant_start(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "gnomon.bench.worker", "gnomon", str(tmp_path / "absent"), "{}")
    samples: list[Sample] = []
    contender = WorkerContender(Arm(name="A", kind="engine", command=command))
    Runner([contender], samples.append, Plan(0)).run([Cell.parse("prompt:4")])
    assert [s.status for s in samples] == ["failed"]
    assert "absent" in (samples[0].reason or "")
