"""Windows of prompts bounded by the scores that attention holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny_models
from engine_fixtures import Rig, tiny_loaded
from gnomon.config import EngineConfig, KvScheme
from gnomon.engine.api import Request
from gnomon.engine.coding import coding_for
from gnomon.engine.prefill import SPARE
from gnomon.engine.workspace import LIMIT, Workspace, workspace_of
from gnomon.kernels import codes, dispatch, native

QWEN = Workspace(24 * 2)
"""Qwen3.8-27B: 24 query heads in bfloat16."""


def test_the_contracts_numbers() -> None:
    assert QWEN.chunk(2048, 10_398) == 2048
    assert QWEN.chunk(2048, 78_678) == 256
    assert QWEN.chunk(2048, 10**9) == 8
    assert QWEN.chunk(5, 10**9) == 5
    assert Workspace().chunk(2048, 10**9) == 2048


@given(st.integers(1, 4096), st.integers(1, 10**6), st.integers(0, 1000))
def test_chunks_are_the_widest_halvings_that_fit(chunk: int, context: int, pair_bytes: int) -> None:
    space = Workspace(pair_bytes)
    got = space.chunk(chunk, context)
    assert got == chunk or got >= min(8, chunk)
    assert got <= 8 or got * context * pair_bytes <= LIMIT
    if got < chunk and got > 8:
        assert min(chunk, 2 * got + 1) * context * pair_bytes > LIMIT


@given(st.integers(1, 4096), st.integers(1, 10**6), st.integers(1, 1000), st.floats(0.01, 1))
def test_what_is_counted_covers_shorter_prompts(chunk: int, context: int, pair_bytes: int, share: float) -> None:
    """Windows are cut for the prompt, and admission counts its answer too: with that a narrower one."""
    space, prompt = Workspace(pair_bytes, layers=3), max(1, int(context * share))
    scores = space.chunk(chunk, prompt) * prompt * pair_bytes
    assert scores <= space.nbytes(chunk, context)
    assert 2 * scores <= space.beside(chunk, context)


def test_prompts_share_a_window_as_long_as_all_scores_fit() -> None:
    assert QWEN.has_room([(100, 1000), (300, 30_000)])
    assert not QWEN.has_room([(100, 1000), (300, 40_000)])


@pytest.mark.parametrize(
    ("model_type", "shape", "scheme", "want"),
    [
        ("llama", {"head_dim": 64}, None, 0),
        ("llama", {"head_dim": 64}, KvScheme("affine", bits=4), 4 * 4),
        ("llama", {"head_dim": 64}, KvScheme("affine", bits=4, fused=True), 0),
        ("llama", {"head_dim": 64}, KvScheme("turbo"), 0),
        ("qwen3_5", {"head_dim": 256}, None, 4 * 4),
        ("qwen3_5", {"head_dim": 64}, None, 0),
    ],
)
def test_where_scores_are_held(model_type: str, shape: dict[str, Any], scheme: KvScheme | None, want: int) -> None:
    """4 heads in float32."""
    loaded = tiny_loaded(model_type, model=tiny_models.make(model_type, **shape))
    config = tiny_models.config(model_type)
    config.get("text_config", config).update(shape)
    loaded = replace(loaded, config=config)
    coding = None if scheme is None else coding_for(loaded, scheme)
    assert workspace_of(loaded, coding).pair_bytes == want


def test_kernels_that_read_codes_hold_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_loaded("llama", model=tiny_models.make("llama", head_dim=64))
    coding = coding_for(loaded, KvScheme("affine", bits=4))
    assert workspace_of(loaded, coding).pair_bytes
    monkeypatch.setattr(dispatch.thread, "native", True)
    monkeypatch.setattr(codes, "installed", lambda: ["coded_attention"])
    assert not workspace_of(loaded, coding).pair_bytes


@pytest.mark.parametrize(
    ("shape", "coded", "paged", "pair", "copies"),
    [
        ({}, False, False, 0, 2),
        ({}, True, False, 0, 3),
        ({}, False, True, 0, 3),
        ({"head_dim": 256}, False, False, 4 * 2, 2),
    ],
)
def test_what_cuda_holds(
    shape: dict[str, Any], coded: bool, paged: bool, pair: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 heads of keys and as many of values in bfloat16, copied in each of two layers; 4 heads of scores where no kernel takes them."""
    shape = {"head_dim": 64} | shape
    loaded = tiny_loaded("llama", model=tiny_models.make("llama", dtype="bfloat16", **shape))
    loaded = replace(loaded, config={**tiny_models.config("llama"), **shape})
    coding = coding_for(loaded, KvScheme("turbo")) if coded else None
    monkeypatch.setattr("gnomon.engine.workspace.native.is_cuda", lambda: True)
    found = workspace_of(loaded, coding, paged=paged)
    layer = copies * (2 * 2 * shape["head_dim"] * 2)
    assert found == Workspace(pair, layer, 3, 2)
    assert found.beside(2048, 1000) == 1000 * 2 * layer + 1000 * 1000 * 3 + (2048 * 1000 * pair)


def test_a_prompt_runs_in_the_narrower_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes a pair, 200 tokens: 64 queries take 204,800 bytes, 16 take 51,200."""
    monkeypatch.setattr("gnomon.engine.workspace.LIMIT", 60_000)
    loaded = tiny_loaded("llama", model=tiny_models.make("llama", head_dim=64))
    rig = Rig(loaded, EngineConfig(prefill_chunk=64), kv=KvScheme("affine", bits=4))
    rig.submit(Request("long", tuple(range(3, 203)), max_tokens=1))
    rig.finish()
    assert rig.counters.prefill_chunks == -(-199 // 16)


@pytest.mark.parametrize(("is_cuda", "spare", "cleared"), [(False, 0, 3), (True, SPARE, 0), (True, SPARE + 1, 3)])
def test_what_windows_leave_spare(monkeypatch: pytest.MonkeyPatch, is_cuda: bool, spare: int, cleared: int) -> None:
    """A GPU's buffers are kept for the next window as long as they are few."""
    rig, found = Rig(tiny_loaded("llama"), EngineConfig(prefill_chunk=32)), list[str]()
    monkeypatch.setattr(native, "is_cuda", lambda: is_cuda)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: spare)
    monkeypatch.setattr(mx, "clear_cache", lambda: found.append("cleared"))
    prefill = rig.core.runner.new_prefill([list(range(3, 100))])
    while not prefill.finished:
        prefill.advance()
    assert len(found) == cleared
