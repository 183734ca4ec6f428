"""From samples to comparisons: pairing by block, exclusion with reasons, refusal of ratios between different work."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gnomon.bench.schema import METRICS, Comparison, Exclusion, Pair, Sample, Work
from gnomon.bench.statistics import METHOD, Verdict, decide, interval


def difference(a: Work, b: Work) -> str | None:
    """Why two samples must not be set in a ratio, or None if they did the same work."""
    for name in Work.model_fields:
        left, right = getattr(a, name), getattr(b, name)
        if left != right:
            return f"different work: {name} is {left!r} against {right!r}"
    return None


def _last_attempts(samples: Sequence[Sample]) -> dict[tuple[int, str], Sample]:
    return {(s.block, s.arm): s for s in sorted(samples, key=lambda s: s.attempt)}


def pair(
    samples: Sequence[Sample], baseline: str, candidate: str, metric: str
) -> tuple[list[Pair], list[Exclusion], list[str]]:
    """Pairs, exclusions and the reasons for which work differed, over the measured blocks (block >= 0) of one cell."""
    found = _last_attempts(samples)
    pairs: list[Pair] = []
    excluded: list[Exclusion] = []
    mismatches: list[str] = []
    seen: set[int] = set()
    sign = 1.0 if METRICS[metric].better == "higher" else -1.0
    for block in sorted({s.block for s in samples if s.block >= 0}):
        a, b = found.get((block, baseline)), found.get((block, candidate))
        if a is None or b is None:
            excluded.append(Exclusion(block=block, reason=f"not measured: {baseline if a is None else candidate}"))
            continue
        bad = [f"{s.arm} {s.status}: {s.reason}" for s in (a, b) if s.status != "ok"]
        if bad:
            excluded.append(Exclusion(block=block, reason="; ".join(bad)))
            continue
        if a.work is None or b.work is None:  # the schema refuses an ok sample without work
            raise ValueError(f"block {block} has an ok sample without work")
        mismatch = difference(a.work, b.work)
        if a.seed != b.seed:
            mismatch = f"different work: seed is {a.seed} against {b.seed}"
        left, right = a.metrics.get(metric), b.metrics.get(metric)
        if mismatch is not None:
            mismatches.append(mismatch)
            excluded.append(Exclusion(block=block, reason=mismatch))
        elif left is None or right is None:
            excluded.append(
                Exclusion(block=block, reason=f"no {metric} from {baseline if left is None else candidate}")
            )
        elif left <= 0 or right <= 0:
            excluded.append(Exclusion(block=block, reason=f"{metric} is not positive: {left} against {right}"))
        elif a.seed in seen:
            excluded.append(Exclusion(block=block, reason=f"workload seed {a.seed} was already counted"))
        else:
            seen.add(a.seed)
            pairs.append(
                Pair(
                    block=block,
                    seed=a.seed,
                    first=a.arm if a.slot < b.slot else b.arm,
                    baseline=left,
                    candidate=right,
                    log_ratio=sign * math.log(right / left),
                )
            )
    return pairs, excluded, mismatches


def compare(
    samples: Sequence[Sample], cell: str, baseline: str, candidate: str, metric: str, *, primary: bool = False
) -> Comparison:
    """Compare two arms on one metric of one cell. Raises `ValueError` for an unknown metric."""
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}")
    mine = [s for s in samples if s.cell == cell and s.arm in (baseline, candidate) and s.block >= 0]
    pairs, excluded, mismatches = pair(mine, baseline, candidate, metric)
    verdict = _verdict(mine, pairs, mismatches, baseline, candidate)
    ratios = [p.log_ratio for p in pairs]
    found = interval(ratios) if len(ratios) >= 2 and not mismatches else None
    return Comparison(
        cell=cell,
        metric=metric,
        unit=METRICS[metric].unit,
        better=METRICS[metric].better,
        baseline=baseline,
        candidate=candidate,
        primary=primary,
        pairs=tuple(pairs),
        excluded=tuple(excluded),
        ratio=None if found is None else math.exp(found.estimate),
        lower=None if found is None else math.exp(found.lower),
        upper=None if found is None else math.exp(found.upper),
        method=METHOD,
        outcome=verdict.outcome,
        reason=verdict.reason,
        next=verdict.next,
    )


def _verdict(
    samples: Sequence[Sample], pairs: Sequence[Pair], mismatches: Sequence[str], baseline: str, candidate: str
) -> Verdict:
    if mismatches:
        return Verdict("inapplicable", f"no ratio: {mismatches[0]} (in {len(mismatches)} blocks)")
    for arm in (baseline, candidate):
        own = [s for s in samples if s.arm == arm]
        if own and all(s.status == "unsupported" for s in own):
            return Verdict("inapplicable", f"{arm}: {own[0].reason}")
        if own and not any(s.status == "ok" for s in own):
            return Verdict("blocked", f"{arm} never completed: {own[-1].status}: {own[-1].reason}", f"make {arm} run")
    failures = sum(s.arm == candidate and s.status in ("failed", "invalid", "timeout") for s in samples)
    return decide([p.log_ratio for p in pairs], failures)
