"""Keys and values in fewer bits: words with the codecs' own bits, and attention that reads them."""

from collections.abc import Iterator
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from gnomon.kernels import coded, codes, dispatch, operations
from gnomon.kernels.attention import ADDITIVE, BOOLEAN, CAUSAL, NONE
from gnomon.models.bindings import bind
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs import Affine, Codec, Coding, Turbo
from gnomon.state.paged import PagePool
from kernels import oracle
from kernels.oracle import Array, bits_of, close
from kernels.test_attention import causal
from kernels.test_attention import oracle as attended
from tiny_models import VOCAB_SIZE, make

TYPES = (mx.float32, mx.float16, mx.bfloat16)
FEW = Affine(4), Affine(8, group=32), Turbo(8, 3)
MORE = (
    *(Affine(bits, group=128) for bits in (2, 3, 5, 6)),
    *(Turbo(keys, values) for keys, values in ((5, 8), (4, 4), (2, 5), (2, 2))),
)
CODECS = [*FEW, *(pytest.param(codec, marks=pytest.mark.slow) for codec in MORE)]
DIM = 128


def vectors(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def decoded(codec: Codec, words: mx.array, dtype: mx.Dtype, *, keys: bool) -> Array:
    """What words stand for, in float64 from the formats; rotated values turned back."""
    raw = np.ascontiguousarray(np.array(words)).view(np.uint8)
    if isinstance(codec, Affine):
        size, groups = DIM * codec.bits // 8, DIM // codec.group
        each = groups * dtype.size
        numbers = [mx.array(raw[..., at : at + each]).view(dtype) for at in (size, size + each)]
        packed = mx.array(np.ascontiguousarray(raw[..., :size]))
        return oracle.dequantised(packed, numbers[0], numbers[1], codec.group, codec.bits)
    assert isinstance(codec, Turbo)
    bits, groups = codec.key_bits if keys else codec.value_bits, DIM // 32
    size = DIM * bits // 8
    places = oracle.codes(mx.array(np.ascontiguousarray(raw[..., :size])), bits)
    halves = np.ascontiguousarray(raw[..., size:]).view(np.float16).astype(np.float64)
    scale = np.repeat(halves[..., :groups], 32, -1)
    if keys:
        signed = (places + 128) % 256 - 128 if bits == 8 else places
        return (signed + np.repeat(halves[..., groups:], 32, -1)) * scale
    form = codec.value_codes(DIM, dtype)
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(DIM)] for i in range(DIM)])
    return (np.array(form.levels)[places] * scale) @ matrix / DIM**0.5 * np.array(form.signs)


def pair(codec: Codec, dtype: mx.Dtype) -> tuple[codes.Codes, codes.Codes]:
    return codec.key_codes(DIM, dtype), codec.value_codes(DIM, dtype)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_words_have_the_bits_of_the_codecs_own_operations(extension: ModuleType, codec: Codec) -> None:
    for dtype in TYPES:
        x = vectors(2, 3, 20, DIM, seed=1, dtype=dtype) * vectors(2, 3, 20, 1, seed=2, dtype=dtype)
        # Groups without extent, of zeros, and with a large mean.
        x[0, 0, 0, :64] = 3.0
        x[0, 0, 1] = 0.0
        x[0, 0, 2] += 40.0
        for array in (x, x.swapaxes(0, 1)[:, :, 1::3]):
            for own, form in zip((codec.encode_keys, codec.encode_values), pair(codec, dtype), strict=True):
                made = extension.encode(array, form.form(extension))
                assert made.shape[-1] * 4 == form.form(extension).row_bytes
                got, want = (np.ascontiguousarray(np.array(words)).view(np.uint16) for words in (made, own(array)))
                # Numbers of groups without extent are NaN, and which NaN is the processor's business.
                missing = np.isnan(got.view(np.float16)) & np.isnan(want.view(np.float16)) & (got & 0xFF == 0)
                assert np.array_equal(got[~missing], want[~missing])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 6, 2, 1, 77),
        (2, 4, 2, 9, 150),
        pytest.param((1, 4, 4, 70, 70), marks=pytest.mark.slow),
        pytest.param((1, 3, 1, 2, 900), marks=pytest.mark.slow),
    ],
)
def test_attention_reads_codes(extension: ModuleType, codec: Codec, shape: tuple[int, ...]) -> None:
    batch, heads, groups, length, keys = shape
    for dtype in TYPES[: 1 if keys > 100 else 3]:
        q = vectors(batch, heads, length, DIM, seed=3, dtype=dtype)
        words = (
            codec.encode_keys(vectors(batch, groups, keys, DIM, seed=4, dtype=dtype)),
            codec.encode_values(vectors(batch, groups, keys, DIM, seed=5, dtype=dtype)),
        )
        k, v = (mx.array(decoded(codec, w, dtype, keys=i == 0)) for i, w in enumerate(words))
        forms = [form.form(extension) for form in pair(codec, dtype)]
        # Whole buffers: more rows, and slots beyond `keys` that hold what would be NaN.
        held = [mx.pad(w, [(0, 1), (0, 0), (0, 5), (0, 0)], constant_values=0xFFFFFFFF) for w in words]
        rng = np.random.default_rng(0)
        seen = rng.random((batch, 1, length, keys)) < 0.6
        seen[0, 0, 0] = False
        hidden = np.where(seen, 0.0, -np.inf)
        sinks = vectors(heads, seed=6)
        for kind, mask, bias, sink in (
            (NONE, None, np.zeros((length, keys)), None),
            (CAUSAL, None, causal(length, keys), sinks),
            (BOOLEAN, mx.array(seen), hidden, None),
            (ADDITIVE, mx.array(hidden.astype(np.float32)), hidden, sinks),
        ):
            got = extension.coded_attention(q, *held, *forms, keys, 0.09, kind, mask, None, 0, sink)
            want, size = attended(q, k, v, 0.09, bias, sink)
            # What codes stand for is a small difference of larger numbers, or a sum over a whole head.
            close(got, want, size.max(), terms=keys)
            if kind == BOOLEAN:
                assert not np.array(got[0, :, 0].astype(mx.float32)).any()


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        (Affine(4), mx.float32),
        (Affine(8), mx.bfloat16),
        (Affine(4, 32), mx.float16),
        (Turbo(8, 3), mx.float32),
        (Turbo(4, 4), mx.float32),
    ],
    ids=str,
)
def test_a_row_is_the_same_in_any_company(extension: ModuleType, codec: Codec, dtype: mx.Dtype) -> None:
    """Other rows, longer buffers, windows, orders and threads change no bit; nor whether lengths or a mask say what is seen."""
    lengths, width = [900, 40, 333], 4
    forms = [form.form(extension) for form in pair(codec, dtype)]
    slots = max(lengths) + width
    q = vectors(3, 6, width, DIM, seed=1, dtype=dtype)
    k, v = (
        own(vectors(3, 2, slots, DIM, seed=seed, dtype=dtype))
        for own, seed in ((codec.encode_keys, 2), (codec.encode_values, 3))
    )
    starts = mx.array(lengths)
    whole = extension.coded_attention(q, k, v, *forms, slots, 0.1, CAUSAL, None, starts, 0, None)
    seen = mx.arange(slots)[None, None, None] <= (starts[:, None] + mx.arange(width))[:, None, :, None]
    masked = extension.coded_attention(q, k, v, *forms, slots, 0.1, BOOLEAN, seen, None, 0, None)
    assert np.array_equal(bits_of(masked), bits_of(whole))
    order = mx.array(np.random.default_rng(1).permutation(slots))
    back = mx.argsort(order)
    shuffled = [mx.take(x, order, axis=2) for x in (k, v)]
    ordered = extension.coded_attention(q, *shuffled, *forms, slots, 0.1, CAUSAL, None, starts, 0, None, back[None])
    assert np.array_equal(bits_of(ordered), bits_of(whole))
    for threads in (1, 2, 3):
        extension.set_threads(threads)
        for row, length in enumerate(lengths):
            for i in range(width):
                end, one = length + i + 1, slice(row, row + 1)
                alone = extension.coded_attention(
                    q[one, :, i : i + 1], k[one], v[one], *forms, end, 0.1, NONE, None, None, 0, None
                )
                assert np.array_equal(bits_of(alone), bits_of(whole[one, :, i : i + 1]))
    extension.set_threads(2)


def test_groups_without_extent_are_nan_where_they_are_seen(extension: ModuleType) -> None:
    codec = Turbo(4, 4)
    keys = vectors(1, 1, 8, DIM, seed=1)
    keys[0, 0, 5, 32:64] = 2.0
    words = codec.encode_keys(keys), codec.encode_values(keys)
    forms = [form.form(extension) for form in pair(codec, mx.float32)]
    q = vectors(1, 2, 8, DIM, seed=2)
    out = np.array(extension.coded_attention(q, *words, *forms, 8, 0.1, CAUSAL, None, None, 0, None))
    assert np.isnan(out[:, :, 5:]).all()
    assert np.isfinite(out[:, :, :5]).all()


@pytest.mark.parametrize("codec", [Affine(8), Turbo(8, 3)], ids=lambda codec: codec.name)
def test_append_writes_the_rows_slots_and_nothing_else(extension: ModuleType, codec: Codec) -> None:
    k, v = (vectors(2, 3, 5, DIM, seed=seed) for seed in (1, 2))
    forms = [form.form(extension) for form in pair(codec, mx.float32)]
    words = codec.encode_keys(k), codec.encode_values(v)
    buffers = [mx.full((3, 3, 16, w.shape[3]), 7, mx.uint32) for w in words]
    mx.eval(buffers)
    made = extension.coded_append(k, v, *forms, mx.array([11, 2]), *buffers)
    mx.eval(made)
    for got, w, buffer in zip(made, words, buffers, strict=True):
        want = np.full(got.shape, 7, np.uint32)
        want[0, :, 11:16], want[1, :, 2:7] = np.array(w[0]), np.array(w[1])
        assert np.array_equal(np.array(got), want)
        # In place: whoever holds the buffer sees it too.
        assert np.array_equal(np.array(buffer), want)


@pytest.fixture
def native(kernels: ModuleType) -> Iterator[ModuleType]:
    kernels.set_isa("auto")
    kernels.set_threads(2)
    dispatch.uninstall()  # an engine of an earlier test has left those of its own build
    coded.install()
    dispatch.install(operations.ALL, kernels)
    dispatch.choose(True)
    yield kernels
    dispatch.choose(False)
    dispatch.uninstall()
    dispatch.stock_calls.clear()
    coded.install()


TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 1000).tolist()


class Walk:
    """Rows of a batch under a codec, each beside a state of its own that takes the same tokens."""

    def __init__(self, model: nn.Module, codec: Codec) -> None:
        self.model, self.codec, self.used = model, codec, 0

    def state(self, pages: PagePool | None = None) -> BatchState:
        binding = bind(self.model)
        caches = binding.make_caches()
        coding = Coding((self.codec,) * len(caches), 0)
        return BatchState(self.model, caches, pad_safe=binding.pad_safe, coding=coding, pages=pages)

    def see(self, state: BatchState, alone: list[BatchState], counts: list[int], back: list[int]) -> None:
        """A window of `counts` tokens per row, of which `back` are taken back, in the batch and alone: the same bits."""
        width = max(counts)
        window = [[TOKENS[(self.used + 7 * i + 31 * row) % 1000] for i in range(width)] for row in range(len(counts))]
        self.used += width
        together = self.forward(state, window, counts)
        for row, (own, count) in enumerate(zip(alone, counts, strict=True)):
            lone = self.forward(own, [window[row][:count]], None)
            assert np.array_equal(bits_of(together[row, :count]), bits_of(lone[0]))
            own.rollback([back[row]])
        state.rollback(back)

    def forward(self, state: BatchState, window: list[list[int]], counts: list[int] | None) -> mx.array:
        with dispatch.step():
            state.begin(len(window[0]), counts)
            logits = self.model(mx.array(window), cache=state.caches)
            state.commit()
        mx.eval(logits, state.arrays())
        return logits


@pytest.mark.parametrize("paged", [False, True], ids=["buffers", "pages"])
@pytest.mark.parametrize("codec", [Affine(4), Turbo(8, 3)], ids=lambda codec: codec.name)
def test_a_models_rows_have_the_same_bits_alone_and_in_batches(native: ModuleType, codec: Codec, paged: bool) -> None:
    """Those alone are in buffers."""
    walk = Walk(make("llama", num_hidden_layers=2, head_dim=64), codec)
    pages = PagePool(2) if paged else None
    state, alone = walk.state(pages), [walk.state()]
    walk.see(state, alone, [30], [0])
    walk.see(state, alone, [1], [0])
    for count in (3, 260):
        other, own = walk.state(pages), [walk.state()]
        walk.see(other, own, [count], [0])
        state.join(other)
        alone += own
        walk.see(state, alone, [1] * len(alone), [0] * len(alone))
    walk.see(state, alone, [4, 4, 4], [2, 0, 3])
    walk.see(state, alone, [1, 1, 1], [0, 0, 0])
    walk.see(state, alone, [5, 1, 3], [0, 0, 0])
    state.keep([2, 0])
    alone = [alone[2], alone[0]]
    walk.see(state, alone, [1, 1], [0, 0])
    state.check_integrity()
    assert not dispatch.stock_calls
    native.set_profile(True)
    walk.see(state, alone, [1, 1], [0, 0])
    assert {"GnomonCodedAppend", "GnomonCodedAttention"} <= set(native.set_profile(False))
