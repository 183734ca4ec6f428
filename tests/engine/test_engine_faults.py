"""What a request breaks, that request alone hears of; what can't be blamed on one is survived, or told to everyone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

import tiny_models
from engine_fixtures import SMALLER, VOCAB_SIZE, Rig, tiny_engine, tiny_loaded, tiny_tokenizer
from gnomon.config import EngineConfig
from gnomon.engine.api import EngineUnavailable, Event, Failed, Finished, Request, SamplingParams
from gnomon.engine.output import TextOutput
from gnomon.engine.sampling import BatchSampler, Drawn
from gnomon.engine.scheduler import Scheduler
from gnomon.propose import Proposer
from solo import GAP_BOUNDS, Solo, solo, ties_until_equal

POISON = 300
TYPES = ("llama", "qwen3_5", "gemma3", "mamba2")
"""A kind of layer state each."""
STEPS = 12


def prompt_of(length: int, last: int | None = None) -> tuple[int, ...]:
    ids = np.random.default_rng(length).integers(3, POISON, length).tolist()
    return (*ids[:-1], last) if last is not None else tuple(ids)


@contextmanager
def broken(model: nn.Module, breaks: Callable[[mx.array], bool], lazily: bool = False) -> Iterator[None]:
    """The model raises on inputs that `breaks` picks: while its graph is built, or when that is evaluated."""
    stock = type(model)

    def call(self: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        breaking = breaks(tokens)
        if breaking and not lazily:
            raise RuntimeError("injected")
        logits = stock.__call__(self, tokens, *args, **kwargs)
        if breaking:
            # MLX's CPU backend refuses this product, but only once it is asked to compute it.
            ones = mx.ones((1, 1, 1), mx.bfloat16)
            logits = logits + mx.gather_mm(ones, ones, rhs_indices=mx.array([0])).sum()
        return logits

    model.__class__ = type(stock.__name__, (stock,), {"__call__": call})
    try:
        yield
    finally:
        model.__class__ = stock


def poisoned(tokens: mx.array) -> bool:
    return bool((tokens == POISON).any().item())


def request(name: str, prompt: Sequence[int], **fields: Any) -> Request:
    return Request(name, tuple(prompt), **{"max_tokens": STEPS, "ignore_eos": True, **fields})


@cache
def alone(model_type: str, length: int) -> Solo:
    return solo(tiny_loaded(model_type).model, prompt_of(length), STEPS)


def assert_unharmed(rig: Rig, model_type: str, *lengths: int) -> None:
    for length in lengths:
        assert isinstance(rig.end(str(length)), Finished)
        assert len(rig.ids(str(length))) == STEPS
        ties_until_equal(rig.ids(str(length)), alone(model_type, length), GAP_BOUNDS["float32"])
    rig.core.check_integrity()
    assert rig.counters.kv_bytes == 0


lazily = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="only MLX's CPU backend refuses it that late"
)


@pytest.mark.parametrize("lazily", [False, pytest.param(True, marks=lazily)], ids=["building", "evaluating"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_row_that_breaks_the_shared_step_fails_alone(model_type: str, lazily: bool) -> None:
    rig = Rig(tiny_loaded(model_type))
    with broken(rig.loaded.model, poisoned, lazily):
        rig.submit(request("30", prompt_of(30)))
        rig.submit(request("7", prompt_of(7)))
        rig.turn(4)
        rig.submit(request("poison", prompt_of(9, last=POISON)))
        rig.finish()
    end = rig.end("poison")
    assert isinstance(end, Failed)
    assert not end.fatal
    assert rig.counters.recoveries == 1
    assert rig.counters.failed_requests == 1
    assert_unharmed(rig, model_type, 30, 7)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_fault_that_does_not_return_costs_nobody(model_type: str) -> None:
    rig = Rig(tiny_loaded(model_type))
    calls = iter(range(1000))
    rig.submit(request("30", prompt_of(30)))
    rig.submit(request("7", prompt_of(7)))
    rig.turn(2)
    with broken(rig.loaded.model, lambda _: next(calls) == 2):
        rig.finish()
    assert rig.counters.recoveries == 1
    assert_unharmed(rig, model_type, 30, 7)


def test_rows_that_break_only_together_fail_together_in_the_end() -> None:
    """Every rebuild prefills all rows anew: without a bound such a batch would crawl at a prefill per token."""
    rig = Rig(tiny_loaded())
    with broken(rig.loaded.model, lambda tokens: tokens.shape == (2, 1)):
        rig.submit(request("30", prompt_of(30), max_tokens=100))
        rig.submit(request("7", prompt_of(7), max_tokens=100))
        rig.finish()
    assert all(isinstance(rig.end(name), Failed) for name in ("30", "7"))
    assert rig.counters.recoveries == 3
    assert rig.ids("7") == alone("llama", 7).ids[:3]


def test_a_lone_row_that_breaks_its_step_fails_and_the_engine_goes_on() -> None:
    rig = Rig(tiny_loaded())
    with broken(rig.loaded.model, poisoned):
        rig.submit(request("poison", prompt_of(9, last=POISON)))
        rig.finish()
        assert isinstance(rig.end("poison"), Failed)
        rig.submit(request("7", prompt_of(7)))
        rig.finish()
    assert_unharmed(rig, "llama", 7)


def test_a_prompt_that_breaks_a_shared_prefill_fails_alone() -> None:
    rig = Rig(tiny_loaded())
    with broken(rig.loaded.model, poisoned):
        rig.submit(request("30", prompt_of(30)))
        rig.submit(request("poison", (5, POISON, 6, 7)))
        rig.submit(request("7", prompt_of(7)))
        rig.finish()
    assert isinstance(rig.end("poison"), Failed)
    assert_unharmed(rig, "llama", 30, 7)


def test_a_prompt_that_breaks_its_own_prefill_leaves_running_rows_alone() -> None:
    rig = Rig(tiny_loaded(), EngineConfig(prefill_chunk=16))
    rig.submit(request("7", prompt_of(7)))
    rig.turn(3)
    long = list(prompt_of(60))
    long[40] = POISON
    with broken(rig.loaded.model, poisoned):
        rig.submit(request("poison", long))
        rig.finish()
    assert isinstance(rig.end("poison"), Failed)
    assert rig.counters.recoveries == 0
    assert_unharmed(rig, "llama", 7)


@pytest.mark.parametrize("batchmates", [(), (30, 7)], ids=["alone", "in a batch"])
@pytest.mark.parametrize("stage", ["draw", "commit"])
def test_a_row_whose_sampler_raises_fails_alone(
    monkeypatch: pytest.MonkeyPatch, stage: str, batchmates: tuple[int, ...]
) -> None:
    stock = getattr(BatchSampler, stage)

    def raises(self: BatchSampler, *args: Any, **kwargs: Any) -> Drawn | None:
        # Two steps go well, so that a step is in flight when it happens.
        if any(row.seed == 666 and step >= 2 for row, step in zip(self._rows, self.steps, strict=True)):
            raise ValueError("injected")
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(BatchSampler, stage, raises)
    rig = Rig(tiny_loaded())
    for length in batchmates:
        rig.submit(request(str(length), prompt_of(length)))
    rig.submit(request("poison", prompt_of(9), sampling=SamplingParams(temperature=1.0, seed=666)))
    rig.finish()
    end = rig.end("poison")
    assert isinstance(end, Failed)
    assert "injected" in end.message
    assert len(rig.ids("poison")) == 2
    assert rig.counters.recoveries == 0
    assert_unharmed(rig, "llama", *batchmates)


def test_a_row_whose_output_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = TextOutput.push

    def push(self: TextOutput, token: int, *args: Any) -> Any:
        if self._stops == ("poison",):
            raise ValueError("injected")
        return stock(self, token, *args)

    monkeypatch.setattr(TextOutput, "push", push)
    rig = Rig(tiny_loaded())
    rig.submit(request("30", prompt_of(30)))
    rig.submit(request("poison", prompt_of(9), stop=("poison",), n=2))
    rig.submit(request("7", prompt_of(7)))
    rig.finish()
    assert isinstance(rig.end("poison"), Failed)
    assert_unharmed(rig, "llama", 30, 7)


def test_a_sink_that_raises_loses_only_its_own_request() -> None:
    rig = Rig(tiny_loaded())
    rig.submit(request("7", prompt_of(7)))
    job = rig.submit(request("poison", prompt_of(9)))
    heard: list[Event] = []

    def sink(event: Event) -> None:
        heard.append(event)
        if len(heard) > 3:
            raise ConnectionError("injected")

    job.sink = sink
    rig.finish()
    assert "poison" in rig.closed
    assert len(heard) == 5, "the one it raised on, and one last attempt to tell it"
    assert_unharmed(rig, "llama", 7)


class Raises(Proposer):
    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        raise ValueError("injected")


class ProposesNonsense(Proposer):
    def propose(self, prompt: Sequence[int], generated: Sequence[int], limit: int) -> Sequence[int]:
        return [VOCAB_SIZE]


@pytest.mark.parametrize("proposer", [Raises, ProposesNonsense])
def test_a_proposer_that_raises_fails_its_request_alone(proposer: type[Raises | ProposesNonsense]) -> None:
    rig = Rig(tiny_loaded(), propose=lambda r, _: proposer() if r.id == "poison" else None)
    rig.submit(request("30", prompt_of(30)))
    rig.submit(request("poison", prompt_of(9)))
    rig.submit(request("7", prompt_of(7)))
    rig.finish()
    assert isinstance(rig.end("poison"), Failed)
    assert_unharmed(rig, "llama", 30, 7)


def test_when_the_device_is_gone_everyone_hears_of_it() -> None:
    model = tiny_models.make("llama", **SMALLER["llama"])
    told: list[str] = []
    dead = threading.Event()
    with (
        broken(model, lambda _: dead.is_set()),
        tiny_engine(
            config=EngineConfig(batch=2),
            load=lambda: tiny_loaded(model=model),
            on_failure=lambda message: told.append(message),
        ) as engine,
    ):
        heard: dict[str, list[Event]] = {str(i): [] for i in range(6)}
        ended = {name: threading.Event() for name in heard}

        def sink(name: str, event: Event) -> None:
            heard[name].append(event)
            if isinstance(event, Finished | Failed):
                ended[name].set()
            elif len(heard[name]) > 4:
                dead.set()

        for name in heard:
            engine.submit(request(name, prompt_of(9), max_tokens=1000), lambda e, name=name: sink(name, e))
        for name in heard:
            assert ended[name].wait(300)
        engine._thread.join(300)
        for events in heard.values():
            assert isinstance(events[-1], Failed)
        # Those that waited never ran, and hear that the engine itself is gone.
        assert sum(isinstance(events[-1], Failed) and events[-1].fatal for events in heard.values()) >= 4
        assert engine.health().state == "failed"
        assert "injected" in (engine.health().message or "")
        assert len(told) == 1
        with pytest.raises(EngineUnavailable):
            engine.submit(request("late", prompt_of(9)), lambda _: None)


def test_a_model_that_does_not_load_is_told_and_survived() -> None:
    def load() -> Any:
        raise ValueError("no such model")

    told: list[str] = []
    with pytest.raises(ValueError, match="no such model"), tiny_engine(load=load, on_failure=told.append) as engine:
        pass
    assert told == ["no such model"]
    with tiny_engine() as engine:
        assert engine.health().state == "ok"


def test_a_defect_of_the_loop_fails_what_ran_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Scheduler.next_preparation
    faults = iter([False, True])

    def next_preparation(self: Scheduler) -> Any:
        if next(faults, False):
            raise KeyError("injected")
        return stock(self)

    monkeypatch.setattr(Scheduler, "next_preparation", next_preparation)
    with tiny_engine() as engine:
        events = list(engine.stream(request("first", prompt_of(9), max_tokens=500)))
        assert isinstance(events[-1], Failed)
        assert not events[-1].fatal
        assert engine.generate(prompt_of(7), max_tokens=STEPS, ignore_eos=True).choices[0].ids == alone("llama", 7).ids
        assert engine.health().state == "ok"


def test_a_loop_that_keeps_failing_gives_up_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_preparation(self: Scheduler) -> Any:
        raise KeyError("injected")

    monkeypatch.setattr(Scheduler, "next_preparation", next_preparation)
    told: list[str] = []
    with tiny_engine(on_failure=told.append) as engine:
        for i in range(3):
            assert isinstance(list(engine.stream(request(str(i), prompt_of(9))))[-1], Failed)
        engine._thread.join(300)
        assert engine.health().state == "failed"
        assert len(told) == 1


def test_text_of_the_tokenizer_is_what_the_events_carry() -> None:
    rig = Rig(tiny_loaded())
    rig.submit(request("7", prompt_of(7)))
    rig.finish()
    text = "".join(getattr(e, "text", "") for e in rig.events["7"])
    assert text == tiny_tokenizer().decode(alone("llama", 7).ids)
