"""Models split over two processes give what mlx-lm gives in one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from test_two_processes import free_ports

import tiny_models

TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "ministral3", "deepseek_v3", "gemma3", "mamba2")
UNSPLIT = {"gemma3", "mamba2"}


@pytest.mark.slow
def test_models_with_a_shard_of_mlx_lm_s(tmp_path: Path) -> None:
    types = [name for name in TYPES if name in tiny_models.CONFIGS]
    paths = [tiny_models.save(name, tmp_path / name) for name in types]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([f"127.0.0.1:{port}" for port in free_ports(2)]))
    worker = [
        sys.executable,
        str(Path(__file__).parent / "split_worker.py"),
        str(tmp_path / "made.npz"),
        *map(str, paths),
    ]
    processes = [
        subprocess.Popen(
            worker,
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[0][0] == said[1][0]
    lines = dict(line.split(maxsplit=1) for line in said[0][0].splitlines())
    made = mx.load(str(tmp_path / "made.npz"))
    assert isinstance(made, dict)
    assert set(made) == set(types) - UNSPLIT
    for name in UNSPLIT & set(types):
        assert "can't be split over processes" in lines[f"{name}:"]
    for name, logits in made.items():
        model, _ = load_model(tmp_path / name)
        cache = make_prompt_cache(model)
        whole = [model(mx.array([[5, 6, 7, 8, 9, 10, 11]]), cache=cache), model(mx.array([[12]]), cache=cache)]
        expected = mx.concatenate(whole, axis=1)
        # Sums over processes have another order, and nothing else differs.
        assert mx.allclose(logits, expected, rtol=1e-4, atol=1e-4).item(), name
        held = int(lines[name].removeprefix("holds "))
        assert held < sum(value.nbytes for _, value in tree_flatten(model.parameters()))
