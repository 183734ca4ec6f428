"""The table of model types holds: each is exact alone, and in batches as `traits` says."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

import every_type
import tiny_models
from batch_walk import Action, Fork, Join, JoinTogether, Leave, Solos, Step, Walk, new_state_of
from gnomon.models.bindings import bind
from gnomon.models.supported import model_types
from gnomon.models.traits import TRIED

BOUND = 5e-5
"""Largest difference of a float32 logit, as a share of the largest; 2.4e-5 was measured (two latent attentions and experts per layer)."""

TYPES = sorted(TRIED - set(every_type.NOT_BUILT), key=str.lower)


def test_every_type_is_built_or_excused() -> None:
    assert set(TYPES) | set(every_type.NOT_BUILT) == model_types()


def _script(seed: int, batchable: bool) -> list[Action]:
    draw = random.Random(seed)

    def sixteenths() -> list[int]:
        return [draw.randint(0, 16) for _ in range(5)]

    def step() -> Action:
        return Step(draw.choice([1, 1, 2, 5, 8]), sixteenths(), sixteenths())

    if not batchable:
        return [Join(70), *[step() for _ in range(12)]]
    script: list[Action] = [Join(97), Join(5), JoinTogether([64, 30])]
    for _ in range(5):
        script += [step(), step(), Leave(draw.randint(0, 7), draw.random() < 0.5), Join(draw.randint(1, 99)), step()]
        script.append(Fork(draw.randint(0, 7), draw.random() < 0.5))
    return script


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_does_what_the_table_says(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_models.CONFIGS, model_type, every_type.config(model_type))
    model = tiny_models.make(model_type)
    binding = bind(model)
    solos = Solos(model)
    state, caches, start = new_state_of(model)(), binding.make_caches(), 0
    for width in (64, 64, 3, 1, 1, 1):
        tokens = mx.array([solos.texts[0][start : start + width]])
        state.begin(width)
        mine = model(tokens, cache=state.caches)
        state.commit()
        theirs = model(tokens, cache=caches)
        mx.eval(mine, theirs, state.arrays())
        state.check_integrity()
        assert mx.array_equal(mine, theirs)
        start += width
    if not binding.window_safe:
        return
    for seed in range(2):
        walk = Walk(model, solos, new_state_of(model))
        walk.run(_script(seed, binding.batchable))
        assert walk.tally.compared
        assert walk.tally.difference <= BOUND * solos.scale
