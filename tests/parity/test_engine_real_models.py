"""Real weights through the whole engine: the starter (quantised, full attention) and Gemma 3 270M (sliding windows)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import gnomon
from gnomon.config import EngineConfig
from gnomon.engine.api import SamplingParams
from gnomon.engine.engine import Engine

STEPS = 16
CUT = 256
pytestmark = [pytest.mark.network, pytest.mark.timeout(14_400)]
"""MLX's CPU backend prefills these at some 10 tokens a second on an idle machine: 700 tokens may outlast the usual limit on a busy one."""


class Pair(NamedTuple):
    """mlx-lm's model and our engine over the same files."""

    theirs: nn.Module
    ours: Engine


Steps = list[tuple[int, mx.array]]
"""mlx-lm's tokens with the log-probabilities over the vocabulary that each came from."""


def pair(path: Path) -> Iterator[Pair]:
    with gnomon.load(path, EngineConfig()) as engine:
        yield Pair(load_model(path)[0], engine)


@pytest.fixture(scope="module")
def starter(starter_path: Path) -> Iterator[Pair]:
    yield from pair(starter_path)


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> Iterator[Pair]:
    yield from pair(gemma_path)


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(10, 40_000, length).tolist()


def theirs(model: nn.Module, prompt: list[int], **settings: Any) -> Steps:
    return [
        (int(token), logprobs)
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=STEPS, **settings)
    ]


def with_its_beginning(model: nn.Module, prompt: list[int]) -> tuple[Steps, Steps]:
    """What mlx-lm says after `CUT` + 1 tokens of a prompt and after all, in steps of `CUT`: the first step of the second is the first's
    only one, so it is computed once."""
    cache = make_prompt_cache(model)
    kept: list[Any] = []

    def keep(done: int, _: int) -> None:
        if done == CUT:
            kept.extend(copy.deepcopy(cache))

    whole = theirs(model, prompt, prompt_cache=cache, prefill_step_size=CUT, prompt_progress_callback=keep)
    return theirs(model, prompt[CUT : CUT + 1], prompt_cache=kept), whole


def assert_equal_to_the_bit(engine: Engine, prompt: list[int], steps: Steps, reused: int = 0) -> None:
    answer = engine.generate(prompt, max_tokens=STEPS, sampling=SamplingParams(logprobs=5), ignore_eos=True)
    choice = answer.choices[0]
    assert answer.usage.cached_tokens == reused
    assert choice.ids == [token for token, _ in steps]
    assert [s.logprob for s in choice.logprobs] == [float(logprobs[token].item()) for token, logprobs in steps]
    for score, (_, logprobs) in zip(choice.logprobs, steps, strict=True):
        best = np.sort(np.array(logprobs.astype(mx.float32)))[::-1][:5]
        assert [top.logprob for top in score.top] == best.tolist()


def assert_equal_alone_and_continued(models: Pair) -> None:
    """Two tokens and 257 from nothing, and 700 that go on from the 257 in our cache, against mlx-lm's from nothing."""
    prompt = prompt_of(700)
    assert_equal_to_the_bit(models.ours, prompt[-2:], theirs(models.theirs, prompt[-2:]))
    first, whole = with_its_beginning(models.theirs, prompt)
    assert_equal_to_the_bit(models.ours, prompt[: CUT + 1], first)
    assert_equal_to_the_bit(models.ours, prompt, whole, reused=CUT + 1)


@pytest.mark.xdist_group("starter")
def test_the_starter_equals_mlx_lm_at_2_257_and_700(starter: Pair) -> None:
    assert_equal_alone_and_continued(starter)


@pytest.mark.xdist_group("gemma")
def test_gemma_equals_mlx_lm_at_2_257_and_700(gemma: Pair) -> None:
    """700 tokens are more than the window of 512."""
    assert_equal_alone_and_continued(gemma)


@pytest.mark.slow
@pytest.mark.xdist_group("starter")
@pytest.mark.parametrize("length", [1, 255, 256, 257, 700, 2048, 2049, 2050, 4100])
def test_the_starter_equals_mlx_lm_at_length(starter: Pair, length: int) -> None:
    prompt = prompt_of(length)
    assert_equal_to_the_bit(starter.ours, prompt, theirs(starter.theirs, prompt))


@pytest.mark.slow
@pytest.mark.xdist_group("gemma")
@pytest.mark.parametrize("length", [1, 257, 511, 512, 513, 514, 700, 2049, 2050, 4100])
def test_gemma_equals_mlx_lm_at_length(gemma: Pair, length: int) -> None:
    prompt = prompt_of(length)
    assert_equal_to_the_bit(gemma.ours, prompt, theirs(gemma.theirs, prompt))
