"""Decode steps on CUDA as one launch: what is recorded, where things lie, what happens where it can't be; on a GPU, the bits."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.config import resolve
from gnomon.kernels import build, dispatch, native
from gnomon.kernels.blocks import flat_test
from gnomon.kernels.cuda import attention, decode, graphs, nvrtc, record, sources
from gnomon.kernels.cuda.record import Plan, Symbol
from gnomon.state.batch_state import BatchState
from kernels.test_build import fake_compiler
from kernels.test_cuda import llama_model, prefilled

KERNEL = sources.make(
    "one", (), ["a", "b"], ["c"], "c[0] = a[0] + b_shape[1] + b_strides[0];", block=32, any_strides=True
)


def call(a: Any, b: Any, size: int = 1) -> Any:
    return KERNEL(
        inputs=[a, b], output_shapes=[(size,)], output_dtypes=[mx.float32], grid=(64, 3, 2), threadgroup=(32, 1, 1)
    )[0]


def test_a_step_is_taken_down_with_the_kernels_that_run_one_by_one() -> None:
    model = llama_model()
    decoder = decode.Decoder.of(model)
    assert isinstance(decoder, decode.Decoder)
    buffers = [mx.zeros((4, 2, 512, 64), dtype=mx.bfloat16)] * 4
    plan = record.record([mx.zeros((3, 1), dtype=mx.int32), *buffers], 3, decoder.chain)
    layer = ["plain", "attend", "add", "gated", "add"]
    assert [c.kernel.name for c in plan.calls] == ["take", "embed", *layer, *layer, "plain"]
    assert plan.result is not None
    assert (plan.result.shape, plan.result.dtype) == ((3, 96), mx.bfloat16)
    attend = plan.calls[3]
    assert attend.grid == (4, 2, 3)  # stretches of 512 slots, blocks of two heads, rows
    assert any(array is model.model.layers[0].self_attn.q_proj.weight for array in plan.calls[2].inputs)
    assert sources.thread.recorder is None


def test_a_windows_step_writes_keys_and_values_in_front_of_attention() -> None:
    decoder = decode.Decoder.of(llama_model())
    assert isinstance(decoder, decode.Decoder)
    buffers = [mx.zeros((4, 2, 512, 64), dtype=mx.bfloat16)] * 4
    plan = record.record([mx.zeros(12, dtype=mx.int32), *buffers], 12, decoder.chain)
    layer = ["plain", "append", "attend", "add", "gated", "add"]
    assert [c.kernel.name for c in plan.calls] == ["take", "embed", *layer, *layer, "plain"]
    assert plan.result is not None
    assert plan.result.shape == (12, 96)
    append, attend = plan.calls[3:5]
    assert (append.grid, attend.grid) == ((1, 1, 12), (4, 2, 12))
    assert append.outputs[0] is attend.inputs[-1]  # or kernels one by one might change places
    assert append.kernel.waits
    assert attend.kernel.waits
    plain = record.record([mx.zeros((12, 1), dtype=mx.int32), *buffers], 12, decoder.chain)
    assert attend.kernel.full_name not in {c.kernel.full_name for c in plain.calls}


@given(st.lists(st.tuples(st.integers(0, 2**21 - 40), st.integers(1, 16)), min_size=1, max_size=2), st.integers(0, 30))
def test_a_spot_names_row_position_and_place(rows: list[tuple[int, int]], first: int) -> None:
    places = [(i + first, start + n) for i, (start, count) in enumerate(rows) for n in range(count)]
    found = attention.spots(places, 32)
    assert len(found) == 32
    last = found[len(places) - 1]
    assert set(found[len(places) - 1 :]) == {last}
    for spot, (row, position) in zip(found, places, strict=False):
        assert 0 <= spot < 2**31
        start = dict(enumerate(rows, first))[row][0]
        assert (spot >> 26, spot & (2**21 - 1), spot >> 21 & 31) == (row, position, position - start)


def test_the_text_of_a_kernel_declares_what_its_body_names() -> None:
    plan = record.record(
        [mx.zeros((2, 3), dtype=mx.int32)], 2, lambda n, x: call(mx.zeros(4, dtype=mx.bfloat16), call(n, x))
    )
    first, second = plan.calls

    def text(one: record.Call) -> str:
        return record.text(one.kernel, record.signature(record.parameters(one)))

    assert "(const Numbers a, const int* b, const Shape b_shape, const Strides b_strides, float* c)" in text(first)
    assert "(const __nv_bfloat16* a, const float* b," in text(second)
    assert "__launch_bounds__(32, 1)" in text(first)
    assert (first.grid, first.block) == ((2, 3, 2), 32)


@pytest.mark.parametrize("step", [lambda n, x: x + 1, lambda n, x: x, lambda n, x: mx.abs(call(n, x))])
def test_a_step_that_is_more_than_kernels_is_refused(step: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="the step"):
        record.record([mx.zeros((2, 3), dtype=mx.int32)], 2, step)
    assert sources.thread.recorder is None


@given(st.lists(st.tuples(st.integers(1, 900), st.lists(st.integers(0, 30), max_size=3)), min_size=1, max_size=30))
def test_nothing_that_is_still_read_is_written_over(chain: list[tuple[int, list[int]]]) -> None:
    """Kernels run on numbers in one memory laid out by the plan, and in memories of their own: the same comes out."""
    plan = Plan()
    for size, reads in chain:
        inputs = [plan.made[i % len(plan.made)] for i in reads] if plan.made else []
        plan.record(KERNEL, inputs, [(size,)], [mx.uint8], (32, 1, 1), 32)
    plan.result = plan.made[-1]
    offsets, size = plan.places()
    memory, alone = np.zeros(size, dtype=np.uint8), dict[int, np.ndarray]()
    for number, one in enumerate(plan.calls):
        total = number
        for symbol in one.inputs:
            assert isinstance(symbol, Symbol)
            at = offsets[symbol.index]
            assert (memory[at : at + symbol.nbytes] == alone[symbol.index]).all()
            total += int(alone[symbol.index][0])
        made = one.outputs[0]
        alone[made.index] = np.full(made.nbytes, total % 256, dtype=np.uint8)
        if made is not plan.result:
            assert offsets[made.index] % record.ALIGNMENT == 0
            memory[offsets[made.index] : offsets[made.index] + made.nbytes] = alone[made.index]


def test_a_long_chain_takes_the_room_of_its_widest_place() -> None:
    plan = Plan()
    plan.record(KERNEL, [], [(1000,)], [mx.uint8], (32, 1, 1), 32)
    for _ in range(20):
        plan.record(KERNEL, [plan.made[-1]], [(1000,)], [mx.uint8], (32, 1, 1), 32)
    plan.result = plan.made[-1]
    assert plan.places()[1] == 2 * 1024


class Made:
    """A graph that notes what it is run with."""

    def __init__(self, shapes: list[Any]) -> None:
        self.shapes = shapes
        self.lengths: list[list[int]] = []

    def run(self, inputs: Sequence[mx.array], lengths: Sequence[int]) -> mx.array | None:
        if [record.roomy(a.shape) for a in inputs] != self.shapes:
            return None
        self.lengths.append(list(lengths))
        return mx.zeros((inputs[0].shape[0], 1, 96), dtype=mx.bfloat16)


class Maker:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.made: list[Made] = []

    def make(self, inputs: Sequence[mx.array], numbers: int, step: object, shape: list[int]) -> Made:
        assert [numbers, 1, 96] == [inputs[0].shape[0], *shape[1:]] == shape
        if self.error is not None:
            raise self.error
        self.made.append(Made([record.roomy(a.shape) for a in inputs]))
        return self.made[-1]


def steps(decoder: decode.Decoder, state: Any, count: int = 1) -> mx.array | None:
    tokens, logits = mx.zeros((state.num_rows, 1), dtype=mx.int32), None
    for _ in range(count):
        state.begin(1)
        logits = decoder.step(tokens, state.caches)
        state.commit()
    return logits


def test_a_graph_is_made_once_for_so_many_rows_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_GRAPHS", 2)
    model = llama_model(num_hidden_layers=1)
    decoder = decode.Decoder.of(model)
    assert isinstance(decoder, decode.Decoder)
    maker: Any = Maker()
    decoder.graphs = maker
    one, two = prefilled(model, [9]), prefilled(model, [9, 4])
    logits = steps(decoder, one, 3)
    assert logits is not None
    assert logits.shape == (1, 1, 96)
    assert [m.lengths for m in maker.made] == [[[9], [10], [11]]]
    steps(decoder, two)
    steps(decoder, one)
    steps(decoder, two)
    assert [m.lengths for m in maker.made] == [[[9], [10], [11], [12]], [[9, 4], [10, 5]]]
    steps(decoder, prefilled(model, [600]))  # more slots: the one not used for longest goes
    steps(decoder, two)
    assert len(maker.made) == 3
    steps(decoder, one)
    assert len(maker.made) == 4


def test_windows_share_graphs_of_a_few_sizes() -> None:
    model = llama_model(num_hidden_layers=1)
    decoder = decode.Decoder.of(model)
    assert isinstance(decoder, decode.Decoder)
    maker: Any = Maker()
    decoder.graphs = maker
    state = prefilled(model, [9, 4])
    for counts, size in (([3, 3], 6), ([4, 1], 8), ([1, 4], 8), ([1, 1], None), ([4, 4], 8), ([20, 20], 32)):
        width = max(counts)
        state.begin(width, counts)
        before = state.lengths
        logits = decoder.step(mx.zeros((2, width), dtype=mx.int32), state.caches)
        state.commit()
        assert logits is not None
        assert logits.shape == (2, width, 96)
        if size is not None:
            graph = next(m for m in maker.made if m.shapes[0] == (size,))
            places = [(row, before[row] + i) for row in range(2) for i in range(width)]
            expected = [
                attention.spots(places[at : at + 32], size if at == 0 else 8) for at in range(0, len(places), 32)
            ]
            assert graph.lengths[-1] == expected[0]
            assert len(expected) == 1 or maker.made[1].lengths[-1] == expected[1]
        layer: Any = state.caches[0]
        assert layer.appending is logits  # what whoever evaluates the states waits for
    assert [m.shapes[0] for m in maker.made] == [(6,), (8,), (2, 1), (32,)]


@pytest.mark.parametrize(
    "error", [build.BuildError("no NVRTC"), RuntimeError("cuGraphInstantiate failed"), ValueError("not contiguous")]
)
def test_a_step_that_can_not_be_one_launch_goes_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(decode, "graph_failures", [])
    model = llama_model(num_hidden_layers=1)
    decoder: Any = decode.Decoder.of(model)
    decoder.graphs = Maker(error)
    monkeypatch.setattr(decoder, "_one_by_one", lambda *_: mx.ones((1, 1, 96)))
    with caplog.at_level(logging.WARNING):
        logits = steps(decoder, prefilled(model, [9]), 2)
    assert logits is not None
    assert logits.sum().item() == 96
    assert [r.getMessage() for r in caplog.records if str(error) in r.getMessage()] == [
        f"decode steps are launched kernel by kernel, which costs the host a few times as much: {error}"
    ]
    kernels = native.Kernels("native", True, isa=native.CUDA)
    assert (kernels.stats()["graph"], kernels.stats()["graph_reason"]) == (False, str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="builds are for Linux")
def test_where_it_can_not_be_built_steps_go_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name, value in (("is_cuda", lambda: True), ("_graphs", None), ("_no_graphs", None)):
        monkeypatch.setattr(native, name, value)
    monkeypatch.setattr(dispatch, "install", lambda *_: None)
    monkeypatch.setattr(decode, "graph_failures", [])
    try:
        off = native.start("native", cache=tmp_path, graph=False)
        found = [native.start("native", cache=tmp_path, compiler=fake_compiler(tmp_path, fails=True)) for _ in range(2)]
    finally:
        dispatch.choose(False)
    assert off.stats()["graph_reason"] == "switched off"
    for kernels in found:
        assert kernels.native
        assert "out of luck" in str(kernels.stats()["graph_reason"])
    assert len([r for r in caplog.records if "kernel by kernel" in r.getMessage()]) == 1


def test_a_model_without_a_compiled_step_has_no_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "is_cuda", lambda: True)
    monkeypatch.setattr(native, "_load_graphs", lambda *_: None)
    monkeypatch.setattr(dispatch, "install", lambda *_: None)
    monkeypatch.setattr(decode, "graph_failures", [])
    known = llama_model()
    try:
        told = [native.prepare(m, "native", cache=tmp_path).stats() for m in (nn.Linear(2, 2), known, known)]
    finally:
        dispatch.choose(False)
        dispatch.stock_calls.clear()
    assert [stats["graph"] for stats in told] == [False, True, True]
    assert "no compiled step" in told[0]["graph_reason"]


def test_a_driver_that_went_costs_the_graph_and_not_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*_: object) -> None:
        raise RuntimeError("the NVIDIA driver is too old: it has no cuGraphLaunch")

    for name, value in (("is_cuda", lambda: True), ("_graphs", None), ("_no_graphs", None)):
        monkeypatch.setattr(native, name, value)
    monkeypatch.setattr(dispatch, "install", lambda *_: None)
    monkeypatch.setattr(graphs, "load", load)
    try:
        kernels = native.start("native", cache=tmp_path)
    finally:
        dispatch.choose(False)
    assert "too old" in str(kernels.stats()["graph_reason"])


def test_the_extension_is_compiled_without_cudas_headers(tmp_path: Path) -> None:
    tools = build.toolchain(fake_compiler(tmp_path), extension=build.CUDA)
    commands = build.compile_commands(tools, tmp_path, build.CUDA)
    assert sorted(commands) == ["bindings", "driver", "graph", "nanobind"]
    shim = build.CUDA.sources / "shim"
    assert {path.name for path in shim.rglob("*.h")} == {"cuda.h", "cuda_runtime.h", "format.h"}
    assert all(str(shim) in line for name, line in commands.items() if name != "nanobind")
    made = build.ensure(tmp_path / "cache", extension=build.CUDA, compiler=fake_compiler(tmp_path), flags=("-DTEST",))
    assert made.path.name == "gnomon_cuda.so"
    made.path.write_bytes(b"something else")
    with pytest.raises(build.BuildError, match="is not the one that was made there"):
        build.load(made)


def test_kept_machine_code_must_be_ours_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile_one(text: str, architecture: str) -> bytes:
        compiled.append(text)
        return f"{architecture} {text}".encode()

    monkeypatch.setattr(nvrtc, "compile_one", compile_one)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    cache = tmp_path / "cuda"
    for _ in range(2):
        assert nvrtc.compile_all({"a": "one", "b": "two"}, "sm_90a", cache) == {
            "a": b"sm_90a one",
            "b": b"sm_90a two",
        }
    assert sorted(compiled) == ["one", "two"]
    assert nvrtc.compile_all({"a": "one"}, "sm_120a", cache) == {"a": b"sm_120a one"}
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--use_fast_math"))
    nvrtc.compile_all({"a": "one"}, "sm_90a", cache)
    assert compiled.count("one") == 3  # other options are other code
    for path in cache.iterdir():
        os.chmod(path, 0o666)
    with pytest.raises(build.BuildError, match="can be written by others"):
        nvrtc.compile_all({"a": "one"}, "sm_90a", cache)


def test_without_nvrtc_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "LIBRARY", "libno-such-nvrtc.so")
    nvrtc.library.cache_clear()
    with pytest.raises(build.BuildError, match="NVRTC can't be loaded"):
        nvrtc.compile_one("", "sm_90a")


def bits(array: mx.array) -> np.ndarray:
    return np.array(mx.contiguous(array).view(mx.uint16))


@pytest.mark.device
@pytest.mark.parametrize("bit", [4, 16])
def test_one_launch_has_the_bits_of_kernels_one_by_one(bit: int) -> None:
    """Batches of 1, 3, 8 and 17 rows by turns, tokens read back, weights read by the host (which moves them), buffers that grow."""
    model = llama_model()
    if bit != 16:
        nn.quantize(model, 64, bit)
        mx.eval(model.parameters())
    kernels = native.prepare(model, "native", cache=resolve().kernel.kernel_cache)
    assert kernels.graph is None
    decoder = model.decoder
    with dispatch.step():  # MLX's own products of many rows take a minute to compile
        states = [
            prefilled(model, lengths)
            for lengths in ([5], [254, 700, 9], [65, 1, 5, 6, 7, 400, 128, 129], [*range(1, 18)])
        ]
    for turn in range(4):
        for state in states:
            tokens = mx.array([[(11 + 5 * i + turn) % 96] for i in range(state.num_rows)], dtype=mx.int32)
            state.begin(1)
            caches: list[Any] = list(state.caches)
            rows = caches[0].rows
            buffers: list[mx.array] = [array for cache in caches for array in cache.in_place()]
            at_once = decoder._launched(tokens, rows.lengths, buffers)
            assert at_once is not None
            mx.eval(at_once)
            new = [bits(b[i, :, n]) for b in buffers for i, n in enumerate(rows.lengths)]
            alone = decoder._one_by_one(tokens, rows.offsets, buffers)
            assert (bits(at_once) == bits(alone)).all()
            assert all(
                (a == bits(b)).all()
                for a, b in zip(new, (b[i, :, n] for b in buffers for i, n in enumerate(rows.lengths)), strict=True)
            )
            for cache in caches:
                cache.advance_in_place()
            state.commit()
        np.array(model.model.layers[turn % 2].mlp.down_proj.weight.view(mx.uint16))


def windows_and_steps(model: Any, single: BatchState, whole: BatchState, windows: Sequence[Sequence[int]]) -> None:
    """Windows over one state, padded and flat by turns, have the logits of single steps over its like, and of what is taken back nothing
    stays."""
    for turn, counts in enumerate(windows):
        width, rows = max(counts), len(counts)
        tokens = np.array([[(11 + 5 * i + 7 * j + turn) % 96 for j in range(width)] for i in range(rows)])
        real = [(row, i) for row, count in enumerate(counts) for i in range(count)]
        alone: dict[tuple[int, int], np.ndarray] = {}
        for i in range(width):
            single.begin(1, [int(i < count) for count in counts] if rows > 1 else None)
            logits = model(mx.array(tokens[:, i : i + 1]), cache=single.caches)
            single.commit()
            alone |= {(row, i): bits(logits[row, 0]) for row in range(rows) if i < counts[row]}
        flat = bool(turn % 2) and flat_test(model)(whole.caches) >= len(real) > 1
        whole.begin(width, counts if rows > 1 else None, flat=flat)
        fed = [[tokens[place]] for place in real] if flat else tokens
        logits = model(mx.array(np.array(fed)), cache=whole.caches)
        whole.commit()
        mx.eval(whole.arrays())
        found = bits(logits)
        for n, place in enumerate(real):
            assert (alone[place] == (found[n, 0] if flat else found[place])).all(), (turn, place)
        back = [count // 2 for count in counts]
        whole.rollback(back)
        single.trim(back)
        whole.check_integrity()
        assert whole.lengths == single.lengths


@pytest.mark.device
@pytest.mark.parametrize(("bit", "graph"), [(4, True), (16, True), (4, False)], ids=["4", "16", "4, kernel by kernel"])
def test_a_windows_token_has_the_bits_of_a_step(bit: int, graph: bool) -> None:
    model = llama_model()
    if bit != 16:
        nn.quantize(model, 64, bit)
        mx.eval(model.parameters())
    cases = [
        ([5], [[2], [5], [17], [1], [40], [3]]),
        ([254, 700, 9], [[3, 3, 3], [4, 1, 2], [1, 9, 1], [12, 12, 12], [5, 1, 20]]),
        ([65, 1, 5, 6, 7, 400, 128, 129], [[4] * 8, [1, 2, 3, 4, 5, 6, 7, 4], [5] * 8]),
    ]
    if not graph:
        cases = [([254, 7, 9], [[2, 1, 2], [1, 3, 1]])]  # each kernel is compiled by itself
    kernels = native.prepare(model, "native", cache=resolve().kernel.kernel_cache, graph=graph)
    assert (kernels.graph is None) == graph
    try:
        with dispatch.step():
            states = [[prefilled(model, lengths) for _ in range(2)] for lengths, _ in cases]
            for (single, whole), (_, windows) in zip(states, cases, strict=True):
                windows_and_steps(model, single, whole, windows)
    finally:
        dispatch.choose(False)
    assert "decode" not in dispatch.stock_calls


@pytest.mark.device
def test_a_first_graph(tmp_path: Path) -> None:
    """In a process of its own: an extension is loaded once in each."""
    made = build.ensure(tmp_path, extension=build.CUDA)
    code = (
        f"from gnomon.kernels.cuda import graphs; assert graphs.try_out({build.CUDA.module!r}, {str(made.path)!r}) == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
