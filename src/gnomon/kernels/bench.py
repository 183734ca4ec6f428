"""Time native operations against stock ones, paired: `gnomon kernels bench`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from gnomon.kernels.attention import CAUSAL, NONE
from gnomon.kernels.codes import AFFINE

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians in seconds over `ROUNDS` alternating rounds."""

    operation: str
    case: str
    native: float
    stock: float

    @property
    def ratio(self) -> float:
        return self.stock / self.native


Pair = tuple[str, str, Callable[[], mx.array], Callable[[], mx.array]]


def _pairs(e: ModuleType) -> Iterator[Pair]:
    for k, n in ((576, 1536), (2048, 2048)):
        w, s, b = mx.quantize(mx.random.normal((n, k)))
        for rows in (1, 8, 64):
            x = mx.random.normal((rows, k))
            tiled = e.tiled(w), e.tiled(s), e.tiled(b)
            mx.eval(w, s, b, x, *tiled)
            yield (
                "quantized_matmul",
                f"{rows} x {k} by {n}, 4 bits",
                lambda x=x, tiled=tiled: e.quantized_matmul(x, *tiled, 64, 4, False, True),
                lambda x=x, w=w, s=s, b=b: mx.quantized_matmul(x, w, s, b),
            )
            yield (
                "int8",
                f"{rows} x {k} by {n}, 4 bits",
                lambda x=x, tiled=tiled: e.quantized_matmul(x, *tiled, 64, 4, True, True),
                lambda x=x, w=w, s=s, b=b: mx.quantized_matmul(x, w, s, b),
            )
    x, weight = mx.random.normal((64, 576)), mx.ones(576)
    yield (
        "rms_norm",
        "64 x 576",
        lambda: e.rms_norm(x, weight, 1e-5),
        lambda: mx.fast.rms_norm(x, weight, 1e-5),
    )
    for length, keys in ((1, 1024), (64, 256)):
        q, kv = mx.random.normal((1, 9, length, 64)), mx.random.normal((1, 3, keys, 64))
        mx.eval(q, kv)
        kind, mask = (CAUSAL, "causal") if length > 1 else (NONE, None)
        yield (
            "attention",
            f"{length} of {keys}, 9 heads of 64",
            lambda q=q, kv=kv, kind=kind: e.attention(q, kv, kv, 0.125, kind, None, None, 0, None),
            lambda q=q, kv=kv, mask=mask: mx.fast.scaled_dot_product_attention(q, kv, kv, scale=0.125, mask=mask),
        )
    q, kv = mx.random.normal((1, 9, 1, 64)), mx.random.normal((1, 3, 1024, 64))
    for bits in (8, 4):
        form = e.CodesForm(AFFINE, bits, 64, 64, 0, [], [], [])
        words, parts = e.encode(kv, form), mx.quantize(kv, bits=bits)
        mx.eval(q, words, parts)
        yield (
            "encode",
            f"3 heads of 64, 1024 tokens, {bits} bits",
            lambda form=form: e.encode(kv, form),
            lambda bits=bits: mx.quantize(kv, bits=bits)[0],
        )
        yield (
            "coded_attention",
            f"1 of 1024, 9 heads of 64, {bits} bits",
            lambda form=form, words=words: e.coded_attention(
                q, words, words, form, form, 1024, 0.125, NONE, None, None, 0, None
            ),
            lambda bits=bits, parts=parts: quantized_scaled_dot_product_attention(
                q, parts, parts, scale=0.125, mask=None, bits=bits
            ),
        )
    logits = mx.random.normal((1, 49152))
    mx.eval(x, weight, logits)
    yield "logsumexp", "49152", lambda: e.logsumexp(logits, True), lambda: mx.logsumexp(logits, axis=-1, keepdims=True)
    yield "argmax", "49152", lambda: e.argmax(logits, False), lambda: mx.argmax(logits, axis=-1)


def _seconds(operation: Callable[[], mx.array], least: float = 0.01) -> float:
    """Seconds of one call, from as many calls as fill `least`."""
    mx.eval(operation())
    calls = 0
    start = now = time.perf_counter()
    while now - start < least:
        mx.eval(operation())
        calls += 1
        now = time.perf_counter()
    return (now - start) / calls


def bench(extension: ModuleType) -> Iterator[Timing]:
    """Alternate native and stock calls of every operation at a small model's shapes."""
    for operation, case, native, stock in _pairs(extension):
        rounds = [(_seconds(native), _seconds(stock)) for _ in range(ROUNDS)]
        yield Timing(operation, case, *(statistics.median(side) for side in zip(*rounds, strict=True)))
