"""Codes of keys and values on CUDA: what kernels take, and the compiled decode step over coded states with stand-ins for the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from gnomon.config import resolve
from gnomon.kernels import coded as views
from gnomon.kernels import codes as contract
from gnomon.kernels import dispatch, native
from gnomon.kernels.blocks import flat_test
from gnomon.kernels.codes import AFFINE, ROTATED, SHIFTED, Codes
from gnomon.kernels.cuda import attention, coded, coded_attention, codes, decode, windows
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs import Affine, Codec, Coding, Turbo
from gnomon.state.codecs.codec import Fetched
from gnomon.state.codecs.turbo import unrotate
from kernels.test_cuda import llama_model, stand_in
from kernels.test_cuda_graph import windows_and_steps


@pytest.fixture
def active() -> Iterator[None]:
    dispatch.choose(True)
    try:
        with dispatch.step():
            yield
    finally:
        dispatch.choose(False)


@pytest.mark.parametrize("codec", [Affine(4), Affine(8), Affine(4, 32), Turbo(8, 3), Turbo(5, 5), Turbo(2, 2)])
@pytest.mark.parametrize("dim", [64, 128])
def test_codes_that_kernels_take_have_the_codecs_rows(codec: Codec, dim: int) -> None:
    x = mx.random.normal((1, 2, 3, dim)).astype(mx.bfloat16)
    pair = codec.key_codes(dim, mx.bfloat16), codec.value_codes(dim, mx.bfloat16)
    assert coded_attention.why_not(pair) is None
    for code, words in zip(pair, (codec.encode_keys(x), codec.encode_values(x)), strict=True):
        assert codes.row_bytes(code) == words.shape[-1] * 4


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (Codes(AFFINE, 6, 64, 128, mx.bfloat16), "6 bits"),
        (Codes(AFFINE, 8, 64, 128, mx.float32), "float32"),
        (Codes(AFFINE, 8, 16, 64, mx.bfloat16), "groups of 16"),
        (Codes(AFFINE, 8, 64, 192, mx.bfloat16), "heads of 192"),
    ],
)
def test_other_codes_stay_plain_operations(code: Codes, why: str) -> None:
    assert why in str(codes.why_not(code))
    assert coded_attention.why_not((code, code)) is not None


def test_gpus_that_do_not_copy_in_bulk_unpack_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    code = Codes(AFFINE, 8, 64, 64)
    assert coded_attention.why_not((code, code)) is None
    monkeypatch.setattr(coded_attention, "capability", lambda: 89)
    assert coded_attention.why_not((code, code)) == "compute capability 8.9"


def test_heads_of_256_are_unpacked_and_values_of_another_coding_refused() -> None:
    code = Codes(AFFINE, 8, 64, 256, mx.bfloat16)
    assert codes.why_not(code) is None
    assert "256" in str(coded_attention.why_not((code, code)))
    keys, values = Codes(AFFINE, 8, 64, 64, mx.bfloat16), Codes(SHIFTED, 8, 32, 64)
    assert "codings" in str(coded_attention.why_not((keys, values)))
    assert "codings" in str(coded_attention.why_not((Codes(ROTATED, 4, 32, 64), keys)))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "heads", "most"),
    [(32, 8, 4, 32), (28, 4, 7, 64), (16, 1, 8, 64), (9, 3, 3, 64), (8, 8, 1, 32)],
)
def test_a_block_takes_up_to_eight_heads(q_heads: int, kv_heads: int, heads: int, most: int) -> None:
    cut = coded_attention.Cut(q_heads, kv_heads)
    assert (cut.heads, cut.blocks, cut.most_stretches) == (heads, q_heads // heads, most)
    assert cut.stretches(1) == 1
    assert cut.stretches(129) == 2
    assert cut.stretches(1 << 20) == most


def test_which_windows_the_attention_kernel_takes() -> None:
    pair = Affine(8).key_codes(64, mx.bfloat16), Affine(8).value_codes(64, mx.bfloat16)
    starts = mx.array([3, 9], dtype=mx.int32)

    def first(width: int, mask: Any, given: mx.array | None = None) -> Any:
        found = coded.first_seen(mx.zeros((2, 4, width, 64), mx.bfloat16), pair, 20, mask, given)
        return None if found is None else found.tolist()

    assert first(1, None) == [19]
    assert first(5, "causal") == [15]
    assert first(5, mx.zeros((2, 1, 5, 20), mx.bool_), starts) == [3, 9]
    assert first(5, None) is None  # every query sees everything
    assert first(5, mx.zeros((2, 1, 5, 20), mx.bool_)) is None
    assert first(17, "causal") is None


def test_what_the_kernel_leaves_is_unpacked_and_attended_by_stock(
    active: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of the kernels' contracts: the codec's own operations stand in for them."""
    codec = Turbo(8, 3)
    pair = codec.key_codes(64, mx.bfloat16), codec.value_codes(64, mx.bfloat16)
    q, k, v = (mx.random.normal((2, heads, 20, 64)).astype(mx.bfloat16) for heads in (4, 2, 2))
    words = codec.encode_keys(k), codec.encode_values(v)
    room = [mx.pad(w, [(0, 1), (0, 0), (0, 12), (0, 0)]) for w in words]

    def unpacked(words: mx.array, code: Codes, dtype: mx.Dtype) -> mx.array:
        wide = codec.decode_keys(words, 64, dtype) if code is pair[0] else codec.rotated_values(words, 64)
        return wide.astype(dtype)

    def turned(x: mx.array, code: Codes) -> mx.array:
        return unrotate(x).astype(x.dtype)

    monkeypatch.setattr(codes, "decode", unpacked)
    monkeypatch.setattr(codes, "unrotate", turned)
    attend = coded.OPERATIONS[0].make(contract.attention, coded)
    y = attend(q, *room, pair, 20, scale=0.125, mask="causal")
    dispatch.thread.active = False
    expected = codec.attend(q, Fetched(*words, 64, 64, mx.bfloat16), 0.125, "causal", None)
    assert mx.array_equal(y, expected)


def test_a_short_window_is_told_from_a_prompt() -> None:
    def takes(width: int, size: int = 64, dtype: mx.Dtype = mx.bfloat16, mask: Any = None) -> bool:
        q, k = (mx.zeros((1, 4, n, size), dtype) for n in (width, 20))
        return windows.takes(q, k, k, mask, None)

    assert takes(1)
    assert takes(16, 256, mask="causal")
    assert not takes(17)
    assert not takes(1, 80)
    assert not takes(1, 64, mx.float32)
    assert not takes(1, mask=mx.zeros((1, 20), mx.int32))


def prefilled(model: Any, codec: Codec, lengths: list[int]) -> BatchState:
    """A state of rows of these lengths, coded."""
    states: list[BatchState] = []
    for i, length in enumerate(lengths):
        state = BatchState(model, make_prompt_cache(model), coding=Coding((codec,) * len(model.layers)))
        tokens = (mx.arange(length) * (3 + i) % 96)[None]
        for part in (tokens[:, :-1], tokens[:, -1:]):
            state.begin(part.shape[1])
            logits = model(part, cache=state.caches)
            state.commit()
            # A kernel that appends in place does so when its step's logits are computed.
            mx.eval(logits, state.arrays())
        states.append(state)
    for other in states[1:]:
        states[0].join(other)
    return states[0]


@pytest.mark.parametrize(("codec", "lengths"), [(Affine(8), [7]), (Turbo(8, 8), [5, 9, 2])], ids=str)
def test_the_decode_step_takes_coded_states(monkeypatch: pytest.MonkeyPatch, codec: Codec, lengths: list[int]) -> None:
    views.install()
    model = llama_model()
    tokens = mx.array([[11 + 5 * i] for i in range(len(lengths))], dtype=mx.int32)
    own = prefilled(model, codec, lengths)
    own.begin(1)
    expected = np.array(model(tokens, cache=own.caches).astype(mx.float32))
    stand_in(monkeypatch)
    plain = attention.attend
    seen: list[tuple[int, ...]] = []

    def attend(form: Any, pair: Any, qkv: Any, keys: mx.array, values: mx.array, *more: Any) -> Any:
        assert keys.dtype == values.dtype == mx.uint32
        assert pair == (codec.key_codes(64, mx.bfloat16), codec.value_codes(64, mx.bfloat16))
        seen.append(keys.shape)
        return plain(
            form, qkv, codec.decode_keys(keys, 64, mx.bfloat16), codec.decode_values(values, 64, mx.bfloat16), *more
        )

    monkeypatch.setattr(coded_attention, "append_and_attend", attend)
    state = prefilled(model, codec, lengths)
    assert decode.swap(model)
    dispatch.choose(True)
    try:
        state.begin(1)
        with dispatch.step():
            logits = np.array(model(tokens, cache=state.caches).astype(mx.float32))
        state.commit()
        assert len(seen) == len(model.layers)
        assert state.lengths == [length + 1 for length in lengths]
        assert flat_test(model)(state.caches) == (64 if len(lengths) > 1 else 0)
        if len(lengths) > 1:
            state.begin(2, [2, 1, 2], flat=True)
            with dispatch.step():
                assert model(tokens[mx.array([0, 0, 1, 2, 2])], cache=state.caches).shape == (5, 1, 96)
            state.commit()
            assert state.lengths == [length + 1 + count for length, count in zip(lengths, (2, 1, 2), strict=True)]
    finally:
        dispatch.choose(False)
    assert "decode" not in dispatch.stock_calls
    state.check_integrity()
    # 8 bits leave little; bf16 rounds in other places.
    assert np.abs(logits - expected).max() < 0.1 * expected.std()


def test_rows_held_in_different_ways_are_the_models_own_forward() -> None:
    model = llama_model()
    decoder = decode.Decoder.of(model)
    assert isinstance(decoder, decode.Decoder)
    state = prefilled(model, Affine(8), [5])
    fresh = BatchState(model, make_prompt_cache(model), coding=state.coding)
    fresh.begin(4)
    model(mx.arange(4)[None], cache=fresh.caches)
    fresh.commit()
    state.join(fresh)
    layer: Any = state.caches[0]
    assert layer.codes_in_place(64, mx.bfloat16) is None
    assert decoder.step(mx.zeros((2, 1), dtype=mx.int32), state.caches) is None


@pytest.mark.device
@pytest.mark.parametrize("codec", [Affine(8), Affine(4), Turbo(8, 3)], ids=str)
def test_a_windows_token_has_the_bits_of_a_step_over_codes(codec: Codec) -> None:
    views.install()
    model = llama_model()
    cases = [([7], [[2], [5], [17], [9]]), ([7, 131, 300], [[3, 3, 3], [4, 1, 2], [10, 10, 10]])]
    native.prepare(model, "native", cache=resolve().kernel.kernel_cache)
    try:
        with dispatch.step():
            states = [[prefilled(model, codec, lengths) for _ in range(2)] for lengths, _ in cases]
            for (single, whole), (_, windows) in zip(states, cases, strict=True):
                windows_and_steps(model, single, whole, windows)
    finally:
        dispatch.choose(False)
    assert "decode" not in dispatch.stock_calls


@pytest.mark.device
@pytest.mark.parametrize("codec", [Affine(8), Affine(4), Turbo(8, 3)], ids=str)
def test_coded_states_on_a_gpu(codec: Codec, tmp_path: Path) -> None:
    """Steps of kernels against plain operations over the same tokens, and rows alone against a batch."""
    views.install()
    model = llama_model()
    lengths = [7, 131, 300]

    def steps(is_native: bool, of: list[int]) -> np.ndarray:
        dispatch.choose(is_native)
        found: list[np.ndarray] = []
        with dispatch.step():
            state = prefilled(model, codec, of)
            for i in range(6):
                state.begin(1)
                tokens = mx.array([[(7 * i + length) % 96] for length in of], dtype=mx.int32)
                logits = model(tokens, cache=state.caches)
                state.commit()
                mx.eval(logits, state.arrays())
                found.append(np.array(logits[:, -1].astype(mx.float32)))
            state.check_integrity()
        return np.stack(found)

    try:
        plain = steps(False, lengths)
        native.prepare(model, "native", cache=tmp_path)
        own = steps(True, lengths)
        # A row is made with tokens of its place in the batch: the first one's are the same alone.
        alone = steps(True, lengths[:1])
    finally:
        dispatch.choose(False)
    assert "decode" not in dispatch.stock_calls
    # Codes of a key that lies between two of them go either way, which 4 bits feel most.
    assert np.sqrt(((own - plain) ** 2).mean()) < 0.1 * plain.std()
    assert (own[:, :1] == alone).all()
