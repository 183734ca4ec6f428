"""Check and time the CUDA kernels on a GPU, paired with mlx-lm in one process.

Weights are random, in the shapes of Llama 3.1 8B and Llama 3.2 1B.

    uv run python benchmarks/cuda_kernels.py [--out DIR] [--only PART,..] [--models NAME,..]

Every cell is a line of DIR/cells.jsonl as soon as it is measured; cells that are there already are not measured again. Rates are medians of
interleaved rounds. `roofline` is the least bytes a step must read over the time it took, as a share of the copy rate measured first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from gnomon.engine.api import SamplingParams
from gnomon.engine.sampling import BatchSampler
from gnomon.engine.sampling.row import RowSampling
from gnomon.kernels import dispatch, native
from gnomon.kernels.cuda import products, verify
from gnomon.state.batch_state import BatchState

Cell = dict[str, Any]
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}
MODELS = {"8B-4": ("8B", 4), "8B-8": ("8B", 8), "8B-16": ("8B", 16), "1B-16": ("1B", 16), "1B-4": ("1B", 4)}
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT, STEPS, ROUNDS = 512, 24, 3
TARGETS = {
    ("8B-4", 1): 3.0,
    ("8B-4", 8): 8.0,
    ("8B-16", 1): 1.3,
    ("8B-16", 8): 1.8,
    ("1B-16", 1): 2.5,
    ("8B-4", "prefill"): 2.0,
    ("1B-4", "prefill"): 2.0,
}


class Results:
    """Cells by key, each written when it is measured."""

    def __init__(self, out: Path) -> None:
        self.path = out / "cells.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.cells: list[Cell] = [json.loads(line) for line in lines]

    def has(self, *key: object) -> bool:
        return any(tuple(cell["key"]) == key for cell in self.cells)

    def add(self, *key: object, **values: Any) -> None:
        cell = {"key": list(key), **values}
        self.cells.append(cell)
        with self.path.open("a") as f:
            f.write(json.dumps(cell) + "\n")
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        print(" ".join(map(str, key)), "|", shown, flush=True)


def seconds(make: Callable[[int], mx.array], calls: int) -> float:
    """Seconds per call, many evaluated at once; `make(i)` may rotate its inputs."""
    mx.eval([make(i) for i in range(calls)])
    start = time.perf_counter()
    mx.eval([make(i) for i in range(calls)])
    return (time.perf_counter() - start) / calls


def copy_rate() -> float:
    """Bytes read and written per second by a large copy."""
    x = mx.random.normal((1 << 30,)).astype(mx.bfloat16)
    mx.eval(x)
    times: list[float] = []
    for _ in range(7):
        start = time.perf_counter()
        mx.eval(x + 1)
        times.append(time.perf_counter() - start)
    return 2 * x.nbytes / statistics.median(times)


def build(name: str) -> nn.Module:
    """A model of random weights, bf16 or quantised in groups of 64."""
    shape, bits = MODELS[name]
    args = llama.ModelArgs(
        model_type="llama",
        rms_norm_eps=1e-5,
        vocab_size=128256,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rope_scaling=dict(ROPE),
        **SHAPES[shape],
    )
    model = llama.Model(args)
    key = mx.random.key(7)
    for i, (path, module) in enumerate(model.named_modules()):
        weight = module.get("weight")
        if weight is None:
            continue
        if weight.ndim == 1:
            module.weight = mx.ones_like(weight).astype(mx.bfloat16)
            continue
        del path
        module.weight = (
            mx.random.normal(weight.shape, dtype=mx.bfloat16, key=mx.random.split(key, 1000)[i % 1000]) * 0.02
        )
        mx.eval(module.weight)
        del weight
    if bits != products.DENSE:
        nn.quantize(model, 64, bits)
    mx.eval(model.parameters())
    return model


def step_bytes(model: Any, rows: int, context: int) -> int:
    """Least bytes one decode step reads: all weights but the rows of an untied table, keys and values."""
    total = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    if not model.args.tie_word_embeddings:
        total -= sum(a.nbytes for _, a in tree_flatten(model.model.embed_tokens.parameters()))
    args = model.args
    kv = 2 * args.num_hidden_layers * args.num_key_value_heads * (args.hidden_size // args.num_attention_heads) * 2
    return total + rows * context * kv


class Stock:
    """mlx-lm's own loop over a batch of equally long rows: `generate_step`'s order of operations."""

    def __init__(self, model: Any, rows: int, prompt: mx.array) -> None:
        self.model = model
        lone = make_prompt_cache(model)
        logits = model(prompt, cache=lone)[:, -1]
        self.cache = make_prompt_cache(model)
        for mine, theirs in zip(self.cache, lone, strict=True):
            keys, values, offset = theirs.state
            mine.state = mx.repeat(keys, rows, axis=0), mx.repeat(values, rows, axis=0), offset
        self.y = mx.repeat(mx.argmax(logits, axis=-1), rows, axis=0)
        mx.eval(self.y, [c.state[:2] for c in self.cache])

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds and host seconds per step."""
        host, start = 0.0, time.perf_counter()
        before = None
        for _ in range(steps):
            begun = time.perf_counter()
            logits = self.model(self.y[:, None], cache=self.cache)[:, -1]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            self.y = mx.argmax(logprobs, axis=-1)
            mx.async_eval(self.y)
            host += time.perf_counter() - begun
            if before is not None:
                before.tolist()
            before = self.y
        mx.eval(self.y)
        return (time.perf_counter() - start) / steps, host / steps


class Native:
    """The engine's plain step over its own states and sampler: greedy rows, read-back one step behind."""

    def __init__(self, model: Any, rows: int, prompt: mx.array) -> None:
        self.model = model
        state = BatchState(model, make_prompt_cache(model))
        state.begin(prompt.shape[1])
        with dispatch.step():
            logits = model(prompt, cache=state.caches)[:, -1:]
        state.commit()
        while state.num_rows < rows:
            state.join(state.fork(0))
        self.state = state
        self.pending = mx.repeat(mx.argmax(logits, axis=-1), rows, axis=0).astype(mx.int32)
        self.sampler = BatchSampler([RowSampling(SamplingParams(temperature=0.0), seed) for seed in range(rows)])
        mx.eval(self.pending, state.arrays())

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds and host seconds per step."""
        host, start = 0.0, time.perf_counter()
        before = None
        for _ in range(steps):
            begun = time.perf_counter()
            with dispatch.step():
                self.state.begin(1)
                logits = self.model(self.pending, cache=self.state.caches)
                self.state.commit()
                tokens = self.sampler.draw(logits).tokens
            self.sampler.commit(tokens, [1] * self.state.num_rows)
            mx.async_eval(tokens)
            host += time.perf_counter() - begun
            if before is not None:
                before.tolist()
            before = self.pending = tokens
        mx.eval(self.pending)
        return (time.perf_counter() - start) / steps, host / steps


def check(results: Results) -> None:
    """Every kernel against float64, and rows alone."""
    if results.has("check"):
        return
    checks = list(verify.verify())
    failed = [f"{c.operation} {c.case}: {c.error:.3g}, invariant {c.invariant}" for c in checks if not c.passed]
    worst = {c.operation: max(d.error for d in checks if d.operation == c.operation) for c in checks}
    results.add("check", cases=len(checks), failed=failed, worst=worst)


def micro(results: Results) -> None:
    """Single products, weights rotated so that they come from memory."""
    for bits in (4, 8, 16):
        for n, k in ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (2048, 2048)):
            size = n * k * (2 if bits == 16 else bits / 8 + 4 / 64)
            copies = max(2, int(3e8 / size))
            sets: list[products.Weights] = []
            for i in range(copies):
                w = mx.random.normal((n, k), dtype=mx.bfloat16, key=mx.random.key(i)) * 0.02
                sets.append(
                    products.Weights(w) if bits == 16 else products.Weights(*mx.quantize(w, 64, bits), None, bits)
                )
                mx.eval(sets[-1].arrays())
            for rows in (1, 8, 16, 32):
                if results.has("product", bits, n, k, rows):
                    continue
                x = mx.random.normal((rows, k), dtype=mx.bfloat16)
                mx.eval(x)

                def stock(i: int, x: mx.array = x, sets: list[products.Weights] = sets) -> mx.array:
                    w = sets[i % len(sets)]
                    if w.scales is None:
                        return x @ w.weight.T
                    return mx.quantized_matmul(x, w.weight, w.scales, w.biases, True, 64, w.bits)

                def own(i: int, x: mx.array = x, sets: list[products.Weights] = sets) -> mx.array:
                    return products.product(x, sets[i % len(sets)])

                calls = min(200, max(20, int(2e10 / size)))
                theirs, ours = seconds(stock, calls), seconds(own, calls)
                results.add(
                    "product", bits, n, k, rows, stock_us=theirs * 1e6, own_us=ours * 1e6, tb_s=size / ours / 1e12
                )


def decode(results: Results, name: str, rate: float, batches: list[int]) -> None:
    model = build(name)
    prompt = mx.random.randint(0, 128256, (1, PROMPT), key=mx.random.key(3))
    kernels = native.prepare(model, "native", cache=Path("kernels"))
    if not kernels.layers:
        raise SystemExit(f"{name}: no compiled decode: {dict(dispatch.stock_calls)}")
    if not results.has(name, "prefill"):
        rounds: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            pair: list[float] = []
            for policy in ("stock", "native"):
                native.start(policy, cache=Path("kernels"))
                times: list[float] = []
                for _ in range(2):
                    cache = make_prompt_cache(model)
                    mx.synchronize()
                    start = time.perf_counter()
                    with dispatch.step():
                        mx.eval(model(prompt, cache=cache)[:, -1])
                    times.append(time.perf_counter() - start)
                pair.append(min(times))
            rounds.append((pair[0], pair[1]))
        theirs, ours = (statistics.median(side) for side in zip(*rounds, strict=True))
        results.add(name, "prefill", stock=PROMPT / theirs, own=PROMPT / ours, ratio=theirs / ours)
    for rows in batches:
        if results.has(name, rows):
            continue
        native.start("stock", cache=Path("kernels"))
        stock = Stock(model, rows, prompt)
        stock.run(4)
        native.start("native", cache=Path("kernels"))
        began = time.perf_counter()
        own = Native(model, rows, prompt)
        own.run(4)
        warm = time.perf_counter() - began
        pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for _ in range(ROUNDS):
            native.start("stock", cache=Path("kernels"))
            theirs = stock.run(STEPS)
            native.start("native", cache=Path("kernels"))
            pairs.append((theirs, own.run(STEPS)))
        s, sh, o, oh = (statistics.median(p[side][part] for p in pairs) for side in (0, 1) for part in (0, 1))
        least = step_bytes(model, rows, PROMPT + ROUNDS * STEPS // 2)
        results.add(
            name,
            rows,
            stock=rows / s,
            own=rows / o,
            ratio=s / o,
            stock_ms=s * 1e3,
            stock_host_ms=sh * 1e3,
            own_ms=o * 1e3,
            own_host_ms=oh * 1e3,
            roofline=least / o / rate,
            first_s=warm,
        )
        del stock, own
        mx.clear_cache()


def table(results: Results) -> Iterator[str]:
    yield f"{'model':8}{'B':>8}{'mlx-lm':>10}{'native':>10}{'ratio':>7}{'target':>8}{'ms':>8}{'host':>7}{'roofline':>10}"
    for cell in results.cells:
        key = tuple(cell["key"])
        if key[0] not in MODELS:
            continue
        target = TARGETS.get((key[0], key[1]))
        tail = f"{cell['own_ms']:8.2f}{cell['own_host_ms']:7.2f}{cell['roofline']:10.0%}" if "own_ms" in cell else ""
        yield (
            f"{key[0]:8}{key[1]!s:>8}{cell['stock']:10.0f}{cell['own']:10.0f}{cell['ratio']:7.2f}"
            f"{f'{target:.1f}' if target else '':>8}{tail}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("cuda-results"))
    parser.add_argument("--only", default="check,micro,models")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    args = parser.parse_args()
    if not mx.cuda.is_available():
        raise SystemExit("no CUDA device")
    results = Results(args.out)
    rate = copy_rate()
    results.add("copy", bytes_per_second=rate)
    parts = args.only.split(",")
    if "check" in parts:
        check(results)
    if "models" in parts:
        for name in args.models.split(","):
            try:
                decode(results, name, rate, [int(rows) for rows in args.batches.split(",")])
            except Exception as error:  # noqa: BLE001  (the other cells are worth having)
                results.add("failed", name, error=f"{type(error).__name__}: {error}"[:2000])
            mx.clear_cache()
    if "micro" in parts:
        micro(results)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
