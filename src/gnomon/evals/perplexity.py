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

from gnomon.bench.preflight import preflight
from gnomon.bench.provenance import provenance
from gnomon.bench.schema import Arm, Run, Sample, Work
from gnomon.bench.store import new_id, now
from gnomon.engine.api import Engine


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
    model = engine.model
    origin = provenance(Path(model.path), hash_cache)
    length = len(parts[0])
    work = Work(
        task=f"perplexity of {text.name}, windows of {length}",
        model=origin.model_sha256,
        prompt=hashlib.sha256(repr(list(parts)).encode()).hexdigest(),
        prompt_tokens=sum(map(len, parts)),
        machine=origin.machine,
    )
    sample = Sample(
        index=0,
        cell=f"perplexity:{length}",
        block=0,
        slot=0,
        arm="gnomon",
        seed=0,
        status="ok",
        started=0.0,
        seconds=seconds,
        metrics={"perplexity": found.value, "weight_bytes": float(model.weight_bytes)},
        work=work,
        details={
            "standard_error": found.standard_error,
            "tokens": found.tokens,
            "window_nats": list(found.window_nats),
        },
    )
    return Run(
        kind="eval",
        id=new_id(),
        name=f"perplexity of {text.name}, {model.id}",
        created=now(),
        finished=now(),
        complete=True,
        planned_blocks=1,
        argv=tuple(argv),
        provenance=origin,
        preflight=preflight(),
        arms=(Arm(name="gnomon", kind="engine", settings={"window": length}, effective={"tier": model.tier}),),
        samples=(sample,),
    )
