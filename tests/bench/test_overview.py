"""The suite's overview: only complete runs of known legs, the latest of each, and a wide spread is told."""

from __future__ import annotations

from datetime import timedelta

from gnomon.bench.overview import overviews, row
from gnomon.bench.schema import Run

from . import records, report_runs

LEG = ("decode", "stream:1x64", records.RATE)


def test_the_latest_complete_run_of_a_leg_counts() -> None:
    old, new = report_runs.serving(*LEG, 50.0, 25.0), report_runs.serving(*LEG, 60.0, 20.0)
    new = new.model_copy(update={"created": old.created + timedelta(minutes=1)})
    cut: Run = new.model_copy(update={"created": old.created + timedelta(minutes=2), "complete": False})
    (found,) = overviews([new, old, cut], ["readiness", "decode"])
    assert [one.values for one in found.rows] == [("60.24 token/s", "20.08 token/s")]
    assert found.missing == ("readiness",)
    assert found.arms == ("gnomon", "mlx_lm.server")


def test_other_models_machines_and_arms_are_other_groups() -> None:
    one = report_runs.serving(*LEG, 50.0, 25.0)
    elsewhere = one.model_copy(update={"provenance": one.provenance.model_copy(update={"machine": "m9"})})
    fewer = one.model_copy(update={"arms": one.arms[:1]})
    assert len(overviews([one, elsewhere, fewer], ["decode"])) == 3


def test_runs_of_no_leg_are_left_out() -> None:
    one = report_runs.serving(*LEG, 50.0, 25.0)
    for changes in ({"name": "serve table, starter"}, {"name": "serve, decode, no cell, x"}, {"kind": "ab"}):
        assert row(one.model_copy(update=changes), ["gnomon"]) is None
    assert overviews([report_runs.serving("tides", *LEG[1:], 1.0, 2.0)], ["decode"]) == []


def test_a_wide_spread_is_told() -> None:
    one = report_runs.serving(*LEG, 50.0, 25.0)
    slow = one.samples[0].model_copy(update={"metrics": {records.RATE: 40.0}})
    found = row(one.model_copy(update={"samples": (slow, *one.samples[1:])}), ["gnomon", "mlx_lm.server"])
    assert found is not None
    assert found.remarks == ("gnomon spreads by 1.26",)  # 50 x 1.008 / 40
