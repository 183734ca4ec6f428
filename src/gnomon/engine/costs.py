"""What steps and windows of a model cost on this machine: measured once, kept on disk."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx

from gnomon.engine.api import SamplingParams
from gnomon.engine.runner import Runner
from gnomon.engine.sampling import BatchSampler, RowSampling
from gnomon.kernels import dispatch
from gnomon.models.load import LoadedModel
from gnomon.propose import Curve
from gnomon.state.batch_state import BatchState

log = logging.getLogger(__name__)

FORMAT: Final = 2
FILE: Final = "step-costs.json"
WIDTHS: Final = (2, 3, 5, 9, 17)
CONTEXT: Final = 128
"""Tokens that rows hold while they are measured."""
STEPS: Final = 8
"""Plain steps in a row, each built before the one before it is read back, as in decoding."""
TOGETHER: Final = 4
"""Plain steps that are timed as one."""
REPEATS: Final = 7
FEWEST: Final = 3
ENOUGH: Final = 3.0
FIXED: Final = 3.0
"""What a step costs besides its positions, in positions, until steps tell. Stock operations come out between 0.5 and 3."""
FIXED_CPU: Final = 4.5
"""The same with native CPU kernels, up to `TILE` positions: 5.4 ms for one row, 9.3 for 5 positions and 14 for eight."""
TILE: Final = 8
"""Positions that native CPU kernels take at once: more cost in proportion (29 ms for 17, 67 for 40, 110 for 64)."""
FIXED_CUDA: Final = 30.0
"""The same with native CUDA kernels: 3.3 ms for one row of an 8B model at 4 bits, 4.0 for eight."""


def batch_sizes(most: int) -> list[int]:
    """The batch sizes measured for rows up to `most`: powers of two, up to 8, beyond which costs are extrapolated."""
    return [size for size in (1, 2, 4, 8) if size <= max(1, most)]


def curve_of(runner: Runner, *, name: str, most_rows: int, cache: Path | None, widths: Sequence[int] = WIDTHS) -> Curve:
    """The costs of the runner's model, from the file in `cache` or measured now (seconds to tens of seconds).

    `name` tells kernels apart. Sizes that the file lacks are measured and added.
    """
    loaded = runner.loaded
    key = _key(loaded, name)
    store = _read(cache)
    known: dict[str, dict[str, float]] = dict(store.get(key, {}))
    sizes = batch_sizes(most_rows if loaded.binding.batchable else 1)
    measured = {rows: _with_tile(widths, rows) for rows in sizes}
    wanted = [rows for rows in sizes if not {"1", *map(str, measured[rows])} <= set(known.get(str(rows), {}))]
    if wanted:
        log.info(
            "measuring the cost of steps with %s rows, once for this model and machine; it can take a minute on a CPU "
            "(a pinned --num-draft-tokens needs no measurement)",
            wanted,
        )
        begun = time.perf_counter()
        for rows in wanted:
            known[str(rows)] = {
                str(width): seconds for width, seconds in _measured(runner, rows, measured[rows]).items()
            }
            # After each, so that a start that is broken off has not measured in vain.
            _write(cache, {**store, key: known})
        log.info("measured in %.1f s", time.perf_counter() - begun)
    plain = {rows: known[str(rows)]["1"] for rows in sizes}
    windows = {rows: {width: known[str(rows)][str(width)] for width in measured[rows]} for rows in sizes}
    return Curve(plain, windows)


def correct(loaded: LoadedModel, num_rows: int, seconds: Mapping[int, float], *, name: str, cache: Path | None) -> None:
    """Put costs that proved to be others, by width (1: a plain step), in the place of what is kept for the model."""
    store, key = _read(cache), _key(loaded, name)
    known = store.get(key, {})
    if str(num_rows) in known:
        log.info("costs of steps with %d rows were measured wrongly, on a busy machine perhaps: corrected", num_rows)
        own = {**known[str(num_rows)], **{str(width): s for width, s in seconds.items()}}
        _write(cache, {**store, key: {**known, str(num_rows): own}})


def _key(loaded: LoadedModel, name: str) -> str:
    """What costs hold for."""
    return " | ".join(
        (str(loaded.path), f"{loaded.weight_bytes} B", device(), f"mlx {version('mlx')}", name, f"context {CONTEXT}")
    )


def _with_tile(widths: Sequence[int], rows: int) -> Sequence[int]:
    """Widths with the one that fills a tile: the next position costs as much as several before it, so between others it isn't seen."""
    full = TILE // rows
    return sorted({*widths, full}) if widths and full > 1 else widths


def assumed_curve(most_rows: int, *, name: str) -> Curve:
    """What is taken for the costs where measuring them at the start would not be worth it, as where only a grammar's forced text may be
    guessed: so much for a step, and as much for each position, whichever row's. `name` tells kernels apart."""

    def cost(positions: int) -> float:
        if name.startswith("native cuda"):
            return FIXED_CUDA + positions
        if name == "stock":
            return FIXED + positions
        return FIXED_CPU + positions if positions <= TILE else (FIXED_CPU + TILE) / TILE * positions

    sizes = batch_sizes(most_rows)
    return Curve(
        {rows: cost(rows) for rows in sizes},
        {rows: {width: cost(rows * width) for width in _with_tile(WIDTHS, rows)} for rows in sizes},
        assumed=True,
    )


def device() -> str:
    """The device that MLX computes on, as far as it tells."""
    info = mx.device_info() if mx.default_device() != mx.Device(mx.cpu) else {}
    return f"{mx.default_device()} {info.get('device_name', '')} x{os.cpu_count()}"


def _measured(runner: Runner, num_rows: int, widths: Sequence[int]) -> dict[int, float]:
    """Seconds of a plain step (1) and of windows, the least of a few tries each."""
    state = _filled(runner, num_rows)
    model, sampler = runner.loaded.model, BatchSampler([RowSampling(SamplingParams(), 0)] * num_rows)
    limit = runner.loaded.vocab_size

    def forward(tokens: mx.array, width: int) -> mx.array:
        with dispatch.step():
            state.begin(width)
            logits = model(tokens, cache=state.caches)
            state.commit()
            return sampler.draw(logits, tokens[:, 1:] if width > 1 else None).tokens

    def plain() -> float:
        tokens = mx.zeros((num_rows, 1), dtype=mx.int32)
        before, reads = None, list[float]()
        for _ in range(STEPS):
            tokens = forward(tokens, 1)
            mx.async_eval(tokens)
            if before is not None:
                before.tolist()
                reads.append(time.perf_counter())
            before = tokens
        tokens.tolist()
        # Several at once: after a read that came late the next step is computed already, and its read takes no time.
        return min(later - sooner for sooner, later in zip(reads, reads[TOGETHER:], strict=False)) / TOGETHER

    def window(width: int) -> float:
        begun = time.perf_counter()
        guesses = [[(7 * i + 3 * b) % limit for i in range(width)] for b in range(num_rows)]
        forward(mx.array(guesses, dtype=mx.int32), width).tolist()
        with dispatch.step():
            state.rollback([width - 1] * num_rows)
        mx.eval(state.arrays())
        return time.perf_counter() - begun

    tries: dict[int, Callable[[], float]] = {1: plain}
    tries |= {width: (lambda width=width: window(width)) for width in widths}
    best = _best(tries)
    # A wider window does more: what was timed dearer than a wider one was disturbed.
    least = float("inf")
    for width in sorted(best, reverse=True):
        least = best[width] = min(best[width], least)
    return best


def _filled(runner: Runner, num_rows: int) -> BatchState:
    """A state of rows that hold some text."""
    prompt = [(11 * i) % runner.loaded.vocab_size for i in range(CONTEXT + 1)]
    one = runner.prefill_alone(prompt).state
    others = [one.fork(0) for _ in range(num_rows - 1)]
    for other in others:
        one.join(other)
    mx.eval(one.arrays())
    return one


def _best(tries: Mapping[int, Callable[[], float]]) -> dict[int, float]:
    """The least seconds of each, taken in turns, so that a disturbance meets all alike; after `ENOUGH` seconds `FEWEST` turns do."""
    for work in tries.values():
        work()
    best = dict.fromkeys(tries, float("inf"))
    begun = time.perf_counter()
    for turn in range(REPEATS):
        for key, work in tries.items():
            best[key] = min(best[key], work())
        if turn + 1 >= FEWEST and time.perf_counter() - begun > ENOUGH:
            break
    return best


def _read(cache: Path | None) -> Mapping[str, Mapping[str, Any]]:
    if cache is None:
        return {}
    try:
        said = json.loads((cache / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(said, dict) or cast("dict[str, Any]", said).get("format") != FORMAT:
        return {}
    costs = cast("dict[str, Any]", said).get("seconds")
    return cast("dict[str, dict[str, Any]]", costs) if isinstance(costs, dict) else {}


def _write(cache: Path | None, costs: Mapping[str, Any]) -> None:
    if cache is None:
        return
    partial = cache / f"{FILE}.{os.getpid()}.partial"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"format": FORMAT, "seconds": costs}, indent=1) + "\n", encoding="utf-8")
        partial.replace(cache / FILE)
    except OSError as error:
        log.warning("measured step costs can't be kept, so they are measured again each time: %s", error)
