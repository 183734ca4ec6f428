"""A candidate against a reference over a text: both go through it in the same steps, one model in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Protocol

import mlx.core as mx
from pydantic import JsonValue

from gnomon.bench.schema import Run
from gnomon.config import KernelConfig, KvScheme
from gnomon.engine.api import ModelInfo
from gnomon.engine.aside import SideJob
from gnomon.engine.engine import Engine
from gnomon.engine.runner import Runner
from gnomon.engine.scoring import LOGIT_BYTES
from gnomon.evals.divergence import Positions, Summary, compare, condense
from gnomon.evals.record import TextResult
from gnomon.evals.reference import Plan, Reference, Side
from gnomon.kernels import native
from gnomon.models.kv import KV_CONFIG
from gnomon.state.batch_state import BatchState
from gnomon.state.fingerprint import fingerprint

CODED_STEP = 64
"""Tokens of a step where keys and values are coded: a row's first step attends to plain ones, so there must be further ones."""


class Taker(Protocol):
    """Gets a window's logits (n, vocabulary) step by step, with the next tokens (n,), and may keep them until it returns."""

    def __call__(self, start: int, logits: mx.array, targets: mx.array, /) -> None: ...


class LogitsJob(SideJob[bool]):
    """Goes through one window and hands every step's logits to `taker`, on the engine's thread."""

    what: ClassVar[str] = "evaluating"

    def __init__(self, part: tuple[int, ...], step: int, taker: Taker) -> None:
        super().__init__([part])
        self.step = step
        self.taker = taker

    def needed(self, prompt: Sequence[int]) -> int:
        return len(prompt) - 1

    def width(self, runner: Runner, prompt: Sequence[int]) -> int:  # noqa: ARG002  (the base's signature)
        return self.step

    def forward(self, runner: Runner, window: mx.array, state: BatchState) -> mx.array:
        return runner.loaded.model(window, cache=state.caches)

    def take(self, prompt: Sequence[int], start: int, made: mx.array | None) -> bool | None:
        if made is None:
            return True
        end = start + made.shape[1]
        self.taker(start, made[0], mx.array(list(prompt[start + 1 : end + 1]), dtype=mx.int32))
        return True if end == self.needed(prompt) else None


def step_of(asked: int | None, window: int, vocab_size: int, coded: bool) -> tuple[int, int]:
    """Tokens of a step, and how many first positions of each window don't count: where keys or values are coded, those of the first
    step, which attends to plain ones.

    Raises ValueError for a step that leaves nothing to compare.
    """
    widest = max(1, LOGIT_BYTES // (4 * vocab_size))
    if asked is not None and asked > widest:
        raise ValueError(
            f"--step is {asked}, but the logits of a step take at most {LOGIT_BYTES >> 20} MiB: {widest} tokens"
        )
    step = asked if asked is not None else min(CODED_STEP if coded else window - 1, widest)
    if coded and step >= window - 1:
        raise ValueError(
            f"a window has {window} tokens and a step {step}: the first attends to plain keys and values, and no other follows"
        )
    return step, step if coded else 0


def side_of(model: Path, kernels: KernelConfig, kv: KvScheme, memory: Path) -> Side:
    """What identifies a side's numbers. Builds the native kernels if they are wanted and not there. `memory` is where digests are kept.

    Raises OSError or ValueError for a directory that holds no model.
    """
    found = native.start(
        "stock" if kernels.stock else kernels.kernels,
        cache=kernels.kernel_cache,
        threads=kernels.threads,
        graph=kernels.cuda_graph,
    )
    held = kv.name + (f" from {kv.start}" if kv.start else "") + (" fused" if kv.fused else "")
    if kv.mode == "config":
        held += " " + hashlib.sha256((model / KV_CONFIG).read_bytes()).hexdigest()
    memory.mkdir(parents=True, exist_ok=True)
    return Side(
        fingerprint(model, memory),
        found.identity if not found.native or found.path is not None else found.name,
        held,
        f"{mx.default_device()}, mlx {metadata.version('mlx')}",
    )


def fill(reference: Reference, engine: Engine, told: Callable[[int], None]) -> None:
    """Compute the windows that a reference lacks; `told` gets how many are there. Raises what `Engine.set_aside` raises."""
    missing = reference.missing()
    done = len(reference.plan.parts) - len(missing)
    for n in missing:

        def keep(start: int, logits: mx.array, targets: mx.array, window: int = n) -> None:
            reference.save(window, start, condense(logits, targets, reference.top))

        _through(reference.plan, n, engine, keep)
        done += 1
        told(done)


def measure(reference: Reference, candidate: Side, engine: Engine, told: Callable[[int], None]) -> list[Positions]:
    """Every window's positions, from an earlier comparison as far as it got; `told` gets how many are done.

    Raises what `Engine.set_aside` raises, and FileNotFoundError if the reference is incomplete.
    """
    found: list[Positions] = []
    for n in range(len(reference.plan.parts)):
        made = reference.compared(candidate, n)
        if made is None:
            steps: list[Positions] = []

            def see(
                start: int, logits: mx.array, targets: mx.array, window: int = n, into: list[Positions] = steps
            ) -> None:
                into.append(compare(reference.load(window, start), logits, targets))

            _through(reference.plan, n, engine, see)
            made = Positions.join(steps)
            reference.save_compared(candidate, n, made)
        found.append(made)
        told(n + 1)
    return found


def _through(plan: Plan, n: int, engine: Engine, taker: Taker) -> None:
    engine.set_aside(LogitsJob(plan.parts[n], plan.step, taker), [f"window {n}"]).result()


@dataclass(frozen=True, slots=True)
class Named:
    """A side as people know it."""

    model: str
    side: Side

    @property
    def settings(self) -> dict[str, JsonValue]:
        return {"model_id": self.model, **asdict(self.side)}

    def __str__(self) -> str:
        """Short, and equal for equal references: a build of the native kernels doesn't count."""
        return f"{self.model} {self.side.model[:8]}, {self.side.kernels.split()[0]}, kv {self.side.kv}"


def record(
    text: Path,
    plan: Plan,
    skipped: int,
    sides: tuple[Named, Named],
    candidate: ModelInfo,
    found: Summary,
    windows: Sequence[Positions],
    seconds: float,
    *,
    top: int,
    argv: Sequence[str],
    hash_cache: Path,
) -> Run:
    """The result as a run of kind `eval`, with the mean of every window. `sides` are reference and candidate."""
    reference, own = sides
    return TextResult(
        name=f"KL of {own.model} from {reference.model} on {text.name}",
        task=f"KL from {reference} on {text.name}, windows of {plan.window} in steps of {plan.step}",
        cell=f"kl:{plan.window}",
        prompt=plan.digest,
        parts=plan.parts,
        metrics={"kl_divergence": found.mean.value, "perplexity": found.perplexity},
        details={
            **asdict(found),
            "skipped_of_each_window": skipped,
            "logits_kept": top,
            "window_means": [float(window.kl.mean()) for window in windows],
        },
        settings={**own.settings, "reference": reference.settings},
    ).run(candidate, seconds, argv=argv, hash_cache=hash_cache)
