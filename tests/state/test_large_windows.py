"""Wide windows run few layers at once, and large buffers are copied a layer at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache

import tiny_models
from engine_fixtures import tiny_loaded
from gnomon.config import KvScheme
from gnomon.engine.coding import coding_for
from gnomon.engine.paging import pages_for
from gnomon.state import buffer, rows
from gnomon.state.batch_state import BatchState
from gnomon.state.full import FullLayer

KINDS = {
    "full": ("llama", KvScheme()),
    "coded": ("llama", KvScheme("turbo")),
    "pages": ("llama", KvScheme(paged=True)),
    "coded in pages": ("llama", KvScheme("affine", bits=8, paged=True)),
    "sliding": ("gemma3", KvScheme()),
    "recurrent": ("qwen3_5", KvScheme()),
}


class Watch:
    """What is handed to the device, and what is waited for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.handed: list[mx.array] = []
        self.waited: list[mx.array] = []
        self.order: list[str] = []
        patch.setattr(rows, "native", SimpleNamespace(is_cuda=lambda: True))
        patch.setattr(rows, "mx", SimpleNamespace(**{**vars(mx), "async_eval": self.hand, "eval": self.wait}))

    def hand(self, x: mx.array) -> None:
        self.handed.append(x)
        self.order.append("hand")
        mx.async_eval(x)

    def wait(self, x: mx.array) -> None:
        self.waited.append(x)
        self.order.append("wait")
        mx.eval(x)


def logits(kind: str, widths: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Of the last window of several."""
    model_type, scheme = KINDS[kind]
    shape: dict[str, Any] = {"head_dim": 64} if model_type == "llama" else {}
    model = tiny_models.make(model_type, **shape)
    loaded = tiny_loaded(model_type, model=model)
    coding = coding_for(loaded, scheme)
    state = BatchState(
        model, loaded.binding.make_caches(), coding=coding, pages=pages_for(loaded, scheme, coding), pad_safe=False
    )
    found = mx.array(0)
    for width in widths:
        state.begin(width)
        found = model(mx.arange(5, 5 + width)[None], cache=state.caches)
        state.commit()
        mx.eval(found, state.arrays())
    return np.array(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_waited_for_once_the_next_was_handed_over(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "WIDE", 8)
    want = logits(kind, (9, 12))
    watch = Watch(monkeypatch)
    assert np.array_equal(logits(kind, (9, 12)), want)
    layers = len(watch.handed) // 2
    assert layers > 1
    assert watch.order == 2 * ["hand", *(layers - 1) * ["hand", "wait"]]
    expected = [x for at, x in enumerate(watch.handed, 1) if at % layers]
    assert [id(x) for x in watch.waited] == [id(x) for x in expected]


def test_narrow_windows_and_other_devices_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        watch = Watch(patch)
        logits("full", (100, 1))
        assert not watch.order
    watch = Watch(monkeypatch)
    monkeypatch.setattr(rows, "WIDE", 8)
    monkeypatch.setattr(rows, "native", SimpleNamespace(is_cuda=lambda: False))
    logits("full", (9,))
    assert not watch.order


LAYERS, HEADS, DIM = 16, 4, 64
WHOLE = LAYERS * 2 * HEADS * DIM * 1024 * 4
"""Bytes of a row of 1024 slots."""


def filled(length: int) -> BatchState:
    state = BatchState(nn.Module(), [KVCache() for _ in range(LAYERS)])
    append(state, length)
    return state


def append(state: BatchState, width: int) -> None:
    x = mx.ones((state.num_rows, HEADS, width, DIM))
    state.begin(width)
    for layer in state.layers:
        assert isinstance(layer, FullLayer)
        layer.update_and_fetch(x, x)
    state.commit()
    mx.eval(state.arrays())


def peak_of(act: Any) -> int:
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    act()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("is_large", [True, False])
def test_growth_copies_one_large_layer_at_a_time(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 slots are 32 MiB, 2 MiB a layer. All buffers grow by a quarter of that; beside the new is one old one, or are all."""
    monkeypatch.setattr(buffer, "LARGE", 0 if is_large else 1 << 40)
    state = filled(1000)
    taken = peak_of(lambda: append(state, 30)) / WHOLE
    assert 0.2 < taken < 0.5 if is_large else taken > 0.8


@pytest.mark.parametrize("is_large", [True, False])
def test_a_join_copies_one_large_layer_at_a_time(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of their own become two in one buffer, which takes no more: beside it are one layer's old buffers, or all."""
    monkeypatch.setattr(buffer, "LARGE", 0 if is_large else 1 << 40)
    states = [filled(1000), filled(1000)]

    def join() -> None:
        states[0].join(states.pop())
        append(states[0], 1)

    taken = peak_of(join) / WHOLE
    assert taken < 0.4 if is_large else taken > 0.8
