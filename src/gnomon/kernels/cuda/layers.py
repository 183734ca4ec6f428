"""A layer of a decode step in one launch, and the head by blocks that stay.

Contract
    x            rows before the layer as `embed` or `add` leave them: h [M, hidden] bf16 and `Normed`, M from 1 to 8
    layers       of one `Pattern`: the same widths, bits and groups; widths multiples of 128
    keys, values of the layer as `attention.attend` takes them
    result       the same after the layer

Arithmetic: that of the separate kernels in their order, so the bits are theirs (attention: with `Form.fine`).

The blocks of a launch wait for each other, so all must be on the GPU at once: two for each multiprocessor. Two such launches that don't
depend on each other must not run at the same time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx

from gnomon.kernels.cuda.attention import MOST_STRETCHES, Form
from gnomon.kernels.cuda.products import BLOCK, DENSE, TYPES, Normed, Weights
from gnomon.kernels.cuda.sources import Kernel, make

MOST_ROWS = 8
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
FILES = ("linear.cuh", "attention.cuh", "layers.cuh")
LEAST_CAPABILITY = 80
_CAPABILITY, _PROCESSORS = (75, 76), 16  # numbers of CUdevice_attribute


@dataclass(frozen=True, slots=True)
class Layer:
    """What one block's kernels take."""

    q: Weights
    k: Weights
    v: Weights
    o: Weights
    gate: Weights
    up: Weights
    down: Weights
    attention_norm: mx.array
    mlp_norm: mx.array
    head_norms: tuple[mx.array, mx.array] | None
    form: Form
    inverse: mx.array


@dataclass(frozen=True, slots=True)
class Pattern:
    """What the kernel is made for."""

    form: Form
    hidden: int
    inner: int
    kinds: tuple[tuple[int, int, bool], ...]
    """Of the parts in the order of `PARTS`."""
    eps: float

    def why_not(self) -> str | None:
        """What keeps such layers from the kernel, or None."""
        widths = (self.hidden, self.inner, self.form.q_heads * self.form.size)
        if any(width % 128 for width in widths):
            return f"widths {widths} that are no multiples of 128"
        return None


def pattern_of(layers: Sequence[Layer], eps: float) -> Pattern | str:
    """What all these layers have in common, or why one kernel can't take them all."""
    first = layers[0]
    found = Pattern(
        replace(first.form, fine=True),
        first.q.inputs,
        first.gate.outputs,
        tuple(getattr(first, p).kind for p in PARTS),
        eps,
    )
    for layer in layers:
        kinds = tuple(getattr(layer, part).kind for part in PARTS)
        if (replace(layer.form, fine=True), kinds) != (found.form, found.kinds):
            return "layers of several kinds"
        if layer.inverse is not first.inverse and not mx.array_equal(layer.inverse, first.inverse).item():
            return "layers with several rotations"
    return found.why_not() or found


def contiguous(layer: Layer) -> Layer:
    """The layer with arrays that lie as `run` reads them; those that do already are not copied."""

    def laid(part: Weights) -> Weights:
        arrays = {name: getattr(part, name) for name in ("weight", "scales", "biases", "bias")}
        return replace(part, **{name: mx.contiguous(a) for name, a in arrays.items() if a is not None})

    norms = layer.head_norms and (mx.contiguous(layer.head_norms[0]), mx.contiguous(layer.head_norms[1]))
    made = replace(
        layer,
        **{part: laid(getattr(layer, part)) for part in PARTS},
        attention_norm=mx.contiguous(layer.attention_norm),
        mlp_norm=mx.contiguous(layer.mlp_norm),
        head_norms=norms,
    )
    mx.eval(*(a for part in PARTS for a in getattr(made, part).arrays()), made.attention_norm, made.mlp_norm, norms)
    return made


@cache
def processors() -> int:
    """Multiprocessors of the first GPU, asked of the driver, or 0 if it has no room for these kernels or can't be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return 0

    def attribute(number: int) -> int:
        return 0 if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    major, minor = (attribute(number) for number in _CAPABILITY)
    return attribute(_PROCESSORS) if 10 * major + minor >= LEAST_CAPABILITY else 0


def _names(pattern: Pattern) -> list[str]:
    """The kernel's inputs that hold weights."""
    names: list[str] = []
    for part, (bits, _, biased) in zip(PARTS, pattern.kinds, strict=True):
        names += [
            f"{part}_w",
            *([] if bits == DENSE else [f"{part}_s", f"{part}_b"]),
            *([f"{part}_c"] if biased else []),
        ]
    return [*names, "mlp_norm", "next_norm", *(["q_norm", "k_norm"] if pattern.form.normed else [])]


def _weights(pattern: Pattern, rows: dict[str, int]) -> str:
    """A `LayerWeights` of them."""
    code: list[str] = []
    for part, (bits, _, biased) in zip(PARTS, pattern.kinds, strict=True):
        scales = "nullptr, nullptr" if bits == DENSE else f"{part}_s, {part}_b"
        code.append(f"{{{part}_w, {scales}, {f'{part}_c' if biased else 'nullptr'}, {rows[part]}}}")
    return ", ".join([*code, "mlp_norm, next_norm", "q_norm, k_norm" if pattern.form.normed else "nullptr, nullptr"])


@cache
def _kernel(pattern: Pattern, timed: bool) -> Kernel:
    form = pattern.form
    q, kv = form.q_heads * form.size, form.kv_heads * form.size
    widths = (q, kv, kv, pattern.hidden, pattern.inner, pattern.inner, pattern.hidden)
    weights = _weights(pattern, dict[str, int](zip(PARTS, widths, strict=True)))
    kinds = dict(zip(PARTS, pattern.kinds, strict=True))
    held = ", ".join(f"{kinds[part][0]}, {kinds[part][1]}" for part in ("q", "o", "gate", "down"))
    normed, traditional = ("true" if yes else "false" for yes in (form.normed, form.traditional))
    body = f"""
  using W = gnomon::Widths<{pattern.hidden}, {pattern.inner}, {form.q_heads}, {form.kv_heads}, {form.size}, {form.heads_per_block},
                           {held}>;
  const gnomon::LayerWeights<__nv_bfloat16> layer{{{weights}}};
  const gnomon::Cache cache{{const_cast<__nv_bfloat16*>(keys), const_cast<__nv_bfloat16*>(values),
      keys_strides[0], keys_strides[1], keys_strides[2], values_strides[0], values_strides[1], values_strides[2]}};
  const gnomon::Turn turn{{lengths, inverse, {pattern.eps!r}f, {form.eps!r}f, {form.scale!r}f, {traditional}}};
  gnomon::run_layer<__nv_bfloat16, W, {normed}>(
      layer, cache, turn, lengths_shape[0], const_cast<int*>(counters), const_cast<int*>(meeting), h0, hw0, squares0, qkv, attended, parts,
      acted, {{h1, hw1, squares1}}, {{h, hw, squares}}, {"(long long*)times" if timed else "nullptr"});
"""
    inputs = ["h0", "hw0", "squares0", "lengths", "inverse", "counters", "meeting", "keys", "values", *_names(pattern)]
    outputs = ["h", "hw", "squares", "h1", "hw1", "squares1", "qkv", "attended", "parts", "acted"]
    outputs += ["times"] if timed else []
    return make("layer", FILES, inputs, outputs, body, block=BLOCK, blocks_per_processor=2, any_strides=True)


def run(
    pattern: Pattern,
    layer: Layer,
    next_norm: mx.array,
    h: mx.array,
    x: Normed,
    keys: mx.array,
    values: mx.array,
    lengths: mx.array,
    counters: mx.array,
    meeting: mx.array,
    times: list[mx.array] | None = None,
) -> tuple[mx.array, Normed]:
    """The layer over rows h [M, hidden], which are x before the norm.

    `next_norm` is the weight of the norm that comes next; `counters` as in `attention.attend`; `meeting` int32 [2] of zeros, which nothing
    else uses. Nanoseconds of one block at the start and at the ends of query, key and value products, attention, output product, gate and
    up, and down are appended to `times`, int64 [6].
    """
    form, rows = pattern.form, h.shape[0]
    q, kv, blocks = form.q_heads * form.size, form.kv_heads * form.size, form.blocks_per_row
    wide, sums = (rows, pattern.hidden), (rows, pattern.hidden // 16)
    shapes = [wide, wide, sums, wide, wide, sums, (rows, q + 2 * kv), (rows, q)]
    shapes += [(rows * blocks, MOST_STRETCHES, form.heads_per_block, form.size + 2), (rows, pattern.inner)]
    b, f = mx.bfloat16, mx.float32
    weights = [array for part in PARTS for array in getattr(layer, part).arrays()]
    made = _kernel(pattern, times is not None)(
        inputs=[
            *(h, x.rows, x.squares, lengths, layer.inverse, counters, meeting, keys, values),
            *(*weights, layer.mlp_norm, next_norm, *(layer.head_norms or ())),
        ],
        output_shapes=[*shapes, *([(6,)] if times is not None else [])],
        output_dtypes=[b, b, f, b, b, f, b, b, f, b, *([mx.int64] if times is not None else [])],
        grid=(2 * processors() * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )
    if times is not None:
        times.append(made[-1])
    return made[0], Normed(made[1], made[2], x.eps)


@cache
def _head(kind: tuple[int, int, bool], dtype: mx.Dtype, inputs: int, outputs: int, eps: float) -> Kernel:
    t, (bits, group, biased) = TYPES[dtype], kind
    names = ["w0", *([] if bits == DENSE else ["s0", "b0"]), *(["c0"] if biased else [])]
    scales = "nullptr, nullptr" if bits == DENSE else "s0, b0"
    body = f"""
  const gnomon::Weights<{t}> weights{{w0, {scales}, {"c0" if biased else "nullptr"}, {outputs}}};
  gnomon::run_head<{t}, {bits}, {group}, {inputs}>(weights, x, x_shape[0], squares, {eps!r}f, out);
"""
    return make("head", FILES, ["x", "squares", *names], ["out"], body, block=BLOCK, blocks_per_processor=2)


def head(x: Normed, weights: Weights) -> mx.array:
    """x @ w.T (+ bias) for many outputs, a multiple of 32: [M, outputs], M up to 8."""
    kernel = _head(weights.kind, weights.dtype, weights.inputs, weights.outputs, x.eps)
    return kernel(
        inputs=[x.rows, x.squares, *weights.arrays()],
        output_shapes=[(x.rows.shape[0], weights.outputs)],
        output_dtypes=[weights.dtype],
        grid=(2 * processors() * BLOCK, 1, 1),
        threadgroup=(BLOCK, 1, 1),
    )[0]
