"""Real weights through the whole engine: the starter (quantised, full attention) and Gemma 3 270M (sliding windows)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

import gnomon
from gnomon.config import EngineConfig
from gnomon.engine.api import SamplingParams
from gnomon.engine.engine import Engine

STEPS = 16
pytestmark = [pytest.mark.network, pytest.mark.timeout(3600)]
"""MLX's CPU backend prefills these at some 15 tokens a second on an idle machine: 700 tokens may outlast the usual limit on a busy one."""


class Pair(NamedTuple):
    """mlx-lm's model and our engine over the same files."""

    theirs: nn.Module
    ours: Engine


def pair(path: Path) -> Iterator[Pair]:
    with gnomon.load(path, EngineConfig()) as engine:
        yield Pair(load_model(path)[0], engine)


@pytest.fixture(scope="module")
def starter(starter_path: Path) -> Iterator[Pair]:
    yield from pair(starter_path)


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> Iterator[Pair]:
    yield from pair(gemma_path)


def assert_equal_to_the_bit(models: Pair, length: int) -> None:
    prompt = np.random.default_rng(length).integers(10, 40_000, length).tolist()
    steps = list(generate_step(mx.array(prompt), models.theirs, max_tokens=STEPS))
    choice = models.ours.generate(
        prompt, max_tokens=STEPS, sampling=SamplingParams(logprobs=5), ignore_eos=True
    ).choices[0]
    assert choice.ids == [int(token) for token, _ in steps]
    assert [s.logprob for s in choice.logprobs] == [float(logprobs[int(token)].item()) for token, logprobs in steps]
    for score, (_, logprobs) in zip(choice.logprobs, steps, strict=True):
        best = np.sort(np.array(logprobs.astype(mx.float32)))[::-1][:5]
        assert [top.logprob for top in score.top] == best.tolist()


@pytest.mark.xdist_group("starter")
@pytest.mark.parametrize("length", [2, 257, 700])
def test_the_starter_equals_mlx_lm(starter: Pair, length: int) -> None:
    assert_equal_to_the_bit(starter, length)


@pytest.mark.xdist_group("gemma")
@pytest.mark.parametrize("length", [2, 257, 700])
def test_gemma_equals_mlx_lm(gemma: Pair, length: int) -> None:
    """700 tokens are more than the window of 512."""
    assert_equal_to_the_bit(gemma, length)


@pytest.mark.slow
@pytest.mark.xdist_group("starter")
@pytest.mark.parametrize("length", [1, 255, 256, 2048, 2049, 2050, 4100])
def test_the_starter_equals_mlx_lm_at_length(starter: Pair, length: int) -> None:
    assert_equal_to_the_bit(starter, length)


@pytest.mark.slow
@pytest.mark.xdist_group("gemma")
@pytest.mark.parametrize("length", [1, 511, 512, 513, 514, 2049, 2050, 4100])
def test_gemma_equals_mlx_lm_at_length(gemma: Pair, length: int) -> None:
    assert_equal_to_the_bit(gemma, length)
