"""A layer of experts as one operation, against float64 and against itself."""

from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from gnomon.kernels import dispatch, layers
from kernels.oracle import Array, bits_of, dequantised, quantised, wide
from tiny_models import make

K, N, EXPERTS = 64, 96, 6


class Case:
    """Random weights, as the extension takes them and as float64."""

    def __init__(self, e: ModuleType, bits: int, dtype: mx.Dtype) -> None:
        self.extension, self.dtype = e, dtype
        router = mx.random.normal((EXPERTS, K), key=mx.random.key(9)).astype(dtype)
        self.router, projections = wide(router), [e.Projection(router, None, None, None, 0, 0)]
        self.matrices: list[Array] = []
        for which, (rows, inputs) in enumerate(((N, K), (N, K), (K, N))):
            each = [quantised(rows, inputs, 32, bits or 4, dtype, 10 * which + i) for i in range(EXPERTS)]
            exact = np.stack([dequantised(*packed, 32, bits or 4) for packed in each]) / 8
            if bits:
                w, scales, biases = (mx.stack(list(parts)) for parts in zip(*each, strict=True))
                tiled = bits in (4, 8)
                parts = [w, scales / 8, biases / 8]
                if tiled:
                    parts = [e.tiled(part) for part in parts]
                projections.append(e.Projection(*parts, None, 32, bits, False, tiled))
            else:
                dense = mx.array(exact.astype(np.float32)).astype(dtype)
                exact = wide(dense)
                projections.append(e.Projection(dense, None, None, None, 0, 0))
            self.matrices.append(exact)
        self.projections = projections

    def run(self, x: mx.array, chosen: int, normalised: bool = True, norm: mx.array | None = None) -> mx.array:
        return self.extension.experts(x, norm, 1e-6, *self.projections, chosen, normalised, 0, norm is not None)

    def exact(self, x: Array, chosen: int, normalised: bool, norm: Array | None) -> Array:
        n = x if norm is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * norm
        logits = n @ self.router.T
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        gate, up, down = self.matrices
        y = np.zeros_like(x)
        for i, row in enumerate(n):
            best = np.argsort(-logits[i], kind="stable")[:chosen]
            total = shares[i, best].sum() if normalised else 1.0
            for e in best:
                g = gate[e] @ row
                y[i] += shares[i, e] / total * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)))
        return y if norm is None else x + y


@pytest.mark.parametrize("bits", [0, 3, 4, 8])
@pytest.mark.parametrize(("dtype", "step"), [(mx.float32, 2e-4), (mx.bfloat16, 0.03), (mx.float16, 4e-3)])
def test_the_sum_over_the_likeliest(native: ModuleType, bits: int, dtype: mx.Dtype, step: float) -> None:
    case = Case(native, bits, dtype)
    weights = mx.random.normal((K,), key=mx.random.key(3)).astype(dtype)
    for rows, chosen, normalised, norm in (
        (1, 2, True, None),
        (9, 3, False, weights),
        (40, 1, True, weights),
        (7, EXPERTS, False, None),
    ):
        x = mx.random.normal((rows, K), key=mx.random.key(rows)).astype(dtype)
        got = wide(case.run(x, chosen, normalised, norm))
        expected = case.exact(wide(x), chosen, normalised, None if norm is None else wide(norm))
        # Where two logits round to one value of a narrow type either may be chosen.
        close = np.abs(got - expected).max(-1) <= step * np.abs(expected).max()
        assert close.all() if dtype == mx.float32 else close.mean() >= 0.85


def test_a_row_is_the_same_to_the_bit_whoever_is_beside_it(native: ModuleType) -> None:
    for bits in (0, 4):
        case = Case(native, bits, mx.float32)
        x = mx.random.normal((3, 60, K), key=mx.random.key(1))
        together = case.run(x, 2)
        assert together.shape == x.shape
        for at in ((0, 0), (1, 30), (2, 59)):
            assert (bits_of(case.run(x[at][None], 2))[0] == bits_of(together)[at]).all()
        assert (bits_of(case.run(x[1:2, 10:25], 2)) == bits_of(together[1:2, 10:25])).all()


def test_of_equals_the_first_are_chosen_and_nan_stays(native: ModuleType) -> None:
    case = Case(native, 4, mx.float32)
    case.projections[0] = native.Projection(mx.zeros((EXPERTS, K)), None, None, None, 0, 0)
    case.router = np.zeros((EXPERTS, K))
    x = mx.random.normal((2, K), key=mx.random.key(5))
    assert np.allclose(wide(case.run(x, 2)), case.exact(wide(x), 2, True, None), atol=1e-3)
    broken = wide(case.run(mx.concatenate([x, mx.full((1, K), mx.nan)]), 2))
    assert np.isfinite(broken[:2]).all()
    assert np.isnan(broken[2]).all()


def test_what_can_not_be_is_refused(native: ModuleType) -> None:
    case = Case(native, 0, mx.float32)
    x = mx.zeros((1, K))
    for chosen in (0, EXPERTS + 1):
        with pytest.raises(ValueError, match=f"{chosen} of {EXPERTS} experts can't be chosen"):
            case.run(x, chosen)
    assert case.run(mx.zeros((0, K)), 1).shape == (0, K)
    case.projections[0] = native.Projection(mx.zeros((EXPERTS + 1, K)), None, None, None, 0, 0)
    with pytest.raises(ValueError, match=f"a layer of {EXPERTS + 1} experts needs as many matrices"):
        case.run(x, 1)


def test_a_block_whose_parts_were_replaced_takes_its_own_forward(native: ModuleType) -> None:
    model: Any = make("qwen3_moe", "float32")
    layers.swap(model, native)
    block, x = model.layers[0].mlp, mx.random.normal((1, 5, model.args.hidden_size), key=mx.random.key(2))
    with dispatch.step():
        before = wide(block(x))
        block.gate = nn.Linear(model.args.hidden_size, model.args.num_experts, bias=False)
        found = wide(block(x))
    assert np.abs(found - before).max() > 1e-4
    assert np.allclose(found, wide(block(x)), atol=1e-5)
