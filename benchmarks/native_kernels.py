"""Native CPU kernels against stock operations: the same requests through two engines of one process, in alternating pairs.

uv run python benchmarks/native_kernels.py MODEL [--pairs 5] [--prompt 64] [--tokens 24]
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from pathlib import Path

from gnomon.config import EngineConfig, KernelConfig
from gnomon.engine.api import Delta, Event, Failed, Finished, Request
from gnomon.engine.engine import Engine, load


def measure(engine: Engine, name: str, prompt: tuple[int, ...], tokens: int) -> tuple[float, float]:
    """Tokens per second of prefill (up to the first token) and of decoding after it, of one greedy request."""
    times: list[float] = []
    ended = threading.Event()
    failures: list[str] = []

    def sink(event: Event) -> None:
        if isinstance(event, Delta):
            times.append(time.perf_counter())
        elif isinstance(event, Finished | Failed):
            if isinstance(event, Failed):
                failures.append(event.message)
            ended.set()

    begun = time.perf_counter()
    engine.submit(Request(name, prompt, max_tokens=tokens, ignore_eos=True), sink)
    ended.wait()
    if failures:
        raise RuntimeError(failures[0])
    return len(prompt) / (times[0] - begun), (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    config = EngineConfig(prompt_cache=0)
    engines = {policy: load(args.model, config, kernels=KernelConfig(kernels=policy)) for policy in ("stock", "native")}
    samples: dict[str, list[tuple[float, float]]] = {policy: [] for policy in engines}
    draw = random.Random(1)
    for pair in range(-1, args.pairs):
        prompt = tuple(draw.randrange(1000, 20000) for _ in range(args.prompt))
        for policy in sorted(engines, reverse=pair % 2 == 0):
            rates = measure(engines[policy], f"{policy}{pair}", prompt, args.tokens)
            if pair >= 0:
                samples[policy].append(rates)
    for phase, name in enumerate(("prefill", "decode")):
        stock, native = ([rates[phase] for rates in samples[policy]] for policy in ("stock", "native"))
        ratios = [n / s for n, s in zip(native, stock, strict=True)]
        print(
            f"{name}: stock {statistics.median(stock):.1f} token/s, native {statistics.median(native):.1f} token/s, "
            f"ratio {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}), {len(ratios)} pairs"
        )
    for engine in engines.values():
        engine.stop()


if __name__ == "__main__":
    main()
