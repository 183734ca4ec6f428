"""Tiled weights: the same bits as weights that lie row by row, and layers that compute what they did."""

from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from gnomon.kernels import dispatch, layers, operations, tiles
from kernels.oracle import bits_of, quantised
from tiny_models import VOCAB_SIZE, make

TYPES = (mx.float32, mx.float16, mx.bfloat16)


@pytest.fixture
def native(kernels: ModuleType) -> Iterator[ModuleType]:
    """This thread's steps multiply in whole numbers."""
    kernels.set_isa("auto")
    kernels.set_threads(2)
    dispatch.install(operations.ALL, kernels)
    dispatch.choose(True, True)
    yield kernels
    dispatch.choose(False)
    dispatch.uninstall()
    dispatch.stock_calls.clear()


@pytest.mark.parametrize("dtype", [mx.uint32, mx.float16, mx.float32])
@pytest.mark.parametrize("shape", [(16, 4), (33, 5), (7, 3), (3, 50, 6)])
def test_a_tile_is_16_rows_turned(kernels: ModuleType, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    a = mx.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    tiled = kernels.tiled(a)
    # Of a view that isn't contiguous too.
    assert (bits_of(kernels.tiled(mx.stack([a, a], -1)[..., 0])) == bits_of(tiled)).all()
    n, width = shape[-2:]
    for matrix, got in zip(np.array(a).reshape(-1, n, width), np.array(tiled).reshape(-1, n * width), strict=True):
        whole = n // 16 * 16
        for row, j in product(range(n), range(width)):
            at = row // 16 * 16 * width + j * 16 + row % 16 if row < whole else row * width + j
            assert got[at] == matrix[row, j]
    assert (bits_of(tiles.rows(tiled)) == bits_of(a)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_products_have_the_same_bits(extension: ModuleType, bits: int) -> None:
    for n, (columns, group, dtype) in enumerate(product((16, 50, 95), (32, 64, 128), TYPES)):
        k = (1 + n % 4) * 128
        plain = quantised(columns, k, group, bits, dtype, seed=n)
        tiled = [extension.tiled(a) for a in plain]
        for rows in (1, 2, 3, 5, 8, 9, 64) if dtype != mx.float32 else (1, 300):
            x = mx.random.normal((rows, k), key=mx.random.key(rows)).astype(TYPES[n % 3])
            for int8 in (True, False):
                expected = extension.quantized_matmul(x, *plain, group, bits, int8)
                got = extension.quantized_matmul(x, *tiled, group, bits, int8, True)
                assert (bits_of(got) == bits_of(expected)).all()
        ids = mx.array([[0, columns - 1], [15, -2]])
        expected = extension.quantized_embedding(ids, *plain, group, bits)
        assert (bits_of(extension.quantized_embedding(ids, *tiled, group, bits, True)) == bits_of(expected)).all()


def test_many_columns_are_shared_among_threads_by_whole_tiles(kernels: ModuleType) -> None:
    kernels.set_threads(3)
    plain = quantised(1111, 512, 64, 4, mx.bfloat16)
    tiled = [kernels.tiled(a) for a in plain]
    for rows in (1, 40):
        x = mx.random.normal((rows, 512), key=mx.random.key(rows))
        expected = bits_of(kernels.quantized_matmul(x, *plain, 64, 4, True))
        assert (bits_of(kernels.quantized_matmul(x, *tiled, 64, 4, True, True)) == expected).all()


def test_lines_of_tiles_are_lines_of_the_cache(kernels: ModuleType) -> None:
    for size in (1, 7, 500):
        tiled = kernels.tiled(mx.zeros((48, size), mx.uint32))
        mx.eval(tiled)
        assert np.array(tiled, copy=False).ctypes.data % 64 == 0


def test_only_products_in_whole_numbers_take_tiles(kernels: ModuleType) -> None:
    w, s, b = quantised(16, 64, 32, 4, mx.float32)
    for bits, integer in ((5, False), (2, True), (6, True)):
        with pytest.raises(ValueError, match=f"tiled weights of {bits} bits"):
            kernels.quantized_matmul(mx.zeros((1, 64)), w, s, b, 32, bits, integer, True)
        with pytest.raises(ValueError, match=f"tiled weights of {bits} bits"):
            kernels.Projection(w, s, b, None, 32, bits, integer, True)


def linear(columns: int, bits: int, bias: bool = False) -> nn.QuantizedLinear:
    made = nn.Linear(128, columns, bias=bias)
    if bias:
        made.bias = mx.random.normal((columns,), key=mx.random.key(5))
    return nn.QuantizedLinear.from_linear(made, 64, bits)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_what_it_was_outside_steps(native: ModuleType, bias: bool) -> None:
    layer, same = linear(50, 4, bias), nn.QuantizedLinear(128, 50, bias, 64, 4)
    same.update(layer.parameters())
    x = mx.random.normal((3, 128), key=mx.random.key(1))
    stock = bits_of(layer(x))
    with dispatch.step():
        inside = bits_of(layer(x))
    assert tiles.tile(layer, native, True)
    assert not tiles.tile(layer, native, True)
    assert (bits_of(layer(x)) == stock).all()
    with dispatch.step():
        assert (bits_of(layer(x)) == inside).all()
        # Activations that come in another type.
        assert (bits_of(layer(x.astype(mx.float16))) == bits_of(same(x.astype(mx.float16)))).all()
    # Readers of the arrays see rows, and the arrays are there once.
    held = dict(tree_flatten(layer.parameters()))
    assert set(held) == {"tiled_weight", "tiled_scales", "tiled_biases"} | ({"bias"} if bias else set())
    for name in tiles.NAMES:
        assert (bits_of(layer[name]) == bits_of(same[name])).all()
        assert (bits_of(getattr(layer, name)) == bits_of(same[name])).all()
        assert (bits_of(layer.get(name)) == bits_of(same[name])).all()
    assert layer.get("other", 3) == 3
    with pytest.raises(AttributeError):
        _ = layer.other


@pytest.mark.parametrize("name", tiles.NAMES)
def test_an_array_put_in_a_tiled_ones_place_is_taken(native: ModuleType, name: str) -> None:
    layer, same = linear(32, 8), linear(32, 8)
    same.update(layer.parameters())
    tiles.tile(layer, native, True)
    for one in (layer, same):
        setattr(one, name, one[name][::-1])
    x = mx.random.normal((2, 128), key=mx.random.key(1))
    assert (bits_of(layer(x)) == bits_of(same(x))).all()
    with dispatch.step():
        assert (bits_of(layer(x)) == bits_of(same(x))).all()


def test_what_products_do_not_take_stays_as_it_is(native: ModuleType) -> None:
    class Special(nn.QuantizedLinear):
        pass

    special = Special(128, 32, False, 64, 4)
    mxfp4 = nn.QuantizedLinear(128, 32, False, 32, 4, "mxfp4")
    for layer in (linear(32, 6), linear(32, 2), special, mxfp4, nn.Linear(64, 32)):
        assert not tiles.tile(layer, native, True)
        assert not isinstance(layer, tiles.Tiled)


def test_experts(native: ModuleType) -> None:
    layer = QuantizedSwitchLinear(64, 40, 5, True, 32, 4)
    layer.bias = mx.random.normal((5, 40), key=mx.random.key(2))
    x = mx.random.normal((3, 1, 1, 64), key=mx.random.key(3))
    chosen = mx.array([[0, 4], [2, 2], [1, 0]], mx.uint32)
    stock = bits_of(layer(x, chosen))
    with dispatch.step():
        inside = bits_of(layer(x, chosen))
    assert tiles.tile(layer, native, True)
    assert (bits_of(layer(x, chosen)) == stock).all()
    assert (layer.input_dims, layer.output_dims, layer.num_experts) == (64, 40, 5)
    with dispatch.step():
        assert (bits_of(layer(x, chosen)) == inside).all()


def test_a_table_is_tiled_once_it_is_a_head(native: ModuleType) -> None:
    table = nn.QuantizedEmbedding(70, 64, 32, 8)
    ids, x = mx.array([[3, 69, 0]]), mx.random.normal((2, 64), key=mx.random.key(3))
    stock = bits_of(table(ids)), bits_of(table.as_linear(x))
    with dispatch.step():
        rows, inside = bits_of(table(ids)), bits_of(table.as_linear(x))
    layers.swap(table, native, True)
    with dispatch.step():
        assert (bits_of(table(ids)) == rows).all()
        assert not isinstance(table, tiles.Tiled)
        for _ in range(2):
            assert (bits_of(table.as_linear(x)) == inside).all()
            assert type(table) is tiles.TiledEmbedding
        assert (bits_of(table(ids)) == rows).all()
    assert (bits_of(table(ids)) == stock[0]).all()
    assert (bits_of(table.as_linear(x)) == stock[1]).all()


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_moe"])
def test_whole_models_have_the_same_bits(native: ModuleType, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = mx.array(np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 30)))

    def logits(model: nn.Module, step: bool) -> list[Any]:
        made: Any = model
        state = make_prompt_cache(made)
        parts = []
        for start, end in ((0, 25), (25, 26), (26, 30)):
            if step:
                with dispatch.step():
                    parts.append(made(tokens[:, start:end], cache=state))
            else:
                parts.append(made(tokens[:, start:end], cache=state))
            mx.eval(parts[-1])
        return [bits_of(part) for part in parts]

    def same(a: list[Any], b: list[Any]) -> bool:
        return all((x == y).all() for x, y in zip(a, b, strict=True))

    def model() -> nn.Module:
        made = make(model_type, "bfloat16")
        nn.quantize(made, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
        return made

    plain, tiled = model(), model()
    stock = logits(plain, step=False)
    swapped = layers.swap(tiled, native, True)
    assert "TiledLinear" in swapped
    assert ("TiledSwitchLinear" in swapped) == (model_type == "qwen3_moe")
    assert layers.swap(tiled, native, True) == {}
    # Before any step, after one, and beside a model that isn't tiled.
    assert same(logits(tiled, step=False), stock)
    with monkeypatch.context() as patched:
        patched.setattr(layers, "tile", lambda *_: False)
        patched.setattr("gnomon.kernels.linear.tile_embedding", lambda *_: False)
        layers.swap(plain, native, True)
        inside = logits(plain, step=True)
    assert not any(isinstance(module, tiles.Tiled) for module in plain.modules())
    assert same(logits(tiled, step=True), inside)
    assert same(logits(tiled, step=False), stock)
    held = sum(array.nbytes for _, array in tree_flatten(tiled.parameters()))
    assert held == sum(array.nbytes for _, array in tree_flatten(plain.parameters()))
