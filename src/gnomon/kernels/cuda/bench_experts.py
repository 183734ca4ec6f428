"""Time layers with experts and gated delta mixers, with their kernels and stock, paired."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_moe

from gnomon.kernels import dispatch
from gnomon.kernels.bench import ROUNDS, Timing
from gnomon.kernels.cuda import mixtures, recurrent

CALLS = 24
HIDDEN = 2048


def experts_layer(bits: int) -> Any:
    """Experts of Qwen3-30B-A3B's size, 128 of width 768, 8 a token, bf16 or affine codes."""
    arguments: Any = SimpleNamespace(
        hidden_size=HIDDEN, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True
    )
    made: Any = qwen3_moe.Qwen3MoeSparseMoeBlock(arguments)
    made.set_dtype(mx.bfloat16)
    if bits < 16:
        nn.quantize(made, 64, bits)
    mx.eval(made.parameters())
    return made


def mixer_layer(bits: int) -> Any:
    """A gated delta mixer of Qwen3.5-35B-A3B's size: 16 key and 32 value heads of 128."""
    args: Any = qwen3_5.TextModelArgs(
        hidden_size=HIDDEN,
        linear_num_value_heads=32,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    made: Any = qwen3_5.GatedDeltaNet(args)
    log = made.A_log
    made.set_dtype(mx.bfloat16)
    made.A_log = log
    if bits < 16:
        nn.quantize(made, 64, bits)
    mx.eval(made.parameters())
    return made


class Held:
    """The state of one mixer, as a model's cache holds it."""

    lengths = None

    def __init__(self, *arrays: mx.array) -> None:
        self.arrays = list(arrays)

    def __getitem__(self, i: int) -> mx.array:
        return self.arrays[i]

    def __setitem__(self, i: int, array: mx.array) -> None:
        self.arrays[i] = array

    def advance(self, tokens: int) -> None:
        """Nothing: only arrays are kept."""


def _timed(make: Callable[[], list[mx.array]], native: bool) -> float:
    """Seconds per call of `CALLS`, built and evaluated together."""
    dispatch.choose(native)
    try:
        with dispatch.step():
            mx.synchronize()
            start = time.perf_counter()
            mx.eval(make())
            mx.synchronize()
            return (time.perf_counter() - start) / CALLS
    finally:
        dispatch.choose(False)


def _paired(operation: str, case: str, make: Callable[[], list[mx.array]]) -> Timing:
    rounds = [(_timed(make, True), _timed(make, False)) for _ in range(ROUNDS + 1)][1:]
    return Timing(operation, case, *(statistics.median(side) for side in zip(*rounds, strict=True)))


def bench_experts(tokens: tuple[int, ...] = (1, 8, 16, 64)) -> Iterator[Timing]:
    """Whole layers: router, chosen experts and their sum."""
    for bits in (4, 8, 16):
        layer = experts_layer(bits)
        mixtures.swap(layer)
        for count in tokens:
            xs = [mx.random.normal((count, 1, HIDDEN), dtype=mx.bfloat16) for _ in range(CALLS)]
            mx.eval(xs)
            yield _paired(
                "experts", f"{count} tokens, 8 of 128, {bits} bits", lambda xs=xs, layer=layer: [layer(x) for x in xs]
            )
        del layer
        mx.clear_cache()


def bench_recurrent(
    cases: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (16, 1), (1, 8), (1, 512)),
) -> Iterator[Timing]:
    """Whole mixers, with their projections."""
    layer = mixer_layer(4)
    recurrent.swap(layer)
    for rows, length in cases:
        calls = CALLS if length < 64 else 1
        xs = [mx.random.normal((rows, length, HIDDEN), dtype=mx.bfloat16) for _ in range(calls)]
        state = mx.random.normal((rows, 32, 128, 128)), mx.random.normal((rows, 3, layer.conv_dim), dtype=mx.bfloat16)
        mx.eval(xs, state)

        def make(xs: list[mx.array] = xs, state: tuple[mx.array, mx.array] = state) -> list[mx.array]:
            held = Held(state[1], state[0])
            return [layer(x, None, held) for x in xs]

        timing = _paired("gated delta mixer", f"{rows} rows of {length}, 4 bits", make)
        scale = CALLS / calls
        yield Timing(timing.operation, timing.case, timing.native * scale, timing.stock * scale)
