"""Generations that a killed server had begun: the identical request gets the whole answer, as if nothing had happened."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_fixtures import VOCAB_SIZE, Rig, tiny_engine, tiny_loaded, tiny_tokenizer
from gnomon.chat import constraint
from gnomon.chat.reasoning import TagFormat, Thinking
from gnomon.config import EngineConfig, SpeculationConfig
from gnomon.engine.api import Delta, Failed, Finished, Replayed, Request, SamplingParams
from gnomon.engine.completion import collect
from gnomon.engine.resume import Record, Store, Unreadable, request_key, store
from gnomon.engine.sampling import Score
from gnomon.engine.speculation import Speculation
from prefix_walk import tokens_of

PROMPT = tokens_of(30)
GREATER = tiny_tokenizer().encode(">")[0]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 12},
        "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    },
    "required": ["a", "b"],
}
LATELY = SamplingParams(
    temperature=1.0,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    presence_context_size=0,
    frequency_penalty=0.2,
    logprobs=3,
)
REQUESTS: dict[str, Request] = {
    "greedy": Request("r", PROMPT, max_tokens=40, ignore_eos=True),
    "seeded": Request("r", PROMPT, SamplingParams(temperature=1.2, seed=5, logprobs=0), max_tokens=40, ignore_eos=True),
    "unseeded, with penalties": Request("r", PROMPT, LATELY, max_tokens=40, ignore_eos=True),
    "xtc": Request(
        "r", PROMPT, SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.05, seed=1), max_tokens=40
    ),
    "grammar": Request(
        "r",
        PROMPT,
        SamplingParams(temperature=1.0, seed=3, logprobs=2),
        max_tokens=60,
        constraint=constraint.json_schema(SCHEMA),
    ),
    "thinking, then grammar": Request(
        "r",
        PROMPT,
        SamplingParams(temperature=1.0, seed=4, logit_bias=((GREATER, 5.0),)),
        max_tokens=60,
        constraint=constraint.json_schema(SCHEMA),
        thinking=Thinking(TagFormat("<", ">"), "<"),
    ),
}


def die(one: Store) -> None:
    """What the system does when a process is killed: its lock is gone, and nothing else happens."""
    assert one.flush(300)
    one._own.release(force=True)


@contextmanager
def opened(directory: Path, every: int = 1) -> Iterator[Store]:
    one = Store(directory, every)
    try:
        yield one
    finally:
        one.close()


def rig_of(saves: Store | None, model_type: str = "llama", **config: Any) -> Rig:
    return Rig(tiny_loaded(model_type), EngineConfig(**{"prefill_chunk": 64, **config}), saves=saves)


def run_until(rig: Rig, request: Request, tokens: int, seed: int = 11) -> bool:
    """Submit and turn until so many tokens were read back; False if the request ended before."""
    job = rig.submit(request, seed)
    while not (job.rows and len(job.rows[0].tokens) >= tokens):
        if not job.open:
            return False
        rig.turn()
    return job.open


def check_as_uninterrupted(rig: Rig, whole: Rig) -> None:
    """Every piece of text with its ids, the end and the usage are the same; log-probabilities to the bit where they are replayed, and
    behind as far as a state computed in other windows has the same ones."""
    ours, theirs = rig.deltas("r"), whole.deltas("r")
    assert [(d.text, d.ids) for d in ours] == [(d.text, d.ids) for d in theirs]
    replayed = next((event for event in rig.events["r"] if isinstance(event, Replayed)), None)
    again = len(replayed.deltas) if replayed is not None else 0
    assert ours[:again] == theirs[:again]
    assert [flat(d) for d in ours] == [pytest.approx(flat(d), abs=1e-4) for d in theirs]
    assert rig.events["r"][-2] == whole.events["r"][-2]
    end, expected = rig.end("r"), whole.end("r")
    assert isinstance(end, Finished)
    assert isinstance(expected, Finished)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert end.usage.cached_tokens <= end.usage.prompt_tokens - 1


def flat(delta: Delta) -> list[float]:
    """Ids and log-probabilities of a delta's tokens, and of their rivals' values."""
    return [value for one in delta.logprobs for value in (one.id, one.logprob, *(top.logprob for top in one.top))]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [*(("llama", name) for name in REQUESTS), ("gemma3", "seeded"), ("qwen3_5", "unseeded, with penalties")],
)
def test_a_killed_generation_goes_on(name: str, model_type: str, tmp_path: Path) -> None:
    """The seed of a request without one is that of the first try."""
    request = REQUESTS[name]
    whole = rig_of(None, model_type)
    whole.submit(request, seed=11)
    whole.finish()
    first = Store(tmp_path, 5)
    assert run_until(rig_of(first, model_type), request, 18)
    die(first)
    with opened(tmp_path, 5) as second:
        assert second.counts.adopted == 1
        rig = rig_of(second, model_type)
        rig.submit(request, seed=12)
        rig.finish()
        check_as_uninterrupted(rig, whole)
        replayed = [event for event in rig.events["r"] if isinstance(event, Replayed)]
        assert len(replayed) == 1
        assert (second.counts.resumed_tokens, second.flush(300)) == (0, True)
        assert rig.counters.generated_tokens <= whole.counters.generated_tokens - 15
        assert list(tmp_path.rglob("*.gen")) == []


@cache
def uninterrupted(request: Request) -> Rig:
    rig = rig_of(None)
    rig.submit(request, seed=11)
    rig.finish()
    return rig


cuts = given(
    name=st.sampled_from(sorted(REQUESTS)),
    cuts=st.lists(st.integers(1, 35), min_size=1, max_size=3),
    every=st.integers(1, 9),
    stop=st.sampled_from([(), ("e ",), ("zz", "the", "a")]),
    cached=st.booleans(),
)


@settings(max_examples=5, deadline=None)
@cuts
def test_wherever_it_is_cut_and_however_often(**how: Any) -> None:
    check_cuts(**how)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@cuts
def test_wherever_it_is_cut_at_length(**how: Any) -> None:
    check_cuts(**how)


def check_cuts(name: str, cuts: list[int], every: int, stop: tuple[str, ...], *, cached: bool) -> None:
    """Killed once or several times, each time a little further on."""
    request, memory = replace(REQUESTS[name], stop=stop), (8 << 30) * cached
    whole, seed = uninterrupted(request), 11
    with tempfile.TemporaryDirectory() as directory:
        for cut in sorted(cuts):
            one = Store(Path(directory), every)
            running = run_until(rig_of(one, prompt_cache=memory), request, cut, seed)
            die(one)
            if not running:
                return
            if cut >= every:
                # Whoever goes on takes the seed that was saved.
                seed = 99
        with opened(Path(directory), every) as last:
            rig = rig_of(last, prompt_cache=memory)
            rig.submit(request, seed)
            rig.finish()
            check_as_uninterrupted(rig, whole)


def test_what_is_not_the_same_request_begins_anew(tmp_path: Path) -> None:
    """Anything that bears on the answer tells requests apart; ids and text of the same prompt are told apart too."""
    base = REQUESTS["seeded"]
    others = [
        replace(base, prompt=(*PROMPT[:-1], 4)),
        replace(base, sampling=replace(base.sampling, seed=6)),
        replace(base, sampling=replace(base.sampling, temperature=1.1)),
        replace(base, max_tokens=41),
        replace(base, stop=("x",)),
        replace(base, ignore_eos=False),
        replace(base, namespace="adapter"),
        replace(base, constraint=constraint.json_object()),
        replace(base, text="the cat"),
    ]
    assert len({request_key(one, "tiny") for one in (base, *others)}) == len(others) + 1
    assert request_key(base, "tiny") != request_key(base, "other model")
    assert request_key(replace(base, id="another", trace_id="t", boundary=3), "tiny") == request_key(base, "tiny")
    first = Store(tmp_path, 5)
    assert run_until(rig_of(first), base, 18)
    die(first)
    with opened(tmp_path, 5) as second:
        rig = rig_of(second)
        rig.submit(others[2])
        rig.finish()
        assert not any(isinstance(event, Replayed) for event in rig.events["r"])


def test_a_prompt_is_known_by_its_text_and_goes_on_with_the_ids_that_were_processed(tmp_path: Path) -> None:
    """After a restart the server doesn't remember which tokens earlier answers were made of: the same text comes as other ids."""
    tokenizer = tiny_tokenizer()
    spelt = tuple(token for letter in "the cat sat" for token in tokenizer.encode(letter))
    plain = tuple(tokenizer.encode("the cat sat"))
    assert len(plain) < len(spelt)
    base = Request(
        "r", spelt, SamplingParams(temperature=1.0, seed=1), max_tokens=30, ignore_eos=True, text="the cat sat"
    )
    first = Store(tmp_path, 5)
    assert run_until(rig_of(first), replace(base, boundary=len(spelt) - 2), 12)
    die(first)
    with opened(tmp_path, 5) as second:
        rig = rig_of(second)
        rig.submit(replace(base, prompt=plain))
        rig.finish()
        check_as_uninterrupted(rig, uninterrupted(base))


def test_several_choices_are_not_saved_and_that_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as saves:
        rig = rig_of(saves)
        rig.submit(replace(REQUESTS["seeded"], n=2, max_tokens=8))
        rig.finish()
        assert saves.flush(300)
        assert saves.counts.skipped == 1
        assert saves.counts.written == 0
    assert "several choices" in caplog.text


def test_a_cancelled_answer_goes_on_and_a_finished_or_answered_one_is_forgotten(tmp_path: Path) -> None:
    request = REQUESTS["seeded"]
    with opened(tmp_path, 4) as saves:
        rig = rig_of(saves)
        assert run_until(rig, request, 11)
        rig.cancel("r")
        rig.finish()
        assert saves.flush(300)
        assert saves.stats()["kept"] == 1
        # All that was read back, not only what the last interval had.
        rig.submit(request)
        rig.finish()
        check_as_uninterrupted(rig, uninterrupted(request))
        (replayed,) = [event for event in rig.events["r"] if isinstance(event, Replayed)]
        assert sum(len(delta.ids) for delta in replayed.deltas) >= 10
        assert run_until(rig, request, 11)
        rig.cancel("r", answered=True)
        rig.finish()
        assert saves.flush(300)
        assert saves.stats()["kept"] == 0
        assert list(tmp_path.rglob("*.gen")) == []


def test_an_answer_cancelled_while_it_is_resumed_is_kept(tmp_path: Path) -> None:
    request = REQUESTS["seeded"]
    first = Store(tmp_path, 5)
    assert run_until(rig_of(first), request, 18)
    die(first)
    with opened(tmp_path, 5) as saves:
        rig = rig_of(saves)
        rig.submit(request)
        rig.cancel("r")
        rig.finish()
        assert saves.stats()["kept"] == 1
        rig.submit(request)
        rig.finish()
        check_as_uninterrupted(rig, uninterrupted(request))


def test_two_answers_of_the_same_request_are_saved_apart(tmp_path: Path) -> None:
    """Neither takes what the other, which still runs, has saved."""
    request = REQUESTS["unseeded, with penalties"]
    first = Store(tmp_path, 3)
    rig = rig_of(first)
    a, b = rig.submit(replace(request, id="a"), seed=1), rig.submit(replace(request, id="b"), seed=2)
    while not (a.rows and b.rows and min(len(a.rows[0].tokens), len(b.rows[0].tokens)) > 8):
        rig.turn()
    begun = {tuple(rig.ids(name)) for name in "ab"}
    die(first)
    with opened(tmp_path, 3) as saves:
        rig = rig_of(saves)
        for name in "cd":
            rig.submit(replace(request, id=name), seed=9)
        rig.finish()
        assert {tuple(rig.ids(name)[:8]) for name in "cd"} == {ids[:8] for ids in begun}
        assert saves.counts.adopted == 2


def test_a_request_that_fails_is_forgotten_and_one_that_the_engine_fails_is_not(tmp_path: Path) -> None:
    request = REQUESTS["seeded"]
    with opened(tmp_path, 4) as saves:
        rig = rig_of(saves)
        assert run_until(rig, request, 9)
        rig.core.jobs["r"].fail(ValueError("its own"))
        rig.finish()
        assert saves.flush(300)
        assert (saves.stats()["kept"], list(tmp_path.rglob("*.gen"))) == (0, [])
        assert run_until(rig, request, 9)
        rig.core.fail_all(RuntimeError("the device is gone"), "engine_failed")
        assert isinstance(rig.end("r"), Failed)
        assert saves.flush(300)
        assert saves.stats()["kept"] == 1


def test_a_checkpoint_that_the_grammar_does_not_allow_is_not_used(tmp_path: Path) -> None:
    request = REQUESTS["grammar"]
    with opened(tmp_path, 1) as saves:
        slot = saves.open(request_key(request, "tiny"))
        scores = (Score(-1.0), Score(-1.0))
        saves.save(slot, Record(slot.key, 3, PROMPT, (GREATER, GREATER), scores))
        saves.keep(slot)
        rig = rig_of(saves)
        rig.submit(request)
        rig.finish()
        check_as_uninterrupted(rig, uninterrupted(request))
        assert saves.counts.rejected == 1


# The store


def record(key: str = "k" * 64, tokens: int = 3, scores: bool = False) -> Record:
    found = (Score(-0.1, ((5, -0.1), (7, -2.5))),) * tokens if scores else ()
    return Record(key, 2**63 + 1, (1, 2, 3), tuple(range(tokens)), found)


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    st.lists(
        st.tuples(
            st.integers(0, 2**31 - 1),
            st.floats(width=32, allow_nan=False),
            st.lists(st.tuples(st.integers(0, 2**31), st.floats(width=32, allow_nan=False)), max_size=3),
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_records_survive_as_bytes(seed: int, prompt: list[int], rows: list[Any], scored: bool) -> None:
    scores = tuple(Score(value, tuple(top)) for _, value, top in rows) if scored else ()
    one = Record("k", seed, tuple(prompt), tuple(token for token, _, _ in rows), scores)
    assert Record.decode(one.encode()) == one


@given(st.data())
def test_a_flipped_bit_or_a_missing_end_is_noticed(data: st.DataObject) -> None:
    whole = record(scores=True).encode()
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = bytearray(whole)
    broken[at] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(broken), whole[:at]):
        with pytest.raises(Unreadable):
            Record.decode(bad)


def leave(directory: Path, *records: Record) -> list[Path]:
    """Files of a process that was killed."""
    one = Store(directory, 1)
    for each in records:
        one.save(one.open(each.key), each)
    die(one)
    return sorted(directory.rglob("*.gen"))


def test_broken_files_are_skipped_counted_and_removed(tmp_path: Path) -> None:
    good, flipped, cut, empty, named, newer = leave(tmp_path, *(record(letter * 64) for letter in "abcdef"))
    data = flipped.read_bytes()
    flipped.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    cut.write_bytes(cut.read_bytes()[:60])
    empty.write_bytes(b"")
    named.write_bytes(good.read_bytes())
    newer.write_bytes(newer.read_bytes()[:8] + b"\x02\0\0\0" + newer.read_bytes()[12:])
    (good.parent / "half.tmp").write_bytes(b"x")
    with opened(tmp_path) as saves:
        assert (saves.counts.adopted, saves.counts.corrupt, saves.counts.foreign) == (1, 4, 1)
        assert saves.claim("a" * 64) is not None
        assert [saves.claim(letter * 64) for letter in "bcdef"] == [None] * 5
        # What another version wrote may be read by it again.
        assert newer.exists()
        assert not any(path.exists() for path in (flipped, cut, empty, named, good.parent / "half.tmp"))


def test_a_file_that_breaks_later_is_not_used_either(tmp_path: Path) -> None:
    leave(tmp_path, record())
    with opened(tmp_path) as saves:
        (path,) = tmp_path.rglob("*.gen")
        path.write_bytes(path.read_bytes()[:-1])
        assert saves.claim(record().key) is None
        assert saves.flush(300)
        assert saves.counts.corrupt == 1
        assert not path.exists()


def test_only_the_owner_may_read_what_is_kept(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (path,) = leave(tmp_path / "deep" / "down", record())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_a_living_process_saves_is_its_own(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        slot = first.open("a" * 64)
        first.save(slot, record("a" * 64))
        assert first.flush(300)
        with opened(tmp_path) as third:
            assert third.claim("a" * 64) is None
        assert second.claim("a" * 64) is None
        first.keep(slot)
        assert first.claim("a" * 64) is not None


def test_the_kept_are_bounded_in_number_bytes_and_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_KEPT", 3)
    paths = leave(tmp_path, *(record(letter * 64) for letter in "abcde"))
    now = time.time()
    for age, path in enumerate(paths):
        os.utime(path, (now - 100 * age, now - 100 * age))
    os.utime(paths[1], (now - 25 * 3600, now - 25 * 3600))
    with opened(tmp_path) as saves:
        # b is too old; of the rest e is the oldest.
        assert (saves.counts.expired, saves.counts.evicted) == (1, 1)
        assert saves.flush(300)
        assert {path.name[0] for path in tmp_path.rglob("*.gen")} == set("acd")
    monkeypatch.setattr(store, "MAX_KEPT_BYTES", 2 * len(record("a" * 64).encode()))
    with opened(tmp_path) as saves:
        assert saves.flush(300)
        assert {path.name[0] for path in tmp_path.rglob("*.gen")} == set("ac")


def test_a_generation_grown_too_large_keeps_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 400)
    with opened(tmp_path) as saves:
        slot = saves.open(record().key)
        for tokens in (10, 500):
            saves.save(slot, record(tokens=tokens))
            assert saves.flush(300)
        assert saves.counts.too_large == 1
        saves.keep(slot)
        found = saves.claim(record().key)
        assert found is not None
        assert len(found[1].tokens) == 10


def test_a_directory_that_can_not_be_written_costs_the_checkpoint_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, not one for every token."""

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", fail)
    request = REQUESTS["seeded"]
    with opened(tmp_path) as saves:
        rig = rig_of(saves)
        rig.submit(request)
        rig.finish()
        check_as_uninterrupted(rig, uninterrupted(request))
        assert saves.flush(300)
        assert saves.counts.failed >= 1
        assert list(tmp_path.rglob("*.tmp")) == []
    assert caplog.text.count("No space left on device") == 1


def test_the_running_engine_saves_stops_and_goes_on(tmp_path: Path) -> None:
    """An engine that is stopped with a request open, and the next one."""
    request = replace(REQUESTS["unseeded, with penalties"], max_tokens=60)
    with tiny_engine(saves=Store(tmp_path, 5)) as engine:
        events = engine.stream(request)
        heard = []
        for event in events:
            heard += event.ids if isinstance(event, Delta) else ()
            if len(heard) >= 12:
                break
        engine.stop()
    with tiny_engine(saves=Store(tmp_path, 5)) as engine:
        whole = collect(engine.stream(request))
        assert whole.choices[0].ids[:12] == heard[:12]
        assert len(whole.choices[0].ids) == whole.usage.completion_tokens == 60
        stats = engine.stats()["generation_checkpoints"]
        assert (stats["enabled"], stats["every"], stats["resumed"], stats["kept"]) == (True, 5, 1, 0)
        assert stats["resumed_tokens"] >= 12
        assert whole.choices[0].finish_reason == "length"
    with tiny_engine() as engine:
        assert engine.stats()["generation_checkpoints"] == {"enabled": False}


def test_guessing_goes_on_too(tmp_path: Path) -> None:
    """Prompt lookup guesses over what was replayed, and changes nothing."""
    request = replace(REQUESTS["greedy"], prompt=PROMPT * 3)
    guessing = Speculation(SpeculationConfig(draft_kind="ngram"), vocab_size=VOCAB_SIZE)
    first = Store(tmp_path, 5)
    assert run_until(rig_of(first), request, 18)
    die(first)
    with opened(tmp_path, 5) as second:
        rig = Rig(tiny_loaded(), EngineConfig(prefill_chunk=64), saves=second, speculation=guessing)
        rig.submit(request)
        rig.finish()
        check_as_uninterrupted(rig, uninterrupted(request))
        assert rig.counters.proposed_tokens > 0
