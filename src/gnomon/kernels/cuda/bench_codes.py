"""Time attention over codes and of short windows against stock operations, paired."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import mlx.core as mx

from gnomon.kernels.bench import ROUNDS, Timing
from gnomon.kernels.codes import AFFINE, Codes
from gnomon.kernels.cuda import coded_attention, codes, windows

CALLS = 32
HEADS, KV_HEADS, SIZE = 32, 8, 128

Step = Callable[[int], mx.array]


def _seconds(make: Step, calls: int) -> float:
    """Seconds per call of many that are evaluated together."""
    start = time.perf_counter()
    mx.eval([make(i) for i in range(calls)])
    return (time.perf_counter() - start) / calls


def _paired(operation: str, case: str, own: Step, stock: Step, calls: int = CALLS) -> Timing:
    rounds = [(_seconds(own, calls), _seconds(stock, calls)) for _ in range(ROUNDS + 1)][1:]
    return Timing(operation, case, *(statistics.median(side) for side in zip(*rounds, strict=True)))


def bench() -> Iterator[Timing]:
    """Decoding at several contexts, in the heads of an 8B model. Stock attention over codes unpacks them: MLX has no product for them."""
    scale = SIZE**-0.5
    for rows, slots in ((1, 4096), (8, 4096), (1, 32768)):
        q = mx.random.normal((rows, HEADS, 1, SIZE), dtype=mx.bfloat16)
        kv = [mx.random.normal((rows, KV_HEADS, slots, SIZE), dtype=mx.bfloat16) for _ in range(2)]
        last = mx.array([slots - 1] * rows, dtype=mx.int32)
        mx.eval(q, kv, last)
        for bits in (4, 8):
            code = Codes(AFFINE, bits, 64, SIZE, mx.bfloat16)
            words = [codes.encode(x, code) for x in kv]
            parts = [mx.quantize(x, 64, bits) for x in kv]
            mx.eval(words, parts)

            def own(
                _: int, words: list[mx.array] = words, code: Codes = code, q: mx.array = q, last: mx.array = last
            ) -> mx.array:
                return coded_attention.attend_over_codes(q, words[0], words[1], (code, code), last, scale)

            def stock(_: int, parts: list[tuple[mx.array, ...]] = parts, bits: int = bits, q: mx.array = q) -> mx.array:
                k, v = (mx.dequantize(*part, group_size=64, bits=bits) for part in parts)
                return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)

            yield _paired("coded_attention", f"{rows} of {slots}, {bits} bits", own, stock)
    for rows, width in ((8, 1), (8, 4)):
        yield _masked(rows, width)


def _masked(rows: int, width: int) -> Timing:
    """Windows over rows of different lengths, whose context grows by a token a call."""
    slots = 1000
    q = mx.random.normal((rows, HEADS, width, SIZE), dtype=mx.bfloat16)
    k = mx.random.normal((rows, KV_HEADS, slots + 4 * CALLS, SIZE), dtype=mx.bfloat16)
    ends = mx.arange(slots, slots - 100 * rows, -100)[:, None, None, None]
    mask = mx.arange(slots + 4 * CALLS)[None, None, None] < ends + mx.arange(width)[:, None]
    mx.eval(q, k, mask)
    count = 0

    def step(attend: Callable[..., mx.array]) -> Step:
        def call(i: int) -> mx.array:
            end = slots + count + i
            return attend(q, k[:, :, :end], k[:, :, :end], scale=SIZE**-0.5, mask=mask[..., :end])

        return call

    rounds: list[tuple[float, float]] = []
    for _ in range(3):
        rounds.append((_seconds(step(windows.attend), 4), _seconds(step(mx.fast.scaled_dot_product_attention), 4)))
        count += 4
    return Timing(
        "attention",
        f"{width} of {slots}.., {rows} rows, mask",
        *(statistics.median(side) for side in zip(*rounds, strict=True)),
    )
