"""A live server that official clients talk to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from agent import script as agent_script
from fake_engine import CALLING, KEY, THINKING, FakeEngine, Job, Live, live_server, logprob

from gnomon.config import HTTPConfig


def script(job: Job) -> None:
    """What the prompt says decides on the answer."""
    if "fail" in job.text:
        job.delta("A")
        job.fail("row 0 met a NaN")
    elif "<user>think" in job.text:
        job.say("because\n</think>\n\nSo", "length")
    elif "wait" in job.text:
        job.delta("A")
    else:
        for index in range(job.request.n):
            for character in "Héllo":
                told = (logprob("H", -0.5, ("H", -0.5), ("J", -1.0)),) if job.request.sampling.logprobs else ()
                job.delta(character, index, *told)
            job.finish("stop", index)
        job.end()


@pytest.fixture(scope="session")
def live() -> Iterator[Live[FakeEngine]]:
    with live_server(
        FakeEngine(script), template=THINKING, http=HTTPConfig(api_keys=(KEY,), body_limit=10_000)
    ) as made:
        yield made


@pytest.fixture(scope="session")
def agent() -> Iterator[Live[FakeEngine]]:
    """A server whose model calls tools."""
    http = HTTPConfig(api_keys=(KEY,), body_limit=10_000)
    with live_server(FakeEngine(agent_script), template=CALLING, http=http) as made:
        yield made
