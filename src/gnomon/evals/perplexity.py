"""Perplexity of a text under a served model: the text's tokens in windows that don't overlap, each scored alone by the engine.

As in `mlx_lm.perplexity`, the mean runs over all tokens but each window's first, an incomplete last window is left out, and the
standard error is that of the mean carried through the exponential.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from gnomon.bench.schema import Run
from gnomon.engine.api import Engine
from gnomon.evals.record import TextResult


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Nats of every window's scored tokens, summed, and what follows from all of them together."""

    value: float
    standard_error: float
    tokens: int
    window_nats: tuple[float, ...]


def windows(ids: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Whole windows of `length` tokens. Raises `ValueError` for a length below 2, and if there is no whole window."""
    if length < 2:
        raise ValueError(f"a window has {length} tokens, at least 2 are needed")
    if len(ids) < length:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one window of {length}")
    return [tuple(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)]


def measure(engine: Engine, parts: Sequence[tuple[int, ...]], told: Callable[[int], None]) -> Perplexity:
    """Score the windows one after the other; `told` gets the number that are done. Raises what `Engine.score` raises."""
    nats: list[float] = []
    sums: list[float] = []
    for done, part in enumerate(parts, 1):
        (scores,) = engine.score([part], 0).result()
        own = [-one.logprob for one in scores]
        nats += own
        sums.append(math.fsum(own))
        told(done)
    value = math.exp(fmean(nats))
    error = value * stdev(nats) / math.sqrt(len(nats)) if len(nats) > 1 else 0.0
    return Perplexity(value, error, len(nats), tuple(sums))


def record(
    engine: Engine,
    text: Path,
    parts: Sequence[tuple[int, ...]],
    found: Perplexity,
    seconds: float,
    *,
    argv: Sequence[str],
    hash_cache: Path,
) -> Run:
    """The result as a run of kind `eval`. Two such runs had the same questions if their prompts' digests are equal."""
    length = len(parts[0])
    return TextResult(
        name=f"perplexity of {text.name}, {engine.model.id}",
        task=f"perplexity of {text.name}, windows of {length}",
        cell=f"perplexity:{length}",
        prompt=hashlib.sha256(repr(list(parts)).encode()).hexdigest(),
        parts=parts,
        metrics={"perplexity": found.value},
        details={
            "standard_error": found.standard_error,
            "tokens": found.tokens,
            "window_nats": list(found.window_nats),
        },
        settings={"window": length},
    ).run(engine.model, seconds, argv=argv, hash_cache=hash_cache)
