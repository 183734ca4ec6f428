"""How much each layer's keys and values lose in fewer bits, and which bits to give them for a budget of bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from gnomon.kernels import coded, dispatch
from gnomon.models.load import LoadedModel
from gnomon.state.batch_state import BatchState
from gnomon.state.codecs import Affine, Codec, Coding

CANDIDATES: Final = (4, 8)
GROUP: Final = 64
PLAIN: Final = 0
"""Bits that mean: not coded."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One layer: bytes of its keys and values per token, and mean KL in nats per position, by bits; `PLAIN` has a KL of 0."""

    layer: int
    num_bytes: Mapping[int, float]
    kl: Mapping[int, float]


def divergence(reference: mx.array, other: mx.array) -> mx.array:
    """KL(reference || other) of logits `[..., vocabulary]` in float32 nats, `[...]`."""
    p, q = (
        x.astype(mx.float32) - mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True) for x in (reference, other)
    )
    return (mx.exp(p) * (p - q)).sum(axis=-1)


def logits(loaded: LoadedModel, rows: Sequence[Sequence[int]], coding: Coding | None = None) -> list[mx.array]:
    """Logits `[1, n - 1, vocabulary]` of each row's tokens after its first: one window for that first token, then one for the rest, so
    that all of them attend to what is coded."""
    binding, found = loaded.binding, list[mx.array]()
    for row in rows:
        state = BatchState(
            loaded.model, binding.make_caches(), pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim, coding=coding
        )
        with dispatch.step():
            state.begin(1)
            loaded.model(mx.array([row[:1]]), cache=state.caches)
            state.commit()
            state.begin(len(row) - 1)
            found.append(loaded.model(mx.array([row[1:]]), cache=state.caches))
            state.commit()
        mx.eval(found[-1])
    return found


def sample(loaded: LoadedModel, num_rows: int, length: int, seed: int = 0) -> list[list[int]]:
    """Texts the model writes by itself at temperature 1, from its end-of-text token on: what its layers see when it is used."""
    first = loaded.eos_token_ids[0] if loaded.eos_token_ids else 0
    binding, rows = loaded.binding, list[list[int]]()
    for number in range(num_rows):
        key = mx.random.key(seed + number)
        state = BatchState(loaded.model, binding.make_caches(), pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim)
        row = [first]
        while len(row) < length:
            key, own = mx.random.split(key)
            with dispatch.step():
                state.begin(1)
                out = loaded.model(mx.array([row[-1:]]), cache=state.caches)
                state.commit()
            row.append(cast(int, mx.random.categorical(out[0, -1].astype(mx.float32), key=own).item()))
            mx.eval(state.arrays())
        rows.append(row)
    return rows


def measure(loaded: LoadedModel, rows: Sequence[Sequence[int]]) -> Iterator[Sensitivity]:
    """Code one layer after the other in each candidate's bits, the others plain, and compare with all plain.

    Layers whose heads can't be coded are left out. Raises ValueError for rows of fewer than 2 tokens.
    """
    if any(len(row) < 2 for row in rows):
        raise ValueError("a row needs 2 tokens at least: the first one's window is always plain")
    coded.install()
    reference = logits(loaded, rows)
    caches = loaded.binding.make_caches()
    for layer, cache in enumerate(caches):
        if type(cache) not in (KVCache, RotatingKVCache):
            continue
        kl, num_bytes = {PLAIN: 0.0}, {PLAIN: _bytes_per_token(loaded, layer, None)}
        try:
            for bits in CANDIDATES:
                codec = Affine(bits, GROUP)
                num_bytes[bits] = _bytes_per_token(loaded, layer, codec)
                coding = Coding(tuple(codec if place == layer else None for place in range(len(caches))))
                pairs = zip(reference, logits(loaded, rows, coding), strict=True)
                kls = [cast(float, divergence(a, b).mean().item()) for a, b in pairs]
                kl[bits] = max(0.0, sum(kls) / len(kls))
        except ValueError as error:
            if "elements can't be held" not in str(error):
                raise
            continue
        yield Sensitivity(layer, num_bytes, kl)


def allocate(measured: Sequence[Sensitivity], budget: float) -> dict[int, int]:
    """Bits by layer, for `budget` bytes per token over these layers: all begin at the fewest bits, and those steps are taken first that
    save most divergence per byte.

    Raises ValueError if even the fewest bits take more.
    """
    ladders = {one.layer: sorted(one.kl, key=one.num_bytes.__getitem__) for one in measured}
    by_layer = {one.layer: one for one in measured}
    chosen = {layer: ladder[0] for layer, ladder in ladders.items()}
    left = budget - sum(by_layer[layer].num_bytes[bits] for layer, bits in chosen.items())
    if left < 0:
        raise ValueError(
            f"the budget is {budget:g} bytes per token, but the fewest bits of all layers take {budget - left:g}"
        )
    steps: list[tuple[float, int, int]] = []

    def push(layer: int) -> None:
        one, ladder = by_layer[layer], ladders[layer]
        at = ladder.index(chosen[layer])
        # A step may lead over a rung that gains nothing.
        for rung in ladder[at + 1 :]:
            gain = one.kl[chosen[layer]] - one.kl[rung]
            if gain > 0:
                heapq.heappush(steps, (-gain / (one.num_bytes[rung] - one.num_bytes[chosen[layer]]), layer, rung))

    for layer in chosen:
        push(layer)
    while steps:
        _, layer, rung = heapq.heappop(steps)
        one = by_layer[layer]
        cost = one.num_bytes[rung] - one.num_bytes[chosen[layer]]
        if cost > 0 and cost <= left:
            left -= cost
            chosen[layer] = rung
            steps = [step for step in steps if step[1] != layer]
            heapq.heapify(steps)
            push(layer)
    return chosen


def _bytes_per_token(loaded: LoadedModel, layer: int, codec: Codec | None) -> float:
    """Bytes the layer's state grows by with a token, from the arrays of a short row."""
    binding = loaded.binding
    caches = binding.make_caches()
    coding = Coding(tuple(codec if place == layer else None for place in range(len(caches))))
    state = BatchState(loaded.model, caches, pad_safe=binding.pad_safe, mask_ndim=binding.mask_ndim, coding=coding)
    for _ in range(2):
        state.begin(1)
        loaded.model(mx.zeros((1, 1), mx.int32), cache=state.caches)
        state.commit()
    return sum(array.nbytes for array in state.layers[layer].snapshot(0).arrays.values()) / 2
