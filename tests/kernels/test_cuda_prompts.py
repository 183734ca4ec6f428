"""Attention of prompts is stock attention's, in few shapes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gnomon.kernels import attention, dispatch
from gnomon.kernels.cuda import prompts

STOCK = mx.fast.scaled_dot_product_attention


def arrays(length: int, before: int, dtype: mx.Dtype = mx.bfloat16, rows: int = 1) -> tuple[mx.array, ...]:
    mx.random.seed(length)
    keys = (rows, 2, before + length, 64)
    return tuple(mx.random.normal(shape).astype(dtype) for shape in ((rows, 4, length, 64), keys, keys))


class Shapes:
    """Stock attention that remembers the lengths it was asked for."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, bool]] = set()

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **how: Any) -> mx.array:
        self.seen.add((q.shape[2], k.shape[2], isinstance(mask, str)))
        return STOCK(q, k, v, mask=mask, **how)


@pytest.fixture
def ours() -> Any:
    shapes = Shapes()
    dispatch.choose(True)
    with dispatch.step():
        yield prompts.OPERATIONS[0].make(shapes, None), shapes
    dispatch.choose(False)


@pytest.mark.parametrize("before", [0, 1, 64, 300])
@pytest.mark.parametrize("length", [17, 64, 65, 200, 513])
def test_causal_chunks(ours: Any, length: int, before: int) -> None:
    attend, shapes = ours
    q, k, v = arrays(length, before)
    found = attend(q, k, v, scale=0.125, mask="causal")
    wide = attention.reference(*(x.astype(mx.float32) for x in (q, k, v)), scale=0.125, mask="causal")
    assert found.shape == wide.shape
    assert np.abs(np.array(found.astype(mx.float32)) - np.array(wide)).max() < 0.03
    assert {(a % 64, b % 64) for a, b, _ in shapes.seen} == {(0, 0)}
    # Filled up by as many, they still count from the last key.
    assert all(causal == (b - a == before) for a, b, causal in shapes.seen)
    assert before > 0 or all(causal for *_, causal in shapes.seen)


@pytest.mark.parametrize("heads", [1, 4])
def test_masks_of_rows(ours: Any, heads: int) -> None:
    attend, shapes = ours
    q, k, v = arrays(40, 30, mx.float16, rows=3)
    mask = mx.random.uniform(shape=(3, heads, 40, 70)) > 0.3
    found = attend(q, k, v, scale=0.125, mask=mask)
    wide = attention.reference(*(x.astype(mx.float32) for x in (q, k, v)), scale=0.125, mask=mask)
    assert np.abs(np.array(found.astype(mx.float32)) - np.array(wide)).max() < 0.005
    assert shapes.seen == {(64, 128, False)}


@pytest.mark.parametrize("seed", range(12))
def test_filling_up_changes_nothing(seed: int) -> None:
    draw = np.random.default_rng(seed)
    length, before = int(draw.integers(17, 150)), int(draw.integers(0, 150))
    q, k, v = (x.astype(mx.float32) for x in arrays(length, before, rows=2))
    mask: Any = "causal"
    if seed % 3:
        lead = [(), (1, 1), (2, 1), (1, 4), (2, 4)][int(draw.integers(5))]
        seen = draw.random((*lead, length, before + length)) > 0.5
        seen[..., 0] = True
        mask = mx.array(seen.tolist())
    found = prompts.attend(STOCK, q, k, v, scale=0.2, mask=mask)
    assert found.shape == q.shape
    assert np.allclose(np.array(found), np.array(STOCK(q, k, v, scale=0.2, mask=mask)), atol=1e-5)


def test_prompts_of_any_length_have_few_shapes() -> None:
    lengths = {prompts.filled(n) for n in range(17, 32769)}
    assert len(lengths) <= 36
    assert all(n <= prompts.filled(n) <= max(64, n + max(63, n // 4)) for n in range(1, 32769))


def shapes_of(chunks: list[tuple[int, int]]) -> list[tuple[int, int, Any]]:
    """Queries, keys and mask that stock attention is asked for, by chunk of (tokens before, tokens)."""
    seen: list[tuple[int, int, Any]] = []

    def stock(q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **how: Any) -> mx.array:
        seen.append((q.shape[2], k.shape[2], mask))
        return q

    for before, length in chunks:
        q, k = (mx.zeros((1, 1, n, 8), mx.bfloat16) for n in (length, before + length))
        prompts.attend(stock, q, k, k, scale=1.0, mask="causal")
    return seen


def test_the_engines_chunks_need_no_written_mask() -> None:
    """A prompt of 40,000 tokens but one: all chunks of 2048 go as they are, and the last one has as many keys more as queries."""
    chunks = [(before, min(2048, 39_999 - before)) for before in range(0, 39_999, 2048)]
    found = shapes_of(chunks)
    assert found[:-1] == [(2048, before + 2048, "causal") for before, _ in chunks[:-1]]
    assert found[-1] == (1280, 19 * 2048 + 1280, "causal")


def test_layers_share_a_written_mask() -> None:
    with dispatch.step():
        first, second = (mask for *_, mask in shapes_of([(300, 40), (300, 40)]))
        assert first is second
        assert first.shape == (64, 384)
        own = np.array(first.astype(mx.float32))
        assert np.array_equal(own == 0, np.arange(384)[None] <= 300 + np.arange(64)[:, None])
        assert own[0, -1] == float(mx.finfo(mx.bfloat16).min)
    with dispatch.step():
        assert shapes_of([(300, 40)])[0][2] is not first


@pytest.mark.parametrize(
    ("length", "before", "dtype", "how"),
    [
        (16, 0, mx.bfloat16, {"mask": "causal"}),
        (40, 0, mx.float32, {"mask": "causal"}),
        (40, 0, mx.bfloat16, {"mask": None}),
        (40, 8, mx.bfloat16, {"mask": mx.zeros((40, 48), mx.bfloat16)}),
        (40, 8, mx.bfloat16, {"mask": mx.ones((1, 48), mx.bool_)}),
        (40, 0, mx.bfloat16, {"mask": "causal", "sinks": mx.zeros(4, mx.bfloat16)}),
    ],
)
def test_what_stays_as_it_is(ours: Any, length: int, before: int, dtype: mx.Dtype, how: Any) -> None:
    attend, shapes = ours
    q, k, v = arrays(length, before, dtype)
    found = attend(q, k, v, scale=0.125, **how)
    assert mx.array_equal(found, STOCK(q, k, v, scale=0.125, **how)).item()
    assert {(a, b) for a, b, _ in shapes.seen} == {(length, before + length)}


def test_outside_a_step_nothing_is_filled_up() -> None:
    shapes = Shapes()
    prompts.OPERATIONS[0].make(shapes, None)(*arrays(40, 0), scale=0.125, mask="causal")  # pyright: ignore[reportArgumentType]
    assert shapes.seen == {(40, 40, True)}
