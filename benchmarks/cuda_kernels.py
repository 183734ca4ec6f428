"""Check and time the CUDA kernels on a GPU, paired with mlx-lm in one process.

Weights are random, in the shapes of Llama 3.1 8B and Llama 3.2 1B.

    uv run python benchmarks/cuda_kernels.py [--out DIR] [--only PART,..] [--models NAME,..] [--limit-s S] [--sanitize]

Every cell is a line of DIR/cells.jsonl as soon as it is measured; cells that are there already are not measured again. Cells that have a
target come first; past `--limit-s` none is begun. Rates are medians of interleaved rounds. `host` is the time until a step is submitted,
`layers` the time one block of the GPU spent in the layers, `roofline` the least bytes a step must read over the time it took, as a share of
the copy rate measured first. Native steps are measured with five kernels a layer and, up to 8 rows, with one (`fused`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
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
from gnomon.kernels.cuda import layers, products, verify
from gnomon.kernels.cuda.decode import Decoder
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
    """Cells by key, each written when it is measured, until `limit` seconds have passed."""

    def __init__(self, out: Path, limit: float) -> None:
        self.end = time.monotonic() + limit
        self.path = out / "cells.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.cells: list[Cell] = [json.loads(line) for line in lines]

    def has(self, *key: object) -> bool:
        """Whether this cell needn't be measured: it is there, or the time is up."""
        return time.monotonic() > self.end or any(tuple(cell["key"]) == key for cell in self.cells)

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


def prefill(results: Results, name: str, model: Any, prompt: mx.array) -> None:
    """A prompt's prefill, stock and native."""
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
    results.add(name, "prefill", stock=PROMPT / theirs, own=PROMPT / ours, own_ratio=theirs / ours)


def phases(model: Any, state: BatchState, tokens: mx.array) -> list[float]:
    """Microseconds of one block in each phase of a layer, on average over the layers of a step that is not kept."""
    decoder = model.decoder
    state.begin(1)
    caches: list[Any] = list(state.caches)
    buffers = [buffer for cache in caches for buffer in cache.in_place()]
    stamps: list[list[int]] = []
    for _ in range(3):
        decoder.times = []
        logits = decoder._forward(tokens, caches[0].rows.offsets, *buffers)
        mx.eval(logits, decoder.times)
        stamps = [launch.tolist() for launch in decoder.times]
    decoder.times = None
    return [round(statistics.mean((after[i + 1] - after[i]) / 1e3 for after in stamps), 2) for i in range(5)]


def decode(results: Results, name: str, model: Any, rate: float, rows: int, prompt: mx.array) -> None:
    """Steps of so many rows: stock, native and native with one launch a layer, by turns."""
    fused = model.decoder
    apart = Decoder(fused.table, fused.layers, fused.norm, fused.head, fused.eps, ())
    decoders = (
        {"own": apart, "fused": fused} if fused.pattern is not None and rows <= layers.MOST_ROWS else {"own": apart}
    )
    native.start("stock", cache=Path("kernels"))
    stock = Stock(model, rows, prompt)
    stock.run(4)
    native.start("native", cache=Path("kernels"))
    states: dict[str, Native] = {}
    values: dict[str, Any] = {}
    for which, decoder in list(decoders.items()):
        began = time.perf_counter()
        object.__setattr__(model, "decoder", decoder)
        try:
            states[which] = Native(model, rows, prompt)
            states[which].run(4)
        except RuntimeError as error:  # the other kernels are worth measuring
            values[f"{which}_error"] = str(error)[:2000]
            del decoders[which]
        values[f"{which}_first_s"] = time.perf_counter() - began
    taken: dict[str, list[tuple[float, float]]] = {which: [] for which in ("stock", *decoders)}
    for _ in range(ROUNDS):
        native.start("stock", cache=Path("kernels"))
        taken["stock"].append(stock.run(STEPS))
        native.start("native", cache=Path("kernels"))
        for which, decoder in decoders.items():
            object.__setattr__(model, "decoder", decoder)
            taken[which].append(states[which].run(STEPS))
    least = step_bytes(model, rows, PROMPT + ROUNDS * STEPS // 2)
    theirs = statistics.median(step for step, _ in taken["stock"])
    for which, rounds in taken.items():
        step, host = (statistics.median(side) for side in zip(*rounds, strict=True))
        values |= {which: rows / step, f"{which}_ms": step * 1e3, f"{which}_host_ms": host * 1e3}
        values |= {f"{which}_ratio": theirs / step, f"{which}_roofline": least / step / rate}
    object.__setattr__(model, "decoder", fused)
    if "fused" in decoders:
        values["fused_phases_us"] = phases(model, states["fused"].state, states["fused"].pending)
    results.add(name, rows, **values)
    del stock, states
    mx.clear_cache()


def cells_of(results: Results, name: str, cells: list[int | str], rate: float) -> None:
    """Those cells of a model that are not there yet."""
    if all(results.has(name, cell) for cell in cells):
        return
    model = build(name)
    prompt = mx.random.randint(0, 128256, (1, PROMPT), key=mx.random.key(3))
    kernels = native.prepare(model, "native", cache=Path("kernels"), fused=True)
    if not kernels.layers:
        raise SystemExit(f"{name}: no compiled decode: {dict(dispatch.stock_calls)}")
    for cell in cells:
        if results.has(name, cell):
            continue
        if isinstance(cell, str):
            prefill(results, name, model, prompt)
        else:
            decode(results, name, model, rate, cell, prompt)


def sanitize(results: Results) -> None:
    """The kernels' checks under compute-sanitizer, in a process of their own."""
    if results.has("sanitize"):
        return
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        results.add("sanitize", error="no compute-sanitizer")
        return
    code = "from gnomon.kernels.cuda import verify; print(*verify.small(), sep='\\n')"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(30.0, results.end - time.monotonic()))
    results.add("sanitize", exit=done.returncode, tail=(done.stdout + done.stderr)[-1500:])


def table(results: Results) -> Iterator[str]:
    heads = ("tok/s", "ratio", "ms", "host", "of copy")
    yield f"{'model':8}{'B':>8}{'target':>8}{'mlx-lm':>10}" + "".join(
        f"  {which + ':':8}" + "".join(f"{head:>8}" for head in heads) for which in ("apart", "fused")
    )
    for cell in results.cells:
        key = tuple(cell["key"])
        if key[0] not in MODELS:
            continue
        target = TARGETS.get((key[0], key[1]))
        line = f"{key[0]:8}{key[1]!s:>8}{f'{target:.1f}' if target else '':>8}{cell['stock']:10.0f}"
        for which in ("own", "fused"):
            if which in cell:
                line += f"{'':10}{cell[which]:8.0f}{cell[f'{which}_ratio']:8.2f}"
                if f"{which}_ms" in cell:
                    line += f"{cell[f'{which}_ms']:8.2f}{cell[f'{which}_host_ms']:8.2f}{cell[f'{which}_roofline']:8.0%}"
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("cuda-results"))
    parser.add_argument("--only", default="check,micro,models")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--limit-s", type=float, default=3600.0, help="begin no cell after so many seconds")
    parser.add_argument("--sanitize", action="store_true", help="run the kernels' checks under compute-sanitizer too")
    args = parser.parse_args()
    if not mx.cuda.is_available():
        raise SystemExit("no CUDA device")
    results = Results(args.out, args.limit_s)
    rate = copy_rate()
    results.add("copy", bytes_per_second=rate)
    parts = args.only.split(",")
    if "check" in parts:
        check(results)
    if "models" in parts:
        batches = [int(rows) for rows in args.batches.split(",")]
        with_target = {name: [cell for model, cell in TARGETS if model == name] for name in args.models.split(",")}
        rest: dict[str, list[int | str]] = {
            name: [cell for cell in (*batches, "prefill") if cell not in first] for name, first in with_target.items()
        }
        for order in (with_target, rest):
            for name, cells in order.items():
                wanted = [cell for cell in cells if cell == "prefill" or cell in batches]
                try:
                    cells_of(results, name, wanted, rate)
                except Exception as error:  # noqa: BLE001  (the other cells are worth having)
                    results.add("failed", name, error=f"{type(error).__name__}: {error}"[:2000])
                mx.clear_cache()
    if args.sanitize:
        sanitize(results)
    if "micro" in parts:
        micro(results)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
