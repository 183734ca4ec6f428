"""Every operation that shares its work among threads, on shapes that are just large enough for it, without a model.

The small end of what ThreadSanitizer runs (`scripts/sanitize_kernels.sh thread`): the sanitizer slows everything down some fifty times.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from gnomon.kernels.attention import ADDITIVE, CAUSAL, NONE
from gnomon.state.codecs import Affine, Turbo
from kernels.oracle import bits_of, quantised

Case = Callable[[ModuleType], list[mx.array]]
SILU = 0
D, HEADS, GROUPS, HIDDEN, BITS, GROUP = 64, 6, 3, 384, 4, 64


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def packed(rows: int, k: int, seed: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    return quantised(rows, k, GROUP, BITS, mx.float32, seed)


def projection(e: ModuleType, rows: int, k: int, seed: int, integer: bool = False) -> object:
    return e.Projection(*packed(rows, k, seed), random(rows, seed=seed), GROUP, BITS, integer)


def products(e: ModuleType) -> list[mx.array]:
    w, made = packed(1100, 512), list[mx.array]()
    tiles = [e.tiled(part) for part in w]
    for rows in (1, 2, 9, 130):
        x = random(rows, 512, seed=rows)
        made += [e.quantized_matmul(x, *w, GROUP, BITS, integer) for integer in (False, True)]
        made += [e.quantized_matmul(x, *tiles, GROUP, BITS, True, True), e.dense_matmul(x, random(1100, 512))]
    return [*made, e.dequantise(*w, GROUP, BITS), e.quantized_embedding(mx.arange(200), *w, GROUP, BITS)]


def experts(e: ModuleType) -> list[mx.array]:
    w = tuple(mx.stack(parts) for parts in zip(*(packed(300, 512, seed) for seed in range(4)), strict=True))
    dense, x = random(4, 300, 512), random(20, 1, 1, 512, seed=1)
    chosen = mx.array(np.random.default_rng(0).integers(0, 4, (20, 2)))
    made = [e.gather_qmm(x, *w, None, chosen, GROUP, BITS, integer) for integer in (False, True)]
    down = e.Projection(random(4, 512, 300, seed=2), None, None, None, 0, 0)
    stacks = [e.Projection(*w, None, GROUP, BITS)] * 2
    block = e.experts(x[:, 0, 0], None, 0.0, projection(e, 4, 512, 5), *stacks, down, 2, True, SILU, True)
    return [*made, e.gather_mm(x, dense.swapaxes(-1, -2), None, chosen), block]


def rows(e: ModuleType) -> list[mx.array]:
    x, w = random(70, 1000), random(1000, seed=1)
    return [
        e.rms_norm(x, w, 1e-5),
        e.layer_norm(x, w, w, 1e-5),
        e.gated(x, x, SILU),
        e.softmax(x),
        e.logsumexp(x, True),
        e.argmax(x, False),
        e.rope(random(2, 6, 70, D), D, False, 1e4, 1.0, mx.array([3, 9]), None),
    ]


def attention(e: ModuleType) -> list[mx.array]:
    made = list[mx.array]()
    # One token over many keys shares the keys out; long windows share their rows.
    for length, keys in ((1, 1500), (2, 700), (60, 300)):
        q, k, v = random(1, HEADS, length, D), random(1, GROUPS, keys, D, seed=1), random(1, GROUPS, keys, D, seed=2)
        order = mx.array(np.random.default_rng(keys).permutation(keys))[None]
        made += [
            e.attention(q, k, v, 0.1, NONE, None, None, 0, random(HEADS)),
            e.attention(q, k, v, 0.1, CAUSAL, None, mx.array([keys - length]), 0, None, order),
            e.attention(q, k, v, 0.1, ADDITIVE, random(1, 1, length, keys), None, 0, None),
        ]
    return made


def coded(e: ModuleType) -> list[mx.array]:
    made = list[mx.array]()
    for codec in (Affine(4), Turbo(8, 3)):
        forms = [codes(128, mx.float32).form(e) for codes in (codec.key_codes, codec.value_codes)]
        k, v = random(2, GROUPS, 600, 128, seed=1), random(2, GROUPS, 600, 128, seed=2)
        words = [e.encode(x, form) for x, form in zip((k, v), forms, strict=True)]
        buffers = [mx.zeros((2, GROUPS, 640, w.shape[3]), mx.uint32) for w in words]
        mx.eval(buffers)
        appended = e.coded_append(k, v, *forms, mx.array([40, 0]), *buffers)
        made += [*words, *appended]
        for length in (1, 30):
            q = random(1, HEADS, length, 128, seed=3)
            held = [w[:1] for w in words]
            made.append(e.coded_attention(q, *held, *forms, 600, 0.1, CAUSAL, None, mx.array([600 - length]), 0, None))
    return made


def recurrent(e: ModuleType) -> list[mx.array]:
    def gates(*shape: int, seed: int) -> mx.array:
        return mx.sigmoid(random(*shape, seed=seed))

    q, k, v = random(2, 12, 2, D) / 8, random(2, 12, 2, D, seed=1) / 8, random(2, 12, 4, D, seed=2)
    state = random(2, 4, D, D, seed=5)
    delta = e.gated_delta(q, k, v, gates(2, 12, 4, seed=3), gates(2, 12, 4, seed=4), state, None)
    widths = (3 * D * 2, D * 2, 2, 2)
    mixer = e.delta_mixer(
        random(2, 30, 512),
        *(projection(e, n, 512, n, True) for n in widths),
        random(3 * D * 2, 4, 1),
        random(2),
        random(2),
        random(D),
        2,
        2,
        1e-6,
        None,
        None,
        mx.array([30, 4]),
    )
    return [*delta, *mixer, e.short_convolution(random(2, 60, 512), random(512, 4, 1, seed=1), True)]


def layers(e: ModuleType) -> list[mx.array]:
    form, made = e.HeadForm(HEADS, GROUPS, 1e-5, D, False, 1e4, 1.0), list[mx.array]()
    norm, one = random(HIDDEN, seed=9), random(D, seed=8)
    widths = (HEADS * D, GROUPS * D, GROUPS * D)
    for integer, (length, before) in product((False, True), ((1, 500), (40, 10))):
        q, k, v = (projection(e, width, HIDDEN, seed, integer) for seed, width in enumerate(widths))
        o, down = projection(e, HIDDEN, HEADS * D, 3, integer), projection(e, HIDDEN, 2 * HIDDEN, 4, integer)
        gate, up = (projection(e, 2 * HIDDEN, HIDDEN, seed, integer) for seed in (5, 6))
        x, at = random(2, length, HIDDEN), mx.array([before, before // 2])
        mlp = (gate, up, down, SILU, norm, 1e-5)
        made += e.heads(x, norm, 1e-5, q, k, v, one, one, form, at, None)
        made += [e.project(x, q, None, 0.0, None), e.gated_mlp(x, norm, 1e-5, *mlp, True)]

        def room() -> list[mx.array]:
            buffers = [random(2, GROUPS, 640, D, seed=seed) for seed in (1, 2)]
            mx.eval(buffers)
            return buffers

        own = (norm, 1e-5, q, k, v, o, one, one, form)
        made += e.attention_layer(x, *own, at, None, 0.1, *room(), norm, 1e-5, x)
        made += e.attention_layer(x, *own, at, None, 0.1, *room(), norm, 1e-5, x, [640, 300, 5, 0])
        blocks = e.Blocks()
        for _ in range(2):
            blocks.add(*own, None, 0.1, norm, 1e-5, norm, 1e-5, *mlp)
        buffers = [*room(), *room()]
        y, appended = e.run_blocks(blocks, x, [before, before // 2], buffers, None)
        mx.eval(y, appended)
        made += [y, *buffers]
    return made


CASES: dict[str, Case] = {
    "products": products,
    "experts": experts,
    "rows": rows,
    "attention": attention,
    "coded": coded,
    "recurrent": recurrent,
    "layers": layers,
}


def made(e: ModuleType, case: Case) -> list[bytes]:
    return [bits_of(array).tobytes() for array in case(e)]


@pytest.fixture
def native(kernels: ModuleType) -> Iterator[ModuleType]:
    kernels.set_isa("auto")
    yield kernels
    kernels.set_threads(2)


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_threads_changes_no_bit(native: ModuleType, name: str) -> None:
    native.set_threads(1)
    alone = made(native, CASES[name])
    for threads in (2, 4):
        native.set_threads(threads)
        assert made(native, CASES[name]) == alone


def test_threads_that_compute_at_once_share_the_pool(native: ModuleType) -> None:
    native.set_threads(3)
    names = ("products", "attention", "rows")
    alone = [made(native, CASES[name]) for name in names]

    def work(at: int) -> list[bytes]:
        with mx.stream(mx.new_stream(mx.cpu)):
            return made(native, CASES[names[at % 3]])

    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(work, range(6)))
    assert together == [alone[at % 3] for at in range(6)]
