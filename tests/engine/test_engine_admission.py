"""Who gets in, in what order, how much room there is, and what is refused."""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from engine_fixtures import CONTEXT, EOS_ID, VOCAB_SIZE, Rig, tiny_engine, tiny_loaded, tiny_tokenizer
from gnomon import bell
from gnomon.config import EngineConfig
from gnomon.engine.admission import retry_after
from gnomon.engine.api import (
    ChoiceFinished,
    Delta,
    EngineUnavailable,
    Event,
    Failed,
    Finished,
    InvalidRequest,
    Progress,
    QueueFull,
    Request,
    SamplingParams,
)
from gnomon.engine.engine import Engine
from gnomon.engine.heart import Heart
from gnomon.models.load import LoadedModel


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(3, VOCAB_SIZE, length).tolist())


def request(name: str, length: int = 5, tokens: int = 8, **fields: Any) -> Request:
    return Request(name, prompt_of(length), **{"max_tokens": tokens, "ignore_eos": True, **fields})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ()}, "prompt", ["empty"]),
        ({"prompt": (3, VOCAB_SIZE)}, "prompt", [str(VOCAB_SIZE), str(VOCAB_SIZE - 1)]),
        ({"prompt": (3, -1)}, "prompt", ["-1", str(VOCAB_SIZE - 1)]),
        ({"prompt": (3,) * CONTEXT}, "prompt", [str(CONTEXT)]),
        ({"n": 0}, "n", ["0", "1 and 8"]),
        ({"n": 9}, "n", ["9", "1 and 8"]),
        ({"max_tokens": 0}, "max_tokens", ["0", "at least 1"]),
        ({"sampling": SamplingParams(logprobs=21)}, "logprobs", ["21", "20"]),
        ({"sampling": SamplingParams(temperature=-0.5)}, "temperature", ["-0.5"]),
        ({"sampling": SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))}, "logit_bias", [str(VOCAB_SIZE)]),
    ],
)
def test_refusals_name_the_field_the_value_and_the_limit(
    engine: Engine, fields: dict[str, Any], param: str, words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(Request(**{"id": "bad", "prompt": (3, 4), **fields}), lambda _: None)
    assert caught.value.param == param
    assert all(word in str(caught.value) for word in words)
    assert engine.stats()["engine"]["open_requests"] == 0


def test_an_id_in_use_is_refused(engine: Engine) -> None:
    engine.submit(request("same", tokens=500), lambda _: None)
    with pytest.raises(InvalidRequest, match="same"):
        engine.submit(request("same"), lambda _: None)
    engine.cancel("same")


def test_max_tokens_ends_where_the_context_does() -> None:
    rig = Rig(tiny_loaded())
    rig.submit(request("a", length=CONTEXT - 3, tokens=50))
    rig.submit(request("b", length=CONTEXT - 2, tokens=None))
    rig.finish()
    assert [len(rig.ids(name)) for name in "ab"] == [3, 2]
    assert rig.events["a"][-2] == ChoiceFinished("a", 0, "length")


def test_a_smaller_context_limit_of_the_operator_holds() -> None:
    with tiny_engine(config=EngineConfig(context_limit=16)) as engine:
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(request("long", length=16), lambda _: None)
        assert caught.value.code == "context_length_exceeded"
        # What Claude Code 2.1.332, pi 1.6.0 and LiteLLM (aider 0.86.2) look for to know that a conversation must become shorter.
        said = str(caught.value)
        assert re.findall(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", said, re.I) == [("16", "15")]
        assert re.search(r"maximum context length is \d+ tokens", said)
        assert "this model's maximum context length is" in said.lower()
        assert len(engine.generate(prompt_of(10), ignore_eos=True).choices[0].ids) == 6
        assert engine.stats()["admission"]["enforced_context_tokens"] == 16
        assert engine.model.context_length == 16


def test_requests_start_in_order_and_leavers_free_their_slot_at_once() -> None:
    rig = Rig(tiny_loaded(), EngineConfig(batch=2))
    for name, tokens in (("a", 3), ("b", 12), ("c", 3), ("d", 3)):
        rig.submit(request(name, tokens=tokens))
    rig.finish()
    assert rig.closed == ["a", "c", "d", "b"]
    # b needs 12 steps, the three others fit beside it one after the other: nobody waited for a whole batch to end.
    assert rig.counters.steps <= 14


def test_a_request_with_more_choices_than_free_rows_waits_and_keeps_its_place() -> None:
    rig = Rig(tiny_loaded(), EngineConfig(batch=3))
    rig.submit(request("a", tokens=6))
    rig.submit(request("many", n=3, tokens=2))
    rig.submit(request("late", tokens=2))
    rig.turn(2)
    assert [bool(rig.ids(name)) for name in ("a", "many", "late")] == [True, False, False]
    rig.finish()
    assert rig.closed == ["a", "many", "late"]


@pytest.mark.parametrize(("rows", "n"), [(8, 8), (4, 3), (2, 5), (1, 3)])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_5", "gemma3"])
def test_choices_share_one_prefill_and_differ_as_if_alone(model_type: str, rows: int, n: int) -> None:
    """Choice i of n is keyed by (seed, i): the same tokens whatever n, the batch, and with more choices than rows."""
    sampling = SamplingParams(temperature=1.0, seed=11)
    rig = Rig(tiny_loaded(model_type), EngineConfig(batch=rows, prefill_chunk=64))
    rig.submit(request("n", length=70, tokens=6, n=n, sampling=sampling))
    rig.finish()
    assert rig.counters.prefill.tokens == 69
    assert rig.counters.prefill_chunks == 2
    got = [rig.ids("n", index) for index in range(n)]
    assert len({tuple(ids) for ids in got}) == n
    end = rig.end("n")
    assert isinstance(end, Finished)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (70, 6 * n)
    whole = Rig(tiny_loaded(model_type), EngineConfig(batch=8, prefill_chunk=64))
    whole.submit(request("n", length=70, tokens=6, n=8, sampling=sampling))
    whole.finish()
    assert got == [whole.ids("n", index) for index in range(n)]


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5", "gemma3"])
def test_a_seed_gives_the_same_tokens_alone_and_in_company(model_type: str) -> None:
    """Other rows' sampling never shifts a row's randomness. (Logits of these models don't depend on the batch beyond 1e-6.)"""
    sampling = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=5, repetition_penalty=1.1)
    alone = Rig(tiny_loaded(model_type))
    alone.submit(request("s", length=20, tokens=20, sampling=sampling))
    alone.finish()
    rig = Rig(tiny_loaded(model_type))
    rig.submit(request("x", length=9, tokens=30, sampling=SamplingParams(temperature=1.3, seed=1)))
    rig.turn(4)
    rig.submit(request("s", length=20, tokens=20, sampling=sampling))
    rig.turn(3)
    rig.submit(request("y", length=33, tokens=5, sampling=SamplingParams(presence_penalty=0.5)))
    rig.finish()
    assert rig.ids("s") == alone.ids("s")


def test_long_prompts_leave_running_rows_a_step_per_chunk_and_short_ones_pass_between() -> None:
    rig = Rig(tiny_loaded(), EngineConfig(prefill_chunk=16))
    rig.submit(request("running", tokens=100))
    rig.turn(2)
    rig.submit(request("long", length=16 * 6 + 1))
    rig.submit(request("longer", length=16 * 8 + 1))
    rig.submit(request("short", length=7, tokens=1))
    before = rig.counters.prefill_chunks
    progress: list[int] = []
    while "long" not in rig.closed:
        steps, chunks = rig.counters.steps, rig.counters.prefill_chunks
        rig.turn()
        assert rig.counters.prefill_chunks - chunks <= 1
        assert rig.counters.steps == steps + 1
        progress.append(len([e for e in rig.events["long"] if isinstance(e, Progress)]))
    assert rig.counters.prefill_chunks - before >= 7
    assert rig.closed == ["short", "long"], "the short prompt went between two chunks of the long one"
    assert progress[0] == 1
    assert not rig.ids("longer"), "one long prompt at a time"
    processed = [e.processed for e in rig.events["long"] if isinstance(e, Progress)]
    assert processed == [16, 32, 48, 64, 80, 96, 97]


def test_short_prompts_prefill_together_within_a_chunk() -> None:
    rig = Rig(tiny_loaded(), EngineConfig(prefill_chunk=64))
    jobs = [rig.submit(request(str(i), length=length)) for i, length in enumerate((20, 12, 21, 30))]
    rig.turn()
    # 3 rows of up to 20 slots fit 64; the fourth would make 4 x 29.
    assert rig.counters.prefill_chunks == 1
    assert [job.num_generated for job in jobs] == [1, 1, 1, 0]
    rig.turn()
    assert rig.counters.prefill_chunks == 2
    assert jobs[3].num_generated == 1


def test_the_first_token_comes_before_the_next_step_is_built() -> None:
    rig = Rig(tiny_loaded())
    job = rig.submit(request("a"))
    rig.turn()
    assert (rig.counters.steps, job.num_generated) == (1, 1)
    rig.turn()
    assert (rig.counters.steps, job.num_generated) == (2, 1), "from here on reading runs a step behind"
    rig.finish()
    assert (rig.counters.steps, job.num_generated) == (8, 8), "and no step is built that nobody needs"


@pytest.mark.parametrize(
    ("config", "tokens"), [(EngineConfig(early_first_token=False), 0), (EngineConfig(pipeline=False), 1)]
)
def test_pipelining_can_be_switched(config: EngineConfig, tokens: int) -> None:
    rig = Rig(tiny_loaded(), config)
    job = rig.submit(request("a"))
    rig.turn()
    assert job.num_generated == tokens
    rig.turn()
    assert job.num_generated == tokens + 1
    rig.finish()
    assert job.num_generated == 8


def test_an_end_of_sequence_token_is_never_content() -> None:
    rig = Rig(tiny_loaded())
    always_eos = SamplingParams(logit_bias=((EOS_ID, 1000.0),))
    rig.submit(request("a", sampling=always_eos, ignore_eos=False))
    rig.submit(request("b", sampling=always_eos, ignore_eos=True, tokens=3))
    rig.finish()
    assert not [e for e in rig.events["a"] if isinstance(e, Delta)]
    assert ChoiceFinished("a", 0, "stop") in rig.events["a"]
    end = rig.end("a")
    assert isinstance(end, Finished)
    assert end.usage.completion_tokens == 1
    assert rig.ids("b") == [EOS_ID] * 3


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    # However late this thread gets its next turn, the answer is not at its end by then.
    with tiny_engine(config=EngineConfig(batch=1, queue=2)) as engine:
        engine.submit(request("running", tokens=1500), lambda _: time.sleep(0.02))
        while engine.stats()["batch"]["active_rows"] == 0:
            time.sleep(0.01)
        for name in "ab":
            engine.submit(request(name, tokens=1500), lambda _: None)
        with pytest.raises(QueueFull, match="limit is 2") as caught:
            engine.submit(request("c"), lambda _: None)
        assert caught.value.retry_after >= 1
        stats = engine.stats()
        assert stats["requests"]["refused"] == 1
        assert stats["batch"]["pending_rows"] == 2
        engine.cancel("a")
        while engine.stats()["batch"]["pending_rows"] == 2:
            time.sleep(0.01)
        engine.submit(request("c"), lambda _: None)
        for name in ("running", "b", "c"):
            engine.cancel(name)


def test_a_burst_fills_free_rows_and_the_queue() -> None:
    """Requests that are about to get a row don't take places of those that must wait."""
    with tiny_engine(config=EngineConfig(batch=2, queue=3)) as engine:
        for i in range(5):
            engine.submit(request(str(i), tokens=1500), lambda _: None)
        with pytest.raises(QueueFull):
            engine.submit(request("5"), lambda _: None)
        for i in range(5):
            engine.cancel(str(i))


def test_retry_after_is_when_the_next_row_should_be_free() -> None:
    assert retry_after(1, 8, 40.0) == 5
    assert retry_after(1, 8, 0.0) == 1
    assert retry_after(1, 1, 10_000.0) == 600


@pytest.mark.parametrize("when", ["waiting", "preparing", "running"])
def test_cancelling(when: str) -> None:
    rig = Rig(tiny_loaded(), EngineConfig(batch=1 if when == "waiting" else 2, prefill_chunk=16))
    rig.submit(request("other", tokens=30))
    rig.turn(2)
    rig.submit(request("c", length=60 if when == "preparing" else 5, n=1, tokens=40))
    rig.turn(2)
    rig.cancel("c")
    done = len(rig.ids("c"))
    assert (done > 0) == (when == "running")
    rig.turn()
    assert rig.events["c"][-2:-1] == [ChoiceFinished("c", 0, "cancelled")]
    assert isinstance(rig.end("c"), Finished)
    assert len(rig.ids("c")) == done
    rig.finish()
    assert len(rig.ids("other")) == 30
    assert rig.counters.cancelled_requests == 1
    assert rig.counters.finished_requests == 1


def test_two_hundred_requests_leave_no_trace() -> None:
    random = np.random.default_rng(1)
    with tiny_engine(config=EngineConfig(queue=300, prefill_chunk=64, prompt_cache=0)) as engine:
        engine.generate(prompt_of(3), max_tokens=2)
        _wait_idle(engine)
        gc.collect()  # models of earlier tests
        engine.generate(prompt_of(3), max_tokens=2)
        _wait_idle(engine)
        memory = engine.stats()["memory"]
        threads = set(threading.enumerate())
        events: dict[str, list[Event]] = {}
        for i in range(200):
            name = str(i)
            events[name] = []
            engine.submit(
                request(
                    name, length=int(random.integers(1, 100)), tokens=int(random.integers(1, 16)), n=1 + (i % 9 == 0)
                ),
                events[name].append,
            )
            if random.random() < 0.4:
                engine.cancel(str(random.integers(0, i + 1)))
            if i % 10 == 0:
                time.sleep(0.01)
        # Too many and too long for any to end first.
        for i in range(30):
            engine.submit(request(f"long {i}", tokens=1500), lambda _: None)
        for i in range(30):
            engine.cancel(f"long {i}")
        assert engine.drain(300)
        _wait_idle(engine)
        stats = engine.stats()
        assert stats["requests"]["finished"] + stats["requests"]["cancelled"] == 232
        assert stats["requests"]["cancelled"] >= 30
        assert stats["requests"]["failed"] == 0
        assert (stats["batch"]["active_rows"], stats["batch"]["pending_rows"], stats["batch"]["kv_bytes"]) == (0, 0, 0)
        assert stats["memory"]["active_bytes"] <= memory["active_bytes"]
        assert stats["memory"]["cache_bytes"] <= memory["cache_bytes"]
        assert set(threading.enumerate()) <= threads
        for heard in events.values():
            assert [isinstance(e, Finished) for e in heard].index(True) == len(heard) - 1
        core = engine._core
        assert core is not None
        core.check_integrity()


def _wait_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 300
    while engine.stats()["batch"]["kv_bytes"] or engine.stats()["engine"]["doing"] != "idle":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_draining_refuses_newcomers_and_lets_the_rest_end(engine: Engine) -> None:
    heard: list[Event] = []
    go = threading.Event()

    def sink(event: Event) -> None:
        assert go.wait(300)
        heard.append(event)

    engine.submit(request("a", tokens=20), sink)
    assert not engine.drain(0.0)
    assert engine.health().state == "draining"
    with pytest.raises(EngineUnavailable, match="draining"):
        engine.submit(request("b"), lambda _: None)
    go.set()
    assert engine.drain(300)
    assert isinstance(heard[-1], Finished)


def test_stopping_tells_open_requests() -> None:
    with tiny_engine(config=EngineConfig(batch=1)) as engine:
        heard: dict[str, list[Event]] = {"running": [], "waiting": []}
        for name, events in heard.items():
            engine.submit(
                request(name, tokens=2000), lambda event, events=events: (events.append(event), time.sleep(0.02))
            )
        while not heard["running"]:
            time.sleep(0.01)
        engine.stop()
        assert engine.health().state == "stopped"
        for events in heard.values():
            assert isinstance(events[-1], Failed)
            assert events[-1].code == "engine_stopped"
        with pytest.raises(EngineUnavailable):
            engine.submit(request("late"), lambda _: None)
        engine.stop()


def test_closing_a_stream_cancels(engine: Engine) -> None:
    stream = engine.stream(request("s", tokens=2000))
    next(stream)
    stream.close()
    assert engine.drain(300)
    assert engine.stats()["requests"]["cancelled"] == 1


def test_stats_are_plain_json(engine: Engine) -> None:
    engine.generate(prompt_of(9), max_tokens=4, ignore_eos=True)
    stats = json.loads(json.dumps(engine.stats()))
    assert stats["tokens"] == {"prompt": 9, "prefilled": 8, "generated": 4, "discarded": 0}
    assert stats["batch"]["configured"] == 8
    assert stats["batch"]["mode"] == "batch"
    assert stats["steps"]["decode"] == 4
    assert stats["steps"]["seconds"]["buckets"]["+Inf"] == 4


def test_a_heart_is_late_only_beyond_what_it_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("gnomon.engine.heart.time.monotonic", lambda: now[0])
    heart = Heart(10)
    heart.beat("decoding")
    now[0] = 9
    assert not heart.is_late
    now[0] = 11
    assert heart.is_late
    heart.beat("prefilling 2048 tokens", 2048)
    now[0] += 1000
    assert not heart.is_late
    now[0] += 1059
    assert heart.is_late


def test_an_engine_that_stops_beating_is_stalled_and_says_at_what() -> None:
    gate, entered = threading.Event(), threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Delta):
            entered.set()
            gate.wait(300)

    with tiny_engine(config=EngineConfig(stall_timeout=0.2)) as engine:
        engine.submit(request("stuck", tokens=4), sink)
        assert entered.wait(300)
        deadline = time.monotonic() + 300
        while engine.health().state != "stalled":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "decoding" in (engine.health().message or "")
        gate.set()
        assert engine.drain(300)
        while engine.health().state == "stalled":
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_while_the_model_loads_nothing_is_taken() -> None:
    gate = threading.Event()

    def load() -> LoadedModel:
        gate.wait(300)
        return tiny_loaded()

    engine = Engine(load, tiny_tokenizer())
    try:
        assert engine.health().state == "loading"
        with pytest.raises(EngineUnavailable, match="loading"):
            engine.submit(request("early"), lambda _: None)
        with pytest.raises(TimeoutError):
            engine.wait(0.01)
        gate.set()
        assert engine.wait(300).vocab_size == VOCAB_SIZE
        assert engine.health().state == "ok"
    finally:
        gate.set()
        engine.stop()


def test_other_threads_of_the_process_give_the_interpreter_back_soon() -> None:
    """By default in 5 ms, which a step waits several times over while a prompt is rendered."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        with tiny_engine() as engine:
            engine.wait(120)
            assert sys.getswitchinterval() <= 0.0005
    finally:
        sys.setswitchinterval(before)


def test_whoever_waits_for_rows_is_woken_once_a_step() -> None:
    """And for the last event of all: none is left that nobody was told of."""
    told: list[str] = []
    ended = threading.Event()

    def wake() -> None:
        told.append("wake")
        if "Finished" in told:
            ended.set()

    def sink(event: Event) -> None:
        told.append(type(event).__name__)
        bell.wake(wake)

    with tiny_engine() as engine:
        engine.submit(request("r", tokens=16, n=4), sink)
        assert ended.wait(120)
    assert told[-1] == "wake"
    steps = "".join("d" if one == "Delta" else "w" if one == "wake" else "" for one in told)
    assert steps.count("d") > 40
    # Before the first step: the prompt's progress and the first tokens; at the end the closing of rows.
    assert steps.count("w") <= 16 + 6
    assert "dddd" in steps
