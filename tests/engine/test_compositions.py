"""Features in each other's company: what each gives alone it gives together, to the token and, where it is promised, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from speculating import FREE, rig_of
from test_engine_resume import die
from test_kv_matrix import KV_CONFIG, PAGED, SCHEMES, loaded_of

import tiny_models
from engine_fixtures import Rig, tiny_loaded, usage
from gnomon.chat import constraint
from gnomon.config import CacheConfig, EngineConfig, KvScheme, SpeculationConfig
from gnomon.engine.api import Delta, Replayed, Request, SamplingParams
from gnomon.engine.resume import Store
from gnomon.models.load import LoadedModel
from prefix_walk import tokens_of

CHUNK = 64
ALL = {**SCHEMES, **PAGED}
PROMPT, MORE = tokens_of(300), tokens_of(70, seed=1)
NGRAM = SpeculationConfig(draft_kind="ngram")
DRAFT = SpeculationConfig(draft_model="tiny")
BOTH = SpeculationConfig(draft_model="tiny", draft_kind="ngram")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Model directories, which are other models' in each test, and so no cell of the matrix."""
    for kind, layers in KV_CONFIG.items():
        entries = ",".join(f'{{"layer_idx": {n}, "bits": {8 if i else 4}}}' for i, n in enumerate(layers))
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "kv_config.json").write_text(f"[{entries}]")
        (tmp_path / kind / "config.json").write_text(kind)
    return tmp_path


@contextmanager
def rig_on(disk: Path | None, loaded: LoadedModel, kv: KvScheme | None = None, **more: Any) -> Iterator[Rig]:
    settings = CacheConfig(ssd_cache=disk, ssd_cache_min_free=0)
    rig = Rig(loaded, EngineConfig(prefill_chunk=CHUNK), cache=settings, kv=kv, **more)
    try:
        yield rig
    finally:
        rig.core.close()
        rig.core.reuse.close()


def request(name: str, prompt: tuple[int, ...] = PROMPT, **how: Any) -> Request:
    return Request(name, prompt, **{"max_tokens": 8, "ignore_eos": True, **how})


def ask(rig: Rig, name: str, prompt: tuple[int, ...] = PROMPT, **how: Any) -> list[int]:
    rig.submit(request(name, prompt, **how))
    rig.finish()
    return rig.ids(name)


def scores(rig: Rig, name: str) -> list[float]:
    return [one.logprob for event in rig.events[name] if isinstance(event, Delta) for one in event.logprobs]


def sampled(cells: Sequence[tuple[str, ...]], every: int) -> list[Any]:
    return [
        pytest.param(*cell, marks=() if number % every == 0 else pytest.mark.slow, id="-".join(cell))
        for number, cell in enumerate(cells)
    ]


SSD_CELLS = [(scheme, kind) for kind in ("sliding", "full", "recurrent", "shared") for scheme in SCHEMES]
SSD_CELLS += [(scheme, "full") for scheme in PAGED]


@pytest.mark.parametrize(("scheme", "kind"), sampled(SSD_CELLS, 5))
def test_coded_states_outlive_the_engine(scheme: str, kind: str, directory: Path) -> None:
    """The second turn after a restart has the bits it has without one, in each of its choices; another codec finds nothing."""
    loaded, disk, scored = loaded_of(kind, directory), directory / "disk", SamplingParams(logprobs=0)
    loaded = replace(loaded, path=directory / kind)
    with rig_on(None, loaded, replace(ALL[scheme], paged=False)) as rig:
        first = ask(rig, "first")
        second = (*PROMPT, *first, *MORE)
        want = ask(rig, "second", second, sampling=scored)
        want_scores, want_cached = scores(rig, "second"), usage(rig, "second").cached_tokens
    assert want_cached == len(PROMPT) + len(first) - 1
    with rig_on(disk, loaded, ALL[scheme]) as rig:
        assert ask(rig, "first") == first
    with rig_on(disk, loaded, ALL[scheme]) as rig:
        assert ask(rig, "second", second, sampling=scored) == want
        assert scores(rig, "second") == want_scores
        assert (usage(rig, "second").cached_tokens, usage(rig, "second").cache_tier) == (want_cached, "ssd")
        rig.core.check_integrity()
    with rig_on(disk, loaded, ALL[scheme]) as rig:
        ask(rig, "two", second, n=2)
        assert [rig.ids("two", index) for index in range(2)] == [want, want]
        assert usage(rig, "two").cache_tier == "ssd"
    with rig_on(disk, loaded, SCHEMES["8" if "8" not in scheme else "4"]) as rig:
        ask(rig, "other", second, max_tokens=1)
        assert usage(rig, "other").cached_tokens == 0


@cache
def small() -> LoadedModel:
    """A draft model that is mostly wrong."""
    return tiny_loaded("llama", model=tiny_models.make("llama", seed=1, num_hidden_layers=1))


GUESSES = {"ngram": NGRAM, "draft": DRAFT, "both": BOTH}
GUESS_CELLS = [(guess, scheme, kind) for scheme in SCHEMES for guess in GUESSES for kind in ("full", "sliding")]
GUESS_CELLS += [(guess, scheme, "full") for scheme in PAGED for guess in GUESSES]


@pytest.mark.parametrize(("guess", "scheme", "kind"), sampled(GUESS_CELLS, 7))
def test_guesses_over_coded_states_change_no_token_of_a_batch(
    guess: str, scheme: str, kind: str, directory: Path
) -> None:
    """Rows that repeat themselves, rows that don't, drawn ones, and one request of two choices, against each alone without guesses."""
    loaded = replace(loaded_of(kind, directory), path=directory / kind)
    hot = SamplingParams(temperature=0.7, seed=3)
    asked = {
        "repeats": request("repeats", PROMPT[:30] * 3, max_tokens=20),
        "new": request("new", PROMPT[:75], max_tokens=20),
        "hot": request("hot", PROMPT[:21] * 2, max_tokens=20, sampling=hot),
        "two": request("two", MORE[:20] * 2, max_tokens=12, n=2),
    }
    draft = small() if guess != "ngram" else None
    rig = rig_of(
        loaded,
        GUESSES[guess],
        EngineConfig(prefill_chunk=CHUNK, prompt_cache=0),
        draft=draft,
        curve=FREE,
        kv=ALL[scheme],
    )
    for one in asked.values():
        rig.submit(one)
        rig.turn(2)
    rig.finish()
    assert rig.counters.proposed_tokens > rig.counters.accepted_tokens
    for name, one in asked.items():
        alone = Rig(loaded, EngineConfig(prefill_chunk=CHUNK, prompt_cache=0), kv=replace(ALL[scheme], paged=False))
        alone.submit(one)
        alone.finish()
        for index in range(one.n):
            assert rig.ids(name, index) == alone.ids(name, index), name


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "count": {"type": "integer", "maximum": 99, "minimum": 10}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("guess", "model_type"),
    sampled([(guess, kind) for guess in ("ngram", "both") for kind in ("llama", "qwen3_5", "gemma3")], 2),
)
def test_forced_text_guessed_text_and_plain_rows_share_a_batch(guess: str, model_type: str) -> None:
    config = GUESSES[guess]
    bound = {"constraint": constraint.json_schema(SCHEMA), "ignore_eos": False, "max_tokens": 60}
    hot = SamplingParams(temperature=0.9, seed=8, logprobs=0)
    asked = [
        request("bound", PROMPT[:40], **bound),
        request("repeats", PROMPT[:25] * 4, max_tokens=40),
        request("plain", PROMPT[:90], max_tokens=40, sampling=hot),
        request("bound two", PROMPT[:33], n=2, sampling=SamplingParams(temperature=0.9, seed=2), **bound),
    ]
    loaded = tiny_loaded(model_type)
    draft = small() if config.draft_model else None
    rig = rig_of(loaded, config, EngineConfig(prefill_chunk=CHUNK), draft=draft, curve=FREE)
    for one in asked:
        rig.submit(one)
        rig.turn()
    rig.finish()
    filled = usage(rig, "bound").fill
    assert filled is not None
    assert filled.grammar > 0
    for one in asked:
        alone = Rig(loaded, EngineConfig(prefill_chunk=CHUNK))
        alone.submit(one)
        alone.finish()
        for index in range(one.n):
            assert rig.ids(one.id, index) == alone.ids(one.id, index), one.id


@pytest.mark.parametrize("config", [DRAFT, BOTH], ids=["draft", "both"])
def test_a_closed_session_lets_go_of_everything_beside_a_draft_model(config: SpeculationConfig) -> None:
    loaded = tiny_loaded("llama")
    rig = rig_of(loaded, config, EngineConfig(prefill_chunk=CHUNK), draft=small(), curve=FREE)
    cache = rig.core.reuse.cache
    assert cache is not None
    first = ask(rig, "first", session="s")
    second = (*PROMPT, *first, *MORE)
    want = ask(rig, "second", second, session="s")
    assert any(entry.guards for entry in cache.entries())
    assert rig.core.reuse.close_session("s")
    assert not rig.core.reuse.close_session("s")
    assert not any(entry.guards for entry in cache.entries())
    assert ask(rig, "again", second, session="s") == want
    cache.allow(0)
    assert cache.num_bytes == 0
    rig.core.check_integrity()
    alone = Rig(loaded, EngineConfig(prefill_chunk=CHUNK, prompt_cache=0))
    assert ask(alone, "second", second) == want


@pytest.mark.parametrize(
    ("scheme", "kind"),
    sampled([("config", "sliding"), ("8", "full"), ("turbo", "recurrent"), ("4 in pages", "full")], 2),
)
def test_an_interrupted_answer_goes_on_from_the_disk_over_coded_states(scheme: str, kind: str, directory: Path) -> None:
    """What the prompt's state was is read, what had been answered is told again, and the answer is the uninterrupted one."""
    loaded, disk, saves = replace(loaded_of(kind, directory), path=directory / kind), directory / "d", directory / "s"
    with rig_on(None, loaded, replace(ALL[scheme], paged=False)) as rig:
        whole = ask(rig, "whole", max_tokens=30)
    store = Store(saves, 4)
    with rig_on(disk, loaded, ALL[scheme], saves=store) as rig:
        job = rig.submit(request("r", max_tokens=30))
        while not job.rows or len(job.rows[0].tokens) < 13:
            rig.turn()
        die(store)
        job.fail(RuntimeError("killed"), fatal=True)
    store = Store(saves, 4)
    with rig_on(disk, loaded, ALL[scheme], saves=store) as rig:
        assert ask(rig, "r", max_tokens=30) == whole
        told = [event for event in rig.events["r"] if isinstance(event, Replayed)]
        assert len(told) == 1
        again = [i for delta in told[0].deltas for i in delta.ids]
        assert len(again) >= 8
        assert again == whole[: len(again)]
        assert usage(rig, "r").cache_tier == "ssd"
    store.close()
