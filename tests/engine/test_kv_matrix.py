"""Every codec with every kind of layer and every feature: what a feature gives is what the same codec gives without it.

The reference of each cell is the greedy answer of a lone request, which other tests hold against mlx-lm and mlx-optiq. A sample of the
cells runs by default, all of them with the slow tests; combinations that don't exist are refused, and the refusals are tested here too.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from proposers import Oracle

import tiny_models
from engine_fixtures import EOS_ID, VOCAB_SIZE, Rig, tiny_engine, tiny_loaded, tiny_tokenizer
from gnomon.chat import constraint
from gnomon.config import EngineConfig, KvScheme
from gnomon.config.kv import parse_scheme
from gnomon.engine.api import Finished, Request, SamplingParams
from gnomon.engine.coding import UnsupportedScheme, coding_for, stats_of
from gnomon.engine.paging import pages_for
from gnomon.models.load import LoadedModel

SCHEMES = {
    "4": KvScheme("affine", bits=4),
    "8": KvScheme("affine", bits=8),
    "8 from 70": KvScheme("affine", bits=8, start=70),
    "8 tiled": KvScheme("affine", bits=8, fused=True),
    "config": KvScheme("config"),
    "turbo": KvScheme("turbo"),
    "turbo k4v2 from 70": KvScheme("turbo", key_bits=4, value_bits=2, start=70),
}
PAGED = {
    f"{name} in pages": replace(scheme, paged=True)
    for name, scheme in {"plain": KvScheme(), **SCHEMES}.items()
    if not scheme.start
}
"""Their reference is the same scheme in buffers of the rows' own."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {"num_hidden_layers": 2}),
    "sliding": ("gemma3", {"sliding_window_pattern": 2, "num_hidden_layers": 2}),
    "recurrent": ("qwen3_5", {"full_attention_interval": 2}),
    "shared": ("gemma4", {"global_head_dim": 64}),
}
KV_CONFIG = {"full": [0], "sliding": [0, 1], "recurrent": [1], "shared": [1, 3]}
"""Layers that the model's kv_config.json codes, the first in 4 bits."""
CHUNK = 64
PROMPT = tuple(np.random.default_rng(3).integers(3, VOCAB_SIZE, 100).tolist())
STEPS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for kind, layers in KV_CONFIG.items():
        entries = [{"layer_idx": n, "bits": 8 if i else 4, "group_size": 64} for i, n in enumerate(layers)]
        (made / kind).mkdir()
        (made / kind / "kv_config.json").write_text(json.dumps(entries))
    return made


@cache
def loaded_of(kind: str, directory: Path) -> LoadedModel:
    model_type, shape = KINDS[kind]
    model = tiny_models.make(model_type, head_dim=64, **shape)
    return replace(tiny_loaded(model_type, model=model), path=directory / kind)


class Cell:
    """One codec over one kind of layer."""

    def __init__(self, scheme: str, kind: str, directory: Path) -> None:
        self.scheme, self.loaded = {**SCHEMES, **PAGED}[scheme], loaded_of(kind, directory)

    def rig(self, propose: Any = None, kv: KvScheme | None = None, **config: Any) -> Rig:
        settings = EngineConfig(**{"prefill_chunk": CHUNK, "prompt_cache": 0, **config})
        return Rig(self.loaded, settings, propose, kv=kv or self.scheme)

    def ask(self, rig: Rig, name: str, prompt: tuple[int, ...] = PROMPT, **how: Any) -> list[int]:
        rig.submit(request(name, prompt, **how))
        rig.finish()
        return rig.ids(name)

    def alone(self, prompt: tuple[int, ...] = PROMPT, **how: Any) -> list[int]:
        return self.ask(self.rig(kv=replace(self.scheme, paged=False)), "alone", prompt, **how)


def request(name: str, prompt: tuple[int, ...] = PROMPT, **how: Any) -> Request:
    return Request(name, prompt, **{"max_tokens": STEPS, "ignore_eos": True, **how})


def prefix_reuse(cell: Cell) -> None:
    """A second turn that goes on from held state gives what one uninterrupted state gives."""
    with_cache = cell.rig(prompt_cache=1 << 30)
    first = cell.ask(with_cache, "first")
    more = (*PROMPT, *first, *PROMPT[:7])
    cell.ask(with_cache, "second", more)
    end = with_cache.end("second")
    assert isinstance(end, Finished)
    assert end.usage.cached_tokens == len(PROMPT) + STEPS - 1
    # The same without a cache: a row that just runs on, its window of new tokens the one that the reuse had.
    state = cell.rig(kv=replace(cell.scheme, paged=False)).core.runner.new_state()
    drained = (*PROMPT[:-1],)
    feeds = [drained[:CHUNK], drained[CHUNK:], PROMPT[-1:], *((token,) for token in first[:-1])]
    feeds += [more[len(PROMPT) + STEPS - 1 : -1]]
    token, want = more[-1], list[int]()
    for feed in feeds:
        state.begin(len(feed))
        cell.loaded.model(mx.array([list(feed)]), cache=state.caches)
        state.commit()
        mx.eval(state.arrays())
    for _ in range(STEPS):
        state.begin(1)
        logits = cell.loaded.model(mx.array([[token]]), cache=state.caches)
        state.commit()
        token = int(mx.argmax(logits[0, -1]).item())
        want.append(token)
    assert with_cache.ids("second") == want


def windows(cell: Cell) -> None:
    """Proposals, most of them wrong, and the roll-backs they take."""
    want = cell.alone()
    rig = cell.rig(lambda request, index: Oracle(want, VOCAB_SIZE, 0.4))
    assert cell.ask(rig, "proposed") == want
    assert rig.counters.proposed_tokens > rig.counters.accepted_tokens > 0


def grammar(cell: Cell) -> None:
    rig = cell.rig()
    rig.submit(request("free"))
    ids = cell.ask(rig, "bound", constraint=constraint.regex("[a-f]{3}-[0-9]{2}"), ignore_eos=False)
    text = tiny_tokenizer().decode([token for token in ids if token != EOS_ID])
    assert len(text) == 6
    assert text[3] == "-"
    assert rig.ids("free") == cell.alone()


def cancellation(cell: Cell) -> None:
    """One of two rows goes; the other doesn't notice."""
    rig = cell.rig()
    rig.submit(request("goes", PROMPT[::-1], max_tokens=200))
    rig.submit(request("stays"))
    rig.turn(8)
    rig.cancel("goes")
    rig.finish()
    assert rig.ids("stays") == cell.alone()


def choices(cell: Cell) -> None:
    rig = cell.rig()
    cell.ask(rig, "three", n=3)
    want = cell.alone()
    assert [rig.ids("three", index) for index in range(3)] == [want] * 3


def batch(cell: Cell) -> None:
    """Prompts of different lengths, joining one after the other; one is a single token, so parts of rows are plain for a step."""
    prompts = {"a": PROMPT, "b": PROMPT[:1], "c": PROMPT[:40], "d": PROMPT[::-1]}
    rig = cell.rig()
    for name, prompt in prompts.items():
        rig.submit(request(name, prompt))
        rig.turn(2)
    rig.finish()
    assert rig.counters.batched_steps > 0
    for name, prompt in prompts.items():
        # "c" and others may be prefilled in one window; that is still each row's own first one.
        assert rig.ids(name) == cell.alone(prompt), name


def seeds(cell: Cell) -> None:
    """A draw depends on the row's seed alone, so two requests alike draw alike in any company."""
    hot = SamplingParams(temperature=0.8, seed=11)
    rig = cell.rig()
    rig.submit(request("other", PROMPT[:50]))
    assert cell.ask(rig, "hot", sampling=hot) == cell.alone(sampling=hot)


FEATURES = {f.__name__: f for f in (prefix_reuse, windows, grammar, cancellation, choices, batch, seeds)}
CELLS = [(scheme, kind, feature) for scheme in SCHEMES for kind in KINDS for feature in FEATURES]
PAGED_CELLS = [(scheme, "full", feature) for feature in FEATURES for scheme in PAGED]
PAGED_DEFAULT = PAGED_CELLS[:: len(PAGED) + 1]


@pytest.mark.parametrize(
    ("scheme", "kind", "feature"),
    [
        pytest.param(
            *cell, marks=() if number % 17 == 0 or cell in PAGED_DEFAULT else pytest.mark.slow, id="-".join(cell)
        )
        for number, cell in enumerate([*CELLS, *PAGED_CELLS])
    ],
)
def test_cell(scheme: str, kind: str, feature: str, directory: Path) -> None:
    FEATURES[feature](Cell(scheme, kind, directory))


# What is refused, and what is said of what stays plain.


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("4", "heads of 16 elements can't be held in 4 bits: they must be a multiple of the group of 64"),
        ("turbo", "heads of 16 elements can't be held by turbo: it takes 64, 128, 256, 512"),
    ],
)
def test_head_widths_are_refused_with_the_number(scheme: str, why: str) -> None:
    with pytest.raises(UnsupportedScheme, match=why):
        coding_for(tiny_loaded("llama"), SCHEMES[scheme])


def test_the_engine_fails_to_start_and_says_so() -> None:
    with pytest.raises(UnsupportedScheme, match="heads of 16"), tiny_engine(kv=SCHEMES["8"]):
        pass


@pytest.mark.parametrize(
    ("model_type", "shape", "scheme", "why"),
    [
        ("mamba2", {}, "8", "mamba2 models have no layer that it codes"),
        ("gemma2", {"head_dim": 64}, "8", "their attention works on keys and values itself"),
        (
            "deepseek_v3",
            {"kv_lora_rank": 64, "qk_rope_head_dim": 64},
            "8",
            "their attention works on keys and values itself",
        ),
        ("gpt_oss", {"head_dim": 64}, "8", "attention sinks can't be combined"),
    ],
)
def test_models_that_cant_are_refused(model_type: str, shape: dict[str, Any], scheme: str, why: str) -> None:
    loaded = tiny_loaded(model_type, model=tiny_models.make(model_type, **shape))
    with pytest.raises(UnsupportedScheme, match=why):
        coding_for(loaded, SCHEMES[scheme])


def test_attention_sinks_combine_with_turbo() -> None:
    loaded = tiny_loaded("gpt_oss", model=tiny_models.make("gpt_oss", head_dim=64))
    rig = Rig(loaded, kv=SCHEMES["turbo"])
    rig.submit(request("sinks"))
    rig.finish()
    assert len(rig.ids("sinks")) == STEPS


def test_a_kv_config_must_name_layers_of_attention(tmp_path: Path) -> None:
    loaded = replace(loaded_of("recurrent", tmp_path), path=tmp_path)
    with pytest.raises(UnsupportedScheme, match="gnomon kv-config writes one"):
        coding_for(loaded, SCHEMES["config"])
    (tmp_path / "kv_config.json").write_text('[{"layer_idx": 0, "bits": 4}]')
    with pytest.raises(UnsupportedScheme, match="gives layer 0 bits, but"):
        coding_for(loaded, SCHEMES["config"])


def test_sliding_layers_say_what_they_do(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = loaded_of("sliding", directory)
    told: dict[str, Any] = {}
    for name in ("4", "turbo", "config"):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            coding = coding_for(loaded, SCHEMES[name])
        told[name] = stats_of(SCHEMES[name], coding, loaded), [record.getMessage() for record in caplog.records]
    assert told["4"][0] == {
        "mode": "4",
        "layers": 1,
        "start": 0,
        "fused": False,
        "attention": {"global": {"affine4g64": 1}, "sliding_window": {"plain": 1}},
    }
    assert told["turbo"][0]["attention"] == {"global": {"turbo-k8v3": 1}, "sliding_window": {"plain": 1}}
    assert told["config"][0]["attention"] == {"global": {"affine8g64": 1}, "sliding_window": {"affine4g64": 1}}
    assert told["4"][1] == [
        "--kv-quant 4 codes layers of full attention: the 1 sliding layers of this model stay plain"
    ]
    assert len(told["turbo"][1]) == 1
    assert told["config"][1] == []


def test_the_engine_tells_scheme_and_tier(directory: Path) -> None:
    tiers: dict[str, str] = {}
    for name in ("8", "8 tiled", "config", "turbo"):
        with tiny_engine(load=lambda: loaded_of("full", directory), kv=SCHEMES[name]) as engine:
            tiers[name] = engine.model.tier
            assert engine.stats()["kv_quant"]["mode"] == SCHEMES[name].name
    assert tiers == {"8": "L1", "8 tiled": "Lab", "config": "L2", "turbo": "Lab"}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("sliding", "gemma3 models are not: a sliding window goes round in a buffer of its own"),
        ("recurrent", "qwen3_5 models are not: a recurrent state is not made of tokens"),
        ("shared", "gemma4 models are not: a sliding window"),
    ],
)
def test_what_cant_be_paged_is_refused_with_the_reason(kind: str, why: str, directory: Path) -> None:
    with pytest.raises(UnsupportedScheme, match=why):
        pages_for(loaded_of(kind, directory), KvScheme(paged=True), None)
    with (
        pytest.raises(UnsupportedScheme, match=why),
        tiny_engine(load=lambda: loaded_of(kind, directory), kv=PAGED["plain in pages"]),
    ):
        pass
    with pytest.raises(ValueError, match="start is 70, but pages are coded from the first token on"):
        replace(SCHEMES["8 from 70"], paged=True)


@pytest.mark.parametrize("text", ["3", "turbo:k3v3", "turbo:k8v6", "turbo:", "", "kv8", "TURBO"])
def test_schemes_that_dont_exist(text: str) -> None:
    with pytest.raises(ValueError, match="turbo"):
        parse_scheme(text)


@pytest.mark.parametrize(
    ("field", "value"), [("bits", 3), ("group", 48), ("key_bits", 3), ("value_bits", 6), ("start", -1)]
)
def test_library_schemes_are_checked(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        KvScheme("affine", **{field: value})
