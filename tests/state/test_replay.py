"""Recurrent layers forget rejected tokens: their mixers run again on what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import every_type
import tiny_models
from batch_walk import new_state_of
from gnomon.state.batch_state import BatchState
from gnomon.state.recurrent import RecurrentLayer
from gnomon.state.replay import watch

TYPES = ("qwen3_5", "mamba2", "falcon_h1", "mamba", "bailing_hybrid")
WIDTH = 5
PROMPTS = (7, 33, 18)


def _model(model_type: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setitem(tiny_models.CONFIGS, model_type, every_type.config(model_type))
    return tiny_models.make(model_type)


def _texts(length: int = 60) -> list[list[int]]:
    return np.random.default_rng(1).integers(3, tiny_models.VOCAB_SIZE, (len(PROMPTS), length)).tolist()


def _forward(
    model: nn.Module, state: BatchState, window: list[list[int]], counts: Sequence[int] | None = None
) -> mx.array:
    state.begin(len(window[0]), counts)
    logits = model(mx.array(window), cache=state.caches)
    state.commit()
    mx.eval(logits, state.arrays())
    return logits


def _batch(model: nn.Module, rows: int) -> BatchState:
    new, texts = new_state_of(model), _texts()
    states: list[BatchState] = []
    for row in range(rows):
        states.append(new())
        _forward(model, states[-1], [texts[row][: PROMPTS[row]]])
    for other in states[1:]:
        states[0].join(other)
    return states[0]


@pytest.mark.parametrize("back", [(5, 2, 0), (0, 4, 4), (1, 1, 5), (5, 5, 5), (3, 0, 0)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("model_type", TYPES)
def test_rejected_tokens_leave_no_trace(
    model_type: str, rows: int, back: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = _model(model_type, monkeypatch), _texts()
    state, back = _batch(model, rows), back[:rows]
    window = [
        texts[b][PROMPTS[b] : PROMPTS[b] + WIDTH - back[b]] + [9] * back[b] for b in range(rows)
    ]  # wrong tokens where they will be taken back
    _forward(model, state, window)
    layers = [layer for layer in state.layers if isinstance(layer, RecurrentLayer)]
    before = [[np.array(x) for x in layer.arrays()] for layer in layers]
    state.rollback(back)
    mx.eval(state.arrays())
    for layer, arrays in zip(layers, before, strict=True):
        for array, old in zip(layer.arrays(), arrays, strict=True):
            for b in range(rows):
                assert back[b] or np.array_equal(np.array(array[b]), old[b]), "a row that keeps everything was touched"
    lengths = [PROMPTS[b] + WIDTH - back[b] for b in range(rows)]
    assert state.lengths == lengths
    logits = _forward(model, state, [[texts[b][lengths[b]]] for b in range(rows)])
    for b in range(rows):
        expected = model(mx.array([texts[b][: lengths[b] + 1]]), cache=make_prompt_cache(model))[0, -1]
        assert mx.abs(logits[b, -1] - expected).max() <= 1e-5 * mx.abs(expected).max()


def test_ragged_windows_keep_ragged_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = _model("qwen3_5", monkeypatch), _texts()
    state = _batch(model, 3)
    counts, back = [5, 3, 1], [1, 2, 1]
    window = [
        texts[b][PROMPTS[b] : PROMPTS[b] + counts[b] - back[b]] + [9] * (WIDTH - counts[b] + back[b]) for b in range(3)
    ]
    _forward(model, state, window, counts)
    state.rollback(back)
    logits = _forward(model, state, [[texts[b][state.lengths[b]]] for b in range(3)])
    for b in range(3):
        expected = model(mx.array([texts[b][: state.lengths[b]]]), cache=make_prompt_cache(model))[0, -1]
        assert mx.abs(logits[b, -1] - expected).max() <= 1e-5 * mx.abs(expected).max()


def test_watching_changes_nothing_but_what_recording_layers_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("qwen3_5", monkeypatch)
    tokens = mx.array([[5, 9, 200]])
    before = model(tokens, cache=make_prompt_cache(model))
    names = [name for name, _ in tree_flatten(model.parameters())]
    classes = [type(module) for module in model.modules()]
    watch(model)
    once = [type(module) for module in model.modules()]
    watch(model)
    assert [type(module) for module in model.modules()] == once
    assert all(issubclass(new, old) and new.__name__ == old.__name__ for new, old in zip(once, classes, strict=True))
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    assert mx.array_equal(model(tokens, cache=make_prompt_cache(model)), before)


@pytest.mark.parametrize(("width", "noted"), [(1, 0), (2, 1), (17, 1), (18, 0)])
def test_inputs_are_kept_only_while_they_may_be_needed(width: int, noted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for single steps, which need none, and not for prompts, where they would be large."""
    model = _model("mamba2", monkeypatch)
    state = new_state_of(model)()
    _forward(model, state, [[5] * width])
    calls: list[Any] = [layer.calls for layer in state.layers if isinstance(layer, RecurrentLayer)]
    assert [len(c) for c in calls] == [noted] * len(calls)
