"""The budget for states: refusals before work with the numbers, and a queue for what would fit later."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gnomon
import tiny_models
from engine_fixtures import Rig, tiny_loaded
from gnomon.config import EngineConfig, resolve
from gnomon.engine.budget import Budget, OverBudget, budget_for
from gnomon.models.fit import Needs, measure_needs

# Two layers, keys and values, two heads of 16, float32.
PER_TOKEN = 2 * 2 * 2 * 16 * 4


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(5 + (i * 7 + seed) % 50 for i in range(length))


def needs_of(full: float = PER_TOKEN, sliding: float = 0, window: int = 0, most: int | None = 2048) -> Needs:
    return Needs(weights=0, full=full, sliding=sliding, window=window, max_positions=most)


def request(name: str, length: int = 100, max_tokens: int = 20, n: int = 1) -> gnomon.Request:
    return gnomon.Request(name, tokens_of(length), max_tokens=max_tokens, n=n, ignore_eos=True)


def rig_of(limit: int | None) -> Rig:
    return Rig(tiny_loaded(), EngineConfig(), budget=Budget(needs_of(), None, 10**9, limit))


def test_states_of_sliding_layers_stop_growing() -> None:
    budget = Budget(needs_of(full=10, sliding=5, window=8), None, 0, 480)
    assert budget.kv(20, 2) == (10 * 20 + 5 * 8) * 2
    assert (budget.kv_context(1), budget.kv_context(2)) == (44, 20)
    assert Budget(needs_of(), None, 0).kv_context(1) is None


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 64), st.integers(1, 8), st.integers(1, 10**6))
def test_the_context_is_the_longest_that_fits(full: int, sliding: int, window: int, n: int, limit: int) -> None:
    budget = Budget(needs_of(full, sliding, window, None), None, 0, limit)
    holds = budget.kv_context(n)
    assert holds is not None
    longer = budget.kv(holds + 1, n)
    assert (budget.kv(holds, n) or 0) <= limit < (longer or 0) or holds == 1 << 24


def test_refusals_come_before_work_with_the_numbers(tmp_path: Path) -> None:
    directory = tiny_models.save("llama", tmp_path / "tiny-llama")
    each = measure_needs(directory).kv(1)
    limit = int(each * 200)
    with gnomon.load(directory, EngineConfig(kv_budget=limit)) as engine:
        assert len(engine.generate([5] * 150, max_tokens=50, ignore_eos=True).choices[0].ids) == 50
        batch = engine.stats()["batch"]
        assert (batch["kv_budget_bytes"], batch["kv_projected_bytes"]) == (limit, 0)
        prefilled = engine.stats()["tokens"]["prefilled"]
        context = engine.model.context_length
        for prompt, how, param, says in (
            (150, {"max_tokens": 51}, "max_tokens", f"max_tokens 51 may take {int(each * 201)} bytes"),
            (
                150,
                {"max_tokens": 51},
                "max_tokens",
                f"{limit} bytes, which is 200 tokens of context: set max_tokens to 50 or",
            ),
            (150, {}, "max_tokens", f"an answer of up to {context - 150} tokens, as max_tokens is unset,"),
            (200, {"max_tokens": 1}, "prompt", "the prompt of 200 tokens"),
            (
                90,
                {"max_tokens": 20, "n": 2},
                "max_tokens",
                "100 tokens of context for each of 2 choices: set max_tokens to 10",
            ),
        ):
            with pytest.raises(gnomon.InvalidRequest, match=says) as caught:
                engine.generate([5] * prompt, **how)
            assert (caught.value.param, caught.value.code) == (param, "kv_budget_exceeded")
        assert engine.stats()["tokens"]["prefilled"] == prefilled
        assert len(engine.generate([5] * 90, max_tokens=10, n=2, ignore_eos=True).choices) == 2


def test_what_would_fit_later_waits_in_its_turn() -> None:
    """Of four requests of 120 tokens each two fit; a small one behind them doesn't overtake, and answers don't change."""
    names = ("a", "b", "c", "d")
    free, rig = rig_of(None), rig_of(PER_TOKEN * 250)
    for one in (free, rig):
        for name in names:
            one.submit(request(name))
        one.submit(request("small", 5, 5))
    most, jobs = 0, dict[str, int]()
    for _ in range(10_000):
        rig.turn()
        running = [name for name, job in rig.core.jobs.items() if job.admitted and job.open]
        assert rig.core.memory.budget.projected_kv(rig.core.jobs[name] for name in running) <= PER_TOKEN * 250
        for name in running:
            jobs.setdefault(name, len(jobs))
        most = max(most, len(running))
        if not rig.core.has_work:
            break
    assert list(jobs) == [*names, "small"]
    assert most == 3
    free.finish()
    assert [rig.ids(name) for name in names] == [free.ids(name) for name in names]


def test_a_cancelled_request_gives_its_place_back() -> None:
    rig = rig_of(PER_TOKEN * 130)
    rig.submit(request("a", max_tokens=30))
    rig.submit(request("b"))
    rig.turn(3)
    assert not rig.core.jobs["b"].admitted
    rig.cancel("a")
    rig.finish()
    assert len(rig.ids("b")) == 20


def test_budgets_that_hold_nothing_stop_the_start(tmp_path: Path) -> None:
    directory = tiny_models.save("llama", tmp_path / "tiny-llama")
    two = int(measure_needs(directory).kv(2))
    with pytest.raises(OverBudget, match=rf"takes {two} bytes, and that is more than --kv-budget, {two - 1} bytes"):
        gnomon.load(directory, EngineConfig(kv_budget=two - 1))
    gnomon.load(directory, EngineConfig(kv_budget=two)).stop()
    # Without files there is nothing to tell bytes by, and a limit that can't be kept is none.
    with pytest.raises((OSError, ValueError)):
        budget_for(tiny_loaded(), None, kv_limit=10**9)
    assert budget_for(tiny_loaded(), None).needs is None


def test_a_budget_that_could_bound_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--kv-budget bounds keys and values, and mamba2 keeps none"):
        gnomon.load(tiny_models.save("mamba2", tmp_path / "tiny-mamba"), EngineConfig(kv_budget=10**9))


def test_the_flag() -> None:
    assert resolve(environ={"GNOMON_KV_BUDGET": "1.5"}).engine.kv_budget == 1_500_000_000
    assert resolve(environ={}).engine.kv_budget is None
