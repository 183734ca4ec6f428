"""States that outlive the engine: restarts, the same bits, and a disk that fails."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from engine_fixtures import Rig, ask, tiny_loaded, tiny_model, usage
from gnomon.config import CacheConfig, EngineConfig
from gnomon.engine import fetch
from gnomon.engine.api import Finished, Request
from gnomon.engine.disk import DiskUnusable
from gnomon.state.ssd import format, store, tier
from gnomon.state.ssd.format import read_header
from prefix_walk import bits, hash_of, record, tokens_of
from solo import GAP_BOUNDS, solo, ties_until_equal

CHUNK = 64


@contextmanager
def rig_on(
    disk: Path,
    model_type: str = "llama",
    cache: dict[str, Any] | None = None,
    operations: str = "stock",
    **config: Any,
) -> Iterator[Rig]:
    """A rig whose cache is also in `disk`; the model's files are beside it. What waits is written at the end."""
    model = disk.parent / f"model-{model_type}"
    if not model.exists():
        model.mkdir()
        (model / "model.safetensors").write_bytes(model_type.encode())
    loaded = replace(tiny_loaded(model_type), path=model)
    settings = CacheConfig(**{"ssd_cache": disk, "ssd_cache_min_free": 0, **(cache or {})})
    rig = Rig(loaded, EngineConfig(**{"prefill_chunk": CHUNK, **config}), cache=settings, operations=operations)
    try:
        yield rig
    finally:
        rig.core.close()
        rig.core.reuse.close()


TYPES = ("llama", "qwen3_moe", "deepseek_v3", "qwen3_5", "gemma3", "gemma4", "gpt_oss", "mamba2", "falcon_h1")


@pytest.mark.parametrize("model_type", TYPES)
def test_after_a_restart_the_next_turn_goes_on_as_if_nothing_had_happened(model_type: str, tmp_path: Path) -> None:
    """mlx-lm runs the same windows and steps without a break; every logit of the second turn has the same bits."""
    model, first, more = tiny_model(model_type, "float32"), tokens_of(511), tokens_of(70, seed=1)
    with rig_on(tmp_path / "disk", model_type) as rig:
        answer = ask(rig, "first", first)
    second = (*first, *answer[:-1], *more)

    caches = make_prompt_cache(model)
    feeds = [first[i : min(i + CHUNK, len(first) - 1)] for i in range(0, len(first) - 1, CHUNK)]
    feeds += [(first[-1],), *((token,) for token in answer[:-1])]
    for feed in feeds:
        mx.eval(model(mx.array([list(feed)]), cache=caches))
    theirs = [model(mx.array([list(feed)]), cache=caches) for feed in (more[:CHUNK], more[CHUNK:-1], more[-1:])]

    with rig_on(tmp_path / "disk", model_type) as rig:
        seen, stop = record(model)
        assert ask(rig, "second", second, tokens=1) == [int(mx.argmax(theirs[-1][0, -1]).item())]
        stop()
        used = usage(rig, "second")
        assert (used.cached_tokens, used.cache_tier, used.cache_miss) == (514, "ssd", None)
        assert [x.shape for x in seen] == [x.shape for x in theirs]
        assert all(np.array_equal(bits(x), bits(y)) for x, y in zip(seen, theirs, strict=True))
        ask(rig, "third", second, tokens=1)
        assert usage(rig, "third").cache_tier == "ram"
        assert rig.core.reuse.sections()["ssd_cache"]["restores"] == 1
        rig.core.check_integrity()


def stats(rig: Rig) -> dict[str, Any]:
    return rig.core.reuse.sections()["ssd_cache"]


def written(rig: Rig) -> None:
    """Wait until nothing is on its way to disk."""
    disk = rig.core.reuse.disk
    assert disk is not None
    disk.tier.tend()
    assert disk.tier.writer.flush(300)


def files(disk: Path) -> list[Path]:
    return sorted(disk.glob("*/*/*.safetensors"))


def test_memory_that_gave_a_state_up_takes_it_back_from_disk(tmp_path: Path) -> None:
    """Room for the state of 400 tokens: the second prompt evicts the first."""
    per_token = 2 * 2 * 2 * 16 * 4
    with rig_on(tmp_path / "disk", prompt_cache=400 * per_token) as rig:
        first = ask(rig, "a", tokens_of(300))
        ask(rig, "b", tokens_of(300, seed=1))
        assert rig.core.reuse.stats()["evictions"] > 0
        assert ask(rig, "c", tokens_of(300)) == first
        used = usage(rig, "c")
        assert (used.cached_tokens, used.cache_tier) == (299, "ssd")
        rig.core.check_integrity()


@pytest.mark.parametrize("change", ["weights", "config.json", "operations", "namespace"])
def test_another_model_at_the_same_path_gets_nothing(change: str, tmp_path: Path) -> None:
    """Size and time of the weights' file stay as they were. The miss says that the tokens are known under another identity."""
    with rig_on(tmp_path / "disk") as rig:
        ask(rig, "a", tokens_of(300), namespace="adapter a")
    model, how = tmp_path / "model-llama", {"namespace": "adapter a"}
    if change == "weights":
        weights = model / "model.safetensors"
        stat, content = weights.stat(), bytearray(weights.read_bytes())
        content[2] ^= 1
        weights.write_bytes(content)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "config.json":
        (model / "config.json").write_text("{}")
    elif change == "namespace":
        how = {"namespace": "adapter b"}
    with rig_on(tmp_path / "disk", operations="native avx2" if change == "operations" else "stock") as rig:
        ask(rig, "b", tokens_of(300), **how)
        used = usage(rig, "b")
        assert (used.cached_tokens, used.cache_tier) == (0, "none")
        assert used.cache_miss is not None
        assert (used.cache_miss.kind, used.cache_miss.position) == ("namespace", 0)


def break_file(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(content[:-1])
    elif how == "header only":
        file.write_bytes(content[:300])
    elif how == "zero length":
        file.write_bytes(b"")
    elif how == "payload bit":
        content[-5] ^= 4
        file.write_bytes(content)
    elif how == "header bit":
        content[100] ^= 1
        file.write_bytes(content)
    elif how == "foreign":
        file.write_bytes(b"something else altogether, of some length")
    elif how == "another's":
        file.write_bytes(next(one for one in files(file.parents[2]) if one != file).read_bytes())
    elif how == "gone":
        file.unlink()
    else:
        raise AssertionError(how)


FAULTS = ("truncated", "header only", "zero length", "payload bit", "header bit", "foreign", "another's", "gone")


@pytest.mark.parametrize("when", ["running", "restarted"])
@pytest.mark.parametrize("how", FAULTS)
def test_files_that_are_not_whole_are_never_lent(how: str, when: str, tmp_path: Path) -> None:
    """The chain's second block is broken: only the first is reused, the answer is the same, the file is counted and removed."""
    disk, prompt = tmp_path / "disk", tokens_of(700)
    with rig_on(disk) as rig:
        expected = ask(rig, "a", prompt)
        written(rig)
        broken = next(file for file in files(disk) if start_of(file) == 256)
        if when == "running":
            break_file(broken, how)
            rig.core.reuse.cache.clear()
            check_reuse_without(rig, prompt, expected)
            reads = stats(rig)["reads"]
            assert (reads["corrupt"], reads["missing"]) == ((0, 1) if how == "gone" else (1, 0))
    if when == "restarted":
        break_file(broken, how)
        with rig_on(disk) as rig:
            check_reuse_without(rig, prompt, expected)
            found, reads = stats(rig)["found"], stats(rig)["reads"]
            # Files as long as the index says are looked into when they are read.
            assert (found["removed"] + reads["corrupt"], found["lost"]) == (
                (0, 1) if how == "gone" else (1, 1 - reads["corrupt"])
            )
    with rig_on(disk) as rig:
        assert ask(rig, "again", prompt) == expected
        assert usage(rig, "again").cached_tokens == 699
        assert stats(rig)["reads"]["corrupt"] == 0


def start_of(file: Path) -> int:
    return read_header(file).entry.start


def check_reuse_without(rig: Rig, prompt: tuple[int, ...], expected: list[int]) -> None:
    assert ask(rig, "broken", prompt) == expected
    used = usage(rig, "broken")
    assert (used.cached_tokens, used.cache_tier) == (256, "ssd")
    # What was gone before the start, nobody knows of any more.
    removed = stats(rig)["found"]["removed"] + stats(rig)["found"]["lost"]
    miss = used.cache_miss
    assert (None if miss is None else (miss.kind, miss.position)) == (None if removed else ("evicted", 256))
    written(rig)


def test_a_hash_is_checked_where_the_sum_agrees(tmp_path: Path) -> None:
    """Somebody changed a number and the sum with it; only --ssd-cache-verify looks at the hashes."""
    disk, prompt = tmp_path / "disk", tokens_of(200)
    with rig_on(disk) as rig:
        expected = ask(rig, "a", prompt)
    (file,) = files(disk)
    forge(file)
    with rig_on(disk, cache={"ssd_cache_verify": True}) as rig:
        assert ask(rig, "b", prompt) == expected
        assert usage(rig, "b").cached_tokens == 0
        assert stats(rig)["reads"]["corrupt"] == 1


def forge(file: Path) -> None:
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    content[-1] ^= 0x40
    entry = json.loads(header["__metadata__"]["entry"])
    entry["crc32"] = zlib.crc32(content[8 + length :])
    text = json.dumps(entry, separators=(",", ":"))
    meta = header.pop("__metadata__")
    header = {"__metadata__": meta | {"entry": text, "digest": format._digest(text, header)}, **header}
    data = json.dumps(header, separators=(",", ":")).encode()
    file.write_bytes(len(data).to_bytes(8, "little") + data + content[8 + length :])


def test_a_file_that_may_not_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, prompt = tmp_path / "disk", tokens_of(700)
    with rig_on(disk) as rig:
        expected = ask(rig, "a", prompt)
    denied = next(file for file in files(disk) if start_of(file) == 256)
    stock = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        if self == denied:
            raise PermissionError(13, "Permission denied", str(self))
        return stock(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with rig_on(disk) as rig:
        check_reuse_without(rig, prompt, expected)
        assert stats(rig)["reads"]["unreadable"] == 1


@pytest.mark.parametrize("fault", ["full", "denied", "floor"])
def test_a_disk_that_takes_no_more_leaves_states_in_memory_and_says_so_once(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    floor = {"ssd_cache_min_free": 1 << 62} if fault == "floor" else {}
    with rig_on(disk, cache=floor) as rig:
        code = errno.ENOSPC if fault == "full" else errno.EACCES

        def fsync(_: int) -> None:
            raise OSError(code, os.strerror(code))

        if fault != "floor":
            monkeypatch.setattr(store.os, "fsync", fsync)
        for i in range(3):
            answer = ask(rig, f"a{i}", tokens_of(300, seed=i))
            written(rig)
            assert ask(rig, f"b{i}", tokens_of(300, seed=i)) == answer
            assert usage(rig, f"b{i}").cache_tier == "ram"
        told = stats(rig)
        assert told["failed_spills"] >= 1
        assert told["paused"] is not None
        assert told["spills"] == 0
        assert rig.core.reuse.disk.flush(5, lambda work, _: work()).durable is False
        assert [r.levelname for r in caplog.records if "writes nothing for now" in r.message] == ["WARNING"]
        assert files(disk) == []
        assert list(disk.glob("*/*/.*.tmp")) == []
        if fault == "floor":
            return
        monkeypatch.undo()
        rig.core.reuse.disk.tier.writer._pause_ends = 0.0
        assert rig.core.reuse.disk.flush(300, lambda work, _: work()).durable is True
        assert stats(rig)["paused"] is None
        assert files(disk) != []


def test_the_cap_lets_go_what_was_used_longest_ago_and_ends_first(tmp_path: Path) -> None:
    """Room for about four of six blocks. Of the prompt that came first its later block goes, not the one it stands on."""
    disk = tmp_path / "disk"
    with rig_on(disk) as rig:
        for seed in range(3):
            ask(rig, str(seed), tokens_of(512, seed=seed), tokens=1)
        written(rig)
        sizes = sorted(file.stat().st_size for file in files(disk))
    assert len(sizes) == 6
    cap = sizes[0] * 4 + 4096 * 6
    with rig_on(disk, cache={"ssd_cache_max": cap}) as rig:
        assert sum(file.stat().st_size for file in files(disk)) <= cap
        for seed, tokens in ((2, 511), (0, 0)):
            ask(rig, f"again {seed}", tokens_of(512, seed=seed), tokens=1)
            assert usage(rig, f"again {seed}").cached_tokens == tokens
        miss = usage(rig, "again 0").cache_miss
        assert miss is not None
        assert miss.kind == "evicted"
        written(rig)
        told = stats(rig)
        assert told["bytes"] == sum(file.stat().st_size for file in files(disk)) <= cap
        assert told["evictions"] >= 2


def test_a_cap_below_one_state_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rig_on(tmp_path / "disk", cache={"ssd_cache_max": 1000}) as rig:
        for seed in range(2):
            ask(rig, str(seed), tokens_of(300, seed=seed), tokens=1)
        written(rig)
        assert stats(rig)["dropped_spills"] >= 2
    assert files(tmp_path / "disk") == []
    assert len([line for line in caplog.messages if line.endswith("--ssd-cache-max is 1000 bytes")]) == 1


def test_equal_beginnings_are_on_disk_once(tmp_path: Path) -> None:
    shared = tokens_of(512)
    with rig_on(tmp_path / "disk") as rig:
        for i in range(4):
            ask(rig, str(i), (*shared, *tokens_of(20, seed=i)), tokens=1)
        written(rig)
    assert sorted(start_of(file) for file in files(tmp_path / "disk")) == [0, 256, 512, 512, 512, 512]


def test_what_nobody_used_goes_from_memory_and_stays_on_disk(tmp_path: Path) -> None:
    with rig_on(tmp_path / "disk", "qwen3_5") as rig:
        answer = ask(rig, "a", tokens_of(300))
        written(rig)
        assert rig.core.reuse.stats()["entries"] > 0
        disk = rig.core.reuse.disk
        disk.config = replace(disk.config, ssd_cache_demote_idle=0.01)
        disk._demote_at = 0.0
        time.sleep(0.02)
        rig.core.tend()
        assert rig.core.reuse.stats()["entries"] == 0
        assert stats(rig)["demotions"] > 0
        rig.core.check_integrity()
        assert ask(rig, "b", tokens_of(300)) == answer
        assert usage(rig, "b").cache_tier == "ssd"


def test_without_write_behind_nothing_is_written_before_memory_gives_it_up(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with rig_on(disk, cache={"ssd_writebehind": False}) as rig:
        ask(rig, "a", tokens_of(300))
        written(rig)
        assert files(disk) == []
        report = rig.core.reuse.disk.flush(300, lambda work, _: work())
        assert (report.durable, report.flushed, report.missing, report.longest) == (True, 2, 0, 303)
        assert report.entries == len(files(disk)) == 2
        again = rig.core.reuse.disk.flush(300, lambda work, _: work())
        assert (again.durable, again.flushed) == (True, 0)


def test_requests_that_want_the_same_read_it_once_and_a_cancelled_one_lets_go(tmp_path: Path) -> None:
    prompt = tokens_of(700)
    with rig_on(tmp_path / "disk") as rig:
        answer = ask(rig, "a", prompt)
    with rig_on(tmp_path / "disk") as rig:
        reader, held = rig.core.reuse.disk.tier.reader, threading.Event()
        stock = reader.store.read

        def read(entry: Any, *, verify: bool) -> Any:
            held.wait(300)
            return stock(entry, verify=verify)

        reader.store.read = read  # pyright: ignore[reportAttributeAccessIssue]
        for name in "bcd":
            rig.submit(Request(name, prompt, max_tokens=4, ignore_eos=True))
        rig.core.read_mail()
        assert rig.core.is_waiting
        rig.cancel("d")
        rig.core.read_mail()
        assert "d" not in rig.core.jobs
        held.set()
        rig.finish()
        assert rig.ids("b") == rig.ids("c") == answer
        assert [usage(rig, name).cache_tier for name in "bc"] == ["ssd", "ssd"]
        reads = stats(rig)["reads"]
        assert (reads["files"], reads["coalesced"]) == (3, 6)


def test_others_are_served_while_a_prompt_is_read(tmp_path: Path) -> None:
    with rig_on(tmp_path / "disk") as rig:
        ask(rig, "a", tokens_of(300))
    with rig_on(tmp_path / "disk") as rig:
        reader, held = rig.core.reuse.disk.tier.reader, threading.Event()
        stock = reader.store.read

        def read(entry: Any, *, verify: bool) -> Any:
            held.wait(300)
            return stock(entry, verify=verify)

        reader.store.read = read  # pyright: ignore[reportAttributeAccessIssue]
        rig.submit(Request("cold", tokens_of(300), max_tokens=4, ignore_eos=True))
        rig.submit(Request("other", tokens_of(50, seed=9), max_tokens=4, ignore_eos=True))
        while not any(isinstance(event, Finished) for event in rig.events["other"]):
            rig.turn()
        assert rig.events["cold"] == []
        held.set()
        rig.finish()
        assert usage(rig, "cold").cached_tokens == 299


def test_a_defect_in_the_tier_costs_reuse_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig_on(tmp_path / "disk") as rig:
        answer = ask(rig, "a", tokens_of(300))

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(rig.core.reuse.disk.tier.index, "plan", fail)
        assert ask(rig, "b", tokens_of(300)) == answer
        assert stats(rig)["failure"] == "plan a read: broken"
        assert ask(rig, "c", tokens_of(300)) == answer
        assert usage(rig, "c").cache_tier == "ram"


def test_what_the_disk_knows_explains_a_miss_after_a_restart(tmp_path: Path) -> None:
    prompt = tokens_of(600)
    with rig_on(tmp_path / "disk") as rig:
        ask(rig, "a", prompt)
    with rig_on(tmp_path / "disk") as rig:
        ask(rig, "b", (*prompt[:256], *tokens_of(300, seed=3)))
        used = usage(rig, "b")
        assert used.cached_tokens == 256
        assert used.cache_miss is not None
        assert (used.cache_miss.kind, used.cache_miss.position) == ("edited text", 256)


def test_a_directory_that_can_not_be_used_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(DiskUnusable, match=r"--ssd-cache .*file"), rig_on(tmp_path / "file"):
        pass
    with pytest.raises(DiskUnusable, match="--prompt-cache is 0"), rig_on(tmp_path / "disk", prompt_cache=0):
        pass


def test_a_lost_or_damaged_index_is_made_again(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with rig_on(disk) as rig:
        answer = ask(rig, "a", tokens_of(700))
    (index,) = disk.glob("*/index.sqlite")
    for content in (None, b"no database at all" * 500):
        for one in disk.glob("*/index.sqlite*"):
            one.unlink()
        if content is not None:
            index.write_bytes(content)
        with rig_on(disk) as rig:
            assert stats(rig)["found"]["added"] == 3
            assert ask(rig, "b", tokens_of(700)) == answer
            assert usage(rig, "b").cached_tokens == 699


@contextmanager
def captures() -> Iterator[list[str]]:
    """What goes to disk is hashed before it is bytes, what comes back after, and must be one of those; the list is of what came back."""
    stock_pack, stock_unpack = tier.pack, fetch.unpack
    kept, came = set[tuple[str, str]](), list[str]()

    def pack(held: Any, entry: Any) -> Any:
        parts = held.layers if hasattr(held, "layers") else dict(enumerate(held.parts))
        kept.add((entry.name, hash_of({i: parts[i] for i in entry.layers})))
        return stock_pack(held, entry)

    def unpack(packed: Any) -> Any:
        layers = stock_unpack(packed)
        assert (packed.entry.name, hash_of(layers)) in kept
        came.append(packed.entry.name)
        return layers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "pack", pack)
        patch.setattr(fetch, "unpack", unpack)
        yield came


@pytest.mark.parametrize(
    ("model_type", "max_examples"),
    [
        ("llama", 2),
        ("qwen3_5", 2),
        *(pytest.param(one, 30, marks=pytest.mark.slow) for one in ("llama", "qwen3_5", "gemma3", "falcon_h1")),
    ],
)
def test_branches_edits_and_restarts(model_type: str, max_examples: int) -> None:
    """A tree of prompts with restarts and little memory in between. Every state that comes back has the bits that were captured, answers
    are mlx-lm's alone up to ties, and the books are straight."""

    @settings(max_examples=max_examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        turns=st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 700), st.integers(1, 90), st.integers(1, 5), st.booleans()),
            min_size=3,
            max_size=6,
        )
    )
    def walk(turns: list[tuple[int, int, int, int, bool]]) -> None:
        texts: list[tuple[int, ...]] = [tokens_of(300)]
        with tempfile.TemporaryDirectory() as directory, captures() as came, ExitStack() as stack:
            disk = Path(directory) / "disk"
            held = stack.enter_context(ExitStack())
            rig = held.enter_context(rig_on(disk, model_type, checkpoint_every=50))
            for turn, (parent, at, count, tokens, restart) in enumerate(turns):
                prompt = (*texts[parent % len(texts)][:at], *tokens_of(count, seed=1000 + turn))
                answer = ask(rig, str(turn), prompt, tokens)
                ties_until_equal(
                    answer, solo(tiny_model(model_type), prompt, len(answer), CHUNK), GAP_BOUNDS["float32"]
                )
                assert usage(rig, str(turn)).cached_tokens < len(prompt)
                texts += [prompt, (*prompt, *answer)]
                rig.core.check_integrity()
                if restart:
                    held.close()
                    rig = held.enter_context(rig_on(disk, model_type, checkpoint_every=50))
                    before = len(came)
                    assert ask(rig, f"again {turn}", prompt, tokens) == answer
                    if len(prompt) > 1:
                        assert usage(rig, f"again {turn}").cached_tokens == len(prompt) - 1
                        assert len(came) > before

    walk()
