"""Prompts of many tokens: memory stays within what admission predicts, and windows within the room for scores."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny_models
from engine_fixtures import Rig, tiny_loaded
from gnomon.config import EngineConfig, KvScheme
from gnomon.engine.api import Request
from gnomon.engine.budget import Budget
from gnomon.engine.coding import coding_for
from gnomon.engine.embedding import EmbeddingJob, trunk, unit
from gnomon.engine.mailbox import Beside
from gnomon.engine.scoring import ScoringJob
from gnomon.engine.workspace import LIMIT, Workspace, workspace_of
from gnomon.kernels import coded, dispatch, operations
from gnomon.models.fit import Needs
from gnomon.models.kv import element_bytes
from gnomon.models.load import LoadedModel
from kernels.built import load_kernels
from prefix_walk import tokens_of

AFFINE, TURBO = KvScheme("affine", bits=8), KvScheme("turbo")
SCHEMES = {
    "plain": KvScheme(),
    "8": AFFINE,
    "4": replace(AFFINE, bits=4),
    "8 tiled": replace(AFFINE, fused=True),
    "turbo": TURBO,
    "plain in pages": KvScheme(paged=True),
    "8 in pages": replace(AFFINE, paged=True),
    "turbo in pages": replace(TURBO, paged=True),
}
HEADS, KV_HEADS, DIM = 4, 2, 64
LONG = 32_768


@cache
def loaded_of(model_type: str = "qwen3", layers: int = 2) -> LoadedModel:
    """With one layer prompts would never attend: keys and values are all that is computed of them."""
    model = tiny_models.make(model_type, head_dim=DIM, num_hidden_layers=layers, max_position_embeddings=2 * LONG)
    config = {**tiny_models.config(model_type), "head_dim": DIM, "num_attention_heads": HEADS}
    return replace(tiny_loaded(model_type, model=model), config=config, context_length=2 * LONG)


@pytest.fixture
def native() -> Iterator[None]:
    kernels = load_kernels()
    kernels.set_isa("auto")
    kernels.set_threads(2)
    dispatch.install(operations.ALL, kernels)
    dispatch.choose(True)
    yield
    dispatch.choose(False)
    dispatch.uninstall()
    coded.install()


@pytest.mark.slow
def test_a_long_prompt_stays_within_the_predicted_peak() -> None:
    """Scores that are held whole are what takes most. On a CPU they are under the other schemes too, whose kernels elsewhere hold none."""
    taken, predicted = peak("8")
    assert taken <= predicted
    # And it is no prediction for something much larger.
    assert taken > predicted / 3


@pytest.mark.slow
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("scheme", ["plain", "8", "4", "turbo", "8 in pages", "turbo in pages"])
def test_native_kernels_keep_a_long_prompt_within_the_predicted_peak(scheme: str) -> None:
    """They hold neither scores nor what the codes stand for."""
    taken, predicted = peak(scheme)
    assert taken <= predicted
    if scheme != "plain":
        # The scores of one window would be eight times as much.
        assert taken < 2048 * LONG * HEADS * 4 / 8


def peak(scheme: str) -> tuple[int, int]:
    """Bytes that a prompt of `LONG` tokens takes at most, and what admission predicts."""
    kv, loaded = SCHEMES[scheme], loaded_of()
    full = 2 * 2 * KV_HEADS * DIM * element_bytes(kv, 0, True, 4)
    needs = Needs(0, full, 0, 0, 2 * LONG, paged=kv.paged)
    coding = coding_for(loaded, kv)
    budget = Budget(needs, 1 << 40, 0, workspace=workspace_of(loaded, coding))
    rig = Rig(loaded, EngineConfig(prompt_cache=0), budget=budget, kv=kv)
    mx.eval(rig.loaded.model.parameters())
    gc.collect()  # what earlier tests left must not go while this is measured
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    job = rig.submit(Request("long", tokens_of(LONG), max_tokens=4, ignore_eos=True))
    predicted = (1 << 40) - (budget.left([job]) or 0)
    rig.finish()
    taken = mx.get_peak_memory() - before
    assert len(rig.ids("long")) == 4
    return taken, predicted


def test_admission_counts_what_scores_take() -> None:
    needs = Needs(0, 1, 0, 0, None)
    plain, whole = Budget(needs, 1 << 40, 0), Budget(needs, 1 << 40, 0, workspace=Workspace(16))
    job = Rig(loaded_of()).submit(Request("r", tokens_of(1000), max_tokens=24))
    assert (plain.left([job]) or 0) - (whole.left([job]) or 0) == 2048 * 1024 * 16 // 4
    # A prompt of one token less has windows of 2,048 that fill the limit.
    assert whole.workspace.nbytes(2048, LONG + 1) == 2048 * LONG * 16 == LIMIT
    copies = Budget(needs, 1 << 40, 0, workspace=Workspace(0, 512, 3, 2))
    assert (plain.left([job]) or 0) - (copies.left([job]) or 0) == 1024 * (2 * 512 + 1024 * 3)


@pytest.mark.parametrize(
    "scheme", [name if name in ("8", "8 in pages") else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
)
def test_vectors_of_long_texts_under_every_scheme(scheme: str) -> None:
    """The vector is that of the trunk over the same windows, and these keep within the room for scores."""
    kv, text, short = SCHEMES[scheme], tokens_of(700), tokens_of(40)
    loaded = loaded_of()
    rig = Rig(loaded, EngineConfig(prefill_chunk=256), kv=kv)
    # As narrow as a text of a hundred thousand tokens would have it.
    pair = LIMIT // (700 * 64)
    rig.core.runner.workspace = Workspace(pair if rig.core.runner.workspace.pair_bytes else 0)
    width = 64 if rig.core.runner.workspace.pair_bytes else 256
    job = EmbeddingJob([text, short])
    rig.mailbox.post(Beside(job))
    seen = windows_of(rig, job)
    assert max(seen) == width
    assert len(seen) == math.ceil(700 / width) + 1
    for prompt, vector in zip((text, short), job.future.result(), strict=True):
        state, made = Rig(loaded, kv=replace(kv, paged=False)).core.runner.new_state(), mx.array(0)
        for start in range(0, len(prompt), width):
            window = prompt[start : start + width]
            with dispatch.step():
                state.begin(len(window))
                made = trunk(loaded)(mx.array([window]), cache=state.caches)
                state.commit()
            mx.eval(made, state.arrays())
        assert vector == unit(np.array(made[0, -1]))
    if rig.core.runner.pages is not None:
        assert rig.core.runner.pages.pages() == []


def test_scores_of_a_long_text_keep_within_the_room_for_scores() -> None:
    rig = Rig(loaded_of(), EngineConfig(prefill_chunk=256), kv=AFFINE)
    rig.core.runner.workspace = Workspace(LIMIT // (500 * 64))
    job = ScoringJob([tokens_of(500)], 0, rig.core.tokenizer)
    rig.mailbox.post(Beside(job))
    assert max(windows_of(rig, job)) == 64
    assert len(job.future.result()[0]) == 499


def windows_of(rig: Rig, job: Any) -> list[int]:
    """Widths of the windows that a side job runs in."""
    seen, forward = list[int](), job.forward

    def watched(runner: Any, window: mx.array, state: Any) -> mx.array:
        seen.append(window.shape[1])
        return forward(runner, window, state)

    job.forward = watched
    for _ in range(200):
        if job.future.done():
            return seen
        rig.turn()
    raise AssertionError("the job did not end")
