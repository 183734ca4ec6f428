"""Pairing, exclusion and refusal: from hand-made samples and from a saved run that is replayed without any model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from gnomon.bench.compare import compare, difference
from gnomon.bench.report import markdown
from gnomon.bench.schema import METRICS, Run, Sample, Work, published_schema
from gnomon.bench.store import load

from .records import RATE, WORK, pairs, sample

REPLAY = Path(__file__).parent / "data" / "replay.json"
EVEN = [(100.0, 110.0 + n) for n in range(6)]


def test_ratio_is_hand_computed() -> None:
    found = compare(pairs([(100, 110), (200, 220), (50, 55), (80, 88), (10, 11)]), "decode:32@0", "A", "B", RATE)
    assert [p.log_ratio for p in found.pairs] == pytest.approx([math.log(1.1)] * 5)
    assert (found.ratio, found.lower, found.upper) == (pytest.approx(1.1), pytest.approx(1.1), pytest.approx(1.1))
    assert (found.outcome, found.unit, found.better) == ("repeatable win", "token/s", "higher")


def test_a_time_is_better_when_lower() -> None:
    samples = [s.model_copy(update={"metrics": {"first_token_seconds": 1 / s.metrics[RATE]}}) for s in pairs(EVEN)]
    found = compare(samples, "decode:32@0", "A", "B", "first_token_seconds")
    assert found.outcome == "repeatable win"
    assert found.ratio is not None
    assert found.ratio > 1


def test_duplicate_seeds_count_once() -> None:
    samples = [s.model_copy(update={"seed": min(s.seed, 4)}) for s in pairs(EVEN)]
    found = compare(samples, "decode:32@0", "A", "B", RATE)
    assert [p.block for p in found.pairs] == [0, 1, 2, 3, 4]
    assert [(e.block, e.reason) for e in found.excluded] == [(5, "workload seed 4 was already counted")]


def test_fewer_than_five_seeds_decide_nothing() -> None:
    samples = [s.model_copy(update={"seed": min(s.seed, 3)}) for s in pairs(EVEN)]
    assert compare(samples, "decode:32@0", "A", "B", RATE).outcome == "inconclusive"


def test_warm_ups_never_count() -> None:
    samples = [*pairs(EVEN), sample(20, -1, "A", 1.0), sample(21, -1, "B", 1e9)]
    assert len(compare(samples, "decode:32@0", "A", "B", RATE).pairs) == 6


@pytest.mark.parametrize("field", sorted(Work.model_fields))
def test_any_difference_of_work_refuses_the_ratio(field: str) -> None:
    value = getattr(WORK, field)
    other = WORK.model_copy(update={field: value + 1 if isinstance(value, int) else f"{value}x"})
    assert field in (difference(WORK, other) or "")
    samples = [s.model_copy(update={"work": other}) if s.arm == "B" and s.block == 3 else s for s in pairs(EVEN)]
    found = compare(samples, "decode:32@0", "A", "B", RATE)
    assert (found.outcome, found.ratio, found.lower, found.upper) == ("inapplicable", None, None, None)
    assert field in found.reason


def test_unknown_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown metric 'speed'"):
        compare(pairs(EVEN), "decode:32@0", "A", "B", "speed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": {"speed": 1.0}}, "unknown metric"),
        ({"metrics": {RATE: -1.0}}, "below 0"),
        ({"metrics": {RATE: math.nan}}, "finite number"),
        ({"metrics": {}}, "lacks metrics or work"),
        ({"work": None}, "lacks metrics or work"),
        ({"status": "failed"}, "gives no reason"),
        ({"status": "great"}, "status"),
        ({"colour": "red"}, "colour"),
        ({"attempt": 0}, "attempt"),
    ],
)
def test_the_schema_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        sample(0, 0, "A", 1.0, **changes)


# The replay fixture: one saved run of three cells.


@pytest.fixture(scope="module")
def replay() -> Run:
    return load(REPLAY)


def test_replay_fits_the_published_schema() -> None:
    """Judged by the jsonschema package, not by our own reader."""
    schema = published_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    saved = json.loads(REPLAY.read_text())
    validator.validate(saved)
    for spoil in (
        lambda r: r.update(format=2),
        lambda r: r.update(colour="red"),
        lambda r: r["samples"][0].update(status="great"),
        lambda r: r["samples"][0]["metrics"].update(speed=1.0),
        lambda r: r["samples"][0].pop("seed"),
        lambda r: r["comparisons"][0].update(outcome="victory"),
    ):
        broken = json.loads(REPLAY.read_text())
        spoil(broken)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(broken)


def test_replay_gives_the_saved_comparisons(replay: Run) -> None:
    """Outcomes are a function of the samples alone: recomputing them gives what was saved."""
    for saved in replay.comparisons:
        again = compare(
            replay.samples, saved.cell, saved.baseline, saved.candidate, saved.metric, primary=saved.primary
        )
        assert again == saved


def test_replay_covers_what_can_go_wrong(replay: Run) -> None:
    assert {s.status for s in replay.samples} == {"ok", "failed", "invalid", "timeout", "interrupted", "unsupported"}
    assert {c.outcome for c in replay.comparisons} == {
        "repeatable win", "measured loss", "inconclusive", "inapplicable", "blocked",
    }  # fmt: skip
    assert all(METRICS[c.metric].unit == c.unit for c in replay.comparisons)


def test_replay_pairs_by_block(replay: Run) -> None:
    win = next(c for c in replay.comparisons if c.outcome == "repeatable win")
    by_block: dict[int, dict[str, Sample]] = {}
    for s in replay.samples:
        if s.cell == win.cell and s.block >= 0:
            by_block.setdefault(s.block, {})[s.arm] = s
    for pair in win.pairs:
        assert pair.baseline == by_block[pair.block][win.baseline].metrics[win.metric]
        assert pair.candidate == by_block[pair.block][win.candidate].metrics[win.metric]
        assert pair.first == ("A" if pair.block % 2 == 0 else "B")


def test_markdown_shows_failures_and_suppresses_refused_ratios(replay: Run) -> None:
    text = markdown(replay)
    for s in replay.samples:
        if s.status != "ok":
            assert f"| {s.index} | {s.cell} | {s.block} | {s.arm} | {s.status} |" in text
    refused = next(line for line in text.splitlines() if "inapplicable" in line and "different work" in line)
    assert "| — | inapplicable |" in refused
    assert "token/s" in text
