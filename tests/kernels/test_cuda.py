"""What the CUDA kernels take, and the compiled decode step over stand-ins for them; on a GPU, the kernels themselves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import KVCache, make_prompt_cache

from gnomon.kernels import dispatch, native
from gnomon.kernels.blocks import flat_test
from gnomon.kernels.cuda import attention, decode, operations, products
from gnomon.kernels.cuda.products import Normed, Weights
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs.affine import Affine
from gnomon.state.codecs.coding import Coding

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama_model(**changes: Any) -> Any:
    mx.random.seed(5)
    args = llama.ModelArgs(model_type="llama", **{**SMALL, "tie_word_embeddings": False, **changes})
    return spread(llama.Model(args))


def qwen3_model() -> Any:
    mx.random.seed(6)
    args = qwen3.ModelArgs(
        model_type="qwen3", max_position_embeddings=512, rope_theta=1e4, tie_word_embeddings=True, **SMALL
    )
    return spread(qwen3.Model(args))


def spread(model: nn.Module) -> nn.Module:
    """bf16 weights large enough to matter; norms that aren't 1."""
    for module in model.modules():
        weight = module.get("weight")
        if weight is not None:
            scale, base = (0.2, 1.0) if weight.ndim == 1 else (0.15, 0.0)
            module.weight = (base + scale * mx.random.normal(weight.shape)).astype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def weights(bits: int, group: int, outputs: int, inputs: int) -> Weights:
    if bits == products.DENSE:
        return Weights(mx.zeros((outputs, inputs), dtype=mx.bfloat16))
    scales = mx.zeros((outputs, inputs // group), dtype=mx.bfloat16)
    return Weights(mx.zeros((outputs, inputs * bits // 32), dtype=mx.uint32), scales, scales, None, bits, group)


@pytest.mark.parametrize(("rows", "most"), [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_kernels_are_made_for_1_8_16_and_32_rows(rows: int, most: int) -> None:
    assert products.Cut.of(rows, weights(4, 64, 4096, 4096)).rows == most


@pytest.mark.parametrize("rows", [0, 33])
def test_other_numbers_of_rows_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"1\.\.32, got {rows}"):
        products.Cut.of(rows, weights(4, 64, 4096, 4096))


@pytest.mark.parametrize(("capability", "limit", "rows"), [(80, 163, 32), (89, 99, 8), (90, 227, 32), (120, 99, 8)])
def test_blocks_fit_other_generations(monkeypatch: pytest.MonkeyPatch, capability: int, limit: int, rows: int) -> None:
    monkeypatch.setattr(products, "capability", lambda: capability)
    assert products.most_rows() == rows
    for (bits, group), m in itertools.product([(4, 32), (8, 128), (16, 64)], (1, 8, rows // 2, rows)):
        for paired, narrow in ((False, False), (True, False), (False, True)):
            cut = products.Cut.of(m, weights(bits, group, 48, 14336), paired=paired, narrow=narrow)
            assert cut.shared_memory(bits, group, 14336) <= limit * 1024


@pytest.mark.parametrize("inputs", [128, 2048, 14336, 53248])
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize(("bits", "group"), [*itertools.product((4, 8), (32, 64, 128)), (16, 64)])
def test_a_block_fits_a_multiprocessor(bits: int, group: int, rows: int, inputs: int) -> None:
    for paired, narrow in ((False, False), (True, False), (False, True)):
        cut = products.Cut.of(rows, weights(bits, group, 48, inputs), paired=paired, narrow=narrow)
        assert cut.shared_memory(bits, group, inputs) < 227 * 1024  # Hopper's limit for one block
        assert cut.tiles % 2 == 0 or not paired


@pytest.mark.parametrize(("bits", "group"), list(itertools.product((4, 8), (32, 64, 128))))
def test_weights_of_a_quantised_layer(bits: int, group: int) -> None:
    layer = nn.Linear(256, 48, bias=True)
    layer.set_dtype(mx.bfloat16)
    found = Weights.of(nn.QuantizedLinear.from_linear(layer, group, bits))
    assert found is not None
    assert (found.outputs, found.inputs, found.kind, len(found.arrays())) == (48, 256, (bits, group, True), 4)


@pytest.mark.parametrize(
    ("bits", "dtype", "width"),
    [(3, mx.bfloat16, 256), (5, mx.float32, 256), (6, mx.float16, 256), (4, mx.bfloat16, 96)],
)
def test_weights_that_kernels_do_not_take(bits: int, dtype: mx.Dtype, width: int) -> None:
    layer = nn.Linear(width, 64, bias=False)
    layer.set_dtype(dtype)
    assert Weights.of(nn.QuantizedLinear.from_linear(layer, 32, bits)) is None


def test_weights_of_float32_are_taken_as_codes_alone() -> None:
    layer = nn.Linear(576, 48, bias=False)
    assert Weights.of(layer) is None
    found = Weights.of(nn.QuantizedLinear.from_linear(layer, 32, 8))
    assert found is not None
    assert (found.dtype, found.kind) == (mx.float32, (8, 32, False))
    for rows in (1, 8, 9, 32):
        cut = products.Cut.of(rows, found)
        assert cut.rows >= rows
        assert not cut.stays
        # Four groups of 32 scales and biases of 4 bytes for each of 16 rows, beside 128 bytes of codes.
        assert cut.stage(8, 32, 4) == cut.tiles * (16 * 128 + 16 * 2 * 4 * 4)


@pytest.mark.parametrize("rows", [1, 32, 33, 64, 65])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_products_of_one_type_go_to_the_kernels(monkeypatch: pytest.MonkeyPatch, rows: int, dtype: mx.Dtype) -> None:
    w, s, b = mx.quantize(mx.random.normal((48, 576), key=mx.random.key(1)).astype(dtype), 32, 4)
    x = mx.random.normal((rows, 1, 576), key=mx.random.key(2)).astype(dtype)
    seen: list[str] = []

    def dense(weights: Weights) -> mx.array:
        return mx.dequantize(weights.weight, weights.scales, weights.biases, weights.group, weights.bits)

    def product(x: mx.array, weights: Weights) -> mx.array:
        seen.append("product")
        return x @ dense(weights).T

    def unpack(weights: Weights) -> mx.array:
        seen.append("unpack")
        return dense(weights)

    def wide(x: mx.array, weights: Weights) -> mx.array:
        seen.append("wide")
        return x @ dense(weights).T

    monkeypatch.setattr(operations, "product", product)
    monkeypatch.setattr(operations, "wide", wide)
    monkeypatch.setattr(operations, "unpack", unpack)
    dispatched = operations.ALL[0].make(mx.quantized_matmul, operations)
    how: dict[str, Any] = {"transpose": True, "group_size": 32, "bits": 4}
    dispatch.choose(True)
    try:
        with dispatch.step():
            y = dispatched(x, w, s, b, **how)
            other = dispatched(x.astype(mx.float16), w, s, b, **how)
        assert dispatch.stock_calls.pop("quantized_matmul") == 1
    finally:
        dispatch.choose(False)
    assert seen == ["product" if rows <= 32 else "wide" if rows <= 64 and dtype == mx.bfloat16 else "unpack"]
    exact = mx.quantized_matmul(x.astype(mx.float32), w, s.astype(mx.float32), b.astype(mx.float32), **how)
    assert y.dtype == dtype
    assert other.shape == y.shape == (rows, 1, 48)
    assert mx.abs(y - exact).max() < (1e-5 if dtype == mx.float32 else 0.02) * mx.abs(exact).max()


@pytest.mark.parametrize(("group", "size", "heads"), [(4, 128, 4), (3, 64, 3), (8, 128, 4), (7, 128, 1), (6, 256, 2)])
def test_a_block_takes_an_even_part_of_the_heads_of_a_group(group: int, size: int, heads: int) -> None:
    form = attention.Form(2 * group, 2, size, 0.1, False, False, 0.0)
    assert form.heads_per_block == heads
    assert form.blocks_per_row == 2 * group // heads


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_dim": 32}, "heads of 32"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "sliding window"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, None),
        ({"num_hidden_layers": 1}, None),
    ],
)
def test_which_models_have_a_decoder(change: dict[str, Any], why: str | None) -> None:
    found = decode.Decoder.of(llama_model(**change))
    assert (why in found) if isinstance(found, str) and why else not isinstance(found, str)


def test_a_model_of_another_type_or_family_has_no_decoder() -> None:
    model = llama_model()
    model.set_dtype(mx.float32)
    assert "float32" in str(decode.Decoder.of(model))
    assert "not known" in str(decode.Decoder.of(nn.Linear(2, 2)))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain MLX operations in float32 for the kernels, by their contracts; `attend` doesn't keep the new key."""

    def dense(w: Weights) -> mx.array:
        if w.scales is None:
            return w.weight.astype(mx.float32)
        return mx.dequantize(w.weight, w.scales, w.biases, w.group, w.bits).astype(mx.float32)

    def rows(x: Any) -> mx.array:
        if not isinstance(x, Normed):
            return x.astype(mx.float32)
        wide = x.rows.astype(mx.float32)
        return wide * mx.rsqrt(x.squares.sum(-1, keepdims=True) / wide.shape[-1] + x.eps)

    def narrow(h: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, Normed]:
        h = h.astype(norm.dtype)
        wide = h.astype(mx.float32)
        squares = (wide * wide).reshape(h.shape[0], -1, 16).sum(-1)
        return h, Normed((wide * norm.astype(mx.float32)).astype(norm.dtype), squares, eps)

    def product(x: Any, *weights: Weights) -> mx.array:
        return mx.concatenate([rows(x) @ dense(w).T for w in weights], axis=1).astype(weights[0].dtype)

    def gated(x: Normed, gate: Weights, up: Weights) -> mx.array:
        return (nn.silu(rows(x) @ dense(gate).T) * (rows(x) @ dense(up).T)).astype(gate.dtype)

    def add(x: mx.array, w: Weights, residual: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, Normed]:
        return narrow(residual.astype(mx.float32) + rows(x) @ dense(w).T, norm, eps)

    def embed(tokens: mx.array, table: Weights, norm: mx.array, eps: float) -> tuple[mx.array, Normed]:
        return narrow(dense(table)[tokens], norm, eps)

    def attend(
        form: Any,
        qkv: Any,
        keys: Any,
        values: Any,
        lengths: Any,
        inverse: Any,
        counters: Any,
        norms: Any,
        in_window: bool,
    ) -> Any:
        b, d = qkv.shape[0], form.size
        home, starts = mx.arange(b), lengths
        if in_window:  # bits 26 to 30 are the row, 21 to 25 which token of its window, the rest its position
            home, lengths = lengths >> 26, lengths & ((1 << 21) - 1)
            starts = lengths - ((starts >> 21) & 31)
        heads = qkv.reshape(b, -1, 1, d)
        q, k, v = mx.split(heads, [form.q_heads, form.q_heads + form.kv_heads], axis=1)
        if norms is not None:
            q, k = (mx.fast.rms_norm(a, n, form.eps) for a, n in zip((q, k), norms, strict=True))
        q, k = (
            mx.fast.rope(a, d, traditional=form.traditional, base=None, scale=1.0, offset=lengths, freqs=1 / inverse)
            for a in (q, k)
        )
        place = home * 2**21 + lengths
        is_again = mx.tril(place[:, None] == place[None], -1).any(-1)  # what fills a window up
        old = mx.arange(keys.shape[2])[None] < starts[:, None]
        new = (home[:, None] == home[None]) & (lengths[None] <= lengths[:, None]) & ~is_again[None]
        k, v = (mx.broadcast_to(a[:, :, 0].swapaxes(0, 1), (b, form.kv_heads, b, d)) for a in (k, v))
        y = mx.fast.scaled_dot_product_attention(
            q,
            mx.concatenate([keys[home], k], axis=2),
            mx.concatenate([values[home], v], axis=2),
            scale=form.scale,
            mask=mx.concatenate([old, new], axis=1)[:, None, None],
        )
        return y.reshape(b, -1)

    for name, function in (("product", product), ("gated", gated), ("add", add), ("embed", embed)):
        monkeypatch.setattr(decode, name, function)
    monkeypatch.setattr(attention, "attend", attend)
    monkeypatch.setattr(mx, "compile", lambda f: f)  # on a CPU it would call a C++ compiler


def prefilled(model: nn.Module, lengths: list[int]) -> BatchState:
    """A state of rows of these lengths."""
    states: list[BatchState] = []
    for i, length in enumerate(lengths):
        state = BatchState(model, make_prompt_cache(model))
        state.begin(length)
        model((mx.arange(length) * (3 + i) % 96)[None], cache=state.caches)
        state.commit()
        mx.eval(state.arrays())
        states.append(state)
    for other in states[1:]:
        states[0].join(other)
    return states[0]


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("llama", [256]),
        ("llama", [5, 9, 2]),
        ("llama tied, llama3 rope, 4 bits", [7]),
        ("qwen3, 8 bits", [5, 9, 2]),
        ("llama float32, 4 bits, 8 for its table", [5, 9, 2]),
    ],
    ids=str,
)
def test_the_decode_step_is_the_models_own_forward(
    monkeypatch: pytest.MonkeyPatch, kind: str, lengths: list[int]
) -> None:
    def make() -> Any:
        if kind == "llama":
            return llama_model()
        if kind == "qwen3, 8 bits":
            model = qwen3_model()
            nn.quantize(model, 64, 8)
        else:
            model = llama_model(tie_word_embeddings=True, rope_scaling=LLAMA3)
            if "float32" in kind:
                model.set_dtype(mx.float32)
                nn.quantize(
                    model,
                    32,
                    4,
                    class_predicate=lambda _, m: (
                        {"bits": 8, "group_size": 32} if isinstance(m, nn.Embedding) else isinstance(m, nn.Linear)
                    ),
                )
            else:
                nn.quantize(model, 64, 4)
        return model

    model, wide = make(), make()
    wide.set_dtype(mx.float32)
    stand_in(monkeypatch)
    tokens = mx.array([[11 + 5 * i] for i in range(len(lengths))], dtype=mx.int32)

    def own_forward(of: Any) -> np.ndarray:
        state = prefilled(of, lengths)
        state.begin(1)
        return np.array(of(tokens, cache=state.caches).astype(mx.float32))

    expected, exact = own_forward(model), own_forward(wide)
    state = prefilled(model, lengths)
    assert decode.swap(model)
    dispatch.choose(True)
    try:
        state.begin(1)
        with dispatch.step():
            logits = model(tokens, cache=state.caches).astype(mx.float32)
        state.commit()
    finally:
        dispatch.choose(False)
    assert "decode" not in dispatch.stock_calls
    assert state.lengths == [length + 1 for length in lengths]
    state.check_integrity()
    assert logits.shape == expected.shape
    if "float32" in kind:
        assert np.abs(np.array(logits) - exact).max() < 1e-4 * exact.std()
        return
    # bf16 rounds in other places: not further from float32 than the model's own forward is.
    error, usual = (np.sqrt(((y - exact) ** 2).mean()) for y in (np.array(logits), expected))
    assert error < 1.5 * usual < 0.2 * exact.std()


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [([7], [3]), ([5, 9, 2], [4, 1, 2]), ([5, 9, 2], [3, 3, 3]), ([40, 3], [20, 20]), ([3], [64])],
    ids=str,
)
def test_a_windows_tokens_are_as_many_rows(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], counts: list[int]
) -> None:
    """Padded, and flat: only the real tokens, row by row; more than 32 tokens are two launches, of which the second sees the first's."""
    model, width = llama_model(), max(counts)
    wide = llama_model()
    wide.set_dtype(mx.float32)
    stand_in(monkeypatch)
    window = mx.array([[(11 + 5 * i + 3 * j) % 96 for j in range(width)] for i in range(len(lengths))])
    real = [(row, i) for row, count in enumerate(counts) for i in range(count)]

    def own_forward(of: Any) -> np.ndarray:
        state = prefilled(of, lengths)
        state.begin(width, counts if len(counts) > 1 else None)
        logits = np.array(of(window, cache=state.caches).astype(mx.float32))
        return np.stack([logits[place] for place in real])

    expected, exact = own_forward(model), own_forward(wide)
    decode.swap(model)
    plain, fed = attention.attend, list[int]()
    kept: dict[int, Any] = {}

    def attend(form: Any, qkv: Any, keys: Any, values: Any, lengths: Any, *more: Any) -> Any:
        """The stand-in, and what a first launch leaves for the second."""
        fed.append(qkv.shape[0])
        at = len(fed) - 1
        if at >= len(model.layers):
            keys, values = kept[at - len(model.layers)]
        home, position = (lengths >> 26).tolist(), (lengths & (2**21 - 1)).tolist()
        heads = qkv.reshape(qkv.shape[0], -1, form.size)
        k = heads[:, form.q_heads : form.q_heads + form.kv_heads, None]
        k = mx.fast.rope(k, form.size, traditional=False, base=1e4, scale=1.0, offset=lengths & (2**21 - 1))
        with_new = [mx.array(keys), mx.array(values)]
        for i, (row, slot) in enumerate(zip(home, position, strict=True)):
            with_new[0][row, :, slot] = k[i, :, 0]
            with_new[1][row, :, slot] = heads[i, form.q_heads + form.kv_heads :]
        kept[at] = with_new
        return plain(form, qkv, keys, values, lengths, *more)

    monkeypatch.setattr(attention, "attend", attend)
    for flat in (False, True) if len(lengths) > 1 else (False,):
        state = prefilled(model, lengths)
        fed.clear()
        state.begin(width, counts if len(counts) > 1 else None, flat=flat)
        given = mx.array([[int(window[place].item())] for place in real]) if flat else window
        dispatch.choose(True)
        try:
            assert flat_test(model)(state.caches) == (64 if len(lengths) > 1 else 0)
            with dispatch.step():
                logits = np.array(model(given, cache=state.caches).astype(mx.float32))
        finally:
            dispatch.choose(False)
        state.commit()
        assert logits.shape[:2] == given.shape
        assert state.lengths == [length + count for length, count in zip(lengths, counts, strict=True)]
        state.check_integrity()
        assert sum(fed[:: len(model.layers)]) >= given.size
        found = logits[:, 0] if flat else np.stack([logits[place] for place in real])
        error, usual = (np.sqrt(((y - exact) ** 2).mean()) for y in (found, expected))
        assert error < 1.5 * usual < 0.2 * exact.std()


@pytest.mark.parametrize("counts", [[1], [5], [3, 1, 2]], ids=str)
@pytest.mark.parametrize("coding", [None, Coding((Affine(8),) * 2)], ids=["plain", "to be coded"])
def test_a_short_prompt_is_a_window_too(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], coding: Coding | None
) -> None:
    """A fresh state has no buffers yet: they are made."""
    model, width = llama_model(), max(counts)
    wide = llama_model()
    wide.set_dtype(mx.float32)
    window = mx.array([[(11 + 5 * i + 3 * j) % 96 for j in range(width)] for i in range(len(counts))])
    real = [(row, i) for row, count in enumerate(counts) for i in range(count)]

    def fresh() -> BatchState:
        states = [BatchState(model, make_prompt_cache(model), coding=coding) for _ in counts]
        for other in states[1:]:
            states[0].join(other)
        states[0].begin(width, counts if len(counts) > 1 else None)
        return states[0]

    expected, exact = (np.array(of(window, cache=fresh().caches).astype(mx.float32)) for of in (model, wide))
    stand_in(monkeypatch)
    decode.swap(model)
    state = fresh()
    dispatch.choose(True)
    try:
        with dispatch.step():
            logits = np.array(model(window, cache=state.caches).astype(mx.float32))
    finally:
        dispatch.choose(False)
    state.commit()
    state.check_integrity()
    assert state.lengths == counts
    assert "decode" not in dispatch.stock_calls
    held = [array.shape for array in state.arrays() if array.ndim == 4]
    assert held == [(4 if len(counts) > 1 else 1, 2, 256, 64)] * 4
    error, usual = (np.sqrt(np.mean([(y[at] - exact[at]) ** 2 for at in real])) for y in (logits, expected))
    assert error < 1.5 * usual < 0.2 * exact.std()


def test_what_the_decode_step_leaves_to_the_model() -> None:
    model = llama_model()
    decoder = decode.Decoder.of(model)
    assert isinstance(decoder, decode.Decoder)
    empty = BatchState(model, make_prompt_cache(model))
    empty.begin(1)
    token = mx.zeros((1, 1), dtype=mx.int32)
    assert decoder.step(mx.zeros((65, 1), dtype=mx.int32), empty.caches) is None
    assert decoder.step(token, [KVCache() for _ in model.layers]) is None
    assert decoder.is_current()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight + 1
    assert not decoder.is_current()


def test_buffers_for_appends_in_place_have_room_and_are_not_a_snapshots() -> None:
    model = llama_model(num_hidden_layers=1)
    state = prefilled(model, [300])
    taken = state.snapshot(0)
    mx.eval([array for layer in taken.layers for array in layer.arrays.values()])
    before = np.array(taken.layers[0].arrays["keys"].astype(mx.float32))
    revived = BatchState.restore(model, make_prompt_cache(model), taken)
    revived.begin(1)
    layer: Any = revived.caches[0]
    keys, values = layer.in_place()
    assert keys.shape == values.shape == (1, 2, 512, 64)
    layer.advance_in_place()
    revived.commit()
    revived.check_integrity()
    keys[...] = 0
    mx.eval(keys)
    assert (np.array(taken.layers[0].arrays["keys"].astype(mx.float32)) == before).all()
    again, _ = layer.in_place()
    assert again is keys


def test_shared_buffers_grow_for_appends_in_place() -> None:
    model = llama_model(num_hidden_layers=1)
    state = prefilled(model, [256, 3])
    state.begin(1)
    layer: Any = state.caches[0]
    kept = np.array(layer.keys[0, :, :256].astype(mx.float32))
    keys, _ = layer.in_place()
    assert keys.shape[2] > 256
    assert (np.array(keys[0, :, :256].astype(mx.float32)) == kept).all()


@pytest.mark.parametrize(
    ("policy", "capability", "is_native"),
    [("auto", 90, True), ("auto", 89, False), ("auto", 120, False), ("stock", 90, False), ("native", 89, True)],
)
def test_which_policy_takes_these_kernels(
    policy: native.Policy, capability: int, is_native: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unasked for only on the GPUs that they were checked and measured on."""
    monkeypatch.setattr(native, "is_cuda", lambda: True)
    monkeypatch.setattr("gnomon.kernels.cuda.sources.capability", lambda: capability)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    try:
        found = native.start(policy, cache=tmp_path, graph=False)
        assert (found.policy, found.native, found.reason) == (policy, is_native, None)
        assert found.isa == (native.CUDA if is_native else None)
    finally:
        dispatch.choose(False)
        dispatch.uninstall()


@pytest.mark.device
def test_every_kernel_against_float64_and_rows_alone() -> None:
    from gnomon.kernels.cuda.verify import verify

    checks = list(verify())
    assert len(checks) > 200
    assert not [check for check in checks if not check.passed]


def test_what_the_card_computed_is_told_apart_by_the_kernels_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = native.Kernels("native", True, isa=native.CUDA)
    before = kernels.identity
    assert before.startswith("native cuda ")
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read(path) + "//")
    assert kernels.identity != before
