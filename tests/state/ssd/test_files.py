"""The files: any arrays come back as they were, other programs read them, and no altered one is taken."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from gnomon.state.keys import root_key
from gnomon.state.prefix.block import Block, Checkpoint
from gnomon.state.snapshot import LayerSnapshot
from gnomon.state.ssd.format import BadFile, Entry, read
from gnomon.state.ssd.pack import entry_of, pack, unpack
from gnomon.state.ssd.store import Store

ROOT = Block(root_key("n"), None, ())
DTYPES = (
    mx.bool_,
    mx.uint8,
    mx.int8,
    mx.uint16,
    mx.int32,
    mx.uint32,
    mx.float16,
    mx.bfloat16,
    mx.float32,
    mx.complex64,
)

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
arrays = st.builds(
    lambda dtype, shape, seed: (mx.random.uniform(0, 250, shape, key=mx.random.key(seed))).astype(dtype),
    st.sampled_from(DTYPES),
    shapes,
    st.integers(0, 9),
)
snapshots = st.builds(
    LayerSnapshot,
    st.sampled_from(["full", "sliding", "recurrent", "what others add"]),
    st.dictionaries(st.sampled_from(["keys", "values", "keys.scales", "0", "draft/1"]), arrays, max_size=3),
    st.dictionaries(st.sampled_from(["length", "index", "bits"]), st.integers(0, 1 << 40), max_size=3),
)


def bits(array: mx.array) -> bytes:
    return bytes(memoryview(array.reshape(-1).view(mx.uint8))) if array.size else b""


def check_same(found: dict[int, LayerSnapshot], kept: dict[int, LayerSnapshot]) -> None:
    assert found.keys() == kept.keys()
    for number, layer in kept.items():
        other = found[number]
        assert (other.kind, other.numbers, other.arrays.keys()) == (layer.kind, layer.numbers, layer.arrays.keys())
        for name, array in layer.arrays.items():
            back = other.arrays[name]
            assert (back.dtype, back.shape, bits(back)) == (array.dtype, array.shape, bits(array))


def block_of(parts: list[LayerSnapshot | None], tokens: tuple[int, ...] = (1, 2, 3)) -> Block:
    block = Block(b"", ROOT, tokens)
    block.set_parts(parts)
    mx.eval([a for part in parts if part is not None for a in part.arrays.values()])
    return block


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.none() | snapshots, min_size=1, max_size=4),
    uncut=st.dictionaries(st.integers(0, 70), snapshots, max_size=3),
    tokens=st.lists(st.integers(0, 1 << 31), min_size=1, max_size=256),
)
def test_any_state_comes_back_with_its_bits(
    parts: list[LayerSnapshot | None], uncut: dict[int, LayerSnapshot], tokens: list[int]
) -> None:
    block = block_of(parts, tuple(tokens))
    mx.eval([a for layer in uncut.values() for a in layer.arrays.values()])
    checkpoint = Checkpoint(block, (len(tokens) + 1) // 2, uncut)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for held, kept in ((block, {i: p for i, p in enumerate(parts) if p is not None}), (checkpoint, uncut)):
            entry = entry_of(held, "ab" * 16)
            store.write(pack(held, entry))
            packed = store.read(entry, verify=True)
            assert packed.entry == entry
            check_same(unpack(packed), kept)


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    """safetensors' own reader and MLX's find the arrays, whatever else the header says."""
    arrays = {"keys": mx.arange(24, dtype=mx.float32).reshape(1, 2, 3, 4), "scales": mx.ones((1, 2), mx.bfloat16)}
    block = block_of([LayerSnapshot("full", arrays, {"length": 3}), None])
    store, entry = Store(tmp_path), entry_of(block, "ab" * 16)
    store.write(pack(block, entry))
    with safe_open(store.path(entry), "np") as opened:
        assert set(opened.keys()) == {"0.keys", "0.scales"}
        assert np.array_equal(opened.get_tensor("0.keys"), np.array(arrays["keys"]))
        assert json.loads(opened.metadata()["entry"])["tokens"] == [1, 2, 3]
    loaded: Any = mx.load(str(store.path(entry)))
    assert loaded["0.scales"].dtype == mx.bfloat16
    assert all(mx.array_equal(loaded[f"0.{name}"], array) for name, array in arrays.items())


@settings(max_examples=150, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_no_altered_file_is_taken(at: float, bit: int, cut: bool) -> None:
    """One bit anywhere, or any end cut off."""
    block = block_of([LayerSnapshot("full", {"keys": mx.arange(40, dtype=mx.float32)}, {"length": 3})])
    with tempfile.TemporaryDirectory() as directory:
        store, entry = Store(Path(directory)), entry_of(block, "ab" * 16)
        store.write(pack(block, entry))
        path = store.path(entry)
        content = bytearray(path.read_bytes())
        place = int(at * len(content))
        if cut:
            del content[place:]
        else:
            content[place] ^= 1 << bit
        path.write_bytes(content)
        try:
            packed = read(path)
        except BadFile:
            return
        # The padding of the header may hold anything that JSON reads as nothing.
        assert packed.entry == entry
        check_same(unpack(packed), {0: block.parts[0]})  # pyright: ignore[reportArgumentType]


def test_the_name_tells_everything_apart() -> None:
    entry = Entry("a", "b", "block", b"p", 0, (1, 2), (0,), 2)
    others = [
        Entry("x", "b", "block", b"p", 0, (1, 2), (0,), 2),
        Entry("a", "b", "checkpoint", b"p", 0, (1, 2), (0,), 2),
        Entry("a", "b", "block", b"q", 0, (1, 2), (0,), 2),
        Entry("a", "b", "block", b"p", 0, (1, 3), (0,), 2),
        Entry("a", "b", "block", b"p", 0, (1, 2), (0, 1), 2),
    ]
    assert len({one.name for one in (entry, *others)}) == 6


def test_a_hash_that_is_the_same_by_chance_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name the same: what is read is compared with the tokens themselves."""
    monkeypatch.setattr(Entry, "name", "same")
    store = Store(tmp_path)
    mine, other = block_of([None], (1, 2)), block_of([None], (1, 3))
    store.write(pack(other, entry_of(other, "ab" * 16)))
    with pytest.raises(BadFile, match="other tokens"):
        store.read(entry_of(mine, "ab" * 16), verify=False)


def test_unfinished_files_go_when_their_writer_is_gone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = store.home / "ab"
    folder.mkdir(parents=True)
    import os

    for pid in (os.getpid(), 1 << 29):
        (folder / f".name.{pid}.0123.tmp").write_bytes(b"half")
    assert store.reap() == 1
    assert [file.name for file in folder.iterdir()] == [f".name.{os.getpid()}.0123.tmp"]
