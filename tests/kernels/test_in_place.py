"""Attention layers that append to the state's buffers themselves: the same bits, and nobody else's tokens touched."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from batch_walk import new_state_of
from gnomon.kernels import blocks, coded, dispatch, layers
from gnomon.models.bindings import bind
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs import Affine, Codec, Coding, Turbo
from gnomon.state.full import FullLayer
from gnomon.state.paged.arrays import Layout, PageArrays
from gnomon.state.paged.pool import PagePool
from gnomon.state.sliding import SlidingLayer
from kernels.oracle import bits_of
from tiny_models import CONFIGS, VOCAB_SIZE, make

TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 600)


@pytest.fixture
def calls(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of the windows that were appended in place."""
    seen: list[int] = []

    def watch(kind: type[FullLayer | SlidingLayer]) -> None:
        own = kind.advance_in_place

        def advance_in_place(self: Any) -> None:
            seen.append(self.rows.width)
            own(self)

        monkeypatch.setattr(kind, "advance_in_place", advance_in_place)

    watch(FullLayer)
    watch(SlidingLayer)
    return seen


def forward(model: nn.Module, state: BatchState, window: list[list[int]], counts: list[int] | None = None) -> mx.array:
    state.begin(len(window[0]), counts)
    with dispatch.step():
        logits = model(mx.array(window), cache=state.caches)
    state.commit()
    return logits


def walk(model: nn.Module, coding: Coding | None = None, pages: PagePool | None = None) -> list[np.ndarray]:
    """Logits of a batch's life: a lone row, a snapshot that goes its own way, rows of other lengths, padded windows, tokens taken back."""
    binding, seen = bind(model), list[np.ndarray]()

    def new() -> BatchState:
        return BatchState(
            model,
            binding.make_caches(),
            pad_safe=binding.pad_safe,
            mask_ndim=binding.mask_ndim,
            coding=coding,
            pages=pages,
        )

    at = iter(int(token) for token in TOKENS)

    def take(count: int) -> list[int]:
        return [next(at) for _ in range(count)]

    def see(state: BatchState, window: list[list[int]], counts: list[int] | None = None) -> None:
        logits = forward(model, state, window, counts)
        mx.eval(logits, state.arrays())
        for row, count in enumerate(counts or [len(window[0])] * len(window)):
            seen.append(bits_of(logits[row, :count]))

    first = new()
    see(first, [take(20)])
    for width in (1, 1, 5, 1):
        see(first, [take(width)])
    saved = first.snapshot(0)
    see(first, [take(1)])
    other = BatchState.restore(model, new().templates, saved, coding=coding, pages=pages)
    see(other, [take(1)])
    see(first, [take(3)])
    see(other, [take(1)])
    last = new()
    see(last, [take(7)])
    first.join(other)
    first.join(last)
    for _ in range(3):
        see(first, [take(1), take(1), take(1)])
    see(first, [take(4), take(4), take(4)], [4, 2, 1])
    first.rollback([2, 0, 1])
    see(first, [take(1), take(1), take(1)])
    first.keep([2, 0])
    see(first, [take(2), take(2)])
    # Two forwards of which only the second one's logits are asked for.
    forward(model, first, [take(1), take(1)])
    see(first, [take(1), take(1)])
    first.keep([1])
    see(first, [take(240)])
    for _ in range(3):
        see(first, [take(1)])
    return seen


@pytest.mark.parametrize(
    ("model_type", "dtype", "integer"),
    [
        ("llama", "float32", False),
        ("llama", "float32", True),
        ("qwen2", "float16", False),
        ("qwen3", "bfloat16", False),
        ("gemma3", "float32", False),
    ],
)
def test_appending_in_place_changes_no_bit(
    native: ModuleType, calls: list[int], model_type: str, dtype: str, integer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers as one operation, layer by layer, and with states that append themselves."""
    # Qwen 2's projections have biases.
    monkeypatch.setitem(CONFIGS, "qwen2", CONFIGS["llama"])
    model: Any = make(model_type, dtype)
    nn.quantize(
        model, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m["weight"].shape[-1] % 32 == 0
    )
    mx.eval(model.parameters())
    assert "NativeTransformerBlock" in layers.swap(model, native, integer)
    apart = walk(model)
    assert {1, 2, 3, 4, 5} <= set(calls)
    taken = list(calls)
    found = {"layer by layer": apart}
    if model_type == "gemma3":
        assert taken.count(1) > len(taken) // 2
        assert sum(blocks.swap(model, native).values()) == 1
        calls.clear()
        found["one operation"] = walk(model)
        # A lone row's window of several tokens is not appended to its rings in place, but to the other layers' buffers.
        assert len(calls) == len(taken)
    else:
        assert sum(blocks.swap(model, native).values()) == 1
        assert blocks.swap(model, native) == {}
        calls.clear()
        runs: list[int] = []
        own = blocks.Run.run

        def run(self: blocks.Run, *args: Any) -> mx.array | None:
            y = own(self, *args)
            if y is not None:
                runs.append(y.shape[1])
            return y

        monkeypatch.setattr(blocks.Run, "run", run)
        found["one operation"] = walk(model)
        # A state's first window has no buffers yet.
        assert len(runs) * len(model.layers) == len(calls)
        assert calls == taken
    calls.clear()
    monkeypatch.setattr(FullLayer, "in_place", lambda self, mask=None, settled=True: None)
    monkeypatch.setattr(SlidingLayer, "ring_in_place", lambda self, mask=None, settled=True: None)
    expected = walk(model)
    assert not calls
    for name, bits in found.items():
        assert len(bits) == len(expected)
        for mine, theirs in zip(bits, expected, strict=True):
            assert (mine == theirs).all(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_attention_has_the_bits_in_place_that_it_has_apart(
    native: ModuleType, calls: list[int], dtype: str
) -> None:
    model = make("qwen3_5", dtype)
    assert {"NativeQwen3NextAttention", "NativeGatedDeltaNet", "NativeDecoderLayer"} <= set(layers.swap(model, native))
    new, tokens = new_state_of(model), [int(token) for token in TOKENS[:60]]
    states = [new() for _ in range(3)]
    # A state's first window has no buffers.
    whole = [bits_of(forward(model, states[row], [tokens[30 * row : 30 * row + 30]]))[0] for row in (0, 1)]
    assert not calls
    parts = [forward(model, states[2], [tokens[start:end]]) for start, end in ((0, 10), (10, 11), (11, 30))]
    assert (bits_of(mx.concatenate(parts, axis=1))[0] == whole[0]).all()
    assert set(calls) == {1, 19}
    lone, batch = states[2], states[0]
    batch.join(states[1])
    for token in (3, 4, 5):
        together = bits_of(forward(model, batch, [[token], [token + 1]]))
        assert (bits_of(forward(model, lone, [[token]]))[0] == together[0]).all()


@pytest.mark.parametrize(
    ("dtype", "codecs"),
    [
        ("float32", (None, None)),
        ("bfloat16", (None, None)),
        ("bfloat16", (Affine(8), Affine(8))),
        ("float32", (Affine(4), None)),
        ("float32", (None, Turbo(8, 3))),
    ],
    ids=["plain", "plain bfloat16", "8 bfloat16", "4 and plain", "plain and turbo"],
)
def test_one_operation_takes_codes_and_pages(
    native: ModuleType, dtype: str, codecs: tuple[Codec | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer and as one operation, in buffers and in pages: the same bits."""
    coded.install()
    model: Any = make("llama", dtype, head_dim=64, num_hidden_layers=2)
    coding = Coding(codecs) if any(codecs) else None
    layers.swap(model, native)
    expected = walk(model, coding)
    blocks.swap(model, native)
    taken: list[bool] = []
    own = blocks.Run.run

    def run(self: blocks.Run, *args: Any) -> mx.array | None:
        y = own(self, *args)
        taken.append(y is not None)
        return y

    monkeypatch.setattr(blocks.Run, "run", run)
    for is_paged in (False, True):
        taken.clear()
        pool = PagePool(2) if is_paged else None
        found = walk(model, coding, pool)
        # All but first windows, and those of a row that joins its batch.
        assert taken.count(False) <= 5
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine == theirs).all()
        if pool is not None:
            pool.check_integrity()
            assert not any(mx.any(array[:, 0] != 0).item() for layer in pool.layers for array in layer.lying())


def test_layers_of_their_own_find_keys_in_their_pages(native: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts' models, which run layer by layer: nothing is gathered, and the bits are those of buffers."""
    coded.install()
    model: Any = make("qwen3_moe", "float32")
    assert "NativeAttention" in layers.swap(model, native)
    expected = walk(model)
    own = PageArrays.read
    runs: list[int] = []

    def read(self: PageArrays, layout: Layout) -> tuple[mx.array, mx.array]:
        assert layout.run is not None
        runs.append(layout.run)
        return own(self, layout)

    monkeypatch.setattr(PageArrays, "read", read)
    found = walk(model, pages=PagePool(len(model.layers)))
    assert runs
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine == theirs).all()


@pytest.fixture
def ringed(native: ModuleType) -> nn.Module:
    """A model with rings of 40 tokens whose layers run as one operation."""
    model = make("gemma3", "float32")
    layers.swap(model, native)
    assert sum(blocks.swap(model, native).values()) == 1
    return model


def test_rings_go_around_alike_alone_and_in_a_batch(ringed: Any, calls: list[int]) -> None:
    new, prompts = new_state_of(ringed), ([*TOKENS[:70]], [*TOKENS[70:103]])
    lone, shared = [new(), new()], [new(), new()]
    for state, prompt in zip([*lone, *shared], [*prompts, *prompts], strict=True):
        mx.eval(forward(ringed, state, [[int(token) for token in prompt]]), state.arrays())
    batch, other = shared
    batch.join(other)
    calls.clear()
    for step in range(40):
        width = 3 if step % 9 == 4 else 1
        window = [[(7 * step + 5 * i + row) % VOCAB_SIZE for i in range(width)] for row in (0, 1)]
        together = bits_of(forward(ringed, batch, window))
        for row, state in enumerate(lone):
            assert (bits_of(forward(ringed, state, [window[row]]))[0] == together[row]).all()
    assert calls.count(3) >= 5 * len(ringed.layers)


@pytest.mark.parametrize("of_rings_alone", [False, True])
def test_copies_of_a_ring_are_made_before_it_goes_on(ringed: nn.Module, of_rings_alone: bool) -> None:
    """However late they are computed."""
    states = [new_state_of(ringed)() for _ in range(2)]
    found: list[list[mx.array]] = []
    for late, state in enumerate(states):
        mx.eval(forward(ringed, state, [[int(token) for token in TOKENS[:60]]]))
        mx.eval(forward(ringed, state, [[1]]), state.arrays())
        copies = state.uncut(0).values() if of_rings_alone else state.snapshot(0).layers
        saved = [array for layer in copies for array in layer.arrays.values()]
        if not late:
            mx.eval(saved)
        for token in (2, 3, 4):
            mx.eval(forward(ringed, state, [[token]]))
        found.append(saved)
    for early, late in zip(*found, strict=True):
        assert (bits_of(early) == bits_of(late)).all()


def test_a_ring_that_a_snapshot_holds_is_not_written_to(ringed: nn.Module) -> None:
    state = new_state_of(ringed)()
    for window in ([int(token) for token in TOKENS[:60]], [1]):
        mx.eval(forward(ringed, state, [window]), state.arrays())
    saved, found = state.snapshot(0), list[np.ndarray]()
    mx.eval([array for layer in saved.layers for array in layer.arrays.values()])
    for _ in range(2):
        again = BatchState.restore(ringed, new_state_of(ringed)().templates, saved)
        found.append(np.stack([bits_of(forward(ringed, again, [[token]])) for token in (5, 6, 7)]))
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize(
    ("width", "size", "phases"), [(1, 24, (7, 3)), (1, 40, (0, 0)), (4, 27, (0, 0)), (2, 48, (1, 5))]
)
def test_a_ring_is_attended_from_its_oldest_key(
    native: ModuleType, width: int, size: int, phases: tuple[int, ...]
) -> None:
    """Against float64, over keys that lie anywhere in the ring; what is no key of the window is infinite."""
    random = np.random.default_rng(size)
    hidden, heads, groups, d, window, starts = 32, 4, 2, 16, 24, (70, 9)
    maps = [random.normal(size=(rows, hidden)) / 6 for rows in (heads * d, groups * d, groups * d)]
    out = random.normal(size=(hidden, heads * d)) / 8
    x = random.normal(size=(2, width, hidden))
    past = random.normal(size=(2, 2, groups, 80, d))  # keys and values of each row by position
    held = np.full((2, 2, groups, size, d), np.inf)
    expected = np.zeros_like(x)
    for row, start in enumerate(starts):
        q, k, v = ((x[row] @ m.T).reshape(width, -1, d).swapaxes(0, 1) for m in maps)
        for position in range(max(0, start - window + 1), start):
            held[:, row, :, (position - phases[row]) % size] = past[:, row, :, position]
        past[0, row, :, start : start + width], past[1, row, :, start : start + width] = k, v
        for i in range(width):
            seen = slice(max(0, start + i - window + 1), start + i + 1)
            mixed = []
            for head in range(heads):
                keys, values = past[:, row, head // 2, seen]
                weights = np.exp(0.25 * keys @ q[head, i])
                mixed.append(weights @ values / weights.sum())
            expected[row, i] = out @ np.concatenate(mixed)
    projections = [native.Projection(mx.array(m.astype(np.float32)), None, None, None, 0, 0) for m in (*maps, out)]
    form = native.HeadForm(heads, groups, 0.0, 0, False, 1.0, 1.0)
    buffers = [mx.array(a.astype(np.float32)) for a in held]
    ring = [size, window, *phases]
    own = (*projections, None, None, form, mx.array(starts), None, 0.25, *buffers, None, 0.0, None)
    y, keys, values = native.attention_layer(mx.array(x.astype(np.float32)), None, 0.0, *own, ring)
    assert np.abs(np.array(y) - expected).max() < 1e-5
    for array, kind in ((keys, 0), (values, 1)):
        for row, start in enumerate(starts):
            slots = [(start + i - phases[row]) % size for i in range(width)]
            new = past[kind, row, :, start : start + width]
            assert np.allclose(np.array(array)[row][:, slots], new, atol=1e-5)


def test_rings_that_can_not_be_are_refused(native: ModuleType) -> None:
    d = 16
    p = [native.Projection(mx.zeros((d, d)), None, None, None, 0, 0) for _ in range(4)]
    form = native.HeadForm(1, 1, 0.0, 0, False, 1.0, 1.0)

    def layer(ring: list[int], slots: int = 8) -> None:
        keys = mx.zeros((1, 1, slots, d))
        mx.eval(
            native.attention_layer(
                mx.zeros((1, 2, d)),
                None,
                0.0,
                *p,
                None,
                None,
                form,
                mx.array([20]),
                None,
                1.0,
                keys,
                keys,
                None,
                0.0,
                None,
                ring,
            )
        )

    with pytest.raises(ValueError, match="phase for each of 1 rows"):
        layer([8, 7])
    with pytest.raises(ValueError, match="window of 2 tokens that see 8 doesn't fit a ring of 8"):
        layer([8, 8, 0])
    with pytest.raises(RuntimeError, match="row 0 ends at 8 of 7 slots"):  # in the step
        layer([8, 7, 0], 7)
    layer([8, 7, 0])


@pytest.mark.parametrize(
    ("model_type", "dtype", "paged"),
    [
        ("llama", "float32", False),
        ("llama", "float32", True),
        ("qwen3", "bfloat16", False),
        ("qwen3", "bfloat16", True),
    ],
)
def test_a_flat_window_has_the_bits_of_a_padded_one(
    native: ModuleType, model_type: str, dtype: str, paged: bool
) -> None:
    model: Any = make(model_type, dtype)
    layers.swap(model, native)
    new = new_state_of(model)
    if paged:
        pool, templates = PagePool(len(model.layers)), new().templates

        def new() -> BatchState:
            return BatchState(model, templates, pages=pool)

    takes = blocks.flat_test(model)
    assert not takes(new().caches)
    blocks.swap(model, native)
    takes = blocks.flat_test(model)
    states: list[BatchState] = []
    for _ in range(2):
        state = new()
        mx.eval(forward(model, state, [[1, 2, 3, 4, 5]]))
        assert not takes(state.caches)
        for prompt in ([9, 8, 7], [11, 12, 13, 14, 15, 16, 17]):
            other = new()
            mx.eval(forward(model, other, [prompt]))
            state.join(other)
        states.append(state)
    padded, flat = states
    assert takes(flat.caches)
    for counts, back in (([1, 4, 2], [0, 2, 1]), ([3, 1, 1], [2, 0, 0]), ([2, 2, 2], [0, 0, 0])):
        width = max(counts)
        window = [[20 + 10 * row + i for i in range(width)] for row in range(3)]
        expected = forward(model, padded, window, counts)
        flat.begin(width, counts, flat=True)
        tokens = [[token] for own, count in zip(window, counts, strict=True) for token in own[:count]]
        with dispatch.step():
            found = model(mx.array(tokens), cache=flat.caches)
        flat.commit()
        real = [bits_of(expected[row, i]) for row, count in enumerate(counts) for i in range(count)]
        assert (bits_of(found[:, 0]) == np.stack(real)).all()
        padded.rollback(back)
        flat.rollback(back)
        assert flat.lengths == padded.lengths
        assert (bits_of(forward(model, flat, [[5]] * 3)) == bits_of(forward(model, padded, [[5]] * 3))).all()
    flat.keep([1])
    assert not takes(flat.caches)
    with pytest.raises(ValueError, match="several rows"):
        flat.begin(1, flat=True)


def replace_weight(model: Any) -> None:
    model.layers[1].mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight


def replace_projection(model: Any) -> None:
    model.layers[1].self_attn.v_proj = model.layers[0].self_attn.v_proj


def replace_norm(model: Any) -> None:
    model.layers[0].post_attention_layernorm = nn.RMSNorm(64, 1e-2)


def replace_layer(model: Any) -> None:
    model.layers[1] = model.layers[0]


@pytest.mark.parametrize("change", [replace_weight, replace_projection, replace_norm, replace_layer])
def test_what_was_replaced_is_seen(native: ModuleType, change: Callable[[Any], None]) -> None:
    found: list[np.ndarray] = []
    for is_run in (False, True):
        model = make("llama", "float32")
        layers.swap(model, native)
        if is_run:
            blocks.swap(model, native)
        state = new_state_of(model)()
        mx.eval(forward(model, state, [[1, 2, 3]]), state.arrays())
        before = bits_of(forward(model, state, [[4, 5]]))
        state.rollback([2])
        change(model)
        found.append(bits_of(forward(model, state, [[4, 5]])))
        assert (found[-1] != before).any()
    assert (found[0] == found[1]).all()


def test_rows_that_do_not_fit_are_refused(native: ModuleType) -> None:
    model: Any = make("llama", "float32")
    layers.swap(model, native)
    blocks.swap(model, native)
    run, h = model.model.fused, mx.zeros((1, 1, 64))
    heads, size = model.args.num_key_value_heads, model.args.head_dim or 64 // model.args.num_attention_heads
    buffers = [mx.zeros((1, heads, 8, size)) for _ in range(2 * len(model.layers))]
    for start in (8, -1):
        with pytest.raises(IndexError, match=f"row 0 ends at {start + 1} of 8 slots"):
            native.run_blocks(run.blocks, h, [start], buffers, None)
    assert native.run_blocks(run.blocks, h, [7], buffers, None) is not None
    assert native.run_blocks(run.blocks, h, [7], buffers[1:], None) is None
    assert native.run_blocks(run.blocks, h, [7], [mx.zeros((1, heads + 1, 8, size)), *buffers[1:]], None) is None
    assert native.run_blocks(run.blocks, h, [7], [buffers[0].astype(mx.bfloat16), *buffers[1:]], None) is None


def test_masks_that_hide_more_are_not_taken(native: ModuleType, calls: list[int]) -> None:
    model = make("llama", "float32")
    layers.swap(model, native)
    state = new_state_of(model)()
    mx.eval(forward(model, state, [[1, 2, 3]]))
    layer = state.layers[0]
    assert isinstance(layer, FullLayer)
    state.begin(2)
    assert layer.in_place("causal") is not None
    assert layer.in_place(None) is None
    assert layer.in_place(mx.ones((2, 5), dtype=mx.bool_)) is None
    state.abort()
    state.begin(1)
    assert layer.in_place(None) is not None
    assert layer.in_place(layer.make_mask(1, window_size=2)) is None
    state.abort()
    assert not calls


def test_buffers_that_are_views_are_refused(kernels: ModuleType) -> None:
    """Appending to them would write somewhere else."""
    d = 16
    p = [kernels.Projection(mx.zeros((d, d)), None, None, None, 0, 0) for _ in range(4)]
    form = kernels.HeadForm(1, 1, 0.0, d, False, 10000.0, 1.0)
    x, at = mx.zeros((1, 1, d)), mx.array([0])
    keys = mx.zeros((1, 1, 8, d))[:, :, ::2]
    mx.eval(keys)
    with pytest.raises(ValueError, match="contiguous"):
        mx.eval(kernels.attention_layer(x, None, 0.0, *p, None, None, form, at, None, 1.0, keys, keys, None, 0.0, None))
