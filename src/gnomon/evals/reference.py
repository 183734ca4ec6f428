"""Distributions of a reference over a text, kept on disk: computed once, compared with as often as wanted.

A directory per reference, named by a digest of all that its numbers depend on; a safetensors file per step of a window. Where the whole
vocabulary fits, a file holds the logits as the model gave them, in its own type, so that nothing is lost. Otherwise it holds, for
each position, the `top` largest ones, the log-sum-exp of all, and of the rest its probability and its sum of p log p: that bounds the
divergence from both sides (`gnomon.evals.divergence`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np

from gnomon.evals.divergence import FIELDS, Distributions, Positions

FORMAT: Final = 1
ABOUT: Final = "about.json"
"""Tells what a reference depends on; its time is when the reference was last used."""
FEWEST: Final = 16
"""Logits of a position, if not all: with fewer the bounds say nothing."""
REST_BYTES: Final = 20
"""Of a position beside its logits and their ids."""
IN_USE_SECONDS: Final = 600.0
"""A reference that was read or written so lately isn't removed: another process may be at it."""


@dataclass(frozen=True, slots=True)
class Side:
    """What the numbers of a forward depend on beside the token ids.

    `model` is a digest of the model's files, `kernels` tells whose operations run, `kv` how keys and values are held, `machine` the device
    and MLX's version.
    """

    model: str
    kernels: str
    kv: str
    machine: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How a text is gone through: the ids of its windows, each alone from an empty state in steps of `step` tokens."""

    parts: tuple[tuple[int, ...], ...]
    step: int

    @property
    def window(self) -> int:
        return len(self.parts[0])

    @property
    def positions(self) -> int:
        """Positions that have a next token."""
        return len(self.parts) * (self.window - 1)

    @property
    def digest(self) -> str:
        """Of the ids alone: two results with equal ones had the same questions."""
        return hashlib.sha256(repr([list(part) for part in self.parts]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Extent:
    """How many logits of each position a reference keeps (`top`, all of them if that is the vocabulary), and its size at most."""

    top: int
    nbytes: int


def extent(plan: Plan, vocab_size: int, limit: int) -> Extent:
    """As many logits as fit into `limit` bytes: all, else those of the likeliest tokens.

    Raises ValueError if the limit leaves fewer than `FEWEST`.
    """
    room = limit // plan.positions
    if vocab_size * 4 <= room:
        return Extent(vocab_size, plan.positions * vocab_size * 4)
    top = min((room - REST_BYTES) // 8, vocab_size - 1)
    if top < FEWEST:
        raise ValueError(
            f"--reference-size leaves {room} bytes for each of {plan.positions:,} positions, at least {8 * FEWEST + REST_BYTES} are needed"
        )
    return Extent(top, plan.positions * (top * 8 + REST_BYTES))


class ReferenceStore:
    """References in a directory, together at most `limit` bytes: the longest unused ones make room for a new one."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit

    def open(self, side: Side, plan: Plan, kept: Extent) -> Reference:
        """The reference of a side over a text, empty if there is none yet."""
        about = {"format": FORMAT, **asdict(side), "text": plan.digest, "step": plan.step, "top": kept.top}
        found = Reference(self.directory / _digest(about), plan, kept.top)
        if not found.path.is_dir():
            self._make_room(kept.nbytes)
            found.path.mkdir(parents=True, exist_ok=True)
        (found.path / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        return found

    def _make_room(self, needed: int) -> None:
        if not self.directory.is_dir():
            return
        held = sorted((path for path in self.directory.iterdir() if (path / ABOUT).is_file()), key=_used)
        sizes = {path: sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in held}
        left = sum(sizes.values())
        for path in held:
            if left + needed <= self.limit or time.time() - _used(path) < IN_USE_SECONDS:
                return
            shutil.rmtree(path)
            left -= sizes[path]


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()


def _used(path: Path) -> float:
    return (path / ABOUT).stat().st_mtime


class Reference:
    """One reference's files. A window is there when its last step is: files appear whole, and in order."""

    def __init__(self, path: Path, plan: Plan, top: int) -> None:
        self.path = path
        self.plan = plan
        self.top = top

    def missing(self) -> list[int]:
        """Windows that have to be computed."""
        last = (self.plan.window - 2) // self.plan.step * self.plan.step
        return [n for n in range(len(self.plan.parts)) if not self._file(n, last).is_file()]

    def save(self, window: int, start: int, kept: Distributions) -> None:
        """Keep the step of a window that began at position `start`."""
        file = self._file(window, start)
        partial = file.with_name(f"{file.stem}.{os.getpid()}.partial.safetensors")
        mx.save_safetensors(str(partial), kept.arrays())
        partial.replace(file)
        os.utime(self.path / ABOUT)

    def load(self, window: int, start: int) -> Distributions:
        """A step that was kept. Raises FileNotFoundError if there is none: another process made room, or somebody cleaned up."""
        file = self._file(window, start)
        os.utime(self.path / ABOUT)
        if not file.is_file():
            raise FileNotFoundError(f"{file} is gone")
        return Distributions(**cast(Mapping[str, mx.array], mx.load(str(file))))

    def compared(self, candidate: Side, window: int) -> Positions | None:
        """What an earlier comparison of this window with a candidate found."""
        file = self._compared(candidate, window)
        if not file.is_file():
            return None
        with np.load(file) as arrays:
            return Positions(**{name: arrays[name] for name in FIELDS})

    def save_compared(self, candidate: Side, window: int, found: Positions) -> None:
        """Keep what a comparison found, so that one that was cut short goes on."""
        file = self._compared(candidate, window)
        partial = file.with_name(f"{file.stem}.{os.getpid()}.partial.npz")
        np.savez(partial, **{name: getattr(found, name) for name in FIELDS})
        partial.replace(file)

    def _compared(self, candidate: Side, window: int) -> Path:
        return self.path / f"{_digest({'format': FORMAT, **asdict(candidate)})}-{window:05d}.npz"

    def _file(self, window: int, start: int) -> Path:
        return self.path / f"{window:05d}-{start:07d}.safetensors"
