"""Time the CUDA kernels against stock operations, paired."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import mlx.core as mx

from gnomon.kernels.bench import ROUNDS, Timing
from gnomon.kernels.cuda import bench_codes
from gnomon.kernels.cuda.bench_experts import bench_experts, bench_recurrent
from gnomon.kernels.cuda.operations import quantized_matmul
from gnomon.kernels.cuda.products import DENSE, Weights, product

CALLS = 100
MEMORY = 2e8
"""Bytes of weights to go round, more than caches hold."""


def _seconds(make: Callable[[int], mx.array]) -> float:
    """Seconds per call of many that are evaluated together."""
    start = time.perf_counter()
    mx.eval([make(i) for i in range(CALLS)])
    return (time.perf_counter() - start) / CALLS


def bench() -> Iterator[Timing]:
    """Products in the shapes of an 8B model, for a few rows and for many, weights read from memory."""
    for bits in (4, 8, DENSE):
        for n, k in ((4096, 4096), (14336, 4096)):
            count = max(2, int(MEMORY / (n * k * bits / 8)))
            sets = [_weights(n, k, bits, seed) for seed in range(count)]
            for rows in (1, 8, 32, 64, 512) if bits != DENSE else (1, 8, 32):
                x = mx.random.normal((rows, k), dtype=mx.bfloat16)
                mx.eval(x)

                def own(i: int, x: mx.array = x, sets: list[Weights] = sets) -> mx.array:
                    w = sets[i % len(sets)]
                    return product(x, w) if w.scales is None else quantized_matmul(x, w)

                def stock(i: int, x: mx.array = x, sets: list[Weights] = sets) -> mx.array:
                    w = sets[i % len(sets)]
                    if w.scales is None:
                        return x @ w.weight.T
                    return mx.quantized_matmul(x, w.weight, w.scales, w.biases, True, w.group, w.bits)

                rounds = [(_seconds(own), _seconds(stock)) for _ in range(ROUNDS + 1)][1:]
                case = f"{rows} x {k} by {n}, {'bf16' if bits == DENSE else f'{bits} bits'}"
                yield Timing("product", case, *(statistics.median(side) for side in zip(*rounds, strict=True)))
    yield from bench_codes.bench()
    yield from bench_experts()
    yield from bench_recurrent()


def _weights(n: int, k: int, bits: int, seed: int) -> Weights:
    w = mx.random.normal((n, k), dtype=mx.bfloat16, key=mx.random.key(seed)) * 0.02
    made = Weights(w) if bits == DENSE else Weights(*mx.quantize(w, 64, bits), None, bits)
    mx.eval(made.arrays())
    return made
