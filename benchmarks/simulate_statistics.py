"""Simulate the decision rule: coverage of intervals, false positives and power at 5, 6 and 12 blocks under realistic noise.

Prints the Markdown tables of docs/measuring.md. `uv run python benchmarks/simulate_statistics.py [--trials 4000] [--seed 1]`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gnomon.bench.statistics import CONFIDENCE, THRESHOLD, t_quantile

Array = NDArray[np.float64]
RESAMPLES = 999
TAIL = (1 - CONFIDENCE) / 2


@dataclass(frozen=True)
class Noise:
    """Disturbance of one measured log-time. Shares are of the time; a slot is one measurement, two make a block."""

    jitter: float = 0.01
    interaction: float = 0.005
    linear: float = 0.0
    walk: float = 0.0
    outlier: float = 0.0
    outlier_size: float = 0.3
    burst: float = 0.0
    burst_size: float = 0.2

    def draw(self, rng: np.random.Generator, trials: int, blocks: int) -> Array:
        """Log-times [trials, blocks, 2] of two equal arms in the order they are measured."""
        slots = 2 * blocks
        time = rng.normal(0, self.jitter, (trials, slots))
        time += self.linear * np.arange(slots)
        time += np.cumsum(rng.normal(0, self.walk, (trials, slots)), axis=1)
        hit = rng.random((trials, slots)) < self.outlier
        time += hit * rng.exponential(self.outlier_size, (trials, slots))
        state = np.zeros(trials, dtype=bool)
        for slot in range(slots):
            enter, leave = rng.random(trials) < self.burst, rng.random(trials) < 1 / 3
            state = np.where(state, ~leave, enter)
            time[:, slot] += state * self.burst_size
        return time.reshape(trials, blocks, 2) + rng.normal(0, self.interaction, (trials, blocks, 2))


NOISES: dict[str, Noise] = {
    "quiet (1 % jitter)": Noise(),
    "jittery (4 %)": Noise(jitter=0.04, interaction=0.01),
    "steady drift (1 % a slot)": Noise(linear=0.01),
    "wandering drift (2 % a slot)": Noise(walk=0.02),
    "outliers (1 in 10, mean +30 %)": Noise(outlier=0.1),
    "bursts (+20 %, three slots long)": Noise(burst=0.1),
    "all of it": Noise(jitter=0.02, interaction=0.01, linear=0.003, walk=0.01, outlier=0.05, burst=0.05),
}


def log_ratios(noise: Noise, rng: np.random.Generator, trials: int, blocks: int, effect: float) -> tuple[Array, Array]:
    """Log-ratios [trials, blocks], positive where the candidate is faster by `effect`, and the order of each block (+1: AB)."""
    time = noise.draw(rng, trials, blocks)
    order = np.where(np.arange(blocks) % 2 == 0, 1.0, -1.0)
    first_minus_second = time[:, :, 0] - time[:, :, 1]
    return effect + order * first_minus_second, order


def student(d: Array, _order: Array, _rng: np.random.Generator) -> tuple[Array, Array, Array]:
    n = d.shape[1]
    mean = d.mean(1)
    half = t_quantile(1 - TAIL, n - 1) * d.std(1, ddof=1) / math.sqrt(n)
    return mean, mean - half, mean + half


def student_order(d: Array, order: Array, _rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Least squares with a term for the order: it removes steady drift and costs a degree of freedom."""
    n = d.shape[1]
    design = np.stack([np.ones(n), order], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    beta = d @ design @ inverse
    residual = d - beta @ design.T
    half = t_quantile(1 - TAIL, n - 2) * np.sqrt((residual**2).sum(1) / (n - 2) * inverse[0, 0])
    return beta[:, 0], beta[:, 0] - half, beta[:, 0] + half


def _resampled(d: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    trials, n = d.shape
    means = np.empty((trials, RESAMPLES))
    deviations = np.empty((trials, RESAMPLES))
    for row in range(trials):
        sample = d[row][rng.integers(0, n, (RESAMPLES, n))]
        means[row] = sample.mean(1)
        deviations[row] = sample.std(1, ddof=1)
    return means, deviations


def percentile(d: Array, _order: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    means, _ = _resampled(d, rng)
    low, high = np.quantile(means, [TAIL, 1 - TAIL], axis=1)
    return d.mean(1), low, high


def expanded(d: Array, _order: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Percentile bootstrap with Hesterberg's correction for small samples (The American Statistician 69, 2015)."""
    n = d.shape[1]
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(1 - TAIL, n - 1))
    means, _ = _resampled(d, rng)
    low, high = np.quantile(means, [tail, 1 - tail], axis=1)
    return d.mean(1), low, high


def bca(d: Array, _order: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Bias-corrected and accelerated bootstrap (Efron 1987)."""
    normal = NormalDist()
    means, _ = _resampled(d, rng)
    n = d.shape[1]
    below = np.clip((means < d.mean(1)[:, None]).mean(1), 1 / RESAMPLES, 1 - 1 / RESAMPLES)
    bias = np.array([normal.inv_cdf(p) for p in below])
    jack = (d.sum(1, keepdims=True) - d) / (n - 1)
    centred = jack.mean(1, keepdims=True) - jack
    acceleration = (centred**3).sum(1) / np.maximum(6 * (centred**2).sum(1) ** 1.5, 1e-300)
    bounds: list[Array] = []
    for z in (normal.inv_cdf(TAIL), normal.inv_cdf(1 - TAIL)):
        shifted = bias + (bias + z) / (1 - acceleration * (bias + z))
        p = np.array([normal.cdf(value) for value in shifted])
        bounds.append(np.array([np.quantile(row, q) for row, q in zip(means, p, strict=True)]))
    return d.mean(1), bounds[0], bounds[1]


def studentised(d: Array, _order: Array, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    n = d.shape[1]
    means, deviations = _resampled(d, rng)
    error = np.maximum(deviations / math.sqrt(n), 1e-12)
    pivots = (means - d.mean(1)[:, None]) / error
    low, high = np.quantile(pivots, [TAIL, 1 - TAIL], axis=1)
    own = d.std(1, ddof=1) / math.sqrt(n)
    return d.mean(1), d.mean(1) - high * own, d.mean(1) - low * own


METHODS: dict[str, Callable[[Array, Array, np.random.Generator], tuple[Array, Array, Array]]] = {
    "Student's t": student,
    "t with order term": student_order,
    "percentile": percentile,
    "expanded percentile": expanded,
    "BCa": bca,
    "studentised bootstrap": studentised,
}


def shares(d: tuple[Array, Array, Array], effect: float) -> tuple[float, float, float]:
    """Shares of trials whose interval holds the true effect, that are called a win, and that are called a loss."""
    estimate, low, high = d
    edge = math.log1p(THRESHOLD)
    covered = (low <= effect) & (effect <= high)
    win, loss = (estimate > edge) & (low > 0), (estimate < -edge) & (high < 0)
    return float(covered.mean()), float(win.mean()), float(loss.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    blocks = (5, 6, 12)
    print("Coverage of the 95 % interval (share of trials), equal arms:\n")
    print("| noise | method | " + " | ".join(f"{n} blocks" for n in blocks) + " |")
    print("| --- | --- |" + " --- |" * len(blocks))
    for name, noise in NOISES.items():
        for method, function in METHODS.items():
            cells: list[str] = []
            for n in blocks:
                rng = np.random.default_rng((arguments.seed, n))
                trials = arguments.trials if function in (student, student_order) else min(arguments.trials, 2000)
                d, order = log_ratios(noise, rng, trials, n, 0.0)
                cells.append(f"{shares(function(d, order, rng), 0.0)[0]:.1%}")
            print(f"| {name} | {method} | " + " | ".join(cells) + " |")
    print("\nThe whole rule with Student's t: share of trials called a win or a loss, by true effect:\n")
    print(
        "| noise | blocks | equal: win | equal: loss | 2 % faster: win | 5 % slower: loss | 5 % slower: win | 10 % slower: loss |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, noise in NOISES.items():
        for n in blocks:
            row: list[float] = []
            for effect, columns in (
                (0.0, (1, 2)), (math.log(1.02), (1,)), (-math.log(1.05), (2, 1)), (-math.log(1.10), (2,)),
            ):  # fmt: skip
                rng = np.random.default_rng((arguments.seed, n, 7))
                d, order = log_ratios(noise, rng, arguments.trials, n, effect)
                outcome = shares(student(d, order, rng), effect)
                row += [outcome[column] for column in columns]
            print(f"| {name} | {n} | " + " | ".join(f"{share:.1%}" for share in row) + " |")


if __name__ == "__main__":
    main()
