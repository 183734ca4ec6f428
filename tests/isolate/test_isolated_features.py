"""What outlives the engine's process, and what it does beside answers: a real engine over a tiny model, killed and started again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_child import CHUNK, EVERY
from test_isolated_engine import Heard, eventually

from engine_fixtures import tiny_engine, tiny_loaded
from gnomon.config import EngineConfig
from gnomon.engine.api import Delta, EngineUnavailable, Failed, Finished, InvalidRequest, Replayed, Request, Usage
from gnomon.isolate import IsolatedEngine
from gnomon.isolate.engine import Patience
from prefix_walk import tokens_of

CHILD = [sys.executable, str(Path(__file__).with_name("engine_child.py"))]
PROMPT = tokens_of(300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("isolated")
    (made / "model").mkdir()
    (made / "model" / "config.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[IsolatedEngine]:
    running = IsolatedEngine(CHILD, str(directory), Patience(early_death=0, pause=0.1, submit=120, silence=120))
    running.wait()
    yield running
    running.stop()


def ask(engine: IsolatedEngine, name: str, tokens: int, n: int = 1) -> Heard:
    heard = Heard()
    engine.submit(Request(name, PROMPT, max_tokens=tokens, ignore_eos=True, n=n), heard)
    return heard


def ids(heard: Heard, index: int = 0) -> list[int]:
    told = [d for e in heard.events for d in (e.deltas if isinstance(e, Replayed) else [e]) if isinstance(d, Delta)]
    return [i for delta in told if delta.index == index for i in delta.ids]


def usage(heard: Heard) -> Usage:
    end = heard.wait()[-1]
    assert isinstance(end, Finished)
    return end.usage


def kill(engine: IsolatedEngine) -> None:
    os.kill(engine.process()["pid"], signal.SIGKILL)
    eventually(lambda: engine.process()["pid"] is None)


def cut_off(engine: IsolatedEngine, directory: Path) -> Heard:
    """An answer of which something was saved when its process was killed; one that ended before that is asked for again."""
    while True:
        heard = ask(engine, "under way", 700)
        eventually(lambda heard=heard: heard.ended.is_set() or any((directory / "saves").rglob("*.gen")))
        if heard.ended.is_set():
            continue
        kill(engine)
        failed = heard.wait()[-1]
        if isinstance(failed, Failed):
            assert failed.code == "engine_died"
            return heard


def test_the_next_child_has_what_the_killed_one_wrote(engine: IsolatedEngine, directory: Path) -> None:
    """A flushed state is read from disk, and an answer that was under way goes on, both with an uninterrupted engine's tokens."""
    with tiny_engine(load=lambda: tiny_loaded("qwen3"), config=EngineConfig(prefill_chunk=CHUNK)) as alone:
        want = [i for d in alone.stream(Request("w", PROMPT, max_tokens=700, ignore_eos=True)) for i in delta_ids(d)]
    assert usage(ask(engine, "first", 8)).cached_tokens == 0
    assert engine.flush(300).durable
    under_way = cut_off(engine, directory)
    delivered = ids(under_way)
    assert delivered == want[: len(delivered)]
    again, two = ask(engine, "again", 700), ask(engine, "two", 8, n=2)
    used = usage(again)
    assert ids(again) == want
    replayed = [event for event in again.events if isinstance(event, Replayed)]
    assert len(replayed) == 1
    assert sum(len(delta.ids) for delta in replayed[0].deltas) >= EVERY - 1
    assert (used.cache_tier, used.cached_tokens >= len(PROMPT) - 1) == ("ssd", True)
    assert usage(two).cached_tokens == len(PROMPT) - 1
    assert [ids(two, 0), ids(two, 1)] == [want[:8], want[:8]]


def delta_ids(event: object) -> tuple[int, ...]:
    return event.ids if isinstance(event, Delta) else ()


def test_embeddings_are_the_engines_own_and_end_when_nobody_waits(engine: IsolatedEngine) -> None:
    with tiny_engine(load=lambda: tiny_loaded("qwen3"), config=EngineConfig(prefill_chunk=CHUNK)) as alone:
        want = alone.embed([PROMPT, PROMPT[:7]]).result(300)
    assert engine.embed([PROMPT, PROMPT[:7]]).result(300) == want
    with pytest.raises(InvalidRequest, match=r"input\[0\]"):
        engine.embed([tokens_of(5000)]).result(300)
    # Minutes of work, of which a window is done at most before it is noticed that nobody waits.
    long = engine.embed([tokens_of(2000, seed) for seed in range(500)])
    assert not engine.drain(0.05)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        engine.embed([PROMPT])
    assert long.cancel()
    assert engine.drain(300)
    engine._draining = False
    assert engine.embed([PROMPT[:7]]).result(300) == want[1:]
    long = engine.embed([tokens_of(2000, seed) for seed in range(500)])
    kill(engine)
    with pytest.raises(EngineUnavailable, match="killed by SIGKILL"):
        long.result(300)
