"""Products with activations rounded to 8 bits: against float64, their reference in plain operations, and rows alone."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from gnomon.kernels import build, dispatch, integer, layers, native
from kernels.built import SANITIZERS
from kernels.oracle import bits_of, close_to_rounded, quantised, wide
from tiny_models import VOCAB_SIZE, make

BITS, GROUPS = (4, 8), (32, 64, 128)
TYPES = (mx.float32, mx.float16, mx.bfloat16)


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
def test_every_width_group_and_type(extension: ModuleType, bits: int, group: int) -> None:
    for n, (scale_type, x_type) in enumerate(product(TYPES, TYPES)):
        k = (3 + n % 3) * group
        w, s, b = quantised(21 + n, k, group, bits, scale_type, seed=n)
        x = mx.random.normal((1 + n, k), key=mx.random.key(9 + n)).astype(x_type)
        y = extension.quantized_matmul(x, w, s, b, group, bits, True)
        assert y.dtype == mx.result_type(x, s)
        close_to_rounded(y, x, w, s, b, group, bits, 8)
        last = {mx.float32: 2.0**-16, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}[y.dtype]
        reference = wide(integer.reference(x, w, s, b, group, bits, 8))
        assert np.allclose(wide(y), reference, rtol=2 * last, atol=2 * last * np.abs(reference).max())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 29])
@pytest.mark.parametrize("columns", [1, 7, 16, 17, 50])
def test_every_height_and_odd_widths(extension: ModuleType, rows: int, columns: int) -> None:
    for bits in BITS:
        w, s, b = quantised(columns, 352, 32, bits, mx.bfloat16)
        x = mx.random.normal((rows, 352), key=mx.random.key(rows))
        close_to_rounded(extension.quantized_matmul(x, w, s, b, 32, bits, True), x, w, s, b, 32, bits, 8)


def test_the_largest_sums_fit(extension: ModuleType) -> None:
    """All codes at their largest, all activations at theirs: nothing wraps around. Float32 holds these sums."""
    for bits, sign, (most, int8) in product(BITS, (1, -1), ((127.0, True), (32512.0, False))):
        w = mx.full((5, 1024 * bits // 32), 0xFFFFFFFF, mx.uint32)
        ones, zeros = mx.ones((5, 1024 // 128)), mx.zeros((5, 1024 // 128))
        for x in (mx.full((9, 1024), sign * most), mx.full((9, 1024), most) * mx.array([1.0, -1.0] * 512)):
            y = extension.quantized_matmul(x, w, ones, zeros, 128, bits, int8)
            assert (np.array(y) == np.array(x).sum(-1, keepdims=True) * (2**bits - 1)).all()


def test_zeros_subnormals_and_what_is_not_finite(extension: ModuleType) -> None:
    w, s, b = quantised(20, 128, 64, 4, mx.float32)
    x = np.ones((12, 128), dtype=np.float32)
    x[1], x[2] = 0, 1e-41
    x[3, 5], x[4, 100], x[5, 0] = np.nan, np.inf, -np.inf
    for rows in (x, x[:8]):
        y = np.array(extension.quantized_matmul(mx.array(rows), w, s, b, 64, 4, True))
        assert (y[1:3] == 0).all()
        assert np.isnan(y[3:6]).all()
        assert np.isfinite(np.delete(y, [3, 4, 5], 0)).all()


def test_strided_activations_and_experts(extension: ModuleType) -> None:
    parts = [quantised(18, 128, 32, 4, mx.float32, seed=e) for e in range(3)]
    w, s, b = (mx.stack([p[i] for p in parts]) for i in range(3))
    x = mx.random.normal((2, 5, 1, 1, 256), key=mx.random.key(4))[..., ::2]
    experts = mx.array(np.random.default_rng(0).integers(0, 3, (2, 5, 2)))
    y = extension.gather_qmm(x, w, s, b, None, experts, 32, 4, True)
    for i, j, k in product(range(2), range(5), range(2)):
        e = experts[i, j, k].item()
        alone = extension.quantized_matmul(mx.contiguous(x[i, j, 0]), w[e], s[e], b[e], 32, 4, True)
        assert (bits_of(y[i, j, k]) == bits_of(alone)).all()


def test_other_widths_stay_as_they_are(extension: ModuleType) -> None:
    for bits in (2, 3, 5, 6):
        w, s, b = quantised(9, 128, 64, bits, mx.float32)
        x = mx.random.normal((3, 128), key=mx.random.key(1))
        plain, asked = (extension.quantized_matmul(x, w, s, b, 64, bits, flag) for flag in (False, True))
        assert (bits_of(plain) == bits_of(asked)).all()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_a_row_is_the_same_to_the_bit_whoever_is_beside_it(kernels: ModuleType, data: st.DataObject) -> None:
    bits, group = data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from(GROUPS))
    blocks, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    dtype = data.draw(st.sampled_from(TYPES))
    rows = data.draw(st.integers(1, 40))
    w, s, b = quantised(columns, blocks * group, group, bits, dtype, seed=rows)
    x = mx.random.normal((rows, blocks * group), key=mx.random.key(columns)).astype(dtype)

    def multiply(x: mx.array) -> mx.array:
        return kernels.quantized_matmul(x, w, s, b, group, bits, True)

    alone = mx.concatenate([multiply(x[i : i + 1]) for i in range(rows)])
    kernels.set_threads(data.draw(st.integers(1, 3)))
    assert (bits_of(multiply(x)) == bits_of(alone)).all()
    cut = data.draw(st.integers(0, rows))
    assert (bits_of(mx.concatenate([multiply(x[:cut]), multiply(x[cut:])])) == bits_of(alone)).all()
    order = mx.array(data.draw(st.permutations(range(rows))))
    assert (bits_of(multiply(x[order])) == bits_of(alone[order])).all()


@pytest.fixture
def chosen(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[native.Kernels]:
    """What `--kernels int8` starts, with the kernels under test."""
    made = SimpleNamespace(path=tmp_path / "key" / "gnomon_kernels.so", seconds=0.0)
    monkeypatch.setattr(native, "_load", lambda *_: (kernels, made))
    yield native.start("int8", cache=tmp_path, threads=2)
    dispatch.choose(False)
    dispatch.uninstall()
    dispatch.stock_calls.clear()


def test_it_says_that_it_runs(chosen: native.Kernels, tmp_path: Path) -> None:
    told = chosen.stats()
    assert (told["policy"], told["native"], told["int8"]) == ("int8", True, True)
    float_kernels = native.start("native", cache=tmp_path, threads=2)
    assert float_kernels.stats()["int8"] is False
    # Measured costs and saved states belong to one or the other.
    assert chosen.name != float_kernels.name
    assert chosen.identity != float_kernels.identity


def test_whole_models(chosen: native.Kernels, kernels: ModuleType) -> None:
    """The fused layers, the table and the head take it; rows alone and in a batch have the same bits."""
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 30))

    def logits(integer: bool, rows: mx.array) -> mx.array:
        made = make("llama", "float32")
        nn.quantize(made, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
        layers.swap(made, kernels, integer)
        dispatch.choose(True, integer)
        with dispatch.step():
            first = made(rows[:, :20], cache=(state := make_prompt_cache(made)))
            return mx.concatenate([first, made(rows[:, 20:], cache=state)], axis=1)

    together = logits(True, mx.array(tokens))
    for i in range(3):
        assert (bits_of(logits(True, mx.array(tokens[i : i + 1]))) == bits_of(together[i : i + 1])).all()
    exact = wide(logits(False, mx.array(tokens)))
    difference = np.abs(wide(together) - exact).max() / np.abs(exact).max()
    assert 1e-6 < difference < 0.05


def agree(kernels: ModuleType) -> None:
    fused = [isa for isa in kernels.isas() if isa != "portable"]
    if len(fused) < 2:
        pytest.skip("one instruction set with fused multiply-add here")
    for bits, group, rows, int8 in product(BITS, GROUPS, (1, 3, 7, 30), (True, False)):
        w, s, b = quantised(19, 5 * group, group, bits, mx.float16, seed=bits)
        x = mx.random.normal((rows, 5 * group), key=mx.random.key(rows))
        results = []
        for isa in fused:
            kernels.set_isa(isa)
            results.append(bits_of(kernels.quantized_matmul(x, w, s, b, group, bits, int8)))
        kernels.set_isa("auto")
        assert all((r == results[0]).all() for r in results)


def test_instruction_sets_agree_to_the_bit(kernels: ModuleType) -> None:
    agree(kernels)


@pytest.mark.slow
@pytest.mark.skipif("avx512vnni" not in build.cpu_isas(), reason="needs a CPU with AVX-512 VNNI")
def test_avx512_without_vnni_agrees(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = build.ensure(tmp_path_factory.mktemp("kernels"), isas=["avx512vnni", "avx512"], flags=SANITIZERS[""])
    agree(build.load(made))
