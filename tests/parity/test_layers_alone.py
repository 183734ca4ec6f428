"""One row alone is mlx-lm to the bit: logits and state, through chunk borders, wraps, roll-backs, sharing and snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from batch_walk import new_state_of
from gnomon.state.batch_state import BatchState
from tiny_models import VOCAB_SIZE, make

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
WINDOW_TOLERANCE = 1e-5 if ON_CPU else 2e-2
"""On CUDA float32 products run in TF32, and windows of several tokens take other kernels than single steps."""
TYPES = ("llama", "qwen3", "qwen3_5", "gemma3", "gemma4", "qwen3_moe", "deepseek_v3", "gpt_oss", "mamba2")
EXTRAS = ("gemma2", "glm_moe_dsa", "falcon_h1", "mixtral", "mamba")

SLIDING = ("gemma3", "gpt_oss")

SCHEDULES = {
    "ends on a chunk": [64, 64, *[1] * 16],
    "windows between steps": [64, 3, 1, 1, 5, 1, 2, 1, 17, 64, 1, 1],
}
"""Widths of the forwards; sliding windows are 40 wide and caches grow by 256."""

WRAPPING_SCHEDULES = {
    "wraps in single steps": [7, *[1] * 50],
    "wraps twice behind a chunk": [64, 3, *[1] * 82],
    "from one token": [1] * 45,
    "past 256": [64, 64, 64, 60, *[1] * 8],
}


@cache
def _model(model_type: str, dtype: str) -> nn.Module:
    return make(model_type, dtype)


def _text(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, VOCAB_SIZE, length).tolist()


def _same(a: mx.array | None, b: mx.array | None) -> bool:
    """Equal to the bit, or both absent."""
    if a is None or b is None:
        return a is b
    kind = {2: mx.uint16, 4: mx.uint32}[a.itemsize]
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a.view(kind), b.view(kind)))


def _theirs(caches: Sequence[Any]) -> Iterator[dict[str, mx.array]]:
    """State of mlx-lm's caches, free slots left out, as snapshots name it."""
    for cache_ in caches:
        if isinstance(cache_, CacheList):
            yield from _theirs(cache_.caches)
        elif isinstance(cache_, KVCache):
            yield {"keys": cache_.keys[..., : cache_.offset, :], "values": cache_.values[..., : cache_.offset, :]}
        elif isinstance(cache_, RotatingKVCache):
            used = min(cache_.offset, cache_.keys.shape[2])
            yield {"keys": cache_.keys[..., :used, :], "values": cache_.values[..., :used, :]}
        else:
            yield {str(i): x for i, x in enumerate(cache_.cache) if x is not None}


def _assert_same_state(state: BatchState, caches: Sequence[Any]) -> None:
    mine = state.snapshot(0).layers
    theirs = list(_theirs(caches))
    assert len(mine) == len(theirs)
    for layer, (ours, their) in enumerate(zip(mine, theirs, strict=True)):
        assert ours.arrays.keys() == their.keys()
        for name, array in their.items():
            assert _same(ours.arrays[name], array), f"layer {layer}: {name} differ"


def _advance(model: nn.Module, state: BatchState, tokens: list[int]) -> mx.array:
    state.begin(len(tokens))
    logits = model(mx.array([tokens]), cache=state.caches)
    state.commit()
    mx.eval(logits, state.arrays())
    state.check_integrity()
    return logits


def _advance_theirs(model: nn.Module, caches: list[Any], tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=caches)
    mx.eval(logits, [cache_.state for cache_ in caches])
    return logits


def _follow(model: nn.Module, state: BatchState, caches: list[Any], text: list[int], schedule: Sequence[int]) -> None:
    start = 0
    for width in schedule:
        tokens = text[start : start + width]
        assert _same(_advance(model, state, tokens), _advance_theirs(model, caches, tokens)), (
            f"logits differ at {start}"
        )
        start += width


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", TYPES + EXTRAS)
def test_logits_and_state_are_mlx_lms(model_type: str, dtype: str, schedule: str) -> None:
    model = _model(model_type, dtype)
    state, caches = new_state_of(model)(), make_prompt_cache(model)
    widths = SCHEDULES[schedule]
    _follow(model, state, caches, _text(sum(widths)), widths)
    _assert_same_state(state, caches)


@pytest.mark.parametrize("schedule", WRAPPING_SCHEDULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", SLIDING)
def test_logits_and_state_are_mlx_lms_through_wraps(model_type: str, dtype: str, schedule: str) -> None:
    model = _model(model_type, dtype)
    state, caches = new_state_of(model)(), make_prompt_cache(model)
    widths = WRAPPING_SCHEDULES[schedule]
    _follow(model, state, caches, _text(sum(widths)), widths)
    _assert_same_state(state, caches)


@pytest.mark.parametrize("model_type", TYPES + EXTRAS)
@pytest.mark.parametrize("prompt", [[9], [64, 64, 5]])
def test_a_row_taken_back_whole_continues_as_if_never_advanced(model_type: str, prompt: list[int]) -> None:
    """Windows of rejected tokens, at lengths below and above the sliding window, leave no trace in the bits."""
    model = _model(model_type, "float32")
    state, caches = new_state_of(model)(), make_prompt_cache(model)
    text = _text(sum(prompt) + 20)
    _follow(model, state, caches, text, prompt)
    for width in (1, 4, 16):
        _advance(model, state, [11] * width)
        state.rollback([width])
        state.check_integrity()
    _follow(model, state, caches, text[sum(prompt) :], [1] * 3 + [5, 1])


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("prompt", [[9], [64, 64, 5]])
def test_a_kept_prefix_of_a_window_is_the_same_window_without_the_rest(model_type: str, prompt: list[int]) -> None:
    model = _model(model_type, "float32")
    state, caches = new_state_of(model)(), make_prompt_cache(model)
    text = _text(sum(prompt) + 20)
    _follow(model, state, caches, text, prompt)
    start = sum(prompt)
    _advance(model, state, [*text[start : start + 3], 11, 12])
    state.rollback([2])
    _advance_theirs(model, caches, text[start : start + 3])
    mine = _advance(model, state, text[start + 3 : start + 4])
    theirs = _advance_theirs(model, caches, text[start + 3 : start + 4])
    # Attention over a window of another width may round differently; what is kept may not depend on the rejected tokens beyond that.
    assert mx.allclose(mine, theirs, rtol=WINDOW_TOLERANCE, atol=WINDOW_TOLERANCE)


@pytest.mark.skipif(not ON_CPU, reason="attention on CUDA rounds by how large the buffer behind a window is")
@pytest.mark.parametrize("model_type", TYPES + EXTRAS)
@pytest.mark.parametrize("prompt", [[30], [64, 3, *[1] * 10]])
def test_a_row_that_shared_and_is_alone_again_continues_to_the_bit(model_type: str, prompt: list[int]) -> None:
    """Moving into the shared layout and out of it keeps a row's bits, and rotating caches come back in mlx-lm's slots."""
    model = _model(model_type, "float32")
    new = new_state_of(model)
    state, caches = new(), make_prompt_cache(model)
    text = _text(sum(prompt) + 20)
    _follow(model, state, caches, text, prompt)
    for length in (5, 70, 20):
        guest = new()
        _advance(model, guest, [13] * length)
        state.join(guest)
        state.check_integrity()
    state.keep([3, 0, 2])
    state.keep([1])
    state.check_integrity()
    _follow(model, state, caches, text[sum(prompt) :], [1] * 4 + [5, 1])


@pytest.mark.parametrize("model_type", TYPES + EXTRAS)
@pytest.mark.parametrize("prompt", [[30], [64, 64], [64, 3, *[1] * 10]])
def test_a_restored_row_continues_to_the_bit(model_type: str, prompt: list[int]) -> None:
    model = _model(model_type, "float32")
    state, caches = new_state_of(model)(), make_prompt_cache(model)
    text = _text(sum(prompt) + 20)
    _follow(model, state, caches, text, prompt)
    snapshot = state.snapshot(0)
    mx.eval(snapshot.arrays())
    before = [np.array(x) for x in snapshot.arrays()]
    for _ in range(2):  # restoring leaves the snapshot as it was
        restored = BatchState.restore(
            model, state.templates, snapshot, pad_safe=state.pad_safe, mask_ndim=state.mask_ndim
        )
        restored.check_integrity()
        twin = make_prompt_cache(model)
        _follow_quietly(model, twin, text, prompt)
        _follow(model, restored, twin, text[sum(prompt) :], [1] * 4 + [5, 1])
        for array, copy in zip(snapshot.arrays(), before, strict=True):
            assert np.array_equal(np.array(array), copy)


def _follow_quietly(model: nn.Module, caches: list[Any], text: list[int], schedule: Sequence[int]) -> None:
    start = 0
    for width in schedule:
        _advance_theirs(model, caches, text[start : start + width])
        start += width


@pytest.mark.parametrize("model_type", [*TYPES, "falcon_h1", "glm_moe_dsa"])
def test_an_aborted_forward_leaves_no_trace(model_type: str) -> None:
    """A forward that raises half way, after some layers have appended, is undone."""
    model = _model(model_type, "float32")
    state, caches = new_state_of(model)(), make_prompt_cache(model)
    text = _text(120)
    _follow(model, state, caches, text, [64, 16])
    for width in (1, 5):
        state.begin(width)
        layer, failing = state.layers[-1], f"update_and_fetch of layer {len(state.layers) - 1} fails"
        with pytest.raises(RuntimeError, match="fails"):
            _forward_failing_at(model, state, layer, width, failing)
        state.abort()
        state.check_integrity()
    _follow(model, state, caches, text[80:], [1, 1, 5, 1])


def _forward_failing_at(model: nn.Module, state: BatchState, layer: Any, width: int, message: str) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(message)

    name = "update_and_fetch" if hasattr(layer, "update_and_fetch") else "advance"
    setattr(layer, name, fail)
    try:
        model(mx.array([[11] * width]), cache=state.caches)
    finally:
        delattr(layer, name)
